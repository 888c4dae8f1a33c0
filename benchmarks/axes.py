"""What a share of the KV cache costs by axis: bits alone, rank alone, both, and both across depth.

    python benchmarks/axes.py --json FILE [--budgets 0.5,0.25,0.125] [--axes rank bits depth,bits,rank]
        [--text NAME=FILE …] [--windows 4] [--save FOLDER] [--model smollm2]

Latents are fitted as `crosslayer retrofit --axes` does it, and judged by KL to the original on windows of 512 tokens,
as many of each --text, which nothing was fitted to. With --save the models are kept, as AXES-BUDGET, for
benchmarks/quality.py. What is measured stands in FILE after each row.
"""

import argparse
import json
import time
from datetime import date
from pathlib import Path

from quality import mean_interval, window_losses, windows_of

from crosslayer import load_model
from crosslayer.corpus.windows import Windows
from crosslayer.environment import environment
from crosslayer.eviction.running import SmallerCache
from crosslayer.output.progress import Progress
from crosslayer.verbs.retrofit.choose import choose
from crosslayer.verbs.retrofit.convert import convert
from crosslayer.verbs.retrofit.request import Request, RetrofitOptions
from crosslayer.verbs.retrofit.texts import Texts


def calibration_of(tokenizer) -> dict[str, Windows]:
    """Return the windows to which a retrofit fits latents by default."""
    request = Request(RetrofitOptions(kv_budget=0.25, axes="bits,rank"))
    return Texts.load().windows(tokenizer, request)


def main(options: argparse.Namespace) -> None:
    """Measure every budget with every set of axes."""
    model, tokenizer = load_model(options.model, dtype="float32")
    model.eval()
    judged, fitted = windows_of(tokenizer, options), calibration_of(tokenizer)
    rows = []
    for budget in map(float, options.budgets.split(",")):
        for axes in options.axes:
            started = time.perf_counter()
            row = {"axes": axes, "budget": budget}
            rows.append(row)
            try:
                request = Request(RetrofitOptions(kv_budget=budget, axes=axes))
                chosen = choose(model, request, fitted, Progress)
            except ValueError as error:
                row["refused"] = str(error)
                continue
            latents = convert(model, chosen.methods, moments=chosen.moments, share_weights=True).model
            row["seconds"] = round(time.perf_counter() - started, 1)
            _, divergences = window_losses(latents, model, judged, SmallerCache(None, None))
            row |= {"kl": mean_interval(divergences), "kl_by_window": divergences.tolist()}
            if options.save:
                folder = Path(options.save) / f"{axes.replace(',', '-')}-{budget:g}"
                latents.save_pretrained(folder)
                tokenizer.save_pretrained(folder)
            print(axes, budget, row["kl"], row["seconds"], flush=True)
            record = {
                "date": str(date.today()),
                "settings": {name: value for name, value in vars(options).items() if name not in ("json", "save")},
                "rows": rows,
                "environment": environment().model_dump(),
            }
            Path(options.json).write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--budgets", default="0.5,0.25,0.125")
    parser.add_argument("--axes", nargs="+", default=["rank", "bits", "depth,bits,rank"])
    parser.add_argument("--text", action="append", default=[])
    parser.add_argument("--windows", type=int, default=4)
    parser.add_argument("--save")
    parser.add_argument("--json", required=True)
    main(parser.parse_args())
