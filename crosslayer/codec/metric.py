"""What an error in a cached key or value costs, from forward passes alone.

An error in what attention writes counts relative to the stream that it is added to. A query s that reads token t with
probability a_st, and attention output o_s = Σ_t a_st v_t, gives, by head,

    keys     c_st q̃ q̃ᵀ,   c_st = scale² a_st² ‖W_o (v_t − o_s)‖² / ‖x_s‖²,   q̃ = q_s turned into the frame of key t
    values   (a_st a'_st / ‖x_s‖²) W_oᵀ W'_o   for any two heads
    token t  Σ_s c_st ‖q_s‖² + a_st² tr(W_oᵀ W_o) / ‖x_s‖²,   over heads and layers

x is the stream after attention. Where a norm or a factor stands between W_o and the stream, ‖x_s‖ is in units of W_o's
output. The first token, which is stored exactly, is left out. No gradients are needed.

Shapes: T prefix tokens, s queries, H heads, H_kv key-value heads, D head size, W numbers of a layer for each token.
"""

from collections.abc import Sequence
from contextlib import ExitStack
from copy import deepcopy
from typing import Any

import torch
from torch import Tensor, nn
from transformers import Cache, PreTrainedModel

from crosslayer.cache.attention import allowed_by
from crosslayer.codec.states import CodedLayer, turned
from crosslayer.core.transformers_versions import CACHE
from crosslayer.probe.intercept import AttentionCall, visited
from crosslayer.probe.stream import LayerStream, streams

EVERY = 8  # every 8th query of a continuation is read


