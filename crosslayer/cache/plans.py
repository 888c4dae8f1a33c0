"""For which models a smaller cache is defined, and the types of what their layers store and read."""

from transformers import PreTrainedModel

from crosslayer.cache.eviction import Eviction
from crosslayer.cache.offsets import key_offsets
from crosslayer.core.plan import CACHED, DepthPlan
from crosslayer.wiring.kv_bits import KvBits, keeps_recent
from crosslayer.wiring.read import model_plan
from crosslayer.wiring.result import ModelPlan
from crosslayer.wiring.states import field

LARGE_EXCESS = 100.0  # of the mean key's energy over the deviations': codes below 8 bits are then too coarse


def checked_plan(model: PreTrainedModel, eviction: Eviction | None, bits: KvBits | None) -> ModelPlan:
    """Return the plan of a model that caches keys and values of its own tokens, each layer those of one layer.

    Raises:
        ValueError: it does not, or not as the eviction or the bits need it.
    """
    what = "a quantized KV cache" if eviction is None else "eviction"
    wiring = model_plan(model)
    plan, name = wiring.plan, f"{type(model).__name__} ({wiring.type})"
    if not wiring.caches or not model.can_generate():
        raise ValueError(f"{name} keeps no KV cache, so {what} is not defined for it")
    if field(model.config.get_text_config(), "kv_lora_rank"):
        raise ValueError(f"{name} caches latents of keys and values; {what} needs those of each head")
    if plan.beyond_sharing:
        raise ValueError(f"{name}: {plan.beyond_sharing}; {what} is not defined for that")
    for layer, states in enumerate(wiring.layers):
        more = states.every or states.index or states.passes > 1 or states.fixed or states.fixed_float32
        if plan.attends(layer) and more:
            raise ValueError(f"{name}: layer {layer} has {states.mask}; {what} needs keys and values of each token")
        several = [state for state in CACHED if plan.read_count(state, layer) > 1]
        if plan.value_shares[layer] < 1 or several:
            raise ValueError(f"{name}: layer {layer} reads states of several layers; {what} is not defined for that")
        if eviction is not None and states.mask != "no attention" and states.keys == 0:
            raise ValueError(f"{name}: layer {layer} has {states.mask}; eviction needs softmax attention")
    if eviction is not None:
        eviction.check_layers(plan.layers, evicting_groups(wiring))
    if bits is not None:
        unlimited = [layer for layer, states in enumerate(wiring.layers) if states.window is None]
        bits.check_layers([layer for layer in unlimited if plan.stored(layer)], plan.layers)
        if eviction is not None and any(keeps_recent(bits.at(layer)) for layer in range(plan.layers)):
            _check_means(model, bits)
    return wiring


def _check_means(model: PreTrainedModel, bits: KvBits) -> None:
    """Refuse keys with a large mean: the positions of kept tokens are not known, so it cannot be subtracted."""
    excess = max((offset.excess for offset in key_offsets(model).values()), default=0.0)
    if excess > LARGE_EXCESS:
        raise ValueError(
            f"KV bits {bits.text!r}: eviction needs 8 bits or fp8 if the mean of keys exceeds their spread "
            f"tenfold, got {excess**0.5:.0f} times; try 8"
        )


def check_masks(model: PreTrainedModel, what: str) -> None:
    """Refuse an attention implementation that takes no mask."""
    kind = model.config.get_text_config()._attn_implementation or "eager"
    if kind not in ("sdpa", "eager"):
        raise ValueError(f"{what} needs sdpa or eager attention, which take a mask, got {kind!r}")


def stored_kinds(wiring: ModelPlan, bits: KvBits | None) -> list[str | None]:
    """Return the types of stored keys and values by layer; None for a layer with a window, or one that stores none."""
    return [
        bits.at(layer) if bits is not None and wiring.plan.stored(layer) and states.window is None else None
        for layer, states in enumerate(wiring.layers)
    ]


def read_kinds(plan: DepthPlan, stored: list[str | None]) -> list[tuple[str | None, str | None]]:
    """Return the types of the keys and of the values that each layer reads, which are those of their sources."""
    kinds = []
    for layer in range(plan.layers):
        keys, values = ([stored[source] for source in plan.reads(state, layer)] for state in CACHED)
        kinds.append((keys[0] if keys else None, values[0] if values else None))
    return kinds


def evicting_groups(wiring: ModelPlan) -> list[list[int]]:
    """Return the groups of layers from which tokens are evicted: those without a window."""
    return [group for group in sharing_groups(wiring.plan) if wiring.layers[group[0]].window is None]


def sharing_groups(plan: DepthPlan) -> list[list[int]]:
    """Return the layers with attention, in groups that share keys or values, directly or through other layers."""
    groups: list[set[int]] = []
    for layer in filter(plan.attends, range(plan.layers)):
        joined = {layer, *(source for state in CACHED for source in plan.reads(state, layer))}
        apart = [group for group in groups if not group & joined]
        groups = [*apart, joined.union(*(group for group in groups if group & joined))]
    return sorted(sorted(group) for group in groups)
