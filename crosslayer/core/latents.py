"""What layers cache instead of keys and values: latents, as numbers or as codes of few bits.

A method whose layers cache latents is a `LatentMethod`, which has the modules that make latents, and keys and values of
them; its own `plan` says which layer reads which below.

Shapes: B batch, T new tokens, S cached + new tokens, C hidden, R channels of a latent, W = 2·H_kv·D channels of a
layer's keys and values.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from crosslayer.core.columns import Columns
from crosslayer.core.method import Config, Method, Mixing, Wiring
from crosslayer.core.packing import pack, unpack
from crosslayer.core.plan import LatentSize

UNIT = 8  # channels with the same number of bits
SCALE = 2  # bytes of a token's scale, a float16
# bits → step between codes of a normal variable with the least mean square error (Max 1960)
STEPS = {1: 1.596, 2: 0.996, 3: 0.586, 4: 0.335, 5: 0.188, 6: 0.104, 7: 0.0569, 8: 0.0308}
WHOLE = 16  # bits of a number that is not coded
# bits → that mean square error
ERRORS = {0: 1.0, 1: 0.363, 2: 0.1175, 3: 0.0345, 4: 0.0095, 5: 0.0025, 6: 0.00066, 7: 0.00017, 8: 0.00004, WHOLE: 0.0}
UNCLIPPED = 4  # bits of channels whose range the scale covers; damage on SmolLM2 decided
SMALLEST = 2.0**-14  # scale, float16's smallest normal number


class LatentEncoder(Mixing):
    """Makes a latent of a layer's input, less what the layer below tells."""

    def __init__(self, inputs: int, width: int, channels: int, bits: Sequence[int] | None, below: bool):
        super().__init__()
        self.bits, self.stores_codes = bits, bits is not None
        self.down = nn.Linear(inputs, channels)
        self.below = nn.Linear(width, channels, bias=False) if below else None

    def forward(self, hidden_states: Tensor, below: Tensor | None) -> Tensor:
        """Return latents (B, 1, T, R): channels, or their codes and a scale."""
        latents = self.down(hidden_states)  # (B, T, R)
        if self.below is not None:
            assert below is not None
            latents = latents - self.below(below)
        return (latents if self.bits is None else coded(latents, self.bits)).unsqueeze(1)

    def new_columns(self) -> Columns:
        """Return empty memory for codes."""
        assert self.bits is not None
        return CodedColumns(self.bits)


class LatentDecoder(Mixing):
    """Makes keys and values of latents and of the layer below."""

    def __init__(self, width: int, channels: int, bits: Sequence[int] | None, below: bool):
        super().__init__()
        self.has_scale = bits is not None
        self.up = nn.Linear(channels, width)
        self.below = nn.Linear(width, width, bias=False) if below else None

    def forward(self, latents: Tensor, below: Tensor | None) -> Tensor:
        """Return keys and values (B, S, W), before qk-norm and rotary embedding."""
        latents = latents.squeeze(1)
        if self.has_scale:
            latents = latents[..., :-1] * latents[..., -1:]
        states = self.up(latents)
        return states if self.below is None else states + self.below(below)


