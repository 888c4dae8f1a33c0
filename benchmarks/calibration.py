"""How long a retrofit with calibration takes, against running the original over the same tokens, and its peak memory.

    python benchmarks/calibration.py [--sequences 128] [--repeats 3]

Each side runs in a process of its own, in turns. "original": forward passes with logits. "retrofit": conversion and
calibration of W_c as by default. "job", once: that with the damage on all domains, as on the command line.
"""

import argparse
import json
import statistics
import subprocess
import sys
import time
from pathlib import Path

RESULTS = Path(__file__).parent / "results" / "calibration.json"
GROUPS = ((18, 19, 20, 21), (22, 23, 24, 25), (26, 27, 28, 29))


def side(name: str, sequences: int) -> None:
    """Run one side and print its seconds, its peak resident memory and the model's bytes."""
    import torch

    import crosslayer
    from crosslayer.corpus.domains import FITTED, embedded_domains, shared_out, split_domains

    model, tokenizer = crosslayer.load_model("smollm2")
    parts = {"calibration": shared_out(sequences, FITTED)}
    windows = split_domains(embedded_domains(), tokenizer, parts=parts)["calibration"]
    started = time.perf_counter()
    if name == "original":
        with torch.no_grad():
            for batch in windows.ids.split(4):
                model(input_ids=batch, use_cache=False)
    elif name == "retrofit":
        method = {"name": "uniattn", "superblocks": GROUPS}
        crosslayer.convert(model, method, calibration=windows.by_domain(), share_weights=True)
    else:
        crosslayer.retrofit(model, tokenizer=tokenizer, method="uniattn", calibration=sequences)
    seconds = time.perf_counter() - started
    peak = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM"))
    size = sum(p.numel() * p.element_size() for p in model.parameters())
    print(json.dumps({"seconds": seconds, "peak": int(peak.split()[1]) * 1024, "model": size}))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sequences", type=int, default=128)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--side", choices=("original", "retrofit", "job"))
    args = parser.parse_args()
    if args.side:
        side(args.side, args.sequences)
        return
    runs: dict[str, list[dict]] = {"original": [], "retrofit": [], "job": []}
    for repeat in range(args.repeats):
        for name in list(runs) if repeat % 2 == 0 else list(runs)[::-1]:
            if name == "job" and repeat:
                continue  # long: once
            command = [sys.executable, __file__, "--side", name, "--sequences", str(args.sequences)]
            runs[name].append(json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout))
            print(repeat, name, f"{runs[name][-1]['seconds']:.1f} s", flush=True)
    ratios = {
        name: [run["seconds"] / plain["seconds"] for run, plain in zip(runs[name], runs["original"], strict=False)]
        for name in ("retrofit", "job")
    }
    limit = 2 * runs["original"][0]["model"] + 1e9
    for name, values in ratios.items():
        peak = max(run["peak"] for run in runs[name])
        print(
            f"{name}: {statistics.median(values):.2f} × the original ({min(values):.2f}-{max(values):.2f}), "
            f"peak {peak / 1e6:.0f} MB (2 × model + 1 GB = {limit / 1e6:.0f} MB)"
        )
    from crosslayer.environment import environment

    RESULTS.write_text(
        json.dumps({"runs": runs, "ratios": ratios, "environment": environment().model_dump()}, indent=1) + "\n"
    )


if __name__ == "__main__":
    main()
