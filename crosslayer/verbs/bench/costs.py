"""What a causal language model computes, reads and stores, and the time that follows from the machine's rates.

prefill       = FLOPs of the matrices / their rate + FLOPs of attention / its rate + head / read rate + operators
another token = weights / read rate + states read / their rate + states copied / copy rate + operators
with a quantised cache: states decoded / their rate instead of copies

Storing less is not reading less: a reader layer reads its source's keys or values again, so what is read counts every
layer with attention, and what is stored (and copied by a dynamic cache) counts only what the plan stores.

Shapes: B batch, T tokens of the prompt, S tokens in the cache, H heads, H_kv key-value heads, D head size.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import nn
from transformers import PreTrainedModel

from crosslayer.core.decoder.attention import map_source
from crosslayer.core.latents import LatentDecoder
from crosslayer.core.method import Mixing
from crosslayer.core.plan import TokenCount, allocated_tokens
from crosslayer.output.record import Frozen
from crosslayer.probe.intercept import AttentionCall, plan_of, read_counts, stored_shares, visited
from crosslayer.wiring import kv_bits


@dataclass(frozen=True)
class Attention:
    """The attention of a layer: H, H_kv, the sizes of a key and a value, its window (None: all), what it stores.

    `stored` is the fraction of its keys and of its values that is stored; `sources` is from how many layers it reads
    keys and values; `row` is over how many of them attention runs, concatenated. `kind` is the type of a quantised
    cache in which it stores them, None: as they are. `codes` are the bytes of a token's latent if it consists of codes.
    `chosen` is how many tokens it attends to, None: all; `limited` says of keys and values whether only these are read.
    `shares_map`: eager attention takes its softmax map from another layer.
    """

    heads: int
    kv_heads: int
    key_size: int
    value_size: int
    window: int | None = None
    stored: tuple[float, float] = (1.0, 1.0)
    sources: tuple[float, float] = (1, 1)
    row: int = 1
    kind: str | None = None
    codes: int | None = None
    chosen: TokenCount | None = None
    limited: tuple[bool, bool] = (False, False)
    shares_map: bool = False

    def read(self, length: int) -> int:
        """Return how many elements of keys and values a new token reads from `length` cached ones, for a batch of 1."""
        if self.chosen is None:
            return self._elements(length, self.sources)
        share = self.chosen.share(length)
        keys, values = (
            count * (share if limited else 1.0) for count, limited in zip(self.sources, self.limited, strict=True)
        )
        return self._elements(length, (keys, values))

    def kept(self, length: int) -> int:
        """Return how many elements the cache holds for `length` tokens, for a batch of 1."""
        return self._elements(length, self.stored)

    def kept_bytes(self, length: int, itemsize: int) -> float:
        """Return how many bytes the cache holds for `length` tokens, for a batch of 1."""
        if self.codes is not None:
            return allocated_tokens(length) * self.codes
        if self.kind is None:
            return self.kept(length) * itemsize
        sizes = zip(self.stored, (self.key_size, self.value_size), strict=True)
        return self.kv_heads * sum(
            share * kv_bits.stored_bytes(self.kind, size, length, itemsize) for share, size in sizes
        )

    def _elements(self, length: int, counts: tuple[float, float]) -> int:
        seen = length if self.window is None else min(length, self.window)
        return round(seen * self.kv_heads * (counts[0] * self.key_size + counts[1] * self.value_size))

    def flops(self, tokens: int, eager: bool = False) -> int:
        """Return FLOPs of a causal prompt: a multiplication and an addition per pair of tokens in QKᵀ and in AV.

        If the window is shorter than the prompt, the mask is explicit, and SDPA computes every pair.
        """
        cut = self.window is not None and self.window < tokens
        pairs = tokens * tokens if cut else tokens * (tokens + 1) // 2
        key_size = 0 if eager and self.shares_map else self.key_size
        return 2 * self.row * pairs * self.heads * (key_size + self.value_size)


@dataclass(frozen=True)
class Structure:
    """The properties of a model on which its costs depend.

    `matrices` and `head` count elements: of all weight matrices that every token passes through (without embeddings),
    and of the language model's head, which runs only for tokens whose logits are needed. `shape` is (outputs, inputs)
    of the largest matrix; `itemsize` is bytes per element. `latents` counts those elements that make keys and values of
    latents, through which every cached token passes, too.
    """

    matrices: int
    head: int
    shape: tuple[int, int]
    attention: tuple[Attention, ...]
    itemsize: int
    latents: int = 0

    def prefill_flops(self, batch: int, tokens: int, eager: bool = False) -> tuple[int, int]:
        """Return FLOPs of a prompt (B, T): of the matrices without the head, and of attention."""
        attention = sum(layer.flops(tokens, eager) for layer in self.attention)
        return 2 * self.matrices * batch * tokens, batch * attention

    def weight_bytes(self) -> int:
        """Return bytes of weights that a decoding step reads, for any batch size."""
        return (self.matrices + self.head) * self.itemsize

    def state_bytes(self, batch: int, length: int) -> int:
        """Return bytes of keys and values that a decoding step reads, in every layer with attention."""
        return batch * self.itemsize * sum(layer.read(length) for layer in self.attention)

    def cache_bytes(self, batch: int, length: int) -> int:
        """Return bytes that a cache of `length` tokens stores."""
        return batch * round(sum(layer.kept_bytes(length, self.itemsize) for layer in self.attention))

    def copied_bytes(self, batch: int, length: int) -> int:
        """Return bytes that `torch.cat` reads and writes in a step of a dynamic cache."""
        return 2 * batch * self.itemsize * sum(layer.kept(length) for layer in self.attention if layer.kind is None)

    def decoded(self, batch: int, length: int) -> int:
        """Return how many elements of quantised keys and values a decoding step decodes."""
        return batch * sum(layer.kept(length) for layer in self.attention if layer.kind is not None)


@torch.no_grad()
def attentions(model: PreTrainedModel, kinds: Sequence[str | None] = ()) -> tuple[Attention, ...]:
    """Return the attention of each layer that has one; runs the model once over two tokens.

    `kinds` are the types in which a quantised cache stores the layers' keys and values.
    """
    calls: dict[int, AttentionCall] = {}
    with visited(model, lambda call: calls.update({call.layer: call})):
        model(torch.zeros(1, 2, dtype=torch.long, device=model.device), use_cache=False)
    config = model.config.get_text_config()
    attention = []
    for layer, call in sorted(calls.items()):
        shares, sources = stored_shares(config, layer), read_counts(config, layer)
        plan = plan_of(config)
        latent = None if plan is None else plan.latents[layer]
        chooser = None if plan is None else plan.choices[layer]
        attention.append(
            Attention(
                heads=call.query.shape[1],
                kv_heads=call.key.shape[1],
                key_size=call.key.shape[-1],
                value_size=call.value.shape[-1],
                window=call.window,
                stored=(shares["keys"], shares["values"]),
                sources=(sources["keys"], sources["values"]),
                row=call.key.shape[2] // call.query.shape[2],  # above 1 if keys of several layers are concatenated
                kind=kinds[layer] if kinds else None,
                codes=None if latent is None else latent.bytes,
                chosen=None if plan is None or chooser is None else plan.chosen,
                limited=(chooser not in (None, layer), chooser is not None),
                shares_map=plan is not None and map_source(plan, layer) is not None,
            )
        )
    return tuple(attention)


def structure(model: PreTrainedModel, kinds: Sequence[str | None] = ()) -> Structure:
    """Return the properties of a causal language model on which its costs depend; runs it once over two tokens.

    Its matrices are those that every token passes through: neither embeddings nor head, nor a method's parameters per
    attention head (tables, where a token reads one row, and weights per channel). `kinds` are the types in which a
    quantised cache stores the layers' keys and values.
    """
    attention, matrices, head = attentions(model, kinds), [], model.get_output_embeddings()
    for module in model.modules():
        by_head = isinstance(module, Mixing) and module.split_by_head
        if isinstance(module, nn.Embedding) or module is head or by_head:
            continue
        for name, parameter in module.named_parameters(recurse=False):
            if parameter.ndim > 2:
                raise ValueError(
                    f"{type(module).__name__}.{name} has {parameter.ndim} dimensions (experts?), and only matrices and "
                    "vectors are modelled"
                )
            matrices += [parameter] if parameter.ndim == 2 else []
    largest = max(matrices, key=lambda weight: weight.numel())
    return Structure(
        matrices=sum(weight.numel() for weight in matrices),
        head=0 if head is None else head.weight.numel(),  # type: ignore[union-attr, operator]
        shape=(largest.shape[0], largest.shape[1]),
        attention=attention,
        itemsize=matrices[0].element_size(),
        latents=sum(
            parameter.numel()
            for module in model.modules()
            if isinstance(module, LatentDecoder)
            for parameter in module.parameters()
            if parameter.ndim == 2
        ),
    )


class Rates(Frozen):
    """Rates of a machine: FLOP/s of matrices and attention, bytes/s of weights, states, copies; seconds per operator.

    `decoding` is in elements/s of quantised keys and values; None if nothing is quantised.
    An asynchronous device computes while operators are launched, so the longer of the two times counts.
    """

    matrices: float
    attention: float
    weights: float
    states: float
    copies: float
    operator: float
    decoding: float | None = None
    asynchronous: bool = False

    def seconds(self, work: float, operators: int) -> float:
        """Return the total time of `work` seconds on the device and the fixed cost of `operators` launches."""
        fixed = operators * self.operator
        return max(work, fixed) if self.asynchronous else work + fixed

    def by_name(self) -> dict[str, float]:
        """Return the rates by name."""
        return self.model_dump(exclude={"asynchronous"}, exclude_none=True)


class Operators(Frozen):
    """How many operators a decoding step runs with each cache, for any length."""

    dynamic: int
    static: int


class Prediction(Frozen):
    """A predicted time in seconds, and its terms in seconds: the device's work, and the fixed cost of operators."""

    seconds: float
    work: dict[str, float]
    operators: float

    @property
    def operator_share(self) -> float:
        """The fraction of the time that is the fixed cost of operators, a rough estimate."""
        return self.operators / self.seconds


