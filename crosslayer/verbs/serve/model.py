"""crosslayer's decoder in vLLM's Transformers backend; only vLLM imports this module.

vLLM runs the decoder of `crosslayer.core.decoder` with vLLM's own linear layers, norms and attention. Tokens of all
requests are concatenated into one sequence; only attention, which is vLLM's, connects tokens. The states that readers
get from sources are those of the new tokens, as without a cache.
"""

from functools import partial
from typing import Any

from torch import Tensor
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from vllm.logger import init_logger
from vllm.model_executor.layers.attention import Attention
from vllm.model_executor.layers.linear import LinearBase
from vllm.model_executor.models.transformers import (
    VLLM_ATTN_ATTR,
    TransformersForCausalLM,
)
from vllm.model_executor.models.utils import maybe_prefix

from crosslayer.core.decoder import CrossLayerModel
from crosslayer.core.decoder.attention import CrossLayerAttention
from crosslayer.verbs.serve.caches import cache_source, flags_of, not_saved, not_servable, untested

logger = init_logger(__name__)
ATTENTION = "crosslayer_vllm"  # the name by which the decoder calls vLLM's attention
# Private methods of vLLM. If vLLM renames one, ours is never called, and the model saves nothing or writes wrong text.
OVERRIDDEN = "_patch_config", "_decorate_for_torch_compile", "_create_attention_instances"
for name in OVERRIDDEN:
    if not hasattr(TransformersForCausalLM, name):
        raise ImportError(f"vLLM's Transformers backend has no {name}, which crosslayer overrides; use another version")
vllm_attention = ALL_ATTENTION_FUNCTIONS["vllm"]


def _attention(module: Any, query: Tensor, *others: Tensor | None, **options: Any) -> tuple[Tensor, None]:
    """Return vLLM's attention, (T, H·D), in the shape of other attention functions, (B, T, H, D)."""
    out, _ = vllm_attention(module, query, *others, **options)
    batch, _, new, size = query.shape
    return out.view(batch, new, -1, size), None


ALL_ATTENTION_FUNCTIONS.register(ATTENTION, _attention)
ALL_MASK_ATTENTION_FUNCTIONS.register(ATTENTION, lambda *_, **__: None)  # vLLM's attention separates the requests


class Reader(Attention):
    """vLLM's attention in a layer that reads the cache of another: it also has that layer's scales.

    A quantized cache holds keys and values divided by their scales, which a checkpoint has for layers that write. vLLM
    itself leaves the scales of other layers at 1, and so reads wrong numbers.
    """

    def __init__(self, source: Attention, **options: Any):
        super().__init__(kv_sharing_target_layer_name=source.layer_name, **options)
        self.source = (source,)  # a tuple hides it from torch: as a submodule it would be loaded twice

    def process_weights_after_loading(self, act_dtype: Any) -> None:
        """Take the scales of the source, which come from the checkpoint before any layer gets here."""
        super().process_weights_after_loading(act_dtype)
        (source,) = self.source
        self._k_scale.copy_(source._k_scale)
        self._v_scale.copy_(source._v_scale)
        self._k_scale_float, self._v_scale_float = source._k_scale_float, source._v_scale_float
        self._k_scale_cpu, self._v_scale_cpu = source._k_scale_cpu, source._v_scale_cpu


class CrossLayerForCausalLM(TransformersForCausalLM):
    """The model that vLLM builds for crosslayer's architecture."""

    def __init__(self, *, vllm_config: Any, prefix: str = ""):
        config = vllm_config.model_config.hf_config
        reason, refused = not_servable(config), untested(config, flags_of(vllm_config))
        if reason is None and refused is not None:
            _, reason = refused
        if reason is not None:
            raise ValueError(f"vLLM cannot serve this crosslayer model: {reason}")
        super().__init__(vllm_config=vllm_config, prefix=prefix)
        # our decoder passes (1, T, C); vLLM's int8 kernel for CPUs with AMX takes only (T, C), as vLLM's models pass it
        for module in self.modules() if self.quant_config is not None else ():
            if isinstance(module, LinearBase):
                module.register_forward_pre_hook(lambda _, inputs: (inputs[0].flatten(0, -2),))
                module.register_forward_hook(lambda _, __, out: out[None])
        warning = not_saved(config)
        if warning is not None:
            logger.warning_once(warning)

    def _patch_config(self) -> None:
        """Make the decoder call vLLM's attention."""
        super()._patch_config()
        # The backend has just set its own function, which returns (T, H·D) and not the shape that our decoder expects.
        self.config._attn_implementation = ATTENTION

    def _decorate_for_torch_compile(self) -> None:
        """Compile the decoder's forward without `takes_cache`: torch.compile cannot read a signature of its own."""
        forward = CrossLayerModel.forward
        # An earlier engine in the same process may have done it, since this changes the class.
        if "__signature__" in vars(forward):
            CrossLayerModel.forward = forward.__wrapped__  # type: ignore[attr-defined]
        super()._decorate_for_torch_compile()

    def _create_attention_instances(self, prefix: str = "") -> None:
        """Give each layer with attention vLLM's attention, with a cache of its own or that of its source.

        The backend's own method creates a cache for every layer, and expects attention in every layer.
        """
        config, parallel = self.config, self.parallel_config
        made: dict[int, Attention] = {}
        for index, layer in enumerate(self.model.layers):
            module: CrossLayerAttention | None = layer.self_attn
            source = cache_source(config, index)
            if module is None or source is None:
                continue
            build = Attention if source == index else partial(Reader, made[source])
            made[index] = build(
                num_heads=self.model_config.get_num_attention_heads(parallel),
                head_size=module.head_dim,
                scale=module.scaling,
                num_kv_heads=self.model_config.get_num_kv_heads(parallel),
                cache_config=self.cache_config,
                quant_config=self.quant_config,
                logits_soft_cap=config.attn_logit_softcapping,
                per_layer_sliding_window=module.sliding_window,
                prefix=maybe_prefix(prefix, f"model.layers.{index}.self_attn.{VLLM_ATTN_ATTR}"),
            )
            setattr(module, VLLM_ATTN_ATTR, made[index])
