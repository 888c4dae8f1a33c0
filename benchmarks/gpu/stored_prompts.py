"""Encoding and decoding of a stored cache against the prefill that it saves, at 8B shape with random weights.

    python benchmarks/gpu/stored_prompts.py --json FILE [--dry-run]

The layers of a model with random weights predict each other almost exactly, so nothing can be fitted to them: the codec
is a stand-in with as many channels as real ones have, random and orthogonal, and predictions of zero that are computed
all the same. It keeps an eighth of the bytes. Decoding is bytes in memory → cache on the device; `raw` copies the same
cache uncompressed from pinned memory. `error` compares decoding on the device with that on the CPU.
"""

import cProfile
import pstats

import torch
from common import SHAPE_8B, TINY, arguments, build, freed, in_turns, resumed, save, seconds

from crosslayer.cache.running import prefill
from crosslayer.codec.chain import Chain, Importance, Layer, sources, step_sizes
from crosslayer.codec.codec import Codec
from crosslayer.codec.entropy import fitted
from crosslayer.codec.fingerprint import model_print
from crosslayer.codec.states import read_shapes, read_states

SHARE = 0.125
CHANNELS = 0.65  # of the numbers of a layer, as in codecs of SmolLM2 and Qwen


def error(cache, other) -> float:
    """Return the largest difference of two caches, over the largest number."""
    pairs = [(own.keys.float().cpu(), right.keys) for own, right in zip(cache.layers, other.layers, strict=True)]
    pairs += [(own.values.float().cpu(), right.values) for own, right in zip(cache.layers, other.layers, strict=True)]
    return max(float((own - right).abs().max() / right.abs().max()) for own, right in pairs)


def stand_in(cache, shapes) -> Chain:
    """Return a chain of random orthogonal channels that keeps `SHARE` of the bytes of a cache of 1,024 tokens."""
    states = read_states(cache, 0, 0, 1024, shapes)
    device = states[0].device
    matrices = []
    for own, shape in zip(states, shapes, strict=True):
        turn = torch.linalg.qr(torch.randn(shape.width, int(CHANNELS * shape.width), device=device)).Q
        spread = torch.logspace(4, -2, turn.shape[1], base=2, device=device) / ((own - own.mean(0)) @ turn).std(0)
        matrices.append((own.mean(0), turn * spread, (turn / spread).T))
    finest, coarsest = -8.0, 8.0  # logarithm of the step, to base 2
    heads = sum(2 * shape.heads for shape in shapes) + 1
    importance = Importance(*(torch.full((heads,), value, device=device) for value in (0.0, 1.0, 0.0)))
    steps = step_sizes(importance.steps(states, shapes, 1024))
    for _ in range(12):
        step = 2 ** ((finest + coarsest) / 2)
        layers = []
        for own, shape, (mean, down, up), below in zip(states, shapes, matrices, sources(shapes), strict=True):
            classes, shift = fitted((own - mean) @ down / step)
            order = classes.argsort()
            predict = torch.zeros(sum(shapes[source].width for source in below), shape.width, device=device)
            fields = predict, down[:, order] / step, up[order] * step, shift[order]
            layers.append(Layer(shape, below, mean, *fields, classes[order].cpu()))
        chain = Chain(layers, importance)
        if chain.bytes_per_token(states, steps) > SHARE * 2 * sum(shape.width for shape in shapes):
            finest = (finest + coarsest) / 2
        else:
            coarsest = (finest + coarsest) / 2
    return chain


def main():
    """Fit once, then measure by length, the shortest first."""
    parser = arguments(__doc__)
    parser.add_argument("--profile", action="store_true", help="print where decoding spends its time")
    options = parser.parse_args()
    device, dtype = ("cpu", torch.float32) if options.dry_run else ("cuda", torch.bfloat16)
    shape, lengths, pairs = (TINY, (64,), 2) if options.dry_run else (SHAPE_8B, (2048, 8192, 32768), 3)
    model = build(shape, [], device, dtype)
    shapes = read_shapes(model)
    text = torch.randint(0, shape["vocab_size"], (1, max(1024, lengths[-1])), device=device)
    codec = Codec(stand_in(prefill(model, text[:, :1024]), shapes), model_print(model))
    record = resumed(options.json, shape=shape, share=SHARE, channels=CHANNELS)
    freed(device)
    for length in lengths:
        if str(length) in record["rows"]:
            continue
        prompt = text[:, :length]
        cache = prefill(model, prompt)
        raw = [state.cpu() for layer in cache.layers for state in (layer.keys, layer.values)]
        raw = [state.pin_memory() for state in raw] if device == "cuda" else raw
        data = codec.encode(cache, prompt)
        calls = {
            "prefill": lambda p=prompt: prefill(model, p),
            "raw": lambda r=raw: [state.to(device, non_blocking=True) for state in r],
            "encoding": lambda c=cache, p=prompt: codec.encode(c, p),
            "decoding": lambda d=data: codec.decode(d, device, dtype),
        }
        if "error" not in record:
            record["error"] = error(codec.decode(data, device, dtype), codec.decode(data, "cpu", torch.float32))
        rows = in_turns({name: lambda c=call: seconds(c, device) for name, call in calls.items()}, pairs, warmup=0)
        size = sum(state.numel() for state in raw) * 2
        record["rows"][str(length)] = {**rows, "bytes": len(data), "raw_bytes": size}
        print(length, record["rows"][str(length)], flush=True)
        save(options.json, record)
        if options.profile:
            profile = cProfile.Profile()
            profile.runcall(calls["decoding"])
            pstats.Stats(profile).sort_stats("tottime").print_stats(12)
        del cache, raw, calls
        freed(device)


if __name__ == "__main__":
    main()