@dataclass(frozen=True, kw_only=True)
class LatentMethod(Method):
    """A method whose layers cache latents; a retrofit fits these to text."""

    rank: float = 0.5
    """Channels of a latent, as a share of the layer's keys and values together."""
    bits: tuple[tuple[int, ...], ...] | None = None
    """Bits of the channels instead of `rank`: for each layer, 0 to 8 for each eight channels of its keys and values,
    falling, or 16 and 0 alone for numbers that are not coded. A latent has no channels with 0 bits."""
    groups: tuple[tuple[int, ...], ...] | None = None
    """Groups of 0-based layers in rising order; layers in none stand alone. None: all layers are a group."""

    @classmethod
    def search_space(cls) -> str:
        """Return that a budget can choose the bits of latents."""
        return "bits"

    def latent_sizes(self, layers: int) -> tuple[LatentSize, ...]:
        """Return the size of each layer's latent, for the plan; refuse impossible options."""
        if not 0 < self.rank <= 1:
            raise ValueError(
                f"{self.name()}: rank must be above 0 and at most 1, a share of keys and values, got {self.rank:g}"
            )
        if self.bits is None:
            return (LatentSize(self.rank),) * layers
        self._check_bits(layers)
        return tuple(map(_size, self.bits))

    def errors(self, layer: int, width: int) -> list[float]:
        """Return the mean square error with which each of W channels of variance 1 is read."""
        if self.bits is None:
            kept = self.channels(layer, width)
            return [0.0] * kept + [1.0] * (width - kept)
        return [ERRORS[number] for number in self.bits[layer] for _ in range(UNIT)]

    def steps(self, layer: int) -> list[float] | None:
        """Return the steps between the codes of the R channels; None: there are no codes."""
        codes = self._codes(layer)
        if codes is None:
            return None
        return [STEPS[number] for number in codes if number for _ in range(UNIT)]

    def _codes(self, layer: int) -> tuple[int, ...] | None:
        """Return the bits of a layer's codes; None: its channels are numbers."""
        if self.bits is None or WHOLE in self.bits[layer]:
            return None
        return self.bits[layer]

    def _check_bits(self, layers: int) -> None:
        assert self.bits is not None
        if self.rank != type(self).rank:
            raise ValueError(f"{self.name()}: bits replace rank; leave one of them out")
        if len(self.bits) != layers:
            raise ValueError(
                f"{self.name()}: bits must have an entry for each of the {layers} layers, got {len(self.bits)}"
            )
        for layer, bits in enumerate(self.bits):
            known = set(bits) <= {0, *STEPS} or set(bits) <= {0, WHOLE}
            if not any(bits) or not known or list(bits) != sorted(bits, reverse=True):
                raise ValueError(
                    f"{self.name()}: bits of layer {layer} must be falling numbers from 8 to 0, or {WHOLE} and 0, not "
                    f"all 0, one for each {UNIT} channels, got {list(bits)}"
                )

    def latent(self, config: Config, wiring: Wiring, layer: int) -> tuple[LatentEncoder, LatentDecoder]:
        """Return the modules that make a layer's latents, and keys and values of them."""
        assert config.num_key_value_heads is not None and config.head_dim is not None
        width = 2 * config.num_key_value_heads * config.head_dim
        if self.bits is not None and UNIT * len(self.bits[layer]) != width:
            raise ValueError(
                f"{self.name()}: keys and values of layer {layer} have {width} channels, so bits must have "
                f"{width / UNIT:g} entries for each layer, one for each {UNIT} channels, got {len(self.bits[layer])}"
            )
        bits = self._codes(layer)
        channels = self.channels(layer, width)
        below = len(wiring.plan.reads("keys", layer)) > 1
        return LatentEncoder(config.hidden_size, width, channels, bits, below), LatentDecoder(
            width, channels, bits, below
        )

    def channels(self, layer: int, width: int) -> int:
        """Return the channels R of a layer's latent, of `width` = 2·H_kv·D channels of keys and values."""
        return max(1, round(self.rank * width)) if self.bits is None else UNIT * sum(map(bool, self.bits[layer]))

    def inherit(self, weights: dict[str, Tensor], config: Config, wiring: Wiring) -> list[str]:
        """Factor W_k and W_v of each layer together, from the weights alone, without the layers below."""
        return [
            name
            for layer, latent in enumerate(wiring.plan.latents)
            if latent is not None
            for name in self._factor(weights, config, wiring, layer)
        ]

    def _factor(self, weights: dict[str, Tensor], config: Config, wiring: Wiring, layer: int) -> list[str]:
        """Write the weights of a layer's latent; return their names."""
        prefix = f"model.layers.{layer}.self_attn."
        both = [weights[f"{prefix}{state}_proj.weight"] for state in "kv"]
        left, values, right = torch.linalg.svd(torch.cat(both).double(), full_matrices=False)  # (W, N), (N,), (N, C)
        encoder, decoder = self.latent(config, wiring, layer)
        kept = min(self.channels(layer, len(left)), len(values))
        states = {f"latent_encoder.{name}": tensor for name, tensor in encoder.double().state_dict().items()}
        states |= {f"latent_decoder.{name}": tensor for name, tensor in decoder.double().state_dict().items()}
        states = {name: torch.zeros_like(tensor, device=left.device) for name, tensor in states.items()}
        states["latent_encoder.down.weight"][:kept] = right[:kept]
        states["latent_decoder.up.weight"][:, :kept] = left[:, :kept] * values[:kept]
        biases = [weights.get(f"{prefix}{state}_proj.bias") for state in "kv"]
        if biases[0] is not None and biases[1] is not None:
            states["latent_decoder.up.bias"] = torch.cat([biases[0], biases[1]]).double()
        weights |= {prefix + name: tensor.to(both[0].dtype) for name, tensor in states.items()}
        return [prefix + name for name in states]


