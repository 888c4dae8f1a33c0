"""Encoding and decoding of a stored cache against the prefill that it saves, at 8B shape with random weights.

    python benchmarks/gpu/stored_prompts.py --json FILE [--dry-run]

The codec is fitted to random tokens at an eighth of the bytes. Decoding is bytes in memory → cache on the device; `raw`
copies the same cache uncompressed from pinned memory. `error` compares decoding on the device with that on the CPU.
"""

import torch
from common import TINY, arguments, build, in_turns, save, seconds
from steps import SHAPE_8B, freed

from crosslayer.codec.codec import Codec, model_print
from crosslayer.codec.fit import _first_step, calibrate, fit_chain, with_rate
from crosslayer.codec.states import read_shapes
from crosslayer.judge.clock import prefill

SHARE = 0.125


def error(cache, other) -> float:
    """Return the largest difference of two caches, over the largest number."""
    pairs = [(own.keys.float().cpu(), right.keys) for own, right in zip(cache.layers, other.layers, strict=True)]
    pairs += [(own.values.float().cpu(), right.values) for own, right in zip(cache.layers, other.layers, strict=True)]
    return max(float((own - right).abs().max() / right.abs().max()) for own, right in pairs)


def main():
    """Fit once, then measure by length, the shortest first."""
    options = arguments(__doc__).parse_args()
    device, dtype = ("cpu", torch.float32) if options.dry_run else ("cuda", torch.bfloat16)
    shape, windows, lengths, pairs = TINY, (8, 64), (64,), 2
    if not options.dry_run:
        shape, windows, lengths, pairs = SHAPE_8B, (3, 768), (2048, 8192), 3
    model = build(shape, [], device, dtype)
    shapes = read_shapes(model)
    ids = torch.randint(0, shape["vocab_size"], (windows[0] + 1, windows[1]))
    record = {"shape": shape, "share": SHARE, "rows": {}}
    made = {}

    def calibrated():
        made["data"] = calibrate(model, shapes, ids[:-1], ids[-1:])

    def fitted():
        data = made.pop("data")
        chain = fit_chain(data, _first_step(data))
        chain = with_rate(chain, data, SHARE * 2 * sum(one.width for one in shapes))
        made["codec"] = Codec(chain, model_print(model))

    record["calibrating_seconds"] = seconds(calibrated, device)
    print("calibrated", record["calibrating_seconds"], flush=True)
    record["fitting_seconds"] = seconds(fitted, device)
    print("fitted", record["fitting_seconds"], flush=True)
    codec = made.pop("codec")
    record["channels"] = [len(layer.classes) for layer in codec.chain.layers]
    save(options.json, record)
    freed(device)
    for length in lengths:
        prompt = torch.randint(0, shape["vocab_size"], (1, length), device=device)
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
        if length == lengths[0]:
            record["error"] = error(codec.decode(data, device, dtype), codec.decode(data, "cpu", torch.float32))
        rows = in_turns({name: lambda c=call: seconds(c, device) for name, call in calls.items()}, pairs, warmup=0)
        size = sum(state.numel() for state in raw) * 2
        record["rows"][length] = {**rows, "bytes": len(data), "raw_bytes": size}
        print(length, record["rows"][length], flush=True)
        save(options.json, record)
        del cache, raw, calls
        freed(device)
    if device == "cuda":
        long = torch.randint(0, shape["vocab_size"], (1, 32768), device=device)
        record["rows"][32768] = in_turns({"prefill": lambda: seconds(lambda: prefill(model, long), device)}, pairs)
        save(options.json, record)


if __name__ == "__main__":
    main()
