"""Loading a stored prompt against the prefill that it saves, at 8B shape, with real codes.

    python benchmarks/gpu/stored_prompts.py --json FILE [--dry-run]

The codes are those of SmolLM2 (`real_codes.safetensors`), repeated to the channels that a codec of an 8B model would
have, 0.72 of the numbers of a layer; its matrices are random, and as large as real ones. The store has an eighth of
the bytes of the 16-bit cache. Times, in turns:

    prefill     of the model
    raw         the uncompressed cache copied from pinned memory
    read        files to memory, hashed, in threads, as a `PromptStore` does
    prepare     compressed bytes to the device, tables and places of pages
    kernel      pages to coefficients
    chain float32, chain tf32, chain float16    coefficients to states
    decode      bytes in memory to the cache on the device: all but `read`
    load        `read` and `decode`, one after the other
"""

import hashlib
import importlib
import tempfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import real_codes
import torch
from common import SHAPE_8B, TINY, arguments, build, freed, in_turns, resumed, save, seconds

from crosslayer.cache.running import prefill
from crosslayer.codec import decoder as decoder_module
from crosslayer.codec import device as reading
from crosslayer.codec import format
from crosslayer.codec.chain import BLOCK, Chain, Importance, Layer, half_layers, predicted, sources
from crosslayer.codec.codec import Codec
from crosslayer.codec.fingerprint import model_print
from crosslayer.codec.states import read_shapes
from crosslayer.machine import full_float32

CHANNELS = 0.72  # of the numbers of a layer, as in codecs of SmolLM2 and Qwen
SIZE = 0.1  # of the entries of random matrices times their width: states stay of order 1


def stand_in(shapes, device) -> tuple[Chain, list[np.ndarray]]:
    """Return a chain of random matrices, and for each of its layers real codes (R, T) of a block."""
    codes, classes = real_codes.load("smollm2")
    every, kinds = np.concatenate(codes), torch.cat(classes)
    generator, at, layers, own_codes = torch.Generator().manual_seed(0), 0, [], []
    for shape, below in zip(shapes, sources(shapes), strict=True):
        width, channels = shape.width, int(CHANNELS * shape.width)
        rows = torch.arange(at, at + channels) % len(every)  # the real channels over and over
        at += channels
        rows = rows[kinds[rows].argsort(stable=True)]
        own_codes.append(every[rows])
        predict = torch.randn(sum(shapes[source].width for source in below), width, generator=generator)
        up = torch.randn(channels, width, generator=generator)
        predict, up = (SIZE / width**0.5 * matrix.half().float() for matrix in (predict, up))
        zeros = torch.zeros(width), torch.full((channels,), 0.1)
        layers.append(Layer(shape, below, zeros[0], predict, up.T, up, zeros[1], kinds[rows]))
    heads = sum(2 * shape.heads for shape in shapes) + 1
    importance = Importance(*(torch.full((heads,), value) for value in (0.0, 1.0, 0.0)))
    return Chain([moved(layer, device) for layer in layers], importance), own_codes


def moved(layer: Layer, device) -> Layer:
    """Return a layer with its matrices on a device."""
    fields = {name: value.to(device) if torch.is_tensor(value) else value for name, value in vars(layer).items()}
    return Layer(**{**fields, "classes": layer.classes})


def blocks_of(codec: Codec, codes: list[np.ndarray], text: np.ndarray) -> list[format.Block]:
    """Return a text's blocks, all with the same codes."""
    parent, blocks, steps = format.root(codec.id), [], np.full(BLOCK, 128, np.uint8)
    longer = [np.concatenate([own[:, :1], own], 1) for own in codes]  # the first token of all has none
    parts = {first: codec.chain.coder.encode(own) for first, own in ((True, codes), (False, longer))}
    width = sum(codec.widths)
    for start in range(0, len(text), BLOCK):
        own = text[start : start + BLOCK]
        facts = format.child(parent, own), parent, start, own, np.zeros(len(codec.widths), np.uint16), 1, 0
        exact = bytes(2 * width) if start == 0 else b""
        blocks.append(format.Block(*facts, steps, exact, parts[start == 0]))
        parent = blocks[-1].name
    return blocks


def chains(codec: Codec, device: str, tokens: int) -> dict[str, Callable[[], object]]:
    """Return what computes states from coefficients, in each precision."""
    layers = codec.decoder.chain_on(torch.device(device)).layers
    halves = half_layers(layers)
    values = [torch.randn(layer.up.shape[0], tokens, device=device, dtype=torch.float16) for layer in layers]

    def in_half() -> None:
        decoded = []
        for layer, half, own in zip(layers, halves, values, strict=True):
            decoded.append(half.decoded([decoded[source] for source in layer.sources], own))

    def in_float() -> None:
        decoded = []
        for layer, own in zip(layers, values, strict=True):
            below = [decoded[source] for source in layer.sources]
            decoded.append(torch.addmm(predicted(below, layer.predict, layer.offset), own.float().T, layer.up))

    def in_full_float() -> None:
        with full_float32():
            in_float()

    def in_tf32() -> None:
        before = torch.backends.cuda.matmul.fp32_precision
        torch.backends.cuda.matmul.fp32_precision = "tf32"
        in_float()
        torch.backends.cuda.matmul.fp32_precision = before

    return {"chain float32": in_full_float, "chain tf32": in_tf32, "chain float16": in_half}