class CodedColumns(Columns):
    """Latents of a layer, stored as codes of some bits for each eight channels, and a scale for each token."""

    def __init__(self, bits: Sequence[int]):
        super().__init__()
        self.bands = [(number, UNIT * list(bits).count(number)) for number in STEPS if number in bits][::-1]
        self.dtype = torch.float32

    def encode(self, states: Tensor) -> tuple[Tensor, ...]:
        """Return the codes of latents (B, 1, T, R + 1), packed, and their scales."""
        self.dtype, packed = states.dtype, []
        sizes = [size for _, size in self.bands]
        for (number, _), codes in zip(self.bands, states[..., :-1].split(sizes, -1), strict=True):
            packed.append(pack((codes + _middle(number)).round().to(torch.uint8), number))
        return torch.cat(packed, -1), states[..., -1:].to(torch.float16)

    def read(self) -> Tensor:
        """Return the stored latents, (B, 1, S, R + 1)."""
        packed, scales = (tensor[:, :, : self.used] for tensor in self.memory)
        pieces = packed.split([number * size // UNIT for number, size in self.bands], -1)
        codes = [
            unpack(piece, number).to(self.dtype) - _middle(number)
            for (number, _), piece in zip(self.bands, pieces, strict=True)
        ]
        return torch.cat([*codes, scales.to(self.dtype)], -1)


def _size(bits: Sequence[int]) -> LatentSize:
    """Return the size of a token's codes and scale: eight channels with b bits take b bytes instead of 16."""
    if WHOLE in bits:
        return LatentSize(bits.count(WHOLE) / len(bits))
    size = sum(bits) + SCALE
    return LatentSize(size / (2 * UNIT * len(bits)), size)


def coded(latents: Tensor, bits: Sequence[int]) -> Tensor:
    """Return the codes of latents (B, T, R), around 0 in steps of 1, and a scale: (B, T, R + 1).

    The scale is the root mean square of a token's latent, or larger, so that no channel of `UNCLIPPED` bits or more is
    clipped: a text's first token has a few very large ones. Gradients pass as if nothing was rounded.
    """
    numbers = [number for number in bits if number for _ in range(UNIT)]
    step = latents.new_tensor([STEPS[number] for number in numbers])
    most = latents.new_tensor([_middle(number) for number in numbers])
    unclipped = sum(number >= UNCLIPPED for number in numbers)  # the first ones
    work = latents.to(torch.promote_types(latents.dtype, torch.float32))
    scale = work.square().mean(-1, keepdim=True).sqrt()
    if unclipped:
        scale = torch.maximum(scale, (work / (most * step))[..., :unclipped].abs().amax(-1, keepdim=True))
    scale = scale.clamp(SMALLEST, torch.finfo(torch.float16).max).to(torch.float16).to(latents.dtype).detach()
    exact = latents / (scale * step)
    codes = ((exact - 0.5).round() + 0.5).clamp(-most, most)
    return torch.cat([codes.detach() + (exact - exact.detach()), scale], -1)  # the difference is 0, its gradient is not


def column_positions(position_ids: Tensor, mask: Any, seen: int | Tensor, columns: int) -> Tensor:
    """Return the positions (1 or B, S) of cached and new tokens; of cached ones no cache keeps them.

    They are the running sum of the mask where it gives those of the new tokens, as in `generate`; else columns are
    counted, in a row with padding between its tokens from 0. Padding gets any position. Compiled code checks nothing.

    Args:
        position_ids: positions of the new tokens, (1 or B, T).
        mask: nonzero for tokens, 0 for padding, (1 or B, up to S); or attention's, (1 or B, 1, T, S); None: no padding.
        seen: columns of cached tokens, which new ones follow.
        columns: S, columns of the cache; unused ones are last.

    Raises:
        ValueError: positions of cached tokens do not follow from those of new ones, or the mask is not a tensor.

    """
    column = torch.arange(columns, device=position_ids.device)  # (S,)
    new = torch.arange(position_ids.shape[1], device=position_ids.device) + seen  # (T,)
    if mask is None:
        mask = torch.ones_like(column).unsqueeze(0)
    elif not isinstance(mask, Tensor):
        raise ValueError("layers with latents need an attention_mask that is a tensor; use sdpa or eager attention")
    elif mask.dim() == 4:
        mask = (mask if mask.dtype == torch.bool else mask > torch.finfo(mask.dtype).min / 2)[:, 0].any(1)
    visible = functional.pad(mask.bool(), (0, columns - mask.shape[-1]))  # (1 or B, S)
    numbers, shifts = visible.cumsum(-1) - 1, position_ids - new
    shift = shifts[:, -1:]  # (1 or B, 1)
    numbered = (~visible[:, new] | (position_ids == numbers[:, new])).all(-1, keepdim=True)
    gap = (~visible & (numbers >= 0) & (column <= new[-1])).any(-1, keepdim=True)
    counted = (shifts == shift).all(-1, keepdim=True) & ((shift == 0) | ~gap)
    if not torch.compiler.is_compiling() and not (numbered | counted).all():
        raise ValueError(
            "position_ids must be the running sum of attention_mask, or columns, before cached latents; leave them out"
        )
    return torch.where(numbered, numbers.clamp_min(0), column + shift)


def _middle(bits: int) -> float:
    """Return the largest code of some bits, as codes are counted around 0."""
    return (2**bits - 1) / 2
