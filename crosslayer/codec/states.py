"""A stock cache as plain states: of each layer keys before rotation and values, as far as a window still holds them.

A cache holds keys after rotary embedding (and after a norm of keys). The angles of a position turn them back exactly:
a sequence of a single token has the same hidden states at any position, so that its keys differ by the rotation alone;
this decides which table of the model and which order of channels each layer uses, whatever the model's family.

Shapes: B rows, S cached tokens, T tokens, H_kv key-value heads, D head size, W = numbers of a layer for each token.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import Cache, DynamicCache, PreTrainedConfig, PreTrainedModel
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

from crosslayer.cache.offsets import Rotation, angle_tables, find_rotation, turns
from crosslayer.core.transformers_versions import CACHE, layers_without_cache
from crosslayer.probe.model import evaluating, plan_of

HALF = torch.finfo(torch.float16).max
# Positions at which keys are compared with those at 0: near ones for channels that turn fast, a far one for slow ones.
PROBED = (1, 3, 40)
ROWS = 8  # tokens for that
UNEVEN = ("dynamic", "longrope")  # their angles depend on the length of the text


@dataclass(frozen=True)
class CodedLayer:
    """What a layer keeps of each token.

    Attributes:
        heads: key-value heads.
        key: numbers of a key.
        value: numbers of a value.
        window: tokens that a query sees, itself included; None: all.
        angles: of one position, in radians, of each pair of channels that turns; empty: keys do not turn.
        order: which channels turn together, `halves` or `pairs`.
    """

    heads: int
    key: int
    value: int
    window: int | None
    angles: tuple[float, ...]
    order: str

    @property
    def width(self) -> int:
        """Numbers that the layer keeps of each token."""
        return self.heads * (self.key + self.value)

    def holds(self, tokens: int) -> int:
        """Return how many of the latest tokens the layer still caches after a number of tokens."""
        return tokens if self.window is None else min(tokens, self.window - 1)


@torch.no_grad()
def turned(keys: Tensor, start: int, shape: CodedLayer, back: bool = False) -> Tensor:
    """Return keys (T, H_kv, D) of the positions from `start` on, rotated or turned back, in float32."""
    rotation = Rotation(shape.angles, shape.order)
    cos, sin = turns(rotation.angles, start, start + len(keys), keys.device)
    return rotation.apply(keys.float().transpose(0, 1), cos, -sin if back else sin).transpose(0, 1)


def read_states(
    cache: Cache, row: int, pad: int, tokens: int, shapes: Sequence[CodedLayer], shift: int = 0
) -> list[Tensor]:
    """Return the states (T, W) of a row's first `tokens` tokens, of each layer those that it still holds.

    A state is keys before rotation, then values, in float32. The row has `pad` columns of padding on its left. Its
    first token was read at the position `shift`.
    """
    states = []
    layers: list[Any] = list(cache.layers)
    for layer, shape in zip(layers, shapes, strict=True):
        lost = layer.get_seq_length() - layer.keys.shape[-2]  # columns that a window has left
        first = max(0, lost - pad)  # token of the row
        columns = slice(pad + first - lost, pad + max(tokens, first) - lost)
        keys = layer.keys[row, :, columns].transpose(0, 1)  # (T, H_kv, D)
        values = layer.values[row, :, columns].transpose(0, 1).float()
        keys = turned(keys, first + shift, shape, back=True)
        states.append(torch.cat([keys.flatten(1), values.flatten(1)], 1))
    return states


def new_cache(
    rows: Sequence[Iterable[Tensor]], shapes: list[CodedLayer], pads: list[int], columns: int, dtype: Any
) -> Cache:
    """Return a cache of `columns` columns from the states of rows, by layer: (T, W) of the latest tokens.

    States that the layer does not keep any more are left out, and columns of padding are zero. Rows are read layer by
    layer: what makes their states needs to hold those of one layer only.
    """
    cache = DynamicCache()
    layers: list[Any] = []
    for index, (shape, *of_rows) in enumerate(zip(shapes, *rows, strict=True)):
        held = shape.holds(columns)
        keys = of_rows[0].new_zeros((len(rows), shape.heads, held, shape.key), dtype=dtype)
        values = keys.new_zeros((len(rows), shape.heads, held, shape.value))
        for row, states in enumerate(of_rows):
            count = min(held, columns - pads[row])
            if len(states) < count:
                raise ValueError(f"the sliding window of layer {index} is not stored for the first {columns} tokens")
            latest = states[len(states) - count :]
            key, value = latest.split([shape.heads * shape.key, shape.heads * shape.value], 1)
            key = turned(key.unflatten(1, (shape.heads, shape.key)), columns - pads[row] - count, shape)
            keys[row, :, held - count :] = key.transpose(0, 1)
            values[row, :, held - count :] = value.unflatten(1, (shape.heads, shape.value)).transpose(0, 1)
        layer = DynamicLayer() if shape.window is None else DynamicSlidingWindowLayer(shape.window)
        layer.update(keys, values)
        if isinstance(layer, DynamicSlidingWindowLayer):
            layer.cumulative_length = columns  # update counted those that it got alone
        layers.append(layer)
    cache.layers = layers
    return cache


def check_cache(cache: Cache, shapes: list[CodedLayer], rows: int, columns: int) -> None:
    """Refuse a cache of other layers, other sizes, or fewer than `columns` columns."""
    if len(cache.layers) != len(shapes):
        raise ValueError(f"the cache must have the codec's {len(shapes)} layers, got {len(cache.layers)}")
    layers: list[Any] = list(cache.layers)
    for index, (layer, shape) in enumerate(zip(layers, shapes, strict=True)):
        _check_layer(layer, index)
        expected = (rows, shape.heads, shape.key, shape.value, shape.window)
        window = layer.sliding_window if layer.is_sliding else None
        got = (len(layer.keys), layer.keys.shape[1], layer.keys.shape[3], layer.values.shape[3], window)
        if got != expected:
            raise ValueError(f"layer {index}: rows, heads, key and value size, window must be {expected}, got {got}")
        if layer.get_seq_length() < columns:
            raise ValueError(f"the cache must hold all {columns} tokens, got {layer.get_seq_length()}")


def _check_layer(layer: Any, index: int) -> None:
    # by type, not isinstance: quantized and other layers of transformers are subclasses with states of their own
    if type(layer) not in (DynamicLayer, DynamicSlidingWindowLayer) or layer.keys is None or layer.keys.dim() != 4:
        raise ValueError(
            f"layer {index} caches something other than keys and values of each token ({type(layer).__name__}); a "
            "codec needs the DynamicCache of a model whose layers all do"
        )


def read_shapes(model: PreTrainedModel) -> list[CodedLayer]:
    """Return the shapes of a model's layers.

    Raises:
        ValueError: the model has shared or chosen layers, MLA, cross-attention, or rotates in another way.
    """
    config: Any = model.config.get_text_config()
    check_config(model.config)
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(config.vocab_size, (ROWS, 1), generator=generator).to(model.device)
    # tokens alone, each at several positions, where their keys differ by the rotation
    states = {}
    with torch.no_grad(), evaluating(model):
        for position in (0, *PROBED):
            states[position] = DynamicCache(config=model.config)
            positions = torch.full_like(ids, position)
            model(ids, position_ids=positions, use_cache=True, **{CACHE: states[position]})
    for index, layer in enumerate(states[0].layers):
        _check_layer(layer, index)
    if len(states[0].layers) != config.num_hidden_layers:
        raise ValueError(f"{config.num_hidden_layers} layers must be cached, got {len(states[0].layers)}")

    # of each layer the sizes, and the rotation that turns its keys from position 0 to the others
    tables = angle_tables(model)
    shapes = []
    for index in range(config.num_hidden_layers):
        layer: Any = states[0].layers[index]
        probed: list[Any] = [cache.layers[index] for cache in states.values()]
        keys = torch.stack([other.keys[:, :, 0].float() for other in probed], 2)  # (ROWS, H_kv, P, D)
        if not keys.isfinite().all() or not layer.values.isfinite().all():
            raise ValueError(f"layer {index} caches numbers that are not finite; check the weights, which may hold NaN")
        tolerance = 1e-3 if layer.keys.dtype == torch.float32 else 0.05  # of the largest number
        rotation = find_rotation(keys, [*states], tables, tolerance)
        if not tables:  # positions are in the hidden states, or in the scores
            rotation = Rotation()
        if rotation is None:
            raise ValueError(
                f"the keys of layer {index} are not rotated by the model's RoPE tables, so they cannot be stored"
            )
        heads, key, value = layer.keys.shape[1], layer.keys.shape[3], layer.values.shape[3]
        window = layer.sliding_window if layer.is_sliding else None
        shapes.append(CodedLayer(heads, key, value, window, rotation.angles, rotation.order))
    return shapes


def check_config(config: PreTrainedConfig) -> None:
    """Refuse what a codec does not know, from a config alone."""
    text: Any = config.get_text_config()
    plan = plan_of(config)
    rope = getattr(text, "rope_parameters", None) or {}
    # one set of parameters for all layers, or one for each type of layer
    kinds = {str(part.get("rope_type")) for part in (rope, *rope.values()) if isinstance(part, dict)}
    reasons = {
        "cross-attention": config.is_encoder_decoder or getattr(text, "cross_attention_layers", None),
        "latents instead of keys and values (MLA)": getattr(text, "kv_lora_rank", None),
        "layers that share keys or values": layers_without_cache(text)
        or (plan is not None and plan.cached_fraction() < 1),
        "layers that choose tokens": plan is not None and plan.reads_less,
        f"angles that depend on the length ({', '.join(UNEVEN)})": kinds & set(UNEVEN),
    }
    for reason, applies in reasons.items():
        if applies:
            raise ValueError(f"{config.model_type} has {reason}; a codec needs separate keys and values per layer")