@dataclass(frozen=True)
class Load:
    """A configuration: B sequences of `context` tokens, then `new_tokens` decoded step by step, and the attention."""

    context: int
    batch: int
    new_tokens: int
    attention: Literal["sdpa", "eager"] = "sdpa"

    @property
    def total(self) -> int:
        """Tokens in the cache at the end."""
        return self.context + self.new_tokens


def predict(model: Structure, rates: Rates, load: Load, operators: Operators) -> dict[str, Prediction]:
    """Return predicted times, by measure: the first token, and each further one with a dynamic and a static cache.

    A dynamic cache is taken at its size halfway through decoding; a static cache is read in full from the beginning.
    A quantised cache is always as large as its text. With it the first token is not predicted, since the prompt, too,
    reads rounded keys and values, for which attention runs over up to twice as many columns.
    """
    matrices, attention = model.prefill_flops(load.batch, load.context, load.attention == "eager")
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
    if model.latents:
        for work, length in ((dynamic, halfway), (static, load.total)):
            work["latents"] = 2 * model.latents * load.batch * length / rates.matrices
    measures = [
        ("ttft", prefill, operators.dynamic),
        ("tpot_dynamic", dynamic, operators.dynamic),
        ("tpot_static", static, operators.static),
    ]
    decoded = model.decoded(load.batch, halfway)
    if decoded and rates.decoding is not None:
        dynamic["decoding"] = decoded / rates.decoding
        measures = [(measure, dynamic, operators.dynamic) for measure in ("tpot_dynamic", "tpot_static")]
    predictions = {}
    for measure, work, count in measures:
        seconds = rates.seconds(sum(work.values()), count)
        predictions[measure] = Prediction(seconds=seconds, work=work, operators=count * rates.operator)
    return predictions
