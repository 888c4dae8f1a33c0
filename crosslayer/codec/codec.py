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
from crosslayer.codec.decoder import MATRICES, Decoder, chain_on_device
from crosslayer.codec.fingerprint import SeenWeights, model_print, tokenizer_print
from crosslayer.codec.states import HALF, CodedLayer, check_cache, check_config, new_cache, read_states
from crosslayer.codec.texts import check_padding, texts_of
from crosslayer.probe.model import unwrapped

VERSION = 4  # of the artifact
FILE = "codec.safetensors"
TOGETHER = 8  # blocks that are encoded together: the layers' products are larger, and threads code side by side
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
        self.chain = chain_on_device(chain, "cpu")
        self.model_print = model_print
        self.tokenizer_print = tokenizer_print
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
        # accelerate offloads weights as tensors without data, so they have no fingerprint
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
            held = zip(states, self.shapes, strict=True)
            if any(len(layer_states) < shape.holds(len(tokens)) for layer_states, shape in held):
                raise ValueError(f"sliding windows no longer hold the end of these {len(tokens)} tokens; pass more ids")
            blocks = self.encode_blocks(states, tokens, 0, format.root(self.id), block, dtype_of(cache))
            packed.append((pad, [encoded.pack() for encoded in blocks]))
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
        for pad, packed in format.unpack_file(data):
            # threads: nearly all of it is SHA-256, which releases the GIL
            with ThreadPoolExecutor(torch.get_num_threads()) as pool:
                read = partial(format.unpack, widths=self.widths, classes=len(self.chain.coder.runs))
                blocks = list(pool.map(read, packed))
            # a block names its parent, and the first one the codec
            parent, start = format.root(self.id), 0
            for block in blocks:
                if block.parent != parent or block.start != start:
                    raise ValueError("the bytes come from a different codec, or their blocks are out of order")
                parent, start = block.name, block.stop
            pads.append(pad)
            rows.append(blocks)
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
        chain = self.decoder.chain_on(states[0].device)
        longest = max(map(len, states))
        total = 0.0
        for layer, layer_states in zip(chain.layers, states, strict=True):
            below = below_of(layer.sources, states, len(layer_states))
            rest = layer_states - predicted(below, layer.predict, layer.offset)
            rest = rest[int(len(layer_states) == longest) :]
            # logarithms: in a plain sum, layers with large states hide what the others tell
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
        if wrong := [index for index, layer_states in enumerate(states) if not layer_states.isfinite().all()]:
            raise ValueError(f"the cache must be finite, got NaN or infinity in layer {wrong[0]}; try bfloat16")
        chain, length = self.decoder.chain_on(states[0].device), len(tokens)
        steps = chain.importance.steps(states, self.shapes, length)
        copies = copies_of_first(states, tokens, size) if start == 0 else 0
        lost = np.array([length - len(layer_states) for layer_states in states])  # first tokens, by layer
        with ThreadPoolExecutor(torch.get_num_threads()) as pool:
            for begin in range(start, length, size * TOGETHER):
                # the codes of several blocks, of each layer those that it holds
                stop = min(begin + size * TOGETHER, length)
                spans = [(max(begin - first, 0), max(stop - first, 0)) for first in lost.tolist()]
                parts = [layer_states[first:last] for layer_states, (first, last) in zip(states, spans, strict=True)]
                codes, _ = code_layers(chain.layers, parts, step_sizes(steps[begin:stop]))

                # the blocks without their codes; the first token of a text stays as it is, clamped to float16
                blocks = []
                for at in range(begin, stop, size):
                    text = tokens[at : at + size]
                    facts = parent, at, text, np.clip(lost - at, 0, len(text)), dtype, 0 if at else copies
                    exact = [layer[0].clamp(-HALF, HALF) for layer in states if at == 0 and len(layer) == length]
                    halves = b"".join(state.half().cpu().numpy().astype("<f2").tobytes() for state in exact)
                    block_steps = steps[at : at + size].cpu().numpy()
                    blocks.append(format.Block(format.child(parent, text), *facts, block_steps, halves))
                    parent = blocks[-1].name

                # of each block the codes (R, T) of its tokens, which threads turn into bytes
                cut = []
                for block in blocks:
                    ends = [of_layer.shape[1] - (stop - block.stop) for of_layer in codes]
                    counted = zip(codes, ends, self.decoder.coded(block), strict=True)
                    cut.append([of_layer[:, max(end, 0) - count : max(end, 0)] for of_layer, end, count in counted])
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
        target = torch.empty(0, device=device or "cpu").device  # cuda:0, not cuda
        states = []
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
            of_layer = {name: getattr(layer, name) for name in MATRICES}
            # the fit has rounded all matrices but the offset to 16 bits
            of_layer = {name: tensor if name == "offset" else tensor.half() for name, tensor in of_layer.items()}
            of_layer["classes"] = layer.classes.to(torch.uint8)
            tensors |= {f"layers.{index}.{name}": tensor.contiguous() for name, tensor in of_layer.items()}
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

        layers = []
        for index, fact in enumerate(facts["layers"]):
            matrices = {name: tensors[f"layers.{index}.{name}"].float() for name in MATRICES}
            classes = tensors[f"layers.{index}.classes"].long()
            sources = tuple(fact.pop("sources"))
            if not classes.equal(classes.sort().values) or not all(0 <= source < index for source in sources):
                raise ValueError("the codec's layers are damaged; fit it again")
            shape = CodedLayer(angles=tuple(fact.pop("angles")), **fact)
            width, channels = shape.width, len(classes)
            predict = sum(layers[source].shape.width for source in sources), width
            expected = [(width,), predict, (width, channels), (channels, width), (channels,)]
            if [tuple(matrix.shape) for matrix in matrices.values()] != expected:
                raise ValueError("the codec's matrices do not match its layers; fit it again")
            layers.append(Layer(shape=shape, sources=sources, classes=classes, **matrices))
        importance = Importance(*(tensors[name] for name in ("mean", "spread", "weight")))
        codec = Codec(Chain(layers, importance), facts["model"], facts["tokenizer"])
        if codec.id.hex() != digest:
            raise KeyError("sha256")
    # what a header that was tampered with raises where it is read
    except (SafetensorError, KeyError, TypeError, IndexError, RuntimeError, AttributeError) as error:
        raise ValueError(f"{path.name} in {str(folder)!r} is damaged; fit the codec again") from error
    if model is not None:
        codec.check(model, tokenizer)
    return codec


