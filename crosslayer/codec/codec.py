"""The codec of a model: a KV cache to bytes and back.

Shapes: B rows, S columns, T tokens, W numbers of a layer for each token, R channels of a layer.
"""

import hashlib
import json
import math
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from copy import copy
from dataclasses import asdict, replace
from functools import cache, cached_property, partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor
from transformers import Cache, PreTrainedModel, PreTrainedTokenizerBase

from crosslayer.codec import format
from crosslayer.codec.chain import (
    BLOCK,
    Chain,
    Importance,
    Layer,
    below_of,
    code_layers,
    half_layers,
    predicted,
    step_sizes,
)
from crosslayer.codec.device import Reader, reads_pages
from crosslayer.codec.fingerprint import SeenWeights, model_print, tokenizer_print
from crosslayer.codec.states import HALF, CodedLayer, check_cache, check_config, new_cache, read_states
from crosslayer.codec.texts import check_padding, texts_of
from crosslayer.probe.model import unwrapped

VERSION = 4  # of the artifact
FILE = "codec.safetensors"
MATRICES = ("offset", "predict", "down", "up", "shift")
TOGETHER = 8  # blocks that are encoded together
AT_ONCE = 8192  # tokens that a GPU decodes together: at the shape of an 8B model, coefficients take 0.8 GB
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
        self.chain_on = cache(partial(on_device, self.chain))
        self._halves_on = cache(lambda device: half_layers(self.chain_on(device).layers))

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

    @cached_property
    def _pages(self) -> Reader:
        return Reader(self.chain.coder, [len(layer.classes) for layer in self.chain.layers])

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
        chain, longest, total = self.chain_on(states[0].device), max(map(len, states)), 0.0
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
        chain, length = self.chain_on(states[0].device), len(tokens)
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
                    counted = zip(codes, ends, self._coded(block), strict=True)
                    cut.append([own[:, max(end, 0) - count : max(end, 0)] for own, end, count in counted])
                for block, packed in zip(blocks, pool.map(chain.coder.encode, cut), strict=True):
                    yield replace(block, parts=packed)

    def _coded(self, block: format.Block) -> list[int]:
        """Return of each layer how many of a block's last tokens have codes: it holds them, and they are not exact."""
        first = np.maximum(block.first, 1 + block.copies) if block.start == 0 else block.first
        return np.maximum(len(block.tokens) - first.astype(int), 0).tolist()

    def decode_rows(
        self,
        rows: Sequence[Sequence[format.Block]],
        pads: list[int],
        columns: int,
        device: Any,
        dtype: torch.dtype,
        half: bool | None = None,
    ) -> Cache:
        """Return the cache of rows of blocks, cut to `columns` columns; `half` as in `decode_layers`."""
        target, states = torch.empty(0, device=device or "cpu").device, []  # cuda:0, not cuda
        for row, pad in zip(rows, pads, strict=True):
            needed = [block for block in row if block.start < columns - pad]
            states.append(self.decode_layers(needed, columns - pad, target, half))
        return new_cache(states, self.shapes, pads, columns, dtype)

    def decode_layers(
        self, blocks: Sequence[format.Block], length: int, device: torch.device, half: bool | None = None
    ) -> Iterator[Tensor]:
        """Yield the states (T, W) of consecutive blocks, layer by layer, up to position `length`.

        Of each layer come the latest tokens that it holds. The codes of all layers are read before the first.

        Args:
            blocks: of a text, one after the other.
            length: position behind the last token.
            device: of the states.
            half: compute in float16; default: on a GPU.
        """
        half = device.type == "cuda" if half is None else half
        runs, size = [], 0  # of blocks that are read together: all, or on a GPU as many as its memory should hold
        for block in blocks:
            if not runs or (half and size + len(block.tokens) > AT_ONCE):
                runs.append([])
                size = 0
            runs[-1].append(block)
            size += len(block.tokens)
        if len(runs) == 1:
            layers: Any = ([own] for own in self._decoded(runs[0], device, half))
        else:  # all layers of a run come before the next run, so all are kept
            layers = zip(*(list(self._decoded(run, device, half)) for run in runs), strict=True)
        for parts in layers:
            kept = [parts[-1][0]]
            for (states, _), (_, begin), run in zip(parts[-2::-1], parts[:0:-1], runs[:0:-1], strict=True):
                if begin > run[0].start:  # the layer does not hold what is before
                    break
                kept.insert(0, states)
            begin = blocks[-1].stop - sum(map(len, kept))
            yield torch.cat(kept)[: max(0, length - begin)] if len(kept) > 1 else kept[0][: max(0, length - begin)]

    def _decoded(
        self, blocks: Sequence[format.Block], device: torch.device, half: bool
    ) -> Iterator[tuple[Tensor, int]]:
        """Yield of each layer the states (T, W) of the latest tokens without a gap, and the position of the first."""
        layers, halves = self.chain_on(device).layers, self._halves_on(device) if half else []
        steps = step_sizes(torch.from_numpy(np.concatenate([block.steps for block in blocks]))).to(device)
        exact = self._exact(blocks[0])
        decoded: dict[int, Tensor] = {}  # of the layers that a later one is predicted from; in float16 less means
        counts = np.array([self._coded(block) for block in blocks])  # (blocks, layers)
        begins = [_begin(blocks, own) for own in counts.T]
        sizes = [blocks[-1].stop - begin for begin in begins]
        coefficients = self._coefficients(blocks, counts, steps, sizes, half)
        for index, (layer, begin, own) in enumerate(zip(layers, begins, coefficients, strict=True)):
            below = below_of(layer.sources, decoded, own.shape[1])
            if half:
                decoded[index] = halves[index].decoded(below, own.half())
                whole = decoded[index].float() + halves[index].mean
            else:
                whole = decoded[index] = torch.addmm(predicted(below, layer.predict, layer.offset), own.T, layer.up)
            needed = {source for later in layers[index + 1 :] for source in later.sources}
            decoded = {key: states for key, states in decoded.items() if key in needed}
            if index in exact and begin <= 1 + blocks[0].copies:
                whole = torch.cat([exact[index].to(device).expand(1 + blocks[0].copies, -1), whole])
                begin = 0
            yield whole, begin

    def _coefficients(
        self, blocks: Sequence[format.Block], counts: np.ndarray, steps: Tensor, sizes: Sequence[int], half: bool
    ) -> Iterator[Tensor]:
        """Yield each layer's coefficients (R, T), float32 or from a kernel float16, of its latest `sizes` tokens."""
        layers = self.chain_on(steps.device).layers
        if half and reads_pages(steps.device):
            channels = [len(layer.classes) for layer in layers]
            out = torch.empty(sum(channels), len(steps), dtype=torch.float16, device=steps.device)
            scales = torch.cat([layer.shift for layer in layers]), steps
            stops = [block.stop - blocks[0].start for block in blocks]
            if self._pages.read([block.parts for block in blocks], counts.tolist(), stops, out, scales):
                for own, size in zip(out.split(channels), sizes, strict=True):
                    yield own[:, len(steps) - size :]
                return
        codes = self._codes(blocks, counts)
        for layer, size in zip(layers, sizes, strict=True):
            own = codes.pop(0)  # the memory of a layer's codes is free behind it
            own = torch.from_numpy(own[:, own.shape[1] - size :]).to(steps.device).float()
            yield layer.coefficients(own, steps[len(steps) - size :])

    def _codes(self, blocks: Sequence[format.Block], counts: np.ndarray) -> list[np.ndarray]:
        """Return each layer's codes (R, T); of the blocks' tokens, the layers have so many (blocks, layers)."""
        stops = counts.cumsum(0)
        layers = zip(self.chain.layers, stops[-1], strict=True)
        codes = [np.empty((len(layer.classes), count), np.int16) for layer, count in layers]

        def read(index: int) -> None:
            spans = zip(codes, stops[index] - counts[index], stops[index], strict=True)
            self.chain.coder.decode(blocks[index].parts, [own[:, start:stop] for own, start, stop in spans])

        with ThreadPoolExecutor(torch.get_num_threads()) as pool:
            list(pool.map(read, range(len(blocks))))
        return codes

    def _exact(self, block: format.Block) -> dict[int, Tensor]:
        """Return the first token's states (W,) of each layer that holds it."""
        if block.start or not len(block.exact):
            return {}
        numbers = torch.from_numpy(np.frombuffer(block.exact, "<f2").astype(np.float32))
        holding = [index for index, first in enumerate(block.first) if first == 0]
        parts = numbers.split([self.widths[index] for index in holding])
        return dict(zip(holding, parts, strict=True))

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


def _begin(blocks: Sequence[format.Block], counts: np.ndarray) -> int:
    """Return the position from which on a layer has codes of all tokens; of each block, it has those of the last."""
    at = len(blocks) - 1
    while at > 0 and counts[at] == len(blocks[at].tokens):
        at -= 1
    return blocks[at].stop - int(counts[at])


def on_device(chain: Chain, device: Any) -> Chain:
    """Return a chain with its matrices on a device."""
    moved = copy(chain)
    moved.layers = [
        replace(layer, **{name: getattr(layer, name).to(device) for name in MATRICES}) for layer in chain.layers
    ]
    moved.importance = Importance(*(part.to(device) for part in vars(chain.importance).values()))
    return moved


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