def measure(model, codec: Codec, codes: list[np.ndarray], length: int, device: str, pairs: int, folder: Path) -> dict:
    """Return times in turns, rates and equality for a prompt of a length."""
    ids = torch.randint(0, model.config.vocab_size, (1, length), device=device)
    blocks = blocks_of(codec, codes, ids[0].cpu().numpy().astype(np.uint32))
    packed = [block.pack() for block in blocks]
    files = [folder / f"{length}-{index}.kv" for index in range(len(packed))]
    for file, data in zip(files, packed, strict=True):
        file.write_bytes(data)
    cache = prefill(model, ids)
    raw = [state.cpu() for layer in cache.layers for state in (layer.keys, layer.values)]
    raw = [state.pin_memory() for state in raw] if device == "cuda" else raw
    del cache
    target, dtype = torch.device(device), model.dtype
    numbers = sum(own.shape[0] for own in codes)
    once = blocks[: decoder_module.AT_ONCE // BLOCK]
    counts, stops = [codec.decoder.coded(block) for block in once], [block.stop for block in once]
    parts = [block.parts for block in once]
    out = torch.zeros(numbers, stops[-1], dtype=torch.float16, device=device)
    scales = torch.full((numbers,), 0.1, device=device), torch.ones(stops[-1], device=device)
    prepared = codec.decoder.pages.prepare(parts, counts, stops, target)

    def read_files() -> list[bytes]:
        def one(file: Path) -> bytes:
            data = file.read_bytes()
            assert hashlib.sha256(data[: -format.HASH]).digest() == data[-format.HASH :]
            return data

        with ThreadPoolExecutor(torch.get_num_threads()) as pool:
            return list(pool.map(one, files))

    def decode(data: list[bytes]) -> object:
        found = [format.unpack(one, codec.widths, len(codec.chain.coder.runs)) for one in data]
        return codec.decode_rows([found], [0], length, device, dtype, half=True)

    calls: dict[str, Callable[[], object]] = {
        "prefill": lambda: prefill(model, ids),
        "raw": lambda: [state.to(device, non_blocking=True) for state in raw],
        "read": read_files,
        "prepare": lambda: codec.decoder.pages.prepare(parts, counts, stops, target),
        **chains(codec, device, stops[-1]),
        "decode": lambda: codec.decode_rows([blocks], [0], length, device, dtype, half=True),
        "load": lambda: decode(read_files()),
    }
    row: dict = {"bytes": sum(map(len, packed)), "raw_bytes": 2 * sum(state.numel() for state in raw)}
    if reading.reads_pages(target):
        pages = importlib.import_module("crosslayer.core.kernels.pages")
        calls["kernel"] = lambda: pages.read(*prepared, out, scales)
        codes_read = torch.zeros(numbers, stops[-1], dtype=torch.int16, device=device)
        pages.read(*prepared, codes_read)
        there = np.concatenate([np.concatenate([own[:, :1], own], 1) for own in codes])
        repeats = -(-stops[-1] // BLOCK)
        row["codes_equal"] = bool((codes_read.cpu().numpy()[:, 1:] == np.tile(there, repeats)[:, 1 : stops[-1]]).all())
    rows = in_turns({name: lambda c=call: seconds(c, device) for name, call in calls.items()}, pairs)
    if "kernel" in rows:
        row["codes_per_second"] = numbers * (stops[-1] - 1) / rows["kernel"]["seconds"]
    return rows | row


def main():
    """Measure by length, the shortest first."""
    options = arguments(__doc__).parse_args()
    device, dtype = ("cpu", torch.float32) if options.dry_run else ("cuda", torch.bfloat16)
    shape, lengths, pairs = (TINY, (512,), 2) if options.dry_run else (SHAPE_8B, (2048, 8192, 32768), 5)
    model = build(shape, [], device, dtype)
    chain, codes = stand_in(read_shapes(model), device)
    codec = Codec(chain, model_print(model))
    record = resumed(options.json, shape=shape, channels=CHANNELS, codes="smollm2")
    freed(device)
    with tempfile.TemporaryDirectory() as folder:
        for length in lengths:
            if str(length) in record["rows"]:
                continue
            record["rows"][str(length)] = measure(model, codec, codes, length, device, pairs, Path(folder))
            print(length, record["rows"][str(length)], flush=True)
            save(options.json, record)
            freed(device)


if __name__ == "__main__":
    main()