def copies_of_first(states: Sequence[Tensor], tokens: np.ndarray, size: int) -> int:
    """Return how many of the first `size` tokens, behind the first, equal it and have its states in all layers (T, W).

    Where a text begins with one token several times, each sees that token alone, as the first does. All of them are
    attention sinks, whose states no other text has. Coded like others, they made a window's KL 12 times as large.
    """
    # a token that differs stands behind all, so that argmax finds one
    equal = int((np.append(tokens[:size], tokens[0] + 1) != tokens[0]).argmax()) - 1
    for layer_states in states:
        if not equal or len(layer_states) < len(tokens):  # a sliding window does not hold the first any more
            return 0
        first = layer_states[0]
        apart = (layer_states[1 : equal + 1] - first).norm(dim=1) > SAME * first.norm()
        equal = int(torch.cat([apart, apart.new_ones(1)]).int().argmax())
    return min(equal, format.MOST_COPIES)


def dtype_of(cache: Cache) -> int:
    """Return the index of a cache's dtype in `format.DTYPES`."""
    layer: Any = cache.layers[0]
    name = str(layer.keys.dtype).removeprefix("torch.")
    if name not in format.DTYPES:
        raise ValueError(f"the cache must be in {', '.join(format.DTYPES)}, got {name}")
    return format.DTYPES.index(name)