class Metric:
    """The costs, summed over the continuations that were read.

    Attributes:
        by_layer: (W, W) of each layer, in double precision.
    """

    def __init__(self, model: PreTrainedModel, shapes: Sequence[CodedLayer]):
        self.model, self.shapes = model, shapes
        self.by_layer = [torch.zeros(shape.width, shape.width, dtype=torch.float64) for shape in shapes]
        self.outputs: dict[int, nn.Linear] = {}  # W_o of each layer
        self.written: dict[int, Tensor] = {}  # the output of W_o of each layer, (T, C)
        self.calls: dict[int, AttentionCall] = {}
        self.energy = torch.zeros(0)

    @torch.no_grad()
    def read(self, cache: Cache, ids: Tensor) -> Tensor:
        """Let the model continue a prefix by tokens (1, T); return the cost of each of the prefix's tokens.

        `cache` is that of the prefix, and stays as it is.
        """
        self.energy = torch.zeros(cache.get_seq_length(), device=ids.device)
        if not self.outputs:
            # W_o has no common name: it is the last linear layer of the attention that takes all heads' values
            calls: list[AttentionCall] = []
            with visited(self.model, calls.append):
                self.model(ids[:, :2], use_cache=False, logits_to_keep=1)
            for call in calls:
                inputs = call.query.shape[1] * call.value.shape[3]
                linears = [module for module in call.module.modules() if isinstance(module, nn.Linear)]
                fitting = [linear for linear in linears if linear.in_features == inputs]
                if not fitting:
                    raise ValueError(
                        f"layer {call.layer} has no output projection of {inputs} inputs, as a codec needs"
                    )
                self.outputs[call.layer] = fitting[-1]
        with ExitStack() as stack:
            for layer, linear in self.outputs.items():

                def keep(module: nn.Module, args: Any, output: Tensor, layer: int = layer) -> None:
                    self.written[layer] = output[0]

                stack.callback(linear.register_forward_hook(keep).remove)
            stack.enter_context(streams(self.model, self._see))
            stack.enter_context(visited(self.model, lambda call: self.calls.__setitem__(call.layer, call)))
            self.model(ids, use_cache=True, logits_to_keep=1, **{CACHE: deepcopy(cache)})
        self.written.clear()
        return self.energy

    def _see(self, stream: LayerStream) -> None:
        call = self.calls.pop(stream.layer)
        assert stream.after_attention is not None, "every layer attends"
        written = self.written[stream.layer].float()
        picked = torch.arange(0, call.query.shape[2], EVERY, device=written.device)
        update = (stream.after_attention - stream.before).float()
        # what a norm or a factor behind W_o makes of its output
        passed = update[picked].square().sum(-1) / written[picked].square().sum(-1)
        inverse = passed / stream.after_attention[picked].float().square().sum(-1)  # (s,)
        self._add(call, picked, inverse)

    def _add(self, call: AttentionCall, picked: Tensor, inverse: Tensor) -> None:
        """Add what a call's picked queries make of errors; `inverse` (s,) is 1 / ‖x‖² in units of W_o's output."""
        shape = self.shapes[call.layer]
        held = call.key.shape[2] - call.query.shape[2]  # of the prefix
        missing = len(self.energy) - held  # tokens that a window has left
        first = max(1 - missing, 0)  # the first token is left out
        start = missing + first  # position of the first token that counts
        chances = _chances(call, picked)  # (H, s, S)
        weight = self.outputs[call.layer].weight.float().unflatten(1, (len(chances), -1)).transpose(0, 1)  # (H, C, D_v)
        gram = torch.einsum("acd,bce->abde", weight, weight)  # (H, H, D_v, D_v)
        query = call.query[0][:, picked].float()  # (H, s, D)
        value, group = call.value[0].float(), len(chances) // shape.heads
        read = chances[:, :, first:held]
        keys = shape.heads * shape.key
        energy = torch.zeros(held - first, device=inverse.device)
        total = torch.zeros(shape.width, shape.width, device=inverse.device)
        together = torch.einsum("ast,bst,s->ab", read, read, inverse)  # (H, H)
        for head in range(len(chances)):
            kv = head // group
            head_gram = gram[head, head]
            # ‖W_o (v_t − o_s)‖² (s, T), multiplied out; rounding can leave it below 0
            output = chances[head] @ value[kv]  # (s, D_v)
            moved = value[kv, first:held]  # (T, D_v)
            apart = (moved @ head_gram * moved).sum(-1) - 2 * output @ head_gram @ moved.T
            apart = apart + (output @ head_gram * output).sum(-1)[:, None]
            cost = read[head].square() * apart.clamp_min(0) * inverse[:, None] * call.scaling**2  # (s, T)
            energy += (cost * query[head].square().sum(-1)[:, None]).sum(0)
            energy += (read[head].square() * inverse[:, None]).sum(0) * head_gram.diagonal().sum()
            # keys
            by_key = query[head][None].expand(held - first, -1, -1)  # (T, s, D), instead of heads
            relative = turned(by_key, start, shape, back=True).transpose(0, 1)  # (s, T, D)
            weighted = (relative * cost.sqrt()[..., None]).flatten(0, 1)
            at = slice(kv * shape.key, (kv + 1) * shape.key)
            total[at, at] += weighted.T @ weighted
            # values
            from_ = keys + kv * shape.value
            for second in range(len(chances)):
                to = keys + second // group * shape.value
                block = total[from_ : from_ + shape.value, to : to + shape.value]
                block += together[head, second] * gram[head, second]
        self.energy[start:] += energy
        self.by_layer[call.layer] += total.cpu().double()


def _chances(call: AttentionCall, picked: Tensor) -> Tensor:
    """Return the attention probabilities (H, s, S) of the picked queries."""
    group = call.query.shape[1] // call.key.shape[1]
    keys = call.key[0].float().repeat_interleave(group, 0)
    scores = call.query[0][:, picked].float() @ keys.transpose(1, 2) * call.scaling
    if call.softcap is not None:
        scores = (scores / call.softcap).tanh() * call.softcap
    if call.position_bias is not None:
        scores = scores + call.position_bias[0][:, picked]
    # a mask may have more columns than there are keys
    allowed = allowed_by(call)[0][:, picked, : keys.shape[1]]  # (1 or H, s, S)
    scores = scores.masked_fill(~allowed, -torch.inf)
    if call.sinks is not None:
        sink = call.sinks[0].float().expand(-1, len(picked), -1)
        return torch.cat([scores, sink], -1).softmax(-1)[..., :-1]
    return scores.softmax(-1)
