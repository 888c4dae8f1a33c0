"""What a share of the KV cache costs by axis: depth, bits or rank alone, or several of them.

    python benchmarks/axes.py --json FILE [--budgets 0.5,0.25,0.125] [--axes depth bits rank depth,bits,rank]
        [--text NAME=FILE …] [--windows 4] [--save FOLDER] [--model smollm2]
    python benchmarks/axes.py --json FILE --merge FILE …    # rows of several files, the best single axis paired

Caches are made as `crosslayer retrofit --kv-budget --axes` does it, and judged by KL to the original on windows of 512
tokens, as many of each --text, which nothing was fitted to. With --save the models are kept, as AXES-BUDGET, for
benchmarks/quality.py. What is measured stands in FILE after each row; a row that cannot be had says why.
"""

import argparse
import json
import time
from datetime import date
from pathlib import Path
from typing import Any

import numpy as np
from quality import mean_interval, window_losses, windows_of
from torch import Tensor
from transformers import PreTrainedModel

from crosslayer import load_model
from crosslayer.environment import environment
from crosslayer.eviction.running import SmallerCache
from crosslayer.verbs.retrofit.convert import convert
from crosslayer.verbs.retrofit.options import AXES
from crosslayer.verbs.retrofit.run import options_of
from crosslayer.verbs.retrofit.strategies import strategy_of
from crosslayer.verbs.retrofit.strategy import Strategy
from crosslayer.verbs.retrofit.texts import RetrofitTexts

ALL = ",".join(AXES)


def smaller(model: PreTrainedModel, tokenizer: Any, strategy: Strategy) -> PreTrainedModel:
    """Return the model as a retrofit makes it, on the text that a retrofit uses by default."""
    windows = RetrofitTexts.load().windows(tokenizer, strategy)
    methods, _, moments = strategy.choose(model, windows)
    calibration = windows["calibration"].by_domain()
    options = {"fit": strategy.fit_of(methods), "moments": moments, "share_weights": True}
    return convert(model, methods, calibration=calibration, **options).model


def measure(model: PreTrainedModel, tokenizer: Any, judged: Tensor, row: dict, save: str | None) -> None:
    """Add to a row of axes and budget what it costs, on windows (N, T)."""
    started = time.perf_counter()
    try:
        strategy = strategy_of(options_of(kv_budget=row["budget"], axes=row["axes"]))
        retrofit = smaller(model, tokenizer, strategy)
    except ValueError as error:
        row["refused"] = str(error)
        return
    row["seconds"] = round(time.perf_counter() - started, 1)
    _, divergences = window_losses(retrofit, model, judged, SmallerCache(None, None))
    row |= {"kl": mean_interval(divergences), "kl_by_window": divergences.tolist()}
    if save:
        folder = Path(save) / f"{row['axes'].replace(',', '-')}-{row['budget']:g}"
        retrofit.save_pretrained(folder)
        tokenizer.save_pretrained(folder)


def differences(rows: list[dict]) -> dict[str, dict]:
    """Return, by budget, the best single axis and the KL of all axes less its KL, paired by window."""
    compared = {}
    for row in rows:
        budget = row["budget"]
        single = [one for one in rows if one["budget"] == budget and one["axes"] in AXES and "kl" in one]
        if row["axes"] == ALL and "kl" in row and single:
            best = min(single, key=lambda one: one["kl"][0])
            gap = np.array(row["kl_by_window"]) - np.array(best["kl_by_window"])
            compared[f"{budget:g}"] = {"best": best["axes"], "all_minus_best": mean_interval(gap)}
    return compared


def write(path: str, record: dict) -> None:
    """Write a record with the comparison of its rows."""
    record["compared"] = differences(record["rows"])
    Path(path).write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


def main(options: argparse.Namespace) -> None:
    """Measure every budget with every set of axes, or merge what was measured."""
    if options.merge:
        records = [json.loads(Path(file).read_text(encoding="utf-8")) for file in options.merge]
        rows = {(row["budget"], row["axes"]): row for record in records for row in record["rows"]}
        write(options.json, records[-1] | {"rows": [rows[key] for key in sorted(rows)]})
        return
    settings = {name: vars(options)[name] for name in ("model", "windows", "text")}
    settings["text"] = [text.partition("=")[0] for text in options.text]
    model, tokenizer = load_model(options.model, dtype="float32")
    model.eval()
    judged, rows = windows_of(tokenizer, options), []
    for budget in map(float, options.budgets.split(",")):
        for axes in options.axes:
            rows.append({"axes": axes, "budget": budget})
            measure(model, tokenizer, judged, rows[-1], options.save)
            print(axes, budget, rows[-1].get("refused") or rows[-1]["kl"], flush=True)
            record = {"date": str(date.today()), "settings": settings, "rows": rows}
            write(options.json, record | {"environment": environment().model_dump()})


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--budgets", default="0.5,0.25,0.125")
    parser.add_argument("--axes", nargs="+", default=[*AXES, ALL])
    parser.add_argument("--text", action="append", default=[])
    parser.add_argument("--windows", type=int, default=4)
    parser.add_argument("--save")
    parser.add_argument("--merge", nargs="+")
    parser.add_argument("--json", required=True)
    main(parser.parse_args())
