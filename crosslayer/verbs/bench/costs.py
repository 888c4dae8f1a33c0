"""What a causal language model computes, reads and stores, and how long it should take, from the machine's own rates.

prefill       = FLOPs of the matrices / their rate + FLOPs of attention / its rate + head / read rate + operators
another token = weights / read rate + states read / their rate + states copied / copy rate + operators

Storing less is not reading less: a layer that borrows keys or values reads its source's again, so what is read counts
every layer that attends, and what is stored (and copied by a dynamic cache) only what the plan stores.

Shapes: B batch, T tokens of the prompt, S tokens in the cache, H heads, H_kv key-value heads, D head size.
"""

from dataclasses import dataclass

import torch
from torch import nn
from transformers import PreTrainedModel

from crosslayer.core.method import Mixing
from crosslayer.output.record import Frozen
from crosslayer.probe.intercept import AttentionCall, read_counts, stored_shares, visited


@dataclass(frozen=True)
class Attention:
    """A layer that attends: H, H_kv, the sizes of a key and a value, its window (None: all), what it stores.

    `stored` is the share of its keys and of its values; `sources` of how many layers it reads keys and values, `row`
    how many of them attention goes over, in a row.
    """

    heads: int
    kv_heads: int
    key_size: int
    value_size: int
    window: int | None = None
    stored: tuple[float, float] = (1.0, 1.0)
    sources: tuple[int, int] = (1, 1)
    row: int = 1

    def read(self, length: int) -> int:
        """Return elements of keys and values that a new token reads of `length` cached ones, for a batch of 1."""
        return self._elements(length, self.sources)

    def kept(self, length: int) -> int:
        """Return elements that the cache holds for `length` tokens, for a batch of 1."""
        return self._elements(length, self.stored)

    def _elements(self, length: int, counts: tuple[float, float]) -> int:
        seen = length if self.window is None else min(length, self.window)
        return round(seen * self.kv_heads * (counts[0] * self.key_size + counts[1] * self.value_size))

    def flops(self, tokens: int) -> int:
        """Return FLOPs of a causal prompt: 2 for each product of a pair, QKᵀ and AV.

        Where the window cuts, the mask is explicit, with which SDPA computes every pair.
        """
        cut = self.window is not None and self.window < tokens
        pairs = tokens * tokens if cut else tokens * (tokens + 1) // 2
        return 2 * self.row * pairs * self.heads * (self.key_size + self.value_size)


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
        """Return bytes of weights that a decoding step reads, whatever the batch."""
        return (self.matrices + self.head) * self.itemsize

    def state_bytes(self, batch: int, length: int) -> int:
        """Return bytes of keys and values that a decoding step reads: every layer that attends, its own or not."""
        return batch * self.itemsize * sum(layer.read(length) for layer in self.attention)

    def cache_bytes(self, batch: int, length: int) -> int:
        """Return bytes that a cache of `length` tokens stores."""
        return batch * self.itemsize * sum(layer.kept(length) for layer in self.attention)

    def copied_bytes(self, batch: int, length: int) -> int:
        """Return bytes that `torch.cat` moves in a step of a dynamic cache: what is stored is read and written."""
        return 2 * self.cache_bytes(batch, length)


@torch.no_grad()
def attentions(model: PreTrainedModel) -> tuple[Attention, ...]:
    """Return the layers that attend; the model runs once over two tokens."""
    calls: dict[int, AttentionCall] = {}
    with visited(model, lambda call: calls.update({call.layer: call})):
        model(torch.zeros(1, 2, dtype=torch.long, device=model.device), use_cache=False)
    config = model.config.get_text_config()
    attention = []
    for layer, call in sorted(calls.items()):
        shares, sources = stored_shares(config, layer), read_counts(config, layer)
        attention.append(
            Attention(
                heads=call.query.shape[1],
                kv_heads=call.key.shape[1],
                key_size=call.key.shape[-1],
                value_size=call.value.shape[-1],
                window=call.window,
                stored=(shares["keys"], shares["values"]),
                sources=(sources["keys"], sources["values"]),
                row=call.key.shape[2] // call.query.shape[2],  # more than 1 where keys of several layers stand in a row
            )
        )
    return tuple(attention)


def structure(model: PreTrainedModel) -> Structure:
    """Return what the costs of a causal language model depend on; it runs once over two tokens.

    Its matrices are what every token passes: neither embeddings nor head, nor what methods keep by head (tables, of
    which a token reads a row, and weights of channels).
    """
    attention, matrices, head = attentions(model), [], model.get_output_embeddings()
    for module in model.modules():
        by_head = isinstance(module, Mixing) and module.split_by_head
        if isinstance(module, nn.Embedding) or module is head or by_head:
            continue
        for name, parameter in module.named_parameters(recurse=False):
            if parameter.ndim > 2:
                raise ValueError(f"{type(module).__name__}.{name} has {parameter.ndim} dimensions: experts, say")
            matrices += [parameter] if parameter.ndim == 2 else []
    largest = max(matrices, key=lambda weight: weight.numel())
    return Structure(
        matrices=sum(weight.numel() for weight in matrices),
        head=0 if head is None else head.weight.numel(),  # type: ignore[union-attr, operator]
        shape=(largest.shape[0], largest.shape[1]),
        attention=attention,
        itemsize=matrices[0].element_size(),
    )


class Rates(Frozen):
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

    def by_name(self) -> dict[str, float]:
        """Return the numbers by their names."""
        return self.model_dump(exclude={"asynchronous"})


class Operators(Frozen):
    """How many operators a decoding step runs with each cache, whatever the length."""

    dynamic: int
    static: int


class Prediction(Frozen):
    """Seconds that a measure should take, and its terms in seconds: the device's work, and the cost of operators."""

    seconds: float
    work: dict[str, float]
    operators: float

    @property
    def operator_share(self) -> float:
        """The share of operators, a rough term, in the whole."""
        return self.operators / self.seconds


@dataclass(frozen=True)
class Load:
    """A setting: B sequences of `context` tokens, then `new_tokens` decoded step by step."""

    context: int
    batch: int
    new_tokens: int

    @property
    def total(self) -> int:
        """Tokens in the cache at the end."""
        return self.context + self.new_tokens


def predict(model: Structure, rates: Rates, load: Load, operators: Operators) -> dict[str, Prediction]:
    """Return what the first token and each further token should take, with a dynamic and a static cache, by measure.

    With a dynamic cache the states are as many as halfway through decoding; a static cache is read whole from the
    beginning.
    """
    matrices, attention = model.prefill_flops(load.batch, load.context)
    weights = model.weight_bytes() / rates.weights
    halfway = load.context + (load.new_tokens + 1) // 2
    prefill = {
        "matrices": matrices / rates.matrices,
        "attention": attention / rates.attention,
        "head": model.head * model.itemsize / rates.weights,
    }
    dynamic = {
        "weights": weights,
        "states": model.state_bytes(load.batch, halfway) / rates.states,
        "copies": model.copied_bytes(load.batch, halfway) / rates.copies,
    }
    static = {"weights": weights, "states": model.state_bytes(load.batch, load.total) / rates.states}
    predictions = {}
    for measure, work, count in (
        ("ttft", prefill, operators.dynamic),
        ("tpot_dynamic", dynamic, operators.dynamic),
        ("tpot_static", static, operators.static),
    ):
        seconds = rates.seconds(sum(work.values()), count)
        predictions[measure] = Prediction(seconds=seconds, work=work, operators=count * rates.operator)
    return predictions
