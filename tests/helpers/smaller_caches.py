"""What tests of evicting and of quantized caches share: plans, a tolerance, an attention function of one's own."""

from collections.abc import Iterator
from contextlib import contextmanager

from transformers.modeling_utils import AttentionInterface

EAGER = 1e-5  # transformers takes the softmax of eager attention in float32
UNIATTN = {"name": "uniattn", "superblocks": [[2, 3], [4, 5]]}
PLANS = [
    None,
    "cla",
    "svformer",
    "resformer",
    UNIATTN,
    {"name": "drop", "layers": [0, 4]},
    [{"name": "attnres"}, "cla"],
]


@contextmanager
def attending_with(model, function) -> Iterator[None]:
    """Let a model attend with a function while the block runs."""
    before = model.config._attn_implementation
    AttentionInterface.register("naive", function)
    try:
        model.set_attn_implementation("naive")
        yield
    finally:
        model.set_attn_implementation(before)
        del AttentionInterface._global_mapping["naive"]
