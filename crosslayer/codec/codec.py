"""The codec of a model: a KV cache to bytes and back.

Shapes: B rows, S columns, T tokens, W numbers of a layer for each token, R channels of a layer.
"""

import hashlib
import json
import math
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor
from transformers import Cache, PreTrainedModel, PreTrainedTokenizerBase

from crosslayer.codec import format
from crosslayer.codec.chain import BLOCK, Chain, Importance, Layer, below_of, code_layers, predicted, step_sizes
from crosslayer.codec.decoder import MATRICES, Decoder, on_device
from crosslayer.codec.fingerprint import SeenWeights, model_print, tokenizer_print
from crosslayer.codec.states import HALF, CodedLayer, check_cache, check_config, new_cache, read_states
from crosslayer.codec.texts import check_padding, texts_of
from crosslayer.probe.model import unwrapped

VERSION = 4  # of the artifact
FILE = "codec.safetensors"
TOGETHER = 8  # blocks that are encoded together
SAME = 0.05  # relative distance of states that are the same but for rounding, in bfloat16 too


class Codec:
    """Encodes and decodes the KV caches of one model.

    Attributes:
        chain: the layers.
        model_print: of the weights that it was fitted to.
        tokenizer_print: of their tokenizer; None: unknown.
        id: SHA-256 of everything that decoding needs, 32 bytes.
    """

    def __init__(self, chain: Chain, model_print: str, tokenizer_print: str | None = None):
        self.chain, self.model_print, self.tokenizer_print = on_device(chain, "cpu"), model_print, tokenizer_print
        self.shapes = [layer.shape for layer in chain.layers]
        self.widths = [shape.width for shape in self.shapes]
        tensors, facts = self._stored()
        digest = hashlib.sha256(json.dumps(facts, sort_keys=True).encode())
        for name in sorted(tensors):
            digest.update(name.encode() + tensors[name].numpy().tobytes())
        self.id = digest.digest()
        self._seen: SeenWeights | None = None  # of the model that was checked last
        self.decoder = Decoder(self.chain)

    def check(self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None = None) -> None:
        """Reject any model but the one that the codec was fitted to.

        The weights are read once, and again after every change that `SeenWeights` notices, which takes less than a
        millisecond where nothing changed.

        Raises:
            ValueError: other weights, other RoPE parameters, another tokenizer, or a cache that no codec knows.
        """
        if tokenizer is not None and self.tokenizer_print not in (None, tokenizer_print(tokenizer)):
            raise ValueError("the codec was fitted with a different tokenizer; fit one to this model with fit-codec")
        model = unwrapped(model)
        if self._seen is not None and self._seen.same(model):
            return
        if any(parameter.is_meta for parameter in model.parameters()):
            raise ValueError("the weights must be on a device, got some that are offloaded; load the model whole")
        check_config(model.config)
        seen = SeenWeights(model)
        if model_print(model) != self.model_print:
            raise ValueError("the codec was fitted to different weights or RoPE; fit one to this model with fit-codec")
        self._seen = seen

    def encode(self, cache: Cache, ids: Tensor, mask: Tensor | None = None, block: int = BLOCK) -> bytes:
        """Return the cache of a text as bytes.

        Args:
            cache: of a stock model; it holds the text's tokens, and may hold more tokens after them.
            ids: the tokens, (B, S) or (S,).
            mask: 0 for padding columns, which must be on the left, (B, S).
            block: tokens that are decoded together.

        Raises:
            ValueError: the cache is not that of the codec's model, or too short; padding is not on the left, or the
                model counted it in the positions.
        """
        rows, columns = texts_of(ids, mask)
        check_padding([pad for pad, _ in rows], columns)
        check_cache(cache, self.shapes, len(rows), columns)
        packed = []
        for row, (pad, tokens) in enumerate(rows):
            states = self.read(cache, row, pad, len(tokens))
            if any(len(own) < shape.holds(len(tokens)) for own, shape in zip(states, self.shapes, strict=True)):
                raise ValueError(f"sliding windows no longer hold the end of these {len(tokens)} tokens; pass more ids")
            made = self.encode_blocks(states, tokens, 0, format.root(self.id), block, dtype_of(cache))
            packed.append((pad, [block.pack() for block in made]))
        return format.pack_file(packed)

    def decode(
        self, data: bytes, device: Any = None, dtype: torch.dtype | None = None, half: bool | None = None
    ) -> Cache:
        """Return the cache that `encode` wrote, a `DynamicCache`; by default on the CPU, in its original dtype.

        `half` computes in float16, as is the default on a GPU.

        Raises:
            ValueError: the bytes are damaged, come from another codec, or have a newer format.
        """
        pads, rows, columns = [], [], set[int]()
        for pad, blocks in format.unpack_file(data):
            parent, start = format.root(self.id), 0
            with ThreadPoolExecutor(
                torch.get_num_threads()
            ) as pool:  # nearly all of it is SHA-256, which releases the GIL
                read = partial(format.unpack, widths=self.widths, classes=len(self.chain.coder.runs))
                own = list(pool.map(read, blocks))
            for block in own:
                if block.parent != parent or block.start != start:
                    raise ValueError("the bytes come from a different codec, or their blocks are out of order")
                parent, start = block.name, block.stop
            pads.append(pad)
            rows.append(own)
            columns.add(pad + start)
        if len(columns) > 1:
            raise ValueError("the rows of the file have different lengths")
        check_padding(pads, max(columns))
        own_dtype = getattr(torch, format.DTYPES[rows[0][0].dtype])
        return self.decode_rows(rows, pads, columns.pop(), device, dtype or own_dtype, half)

    def read(self, cache: Cache, row: int, pad: int, tokens: int) -> list[Tensor]:
        """Return the states (T, W) of a row's first `tokens` tokens, of each layer those that it still holds.

        Raises:
            ValueError: the row's positions count its columns of padding.
        """
        states = read_states(cache, row, pad, tokens, self.shapes)
        if pad:
            turned_less = read_states(cache, row, pad, tokens, self.shapes, shift=pad)
            if self._residual(turned_less) < self._residual(states):
                raise ValueError(
                    f"the positions of row {row} must begin at 0 behind its padding, got {pad}; try to run the model "
                    "with position_ids=(mask.cumsum(1) - 1).clamp_min(0)"
                )
        return states

    def _residual(self, states: Sequence[Tensor]) -> float:
        """Return the mean over layers of log ‖y − b − A y_below‖², without the first token, whose states are apart.

        Keys that are turned back from wrong positions are not what the layers below let expect. Over three tokens of
        SmolLM2, the squared norm is 1.6 to 28 times that of right positions.
        """
        chain, longest, total = self.decoder.chain_on(states[0].device), max(map(len, states)), 0.0
        for layer, own in zip(chain.layers, states, strict=True):
            prediction = predicted(below_of(layer.sources, states, len(own)), layer.predict, layer.offset)
            rest = (own - prediction)[int(len(own) == longest) :]
            total += math.log(float(rest.square().sum()) or 1e-30)
        return total / len(states)

    def encode_blocks(
        self, states: Sequence[Tensor], tokens: np.ndarray, start: int, parent: bytes, size: int, dtype: int
    ) -> Iterator[format.Block]:
        """Yield the blocks of a text from a position on; `states` (T, W) end with its last token.

        Raises:
            ValueError: a state is not finite; `size` is out of range.
        """
        if not 0 < size <= format.LONGEST:
            raise ValueError(f"block must be from 1 to {format.LONGEST} tokens, got {size}")
        if wrong := [index for index, own in enumerate(states) if not own.isfinite().all()]:
            raise ValueError(f"the cache must be finite, got NaN or infinity in layer {wrong[0]}; try bfloat16")
        chain, length = self.decoder.chain_on(states[0].device), len(tokens)
        steps = chain.importance.steps(states, self.shapes, length)
        copies = copies_of_first(states, tokens, size) if start == 0 else 0
        held = np.array([length - len(own) for own in states])  # of each layer, the first token
        with ThreadPoolExecutor(torch.get_num_threads()) as pool:
            for begin in range(start, length, size * TOGETHER):
                stop = min(begin + size * TOGETHER, length)
                spans = [(max(begin - first, 0), max(stop - first, 0)) for first in held.tolist()]
                parts = [own[first:last] for own, (first, last) in zip(states, spans, strict=True)]
                codes, _ = code_layers(chain.layers, parts, step_sizes(steps[begin:stop]))
                blocks = []
                for at in range(begin, stop, size):
                    text, first = tokens[at : at + size], np.clip(held - at, 0, len(tokens[at : at + size]))
                    facts = format.child(parent, text), parent, at, text, first, dtype, 0 if at else copies
                    exact = [own[0].clamp(-HALF, HALF) for own in states if at == 0 and len(own) == length]
                    halves = b"".join(own.half().cpu().numpy().astype("<f2").tobytes() for own in exact)
                    blocks.append(format.Block(*facts, steps[at : at + size].cpu().numpy(), halves))
                    parent = blocks[-1].name
                cut = []  # of each block the codes (R, T) of its tokens
                for block in blocks:
                    ends = [own.shape[1] - (stop - block.stop) for own in codes]
                    counted = zip(codes, ends, self.decoder.coded(block), strict=True)
                    cut.append([own[:, max(end, 0) - count : max(end, 0)] for own, end, count in counted])
                for block, packed in zip(blocks, pool.map(chain.coder.encode, cut), strict=True):
                    yield replace(block, parts=packed)

    def decode_rows(
        self,
        rows: Sequence[Sequence[format.Block]],
        pads: list[int],
        columns: int,
        device: Any,
        dtype: torch.dtype,
        half: bool | None = None,
    ) -> Cache:
        """Return the cache of rows of blocks, cut to `columns` columns; `half` as in `Decoder.layers`."""
        target, states = torch.empty(0, device=device or "cpu").device, []  # cuda:0, not cuda
        for row, pad in zip(rows, pads, strict=True):
            needed = [block for block in row if block.start < columns - pad]
            states.append(self.decoder.layers(needed, columns - pad, target, half))
        return new_cache(states, self.shapes, pads, columns, dtype)

    def save(self, folder: str | Path) -> None:
        """Write the codec into a folder, as one safetensors file."""
        path = Path(folder).expanduser()
        path.mkdir(parents=True, exist_ok=True)
        tensors, facts = self._stored()
        facts["sha256"] = self.id.hex()  # of the tensors and the other facts
        save_file(tensors, path / FILE, metadata={"crosslayer_codec": json.dumps(facts)})

    def _stored(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Return the tensors of the file and the facts in its header."""
        tensors: dict[str, Tensor] = dict(vars(self.chain.importance))
        for index, layer in enumerate(self.chain.layers):
            own = {name: getattr(layer, name) for name in MATRICES}
            own = {name: tensor if name == "offset" else tensor.half() for name, tensor in own.items()}
            own["classes"] = layer.classes.to(torch.uint8)
            tensors |= {f"layers.{index}.{name}": tensor.contiguous() for name, tensor in own.items()}
        facts = {
            "version": VERSION,
            "model": self.model_print,
            "tokenizer": self.tokenizer_print,
            "layers": [{**asdict(layer.shape), "sources": layer.sources} for layer in self.chain.layers],
        }
        return tensors, facts


def load_codec(
    folder: str | Path, model: PreTrainedModel | None = None, tokenizer: PreTrainedTokenizerBase | None = None
) -> Codec:
    """Load the codec that `fit-codec` wrote into a folder.

    Args:
        folder: with codec.safetensors.
        model: to check at once; otherwise the check runs when a prompt is loaded.
        tokenizer: of the model, to check in the same way.

    Raises:
        ValueError: there is no codec, it is damaged or has another format, or it was fitted to another model.
    """
    path = Path(folder).expanduser() / FILE
    if not path.is_file():
        raise ValueError(f"{str(folder)!r} has no {FILE}; write one with crosslayer fit-codec MODEL --out FOLDER")
    try:
        with safe_open(path, "pt") as file:
            facts = json.loads((file.metadata() or {}).get("crosslayer_codec", "{}"))
            if facts.get("version") != VERSION:
                got = facts.get("version")
                raise ValueError(f"the codec's format must be {VERSION}, got {got!r}; fit it again")
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  not a mapping
        digest = facts.pop("sha256")
        codec = _loaded(facts, tensors)
        if codec.id.hex() != digest:
            raise KeyError("sha256")
    except (SafetensorError, KeyError, TypeError, IndexError, RuntimeError, AttributeError) as error:
        raise ValueError(f"{path.name} in {str(folder)!r} is damaged; fit the codec again") from error
    if model is not None:
        codec.check(model, tokenizer)
    return codec


def _loaded(facts: dict[str, Any], tensors: dict[str, Tensor]) -> Codec:
    layers = []
    for index, fact in enumerate(facts["layers"]):
        own = {name: tensors[f"layers.{index}.{name}"].float() for name in MATRICES}
        classes = tensors[f"layers.{index}.classes"].long()
        own_sources = tuple(fact.pop("sources"))
        if not classes.equal(classes.sort().values) or not all(0 <= source < index for source in own_sources):
            raise ValueError("the codec's layers are damaged; fit it again")
        shape = CodedLayer(**{**fact, "angles": tuple(fact["angles"])})
        width = shape.width
        below = sum(layers[source].shape.width for source in own_sources), width
        found = [tuple(matrix.shape) for matrix in own.values()]
        channels = len(classes)
        if found != [(width,), below, (width, channels), (channels, width), (channels,)]:
            raise ValueError("the codec's matrices do not match its layers; fit it again")
        layers.append(Layer(shape=shape, sources=own_sources, classes=classes, **own))
    importance = Importance(*(tensors[name] for name in ("mean", "spread", "weight")))
    return Codec(Chain(layers, importance), facts["model"], facts["tokenizer"])


def copies_of_first(states: Sequence[Tensor], tokens: np.ndarray, size: int) -> int:
    """Return how many of the first `size` tokens, behind the first, equal it and have its states in all layers (T, W).

    Where a text begins with one token several times, each sees that token alone, as the first does. All of them are
    attention sinks, whose states no other text has.
    """
    equal = int((np.append(tokens[:size], tokens[0] + 1) != tokens[0]).argmax()) - 1
    for own in states:
        if not equal or len(own) < len(tokens):  # a sliding window does not hold the first any more
            return 0
        apart = (own[1 : equal + 1] - own[0]).norm(dim=1) > SAME * own[0].norm()
        equal = int(torch.cat([apart, apart.new_ones(1)]).int().argmax())
    return min(equal, format.MOST_COPIES)


def dtype_of(cache: Cache) -> int:
    """Return the index of a cache's dtype in `format.DTYPES`."""
    layer: Any = cache.layers[0]
    name = str(layer.keys.dtype).removeprefix("torch.")
    if name not in format.DTYPES:
        raise ValueError(f"the cache must be in {', '.join(format.DTYPES)}, got {name}")
    return format.DTYPES.index(name)
