"""What a diagnosis takes over a forward pass with SDPA, in time and memory, at 8B shape with random weights.

python benchmarks/gpu/diagnosis.py --json FILE [--dry-run]
"""

import torch
from common import SHAPE_8B, TINY, arguments, build, in_turns, peak_bytes, resumed, save, seconds

from crosslayer import diagnose


@torch.no_grad()
def forward(model, ids, device):
    """Return the time of a forward pass without logits."""
    return seconds(lambda: model.model(ids, use_cache=False), device)


def main():
    """Diagnose by length, the shortest first."""
    options = arguments(__doc__).parse_args()
    device, dtype = ("cpu", torch.float32) if options.dry_run else ("cuda", torch.bfloat16)
    shape, lengths = (TINY, (64,)) if options.dry_run else (SHAPE_8B, (2048, 8192))
    model, record = build(shape, [], device, dtype), resumed(options.json, shape=shape)
    for length in lengths:
        if str(length) in record["rows"]:
            continue
        ids = torch.randint(0, shape["vocab_size"], (1, length), device=device)
        peaks = {}

        def forwards(ids=ids, peaks=peaks):
            peak_bytes(device)
            taken = forward(model, ids, device)
            peaks["forward"] = peak_bytes(device)
            return taken

        def diagnoses(ids=ids, peaks=peaks):
            peak_bytes(device)
            taken = seconds(lambda: diagnose(model, ids.cpu()), device)
            peaks["diagnosis"] = peak_bytes(device)
            return taken

        rows = in_turns({"forward": forwards, "diagnosis": diagnoses}, pairs=3)
        record["rows"][str(length)] = {**rows, "peak_bytes": peaks}
        print(length, record["rows"][str(length)], flush=True)
        save(options.json, record)


if __name__ == "__main__":
    main()
