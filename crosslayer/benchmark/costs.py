"""What a causal language model computes, reads and stores, from its structure, and the time that this should take.

    prefill   = FLOPs of the matrices / their rate + FLOPs of attention / its rate + head / read rate + operators
    one token = weights / read rate + states read / their rate + states copied / copy rate + operators

Storing less is not reading less: a layer that borrows keys or values reads its lender's again, so what is read counts
every layer that attends, and what is stored (and copied by a dynamic cache) only what the plan stores.

Shapes: B batch, T tokens of the prompt, S tokens in the cache, H heads, H_kv key-value heads, D head size.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import nn
from transformers import PreTrainedModel

from crosslayer.probe.intercept import AttentionCall, stored_states, visited


@dataclass(frozen=True)
class Attention:
    """A layer that attends: H, H_kv, the sizes of a key and a value, its window (None: all), what it stores."""

    heads: int
    kv_heads: int
    key_size: int
    value_size: int
    window: int | None = None
    stored: tuple[str, ...] = ("keys", "values")

    def read(self, length: int) -> int:
        """Return elements of keys and values that one new token reads of `length` cached ones, for a batch of one."""
        seen = length if self.window is None else min(length, self.window)
        return seen * self.kv_heads * (self.key_size + self.value_size)

    def kept(self, length: int) -> int:
        """Return elements that the cache holds for `length` tokens, for a batch of one."""
        seen = length if self.window is None else min(length, self.window)
        sizes = {"keys": self.key_size, "values": self.value_size}
        return seen * self.kv_heads * sum(sizes[state] for state in self.stored)

    def flops(self, tokens: int) -> int:
        """Return FLOPs of a causal prompt: 2 for each product of a pair, QKᵀ and AV.

        Where the window cuts, the mask is an explicit one, with which SDPA computes every pair.
        """
        cut = self.window is not None and self.window < tokens
        pairs = tokens * tokens if cut else tokens * (tokens + 1) // 2
        return 2 * pairs * self.heads * (self.key_size + self.value_size)


@dataclass(frozen=True)
class Structure:
    """What the costs depend on.

    `matrices` and `head` are elements: of all weight matrices that every token passes (embeddings aside), and of the
    language model's head, which only the tokens pass whose logits are wanted. `shape` is (outputs, inputs) of the
    largest matrix; `itemsize` bytes an element.
    """

    matrices: int
    head: int
    shape: tuple[int, int]
    attention: tuple[Attention, ...]
    itemsize: int

    def prefill_flops(self, batch: int, tokens: int) -> tuple[int, int]:
        """Return FLOPs of a prompt (B, T): of the matrices without the head, and of attention."""
        return 2 * self.matrices * batch * tokens, batch * sum(layer.flops(tokens) for layer in self.attention)

    def weight_bytes(self) -> int:
        """Return bytes of weights that one decoding step reads, whatever the batch."""
        return (self.matrices + self.head) * self.itemsize

    def state_bytes(self, batch: int, length: int) -> int:
        """Return bytes of keys and values that one decoding step reads: every layer that attends, its own or not."""
        return batch * self.itemsize * sum(layer.read(length) for layer in self.attention)

    def cache_bytes(self, batch: int, length: int) -> int:
        """Return bytes that a cache of `length` tokens stores."""
        return batch * self.itemsize * sum(layer.kept(length) for layer in self.attention)

    def copied_bytes(self, batch: int, length: int) -> int:
        """Return bytes that `torch.cat` moves in one step of a dynamic cache: what is stored is read and written."""
        return 2 * self.cache_bytes(batch, length)


@dataclass(frozen=True)
class Rates:
    """What a machine does: FLOP/s of matrices and attention, bytes/s of weights, states, copies; seconds an operator.

    On an asynchronous device the operators are launched while it computes, so that the longer of the two counts.
    """

    matrices: float
    attention: float
    weights: float
    states: float
    copies: float
    operator: float
    asynchronous: bool = False

    def seconds(self, work: float, operators: int) -> float:
        """Return the time of `work` seconds of the device beside the fixed cost of `operators`."""
        fixed = operators * self.operator
        return max(work, fixed) if self.asynchronous else work + fixed


@dataclass(frozen=True)
class Load:
    """One setting: B sequences of `context` tokens, then `new_tokens` decoded one by one."""

    context: int
    batch: int
    new_tokens: int

    @property
    def total(self) -> int:
        """Tokens in the cache at the end."""
        return self.context + self.new_tokens


@torch.no_grad()
def structure(model: PreTrainedModel) -> Structure:
    """Return what the costs of a causal language model depend on; it runs once over two tokens.

    Raises:
        ValueError: its attention cannot be seen, or it has weights that not every token reads (experts).

    """
    calls: dict[int, AttentionCall] = {}
    with visited(model, lambda call: calls.update({call.layer: call})):
        model(torch.zeros(1, 2, dtype=torch.long, device=model.device), use_cache=False)
    found = []
    for layer, call in sorted(calls.items()):
        sizes = (call.query.shape[1], call.key.shape[1], call.key.shape[-1], call.value.shape[-1])
        found.append(Attention(*sizes, call.window, stored_states(model.config.get_text_config(), layer)))
    weights = _matrices(model)
    head = model.get_output_embeddings()
    largest = max(weights, key=lambda weight: weight.numel())
    return Structure(
        matrices=sum(weight.numel() for weight in weights),
        head=0 if head is None else head.weight.numel(),  # type: ignore[union-attr, operator]
        shape=(largest.shape[0], largest.shape[1]),
        attention=tuple(found),
        itemsize=weights[0].element_size(),
    )


def _matrices(model: PreTrainedModel) -> list[nn.Parameter]:
    """Return the weight matrices that every token passes: not the embeddings, not the head."""
    head, found = model.get_output_embeddings(), []
    for module in model.modules():
        if isinstance(module, nn.Embedding) or module is head:
            continue
        for name, parameter in module.named_parameters(recurse=False):
            if parameter.ndim > 2:
                raise ValueError(f"{type(module).__name__}.{name} has {parameter.ndim} dimensions: experts, say")
            if parameter.ndim == 2:
                found.append(parameter)
    return found


def predict(model: Structure, rates: Rates, load: Load, operators: Mapping[str, int]) -> dict[str, dict[str, float]]:
    """Return seconds of the first token and of each further one, with a dynamic and a static cache, and their terms.

    `operators` are the calls of one forward pass with each cache: "dynamic" and "static". With a dynamic cache the
    states are as many as halfway through decoding; a static cache is read whole from the beginning.
    """
    matrices, attention = model.prefill_flops(load.batch, load.context)
    head = model.head * model.itemsize / rates.weights
    weights = model.weight_bytes() / rates.weights
    middle = load.context + (load.new_tokens + 1) // 2
    terms = {
        "ttft": {"matrices": matrices / rates.matrices, "attention": attention / rates.attention, "head": head},
        "tpot_dynamic": {
            "weights": weights,
            "states": model.state_bytes(load.batch, middle) / rates.states,
            "copies": model.copied_bytes(load.batch, middle) / rates.copies,
        },
        "tpot_static": {"weights": weights, "states": model.state_bytes(load.batch, load.total) / rates.states},
    }
    found = {}
    for name, parts in terms.items():
        count = operators["static" if name == "tpot_static" else "dynamic"]
        seconds = rates.seconds(sum(parts.values()), count)
        found[name] = {"seconds": seconds, **parts, "operators": count * rates.operator}
    return found
