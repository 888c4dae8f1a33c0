"""Intervene on a model that is left as it is, and put everything back.

with intervening(model, waiver(255), PositionSwap(0, 100)): …
"""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

from transformers import PreTrainedModel

from crosslayer.environment import check_flex
from crosslayer.probe.intercept import layer_stack
from crosslayer.verbs.intervene.kinds import Kind, positions_of
from crosslayer.verbs.intervene.running import Running


@contextmanager
def intervening(model: PreTrainedModel, *interventions: Kind) -> Iterator[None]:
    """Run `model` with all `interventions`, the first outermost; it is bit-equal again on exit, whatever happened.

    Args:
        model: any causal or bidirectional Hugging Face model whose attention goes through the attention interface.
        interventions: what to change; positions count tokens from 0, without padding on the left.

    Raises:
        ValueError: the model would ignore an edited mask (FlashAttention), a layer, position or table does not exist,
            or, on a clean exit, a position was outside of every sequence that was run.

    """
    attention = model.config.get_text_config()._attn_implementation or "eager"
    if "flash" in attention:
        raise ValueError(f"{attention} takes no edited mask; load the model with sdpa, eager or flex attention")
    check_flex(attention, model.device)
    running = Running()
    with ExitStack() as stack:
        layers = layer_stack(model)
        for module in model.modules():  # OPT's head skips the body and calls its decoder
            if isinstance(module, PreTrainedModel) and layers in module.modules():
                stack.callback(module.register_forward_pre_hook(running.begin, with_kwargs=True).remove)
        for intervention in interventions:
            intervention.enter(model, running, stack)
        yield
    for intervention in interventions:
        for position in positions_of(intervention):
            if running.passes and (id(intervention), position) not in running.reached:
                raise ValueError(
                    f"{intervention.kind} did nothing: position {position} was outside of every sequence that was run"
                )
