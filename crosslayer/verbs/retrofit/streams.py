"""The residual streams of an original and of its converted model, layer by layer, over all calibration tokens.

Memory: the streams at one layer for all tokens (of both models, or of the converted one only), and the states that
later layers read; never all layers.

Shapes: B sequences of a batch, T tokens, C hidden.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, suppress
from typing import Any

import torch
from torch import Tensor, nn

from crosslayer.core.decoder.layer import CrossLayerDecoderLayer
from crosslayer.core.decoder.modeling import CrossLayerForCausalLM, masks_of
from crosslayer.core.method import Carry

# Several windows in a pass are faster than one: two by 7%, four by 12% (256 tokens each, 135M parameters).
BATCH_TOKENS = 2048


class Streams:
    """Both models at the input of a layer, batch by batch; "before" is the original, "after" the converted model.

    `run_on` "own": each model runs on its own stream, from the first layer on in which they differ. "converted": the
    original's layers run on the converted model's stream. "original": the converted layers run on the original's.

    `text` is ids (N, T), to start at the first layer, or the streams at another layer, (B, T, C) each.
    """

    def __init__(
        self,
        original: CrossLayerForCausalLM,
        converted: CrossLayerForCausalLM,
        text: Tensor | Sequence[Tensor],
        run_on: str,
    ):
        self.body, self.run_on = converted.model, run_on
        self.layers_before, self.layers_after = layers_of(original), layers_of(converted)
        length = (text if isinstance(text, Tensor) else text[0]).shape[1]
        position = torch.arange(length, device=converted.device)[None]  # (1, T)
        config = converted.config
        layer_types = config.layer_types
        assert layer_types is not None
        self.layer_types = layer_types
        if isinstance(text, Tensor):
            batches = text.to(converted.device).split(max(1, BATCH_TOKENS // length))
            embedded = [original.model.embed_tokens(batch) for batch in batches]  # (B, T, C)
            self.after = [self.body.add_positions(stream, position)[0] for stream in embedded]
        else:
            self.after = [stream.clone() for stream in text]
        by_size = {len(stream): stream for stream in self.after}  # the last batch may be smaller
        self.masks = {size: masks_of(config, layer_types, stream, None, position) for size, stream in by_size.items()}
        self.tables = self.body.add_positions(self.after[0], position)[1]
        self.before: list[Tensor] | None = None  # the original's own, once the models differ
        self.passed = -1  # the last layer that `before` has passed
        self.carries: list[Carry] = [{} for _ in self.after]

    def advance(self, layer: int) -> None:
        """Run both models through a layer."""
        self._separate(layer)
        for batch, stream in enumerate(self.after):
            output, self.carries[batch] = self._run(self.layers_after[layer], layer, stream, self.carries[batch])
            if self.run_on == "original":
                output = self._run(self.layers_before[layer], layer, stream, {})[0]
            stream.copy_(output)  # in place: freeing and allocating in turn would fragment the memory
        if self.before is not None and self.passed < layer:
            for stream in self.before:
                stream.copy_(self._run(self.layers_before[layer], layer, stream, {})[0])

    def compute_states(self, layer: int) -> None:
        """Compute and keep the states of a layer that others read, without its MLP; the streams do not advance."""
        block = self.layers_after[layer]
        # nobody reads what the MLP would add
        mlp = block.mlp
        block.mlp = None
        try:
            for batch, stream in enumerate(self.after):
                _, self.carries[batch] = self._run(block, layer, stream, self.carries[batch])
        finally:
            block.mlp = mlp

    def errors(self, layer: int, target: str, reads: Sequence[str] = ("normed",)) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield X (B, T, I) and E (B, T, C) of each batch: inputs of the fit, and error of the converted stream.

        X is the layer's "normed" input, the "values" of its W_v, or the concatenated "heads" that its W_o reads, or
        several of them. `target` is where W_c writes. The original's own stream, if any, advances by this layer.
        """
        self._separate(layer)
        for batch, stream in enumerate(self.after):
            if self.before is None:
                original = self._capture(self.layers_before[layer], layer, stream, {}, target)
            else:
                # its whole output is needed anyway: `advance` then leaves this stream out
                original = self._capture(self.layers_before[layer], layer, self.before[batch], {}, target, stop=False)
                self.before[batch].copy_(original["output"])
            converted = self._capture(self.layers_after[layer], layer, stream, self.carries[batch], target)
            x = torch.cat([converted[name] for name in reads], dim=-1)
            yield x, original["stream"] - converted["stream"]
        self.passed = layer

    def _capture(
        self, block: CrossLayerDecoderLayer, layer: int, stream: Tensor, carry: Carry, target: str, stop: bool = True
    ) -> dict[str, Tensor]:
        """Run a layer, with `stop` only as far as W_c needs, and return tensors by name.

        "normed" or "values" is the input of W_c, "heads" that of W_o; "stream" is what W_c adds to, "output" that of
        the layer, if the run got there.
        """
        captured: dict[str, Tensor] = {}

        def keep(name: str) -> Callable[..., None]:  # a hook before a module, or behind it
            return lambda _, args, output=None: captured.update({name: args[0] if output is None else output})

        def keep_stream(_: nn.Module, args: Any) -> None:
            captured["stream"] = args[0]
            if stop:
                raise _EnoughError

        assert block.input_layernorm is not None
        with ExitStack() as hooks:
            hooks.callback(block.input_layernorm.register_forward_hook(keep("normed")).remove)
            if block.self_attn is not None:
                hooks.callback(block.self_attn.o_proj.register_forward_pre_hook(keep("heads")).remove)
                if block.self_attn.v_proj is not None:
                    hooks.callback(block.self_attn.v_proj.register_forward_hook(keep("values")).remove)
            if target != "mlp" and block.mlp is not None:
                assert block.mlp_norm is not None
                hooks.callback(block.mlp_norm.register_forward_pre_hook(keep_stream).remove)
            with suppress(_EnoughError):
                captured["output"] = self._run(block, layer, stream, carry)[0]
        return {"stream": captured["output"], **captured} if "output" in captured else captured

    def _run(self, block: CrossLayerDecoderLayer, layer: int, stream: Tensor, carry: Carry) -> tuple[Tensor, Carry]:
        """Return the output of a layer, (B, T, C), and the states that later layers read."""
        layer_type = self.layer_types[layer]
        output, carry = block(stream, carry, self.tables.get(layer_type), self.masks[len(stream)][layer_type])
        # "read" is for hidden states that are asked for: kept, it would be a second stream in memory
        return output, {name: state for name, state in carry.items() if name != "read"}

    def _separate(self, layer: int) -> None:
        """Start a stream of its own for the original at the first layer that differs."""
        together = self.run_on == "own" and self.before is None
        if together and not computes_the_same(self.layers_before[layer], self.layers_after[layer]):
            self.before = [stream.clone() for stream in self.after]


def layers_of(model: CrossLayerForCausalLM) -> list[CrossLayerDecoderLayer]:
    """Return the layers of a crosslayer model."""
    return list(model.model.layers)  # type: ignore[arg-type]


def computes_the_same(original: CrossLayerDecoderLayer, converted: CrossLayerDecoderLayer) -> bool:
    """Return whether a converted layer has the original's tensors, attends to all its own tokens and mixes nothing."""
    attention = converted.self_attn
    if attention is None or attention.sources or attention.attends_to_choice or len(attention.mixers):
        return False
    return same_weights(original, converted)


def same_weights(module: nn.Module, other: nn.Module) -> bool:
    """Return whether two modules share all their tensors."""
    weights = dict(module.named_parameters())
    other_weights = dict(other.named_parameters())
    if set(weights) != set(other_weights):
        return False
    return all(weights[name].data_ptr() == other_weights[name].data_ptr() for name in weights)


class _EnoughError(Exception):
    """The stream after attention was captured; the MLP need not run."""
