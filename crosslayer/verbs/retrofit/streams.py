"""The residual streams of an original and of its converted model, layer by layer, over all calibration tokens.

Memory: the streams at one layer for all tokens (of both models, or of the converted alone), and the states that the
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
    """Both models at a boundary between layers, a batch at a time; "before" is the original, "after" the converted.

    With `follow` "both" the original has a stream of its own, from the first layer on in which the models differ. With
    "converted" the original's layers run on the converted model's stream; with "original" the converted model's
    layers are asked about the original's.

    `text` is ids (N, T), which begin at the first layer, or streams that are known at another, (B, T, C) each.
    """

    def __init__(
        self,
        original: CrossLayerForCausalLM,
        converted: CrossLayerForCausalLM,
        text: Tensor | Sequence[Tensor],
        follow: str,
    ):
        self.body, self.follow = converted.model, follow
        self.layers_before, self.layers_after = layers_of(original), layers_of(converted)
        length = text.shape[1] if isinstance(text, Tensor) else text[0].shape[1]
        position = torch.arange(length, device=converted.device)[None]  # (1, T)
        if isinstance(text, Tensor):
            batches = text.to(converted.device).split(max(1, TOKENS_EACH // length))
            placed = [self.body.add_positions(original.model.embed_tokens(batch), position) for batch in batches]
            self.after, self.rotary = [stream for stream, _ in placed], placed[0][1]  # streams (B, T, C)
        else:
            self.after = [stream.clone() for stream in text]
            self.rotary = self.body.add_positions(text[0], position)[1]
        self.before: list[Tensor] | None = None  # the original's own, once it differs
        self.passed = -1  # the last layer that the original's own stream has passed
        self.carries: list[Carry] = [{} for _ in self.after]
        by_size = {len(stream): stream for stream in self.after}  # the last batch may be smaller
        config, kinds = converted.config, converted.config.layer_types
        assert kinds is not None
        self.kinds = kinds
        self.masks = {size: masks_of(config, kinds, stream, None, position) for size, stream in by_size.items()}

    def advance(self, layer: int) -> None:
        """Take both models through a layer."""
        self._separate(layer)
        for number, stream in enumerate(self.after):
            output, self.carries[number] = self._run(self.layers_after[layer], layer, stream, self.carries[number])
            if self.follow == "original":
                output = self._run(self.layers_before[layer], layer, stream, {})[0]
            stream.copy_(output)  # in place: freed and new streams in turns would scatter over the memory
        if self.before is not None and self.passed < layer:
            for stream in self.before:
                stream.copy_(self._run(self.layers_before[layer], layer, stream, {})[0])

    def borrow(self, layer: int) -> None:
        """Keep what a layer lends, of streams that enter it; the streams stay where they are."""
        for number, stream in enumerate(self.after):
            _, self.carries[number] = self._run(self.layers_after[layer], layer, stream, self.carries[number])

    def gaps(self, layer: int, target: str, reads: Sequence[str] = ("normed",)) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield X (B, T, I) and E (B, T, C) of each batch: what is fitted to, and what the converted stream lacks.

        X is the layer's "normed" input, or the concatenated "heads" that its W_o reads, or both. `target` is where W_c
        writes. The original's own stream has passed the layer afterwards.
        """
        self._separate(layer)
        for number, stream in enumerate(self.after):
            if self.before is None:
                original = self._watch(self.layers_before[layer], layer, stream, {}, target)
            else:
                original = self._watch(self.layers_before[layer], layer, self.before[number], {}, target, stop=False)
                self.before[number].copy_(original["output"])
            seen = self._watch(self.layers_after[layer], layer, stream, self.carries[number], target)
            yield torch.cat([seen[name] for name in reads], dim=-1), original["reached"] - seen["reached"]
        self.passed = layer

    def around_attention(self, layer: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield the converted model's stream of each batch before a layer and after its attention, (B, T, C) each."""
        for stream, carry in zip(self.after, self.carries, strict=True):
            yield stream, self._watch(self.layers_after[layer], layer, stream, carry, "attention")["reached"]

    def _watch(
        self, block: CrossLayerDecoderLayer, layer: int, stream: Tensor, carry: Carry, target: str, stop: bool = True
    ) -> dict[str, Tensor]:
        """Run a layer, with `stop` only as far as W_c needs it, and return what was seen by name.

        "normed" and "heads" are what W_c and W_o read; "reached" is the stream to which W_c writes, "output" what
        leaves the layer, if it came so far.
        """
        seen: dict[str, Tensor] = {}

        def keep_normed(_: nn.Module, args: Any, output: Tensor) -> None:
            seen["normed"] = output

        def keep_heads(_: nn.Module, args: Any) -> None:
            seen["heads"] = args[0]

        def keep_reached(_: nn.Module, args: Any) -> None:
            seen["reached"] = args[0]
            if stop:
                raise _EnoughError

        assert block.input_layernorm is not None
        handles = [block.input_layernorm.register_forward_hook(keep_normed)]
        if block.self_attn is not None:
            handles.append(block.self_attn.o_proj.register_forward_pre_hook(keep_heads))
        if target != "mlp" and block.mlp is not None:
            assert block.mlp_norm is not None
            handles.append(block.mlp_norm.register_forward_pre_hook(keep_reached))
        try:
            with contextlib.suppress(_EnoughError):
                seen["output"] = self._run(block, layer, stream, carry)[0]
        finally:
            for handle in handles:
                handle.remove()
        return {"reached": seen["output"], **seen} if "output" in seen else seen

    def _run(self, block: CrossLayerDecoderLayer, layer: int, stream: Tensor, carry: Carry) -> tuple[Tensor, Carry]:
        """Return what leaves a layer, (B, T, C), and what it lends."""
        output, carry = block(stream, carry, self.rotary, self.masks[len(stream)][self.kinds[layer]])
        return output, {name: state for name, state in carry.items() if name != "read"}

    def _separate(self, layer: int) -> None:
        """Give the original a stream of its own where a layer begins to differ."""
        together = self.follow == "both" and self.before is None
        if together and not computes_the_same(self.layers_before[layer], self.layers_after[layer]):
            self.before = [stream.clone() for stream in self.after]


def layers_of(model: CrossLayerForCausalLM) -> list[CrossLayerDecoderLayer]:
    """Return the layers of a model of ours."""
    return list(model.model.layers)  # type: ignore[arg-type]


def computes_the_same(original: CrossLayerDecoderLayer, converted: CrossLayerDecoderLayer) -> bool:
    """Return whether a converted layer has the very weights of the original, borrows nothing and mixes nothing."""
    attention = converted.self_attn
    if attention is None or attention.sources or len(attention.mixers):
        return False
    return same_weights(original, converted)


def same_weights(module: nn.Module, other: nn.Module) -> bool:
    """Return whether two modules hold the very same tensors."""
    weights, others = dict(module.named_parameters()), dict(other.named_parameters())
    if set(weights) != set(others):
        return False
    return all(weights[name].data_ptr() == others[name].data_ptr() for name in weights)


class _EnoughError(Exception):
    """The stream after attention is there; the MLP need not run."""
