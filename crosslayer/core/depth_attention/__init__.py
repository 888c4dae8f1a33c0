"""Attention over depth: a softmax-weighted sum of earlier sublayers' outputs, for every token by itself.

    h = Σ_i α_i v_i,  α_i = softmax_i(s_i),  s_i = dᵀ v_i / rms(v_i),  d = query ∘ gain

`listed` is the definition, in operators that autograd knows. Models run `depth_attention`, one operator of torch for
all of it, eagerly, compiled and checkpointed; its kernels are in `plain`, and in `crosslayer.core.kernels` for GPUs.
"""

from crosslayer.core.depth_attention.operators import depth_attention, keep
from crosslayer.core.depth_attention.plain import depth_scores, exact, inverse_rms, listed, wide

__all__ = ["depth_attention", "depth_scores", "exact", "inverse_rms", "keep", "listed", "wide"]
