"""Attention Residuals in blocks at inference, with one softmax a sublayer and in two phases, against the plain decoder.

    python benchmarks/two_phase.py [--rounds 100] [--json FILE]

A round runs every case once, in an order that alternates: a decoding step after a prompt of 256 tokens, and a prompt of
512. Times are processor time of one thread, which other work on the machine hardly changes. Ratios are taken round by
round against the plain decoder, with 95 % intervals of the median from order statistics. `difference` is the largest
difference of a prompt's logits between both forms with the same weights, float32, over the largest logit.
"""

import argparse
import json
import time
from datetime import date
from pathlib import Path
from statistics import median

import torch
from decoder import SHAPE, filled

from crosslayer.core.decoder import CrossLayerConfig, CrossLayerForCausalLM
from crosslayer.core.transformers_versions import CACHE
from crosslayer.environment import environment
from crosslayer.stats.times import paired_ratio

FULL = "attnres"


def blocks(size, two_phase=False):
    """Return Block AttnRes."""
    return {"name": FULL, "block": size, "two_phase": two_phase}


DEPTHS = {  # layers: methods by case
    8: {
        "plain decoder": None, "full": FULL, "blocks of 2": blocks(2), "blocks of 2, two phases": blocks(2, True),
        "blocks of 8": blocks(8), "blocks of 8, two phases": blocks(8, True),
    },
    32: {"plain decoder": None, "blocks of 8": blocks(8), "blocks of 8, two phases": blocks(8, True)},
}  # fmt: skip


def build(layers, method):
    """Return a decoder; queries are drawn, since zero queries would make all weights equal."""
    torch.manual_seed(0)
    config = CrossLayerConfig(**{**SHAPE, "num_hidden_layers": layers}, cross_layer=method)
    model = CrossLayerForCausalLM(config).eval()
    for name, parameter in model.named_parameters():
        if name.endswith("residual.query"):
            parameter.data.normal_(std=0.1)
    return model


def seconds(run, *args, **options):
    """Return the processor time of a call."""
    started = time.thread_time()
    run(*args, **options)
    return time.thread_time() - started


def measure(layers, methods, ids, rounds):
    """Return a row for each case."""
    models = {name: build(layers, method) for name, method in methods.items()}
    times = {(name, kind): [] for name in models for kind in ("decoding", "prompt")}
    for number in range(-2, rounds):
        if number % 50 in (0, 48):
            caches = {name: filled(model, ids) for name, model in models.items()}
        for name in list(models) if number % 2 else list(models)[::-1]:
            model, new = models[name], ids[:1, number % 200 : number % 200 + 1]
            step = seconds(model, new, **{CACHE: caches[name]}, use_cache=True)
            if number >= 0:
                times[name, "decoding"].append(step)
                if number % 5 == 0:
                    times[name, "prompt"].append(seconds(model, ids[:1, :512], use_cache=False))
    rows = {}
    for name, model in models.items():
        row = rows[f"{layers} layers, {name}"] = {}
        for kind in ("decoding", "prompt"):
            ratio = paired_ratio(times[name, kind], times["plain decoder", kind])
            row[kind] = {"ratio": ratio.value, "ci95": ratio.interval, "seconds": median(times[name, kind])}
        if name.endswith("two phases"):
            other, own = (m(ids[:1, :512], use_cache=False).logits for m in (models[name.split(",")[0]], model))
            row["difference"] = float((own - other).abs().max() / other.abs().max())
            for kind in ("decoding", "prompt"):
                one_phase = times[name.split(",")[0], kind]
                ratio = paired_ratio(times[name, kind], one_phase)
                row[kind] |= {"over_one_phase": ratio.value, "over_one_phase_ci95": ratio.interval}
    return rows


def main():
    """Measure, print and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=100)
    parser.add_argument("--json", type=Path, default=Path(__file__).parent / "results" / "two_phase.json")
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.set_grad_enabled(False)
    ids = torch.randint(0, SHAPE["vocab_size"], (1, 768), generator=torch.Generator().manual_seed(0))
    rows = {}
    for layers, methods in DEPTHS.items():
        rows |= measure(layers, methods, ids, options.rounds)
    for name, row in rows.items():
        print(
            f"| {name} | " + " | ".join(f"{row[k]['ratio']:.3f} {row[k]['ci95']}" for k in ("decoding", "prompt")), row
        )
    result = {"date": str(date.today()), "rounds": options.rounds, "shape": SHAPE, "rows": rows}
    options.json.write_text(json.dumps(result | environment().model_dump(), indent=1) + "\n")


if __name__ == "__main__":
    main()
