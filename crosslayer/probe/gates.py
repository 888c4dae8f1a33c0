"""Output gates: what multiplies the output of each head before W_o (Qwen3-Next, Qwen3.5, Inkling 2).

    o = W_o [g ∘ A V],  0 ≤ g ≤ 1;  importance after the gate of token s: Σ_{t,h} g_th A_ths / Σ_{t,h} g_th

A map shows attention that the gate may close. No module is asked for its gate: it is what the attention function
returned, divided into what the next linear layer of that size receives.

Source: gated attention (arXiv 2505.06708). Shapes: T tokens, H heads, D head size.
"""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

from torch import Tensor, nn
from transformers import PreTrainedModel

from crosslayer.probe.intercept import AttentionCall, intercepted
from crosslayer.probe.measures import working
from crosslayer.probe.model import layer_stack

# How far outside 0 to 1 a ratio may be: both numbers are rounded, by up to 2**-8 of their size in bfloat16.
ROUNDING = 2**-6
# A factor for each token plus one for each channel, in logarithms, leaves nothing of the ratio of a norm. With a mean
# rest below this, the ratio is taken for a norm.
NORM = 1e-2


@contextmanager
def output_gates(model: PreTrainedModel) -> Iterator[dict[int, Tensor]]:
    """Record the gate of each layer that has one, (T, H), mean over channels, of a pass of a single sequence."""
    gates: dict[int, Tensor] = {}
    outputs: dict[int, Tensor] = {}  # of attention functions, (1, T, H, D), until W_o receives them

    def keep(call: AttentionCall) -> AttentionCall:
        def after(out: Tensor) -> Tensor:
            outputs[call.layer] = out
            return out if call.after is None else call.after(out)

        return replace(call, after=after)

    def before_linear(layer: int, _: nn.Module, args: tuple[Any, ...]) -> None:
        # W_o is not known by name: it is the linear layer that reads as many numbers as the heads have returned.
        out, read = outputs.get(layer), args[0]
        if out is None or read.numel() != out.numel():
            return
        read = read.reshape(out.shape)
        if (read == out).all():  # W_o of attention without a gate
            del outputs[layer]
        elif (gate := gate_of(read, out)) is not None:
            gates[layer] = gate
            del outputs[layer]

    with ExitStack() as hooks, intercepted(model, keep):
        for layer, block in enumerate(layer_stack(model)):
            for module in block.modules():
                if isinstance(module, nn.Linear):
                    hooks.callback(module.register_forward_pre_hook(partial(before_linear, layer)).remove)
        yield gates


def gate_of(read: Tensor, out: Tensor) -> Tensor | None:
    """Return the mean over channels (T, H) of what multiplies an output (1, T, H, D); None if that is not a gate.

    A gate is from 0 to 1. The ratio of a norm is a factor of each token times one of each channel.
    """
    read, out = working(read[0]), working(out[0])  # (T, H, D)
    there = out != 0
    ratio = (read / out.masked_fill(~there, 1)).masked_fill(~there, 0)
    if not ratio.isfinite().all() or ratio.min() < -ROUNDING or ratio.max() > 1 + ROUNDING:
        return None
    # a closed gate has no logarithm
    logarithm = ratio.clamp(min=1e-9).log()
    by_token, by_channel = logarithm.mean(dim=(1, 2), keepdim=True), logarithm.mean(dim=0, keepdim=True)
    # a single token is always a factor of itself times one of each channel, whatever the ratio is
    if len(ratio) > 1 and (logarithm - by_token - by_channel + logarithm.mean()).abs().mean() < NORM:
        return None
    return ratio.sum(dim=-1) / there.sum(dim=-1).clamp(min=1)
