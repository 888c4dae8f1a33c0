"""What retrofits of a model cost and save, by each way to fit W_c: the table of docs/evidence/README.md.

    python benchmarks/retrofit.py                        # all wirings, some hours on two cores
    python benchmarks/retrofit.py --only uniattn-4       # a single wiring; results are merged into the JSON
    python benchmarks/retrofit.py --parts times table    # of damage; cache bytes and times; the printed tables

The original runs once for all variants of a wiring; damage is on windows that calibration has not seen.
"""

import argparse
import dataclasses
import json
import time
from pathlib import Path
from typing import Any

import crosslayer
from crosslayer.core.method import Method
from crosslayer.core.methods import method_class, to_entry
from crosslayer.core.options import parse_layers
from crosslayer.corpus.documents import TextSource, load_documents
from crosslayer.corpus.windows import split
from crosslayer.environment import environment
from crosslayer.judge.damage import logits_of, losses
from crosslayer.judge.rows import kl, perplexity
from crosslayer.verbs.bench.run import bench
from crosslayer.verbs.retrofit.cache import token_bytes
from crosslayer.verbs.retrofit.convert import convert

PARTS = ("damage", "times", "table")
RESULTS = Path(__file__).parent / "results" / "retrofit.json"
FOURS, PAIRS = "18-21,22-25,26-29", "16-17,18-19,20-21,22-23,24-25,26-27,28-29"
WIRINGS = {
    "uniattn-4": ("uniattn", FOURS),
    "uniattn-2": ("uniattn", PAIRS),
    "uniattn-top6": ("uniattn", "24-29"),
    "cla-4": ("cla", FOURS),
    "cla-2": ("cla", PAIRS),
    "cla-top6": ("cla", "24-29"),
    "drop-9": ("drop", "19-21,23-25,27-29"),
    "kvsharer-5": ("cla", "11+23+25+27+28,10+26"),  # whose caches differ most, as arXiv 2410.18517 chooses them
    "kvsharer-9": ("cla", "11+19+21+23+24+25+27+28,10+22+26"),
}
VARIANTS: dict[str, tuple[str | None, dict[str, Any]]] = {
    "none": (None, {"fit": "zero"}),
    "mean": ("attention", {"fit": "mean"}),
    "mean, v = 16": ("attention", {"fit": "mean", "groups": 16}),
    "lstsq": ("attention", {"fit": "lstsq"}),
    "ridge": ("attention", {"fit": "ridge"}),
    "layerwise": ("attention", {"fit": "layerwise"}),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--only", nargs="*", choices=list(WIRINGS), default=list(WIRINGS))
    parser.add_argument("--windows", type=int, default=64)
    parser.add_argument("--calibration", type=int, default=32)
    parser.add_argument("--parts", nargs="*", choices=PARTS, default=PARTS)
    args = parser.parse_args()
    if set(args.parts) & {"damage", "times"}:
        model, tokenizer = crosslayer.load_model(args.model)
    if "damage" in args.parts:
        wanted = {"evaluation": args.windows, "calibration": args.calibration}
        texts = split(load_documents(TextSource()), tokenizer, parts=wanted)
        for name in args.only:
            save(name, damages(model, name, texts))
    if "times" in args.parts:
        for name in args.only:
            if not name.startswith("kvsharer"):
                save(name, {"times": times(model, name)})
    if "table" in args.parts:
        print(table(json.loads(RESULTS.read_text())))


def damages(model, name, texts) -> dict[str, Any]:
    """Return the damage of every variant of a wiring."""
    converted, fits, seconds = {}, {}, {}
    bare = wired(model, name)
    for variant, (target, options) in VARIANTS.items():
        if not belongs(name, variant):
            continue
        started = time.perf_counter()
        chosen = dataclasses.replace(bare, compensation=target)
        converted[variant] = convert(model, chosen, calibration=texts["calibration"].ids, share_weights=True, **options)
        fits[variant] = [dataclasses.asdict(fit) for fit in converted[variant].fits]
        seconds[variant] = time.perf_counter() - started
    runs = {variant: logits_of(done.model) for variant, done in converted.items()}
    by_variant = losses(logits_of(model), runs, texts["evaluation"])
    rows = {}
    for variant, measured in by_variant.items():
        ratio, cost = perplexity(measured).change, kl(measured).change
        rows[variant] = {"ratio": ratio.model_dump(), "kl": cost.model_dump()}
        print(f"{name:>13} {variant:<13} ratio {ratio.text()}  KL {cost.text(4)}", flush=True)
    return {
        "methods": [to_entry(bare)],
        "kv_share": token_bytes(converted["none"].model) / token_bytes(model),
        "damage": rows,
        "windows": {
            variant: {key: [round(float(x), 6) for x in values] for key, values in measured.means.items()}
            for variant, measured in by_variant.items()
        },
        "documents": texts["evaluation"].documents,
        "fits": fits,
        "calibration_seconds": seconds,
        "settings": {name: len(part) for name, part in texts.items()},
        "environment": environment().model_dump(),
    }


def belongs(name: str, variant: str) -> bool:
    """Return whether a variant of W_c is measured for a wiring."""
    if name.startswith("kvsharer"):
        return variant in ("none", "lstsq", "ridge")
    if "groups" in VARIANTS[variant][1]:
        return WIRINGS[name][0] == "uniattn"  # Theorem 3.1 is UniAttn's
    return True


def wired(model, name: str) -> Method:
    """Return the method of a wiring without W_c."""
    method, groups = WIRINGS[name]
    layers = model.config.num_hidden_layers
    return method_class(method).from_groups(parse_layers(groups, layers), layers)


def times(model, name) -> dict[str, Any]:
    """Return the bench of a wiring with W_c, as it would be used; rows as the headline has them."""
    chosen = dataclasses.replace(wired(model, name), compensation="attention")
    converted = convert(model, chosen, fit="zero", share_weights=True).model
    measured = bench(converted, model, contexts=(2048,), new_tokens=16)
    return {**measured.record(), "rows": measured.headline()["results"]}


def table(results: dict[str, Any]) -> str:
    """Return the results as two Markdown tables: perplexity ratio with share and times, and KL."""
    variants = list(VARIANTS)
    lines = [
        f"| wiring | KV share | {' | '.join(variants)} | time to first token | time per token |",
        "|" + "---|" * (len(variants) + 4),
    ]
    for name, measured in results.items():
        cells = _cells(measured, "ratio")
        lines.append(f"| {name} | {measured['kv_share']:.2%} | {' | '.join(cells)} | {' | '.join(_ratios(measured))} |")
    lines += ["", f"| KL, nats per token | {' | '.join(variants)} |", "|" + "---|" * (len(variants) + 1)]
    lines += [f"| {name} | {' | '.join(_cells(measured, 'kl'))} |" for name, measured in results.items()]
    return "\n".join(lines)


def _cells(measured: dict[str, Any], key: str) -> list[str]:
    rows = [measured["damage"].get(variant, {}).get(key) for variant in VARIANTS]
    return [f"{_short(row['value'])} ({_short(row['low'])}-{_short(row['high'])})" if row else "" for row in rows]


def _short(value: float) -> str:
    return f"{value:#.3g}".rstrip(".") if value < 1000 else f"{value:,.0f}" if value < 1e5 else f"{value:.1e}"


def _ratios(measured: dict[str, Any]) -> list[str]:
    if "times" not in measured:
        return ["", ""]
    row = measured["times"]["rows"][0]
    result = []
    for key in ("ttft", "tpot_dynamic"):
        low, high = row[key]["interval"]
        result.append(f"{row[key]['ratio']:.3f} ({low:.3f}-{high:.3f})")
    return result


def save(name: str, measured: dict[str, Any]) -> None:
    """Merge a wiring's results into the file."""
    results = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    results[name] = {**results.get(name, {}), **measured}
    RESULTS.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
