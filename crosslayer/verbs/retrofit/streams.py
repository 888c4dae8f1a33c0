"""The residual streams of an original and of its rewired model, layer by layer, over all calibration tokens.

Memory: the streams at a single layer for all tokens (of both models, or of the rewired alone), and the states that the
wiring lends; never all layers.

Shapes: B sequences of a batch, T tokens, C hidden.
"""

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from crosslayer.core.decoder.layer import CrossLayerDecoderLayer
from crosslayer.core.decoder.modeling import CrossLayerForCausalLM, masks_of
from crosslayer.core.method import Carry

TOKENS_EACH = 2048  # of a batch


class Streams:
    """Both models at a boundary between layers, a batch at a time; "before" is the original, "after" the rewired.

    With `follow` "both" the original has a stream of its own, from the first layer on in which the models differ. With
    "rewired" the original's layers are asked about the rewired model's stream; with "original" the rewired model's
    layers are asked about the original's.

    `text` is ids (N, T), which begin at the first layer, or streams that are known at another, (B, T, C) each.
    """

    def __init__(
        self,
        original: CrossLayerForCausalLM,
        rewired: CrossLayerForCausalLM,
        text: Tensor | Sequence[Tensor],
        follow: str,
    ):
        self.body, self.follow = rewired.model, follow
        self.layers_before, self.layers_after = layers_of(original), layers_of(rewired)
        length = text.shape[1] if isinstance(text, Tensor) else text[0].shape[1]
        position = torch.arange(length, device=rewired.device)[None]  # (1, T)
        if isinstance(text, Tensor):
            batches = text.to(rewired.device).split(max(1, TOKENS_EACH // length))
            placed = [self.body.place(original.model.embed_tokens(batch), position) for batch in batches]
            self.after, self.rotary = [stream for stream, _ in placed], placed[0][1]  # streams (B, T, C)
        else:
            self.after = [stream.clone() for stream in text]
            self.rotary = self.body.place(text[0], position)[1]
        self.before: list[Tensor] | None = None  # the original's own, once it differs
        self.passed = -1  # the last layer that the original's own stream has passed
        self.carries: list[Carry] = [{} for _ in self.after]
        by_size = {len(stream): stream for stream in self.after}  # the last batch may be smaller
        config, kinds = rewired.config, rewired.config.layer_types
        assert kinds is not None
        self.kinds = kinds
        self.masks = {size: masks_of(config, kinds, stream, None, position) for size, stream in by_size.items()}

    def advance(self, layer: int) -> None:
        """Take both models through a layer."""
        self._separate(layer)
        for number, stream in enumerate(self.after):
            output, carry = self._run(self.layers_after[layer], layer, stream, self.carries[number])
            if self.follow == "original":
                output = self._run(self.layers_before[layer], layer, stream, {})[0]
            stream.copy_(output)  # in place: freed and new streams in turns would scatter over the memory
            self.carries[number] = _lent(carry)
        if self.before is not None and self.passed < layer:
            for stream in self.before:
                stream.copy_(self._run(self.layers_before[layer], layer, stream, {})[0])

    def borrow(self, layer: int) -> None:
        """Keep what a layer lends, of streams that enter it; the streams stay where they are."""
        for number, stream in enumerate(self.after):
            _, carry = self._run(self.layers_after[layer], layer, stream, self.carries[number])
            self.carries[number] = _lent(carry)

    def gaps(self, layer: int, target: str, reads: Sequence[str] = ("normed",)) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield X (B, T, I) and E (B, T, C) of each batch: what is fitted to, and what the rewired stream lacks.

        X is the layer's "normed" input, or the concatenated "heads" that its W_o reads, or both. `target` is where W_c
        writes. The original's own stream has passed the layer afterwards.
        """
        self._separate(layer)
        for number, stream in enumerate(self.after):
            wanted = self._wanted(layer, number, target)
            rewired = self._watched(self.layers_after[layer], layer, stream, self.carries[number], target, stop=True)
            yield torch.cat([rewired.seen[name] for name in reads], dim=-1), wanted - rewired.reached
        self.passed = layer

    def around_attention(self, layer: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield the rewired model's stream of each batch before a layer and after its attention, (B, T, C) each."""
        block = self.layers_after[layer]
        for stream, carry in zip(self.after, self.carries, strict=True):
            yield stream, self._watched(block, layer, stream, carry, "attention", stop=True).reached

    def _wanted(self, layer: int, number: int, target: str) -> Tensor:
        """Return the stream that W_c of the rewired layer should reach, (B, T, C)."""
        block = self.layers_before[layer]
        if self.before is None:
            return self._watched(block, layer, self.after[number], {}, target, stop=True).reached
        original = self._watched(block, layer, self.before[number], {}, target, stop=False)
        assert original.output is not None
        self.before[number].copy_(original.output)
        return original.reached

    def _watched(
        self, block: CrossLayerDecoderLayer, layer: int, stream: Tensor, carry: Carry, target: str, stop: bool
    ) -> "_Watch":
        """Run a layer, with `stop` only as far as W_c needs it, and return what was seen."""
        with _Watch(block, target, stop) as watch, contextlib.suppress(_EnoughError):
            watch.output = self._run(block, layer, stream, carry)[0]
        return watch

    def _run(self, block: CrossLayerDecoderLayer, layer: int, stream: Tensor, carry: Carry) -> tuple[Tensor, Carry]:
        return block(stream, carry, self.rotary, self.masks[len(stream)][self.kinds[layer]])

    def _separate(self, layer: int) -> None:
        """Give the original a stream of its own where a layer begins to differ."""
        if self.follow != "both" or self.before is not None:
            return
        if not computes_the_same(self.layers_before[layer], self.layers_after[layer]):
            self.before = [stream.clone() for stream in self.after]


def _lent(carry: Carry) -> Carry:
    return {name: state for name, state in carry.items() if name != "read"}


def layers_of(model: CrossLayerForCausalLM) -> list[CrossLayerDecoderLayer]:
    """Return the layers of a model of ours."""
    return list(model.model.layers)  # type: ignore[arg-type]


def computes_the_same(original: CrossLayerDecoderLayer, rewired: CrossLayerDecoderLayer) -> bool:
    """Return whether a rewired layer has the very weights of the original, borrows nothing and mixes nothing."""
    attention = rewired.self_attn
    if attention is None or attention.sources or len(attention.mixers):
        return False
    return same_weights(original, rewired)


def same_weights(module: nn.Module, other: nn.Module) -> bool:
    """Return whether two modules hold the very same tensors."""
    weights, others = dict(module.named_parameters()), dict(other.named_parameters())
    if set(weights) != set(others):
        return False
    return all(weights[name].data_ptr() == others[name].data_ptr() for name in weights)


class _EnoughError(Exception):
    """The stream after attention is there; the MLP need not run."""


class _Watch:
    """Keeps what W_c and W_o of a layer read, by name, and the stream to which W_c writes."""

    def __init__(self, layer: CrossLayerDecoderLayer, target: str, stop: bool):
        self.layer, self.stop = layer, stop
        self.early = target != "mlp" and layer.mlp is not None  # else the layer's output is what W_c changes
        self.seen: dict[str, Tensor] = {}
        self.stream: Tensor | None = None
        self.output: Tensor | None = None
        self.handles: list[Any] = []

    def __enter__(self) -> "_Watch":
        assert self.layer.input_layernorm is not None
        self.handles.append(self.layer.input_layernorm.register_forward_hook(self._keep_normed))
        if self.layer.self_attn is not None:
            self.handles.append(self.layer.self_attn.o_proj.register_forward_pre_hook(self._keep_heads))
        if self.early:
            assert self.layer.mlp_norm is not None
            self.handles.append(self.layer.mlp_norm.register_forward_pre_hook(self._keep_stream))
        return self

    def __exit__(self, *_: Any) -> None:
        for handle in self.handles:
            handle.remove()

    @property
    def reached(self) -> Tensor:
        """The stream after attention, or the layer's output where W_c acts on that; (B, T, C)."""
        stream = self.stream if self.early else self.output
        assert stream is not None
        return stream

    def _keep_normed(self, module: nn.Module, args: Any, output: Tensor) -> None:
        self.seen["normed"] = output

    def _keep_heads(self, module: nn.Module, args: Any) -> None:
        self.seen["heads"] = args[0]

    def _keep_stream(self, module: nn.Module, args: Any) -> None:
        self.stream = args[0]
        if self.stop:
            raise _EnoughError
