"""How what is fitted carries over to other text, by wiring: the tables of docs/evidence/README.md.

    python benchmarks/transfer.py --extra philosophy=FILE.txt.xz physics=FILE.txt.xz    # two hours on a core
    python benchmarks/transfer.py --only drop-9 --extra …                               # a single wiring
    python benchmarks/transfer.py --only cla-pairs --judge science speeches code        # W_c against W_o refitted
    python benchmarks/transfer.py --table                                               # the printed tables

Results are written after each judged domain, and what is there is not measured again. Losses are kept by window, so
that differences are paired. Files hold text (.txt or .txt.xz), documents separated by a line <|doc|>. Matrix products
are in bfloat16 where the CPU has them (streams and sums are not): the KL of that alone is 1e-4 here.
"""

import argparse
import dataclasses
import json
import lzma
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from streams import Known, Upper, from_known

import crosslayer
from crosslayer.core.decoder.convert import convert_weights
from crosslayer.core.method import Method
from crosslayer.core.methods import load_method, merge_plans, method_class, to_entry
from crosslayer.core.options import parse_layers
from crosslayer.corpus.domains import FITTED, embedded_domains, split_domains
from crosslayer.corpus.windows import Windows
from crosslayer.environment import environment
from crosslayer.judge.damage import Losses, compare
from crosslayer.judge.rows import kl, perplexity
from crosslayer.verbs.retrofit.convert import calibrate

RESULTS = Path(__file__).parent / "results" / "transfer.json"
FOURS = "18-21,22-25,26-29"
PAIRS = "24-25,26-27,28-29"
TEXTS = ("none", "books", "web", "docs", "mixture")
REFITS = ("none", "mixture", "mixture, refit-o", "mixture, refit")
WIRINGS = {  # name → method, layers, what is fitted
    "uniattn-4": ("uniattn", FOURS, (*TEXTS, "mixture, ridge")),
    "cla-4": ("cla", FOURS, TEXTS),
    "drop-9": ("drop", "19-21,23-25,27-29", TEXTS),
    "search-85": ("drop", "6-7,17,22,25", ("none", "books", "mixture")),  # by a search that did not repair
    "uniattn-pairs": ("uniattn", PAIRS, REFITS),
    "cla-pairs": ("cla", PAIRS, REFITS),
    "uniattn-fours": ("uniattn", FOURS, REFITS),
    "cla-fours": ("cla", FOURS, REFITS),
    "drop-3": ("drop", "25,27,29", ("none", "mixture")),
    "drop-readers": ("drop", "19-21,23-25,27-29", ("none", "mixture")),
    "bare-83": ("drop", "6-7,17,22,25", ("none", "mixture")),  # by a search that did not repair
    "repaired-83": ("drop", "6,21,25,28-29", ("none", "mixture")),  # by one that does
    "bare-70": ("drop", "4,6-7,17,20,22-23,25,29", ("none", "mixture")),
    "repaired-70": ("drop", "5-7,15,21,25,27-29", ("none", "mixture")),
    "bare-50": ("drop", "4,6-9,12,14,17-20,22-23,25,29", ("none", "mixture")),  # it shared maps in 27 besides: 48 %
    "repaired-50": ("drop", "4-7,9,12,15,21-22,24-29", ("none", "mixture")),
}
COMPARED = (  # on the same windows
    (("cla-pairs", "mixture, refit"), ("cla-pairs", "mixture")),
    (("cla-pairs", "mixture, refit-o"), ("cla-pairs", "mixture")),
    (("uniattn-pairs", "mixture, refit"), ("uniattn-pairs", "mixture")),
    (("uniattn-fours", "mixture, refit"), ("uniattn-fours", "mixture")),
    (("uniattn-fours", "mixture, refit-o"), ("uniattn-fours", "mixture")),
    (("uniattn-fours", "mixture, refit"), ("uniattn-fours", "mixture, refit-o")),
    (("cla-fours", "mixture, refit"), ("cla-fours", "mixture")),
    (("cla-fours", "mixture, refit"), ("drop-readers", "mixture")),
    (("cla-pairs", "mixture, refit"), ("drop-3", "mixture")),
    (("repaired-83", "mixture"), ("bare-83", "mixture")),
    (("repaired-70", "mixture"), ("bare-70", "mixture")),
    (("repaired-50", "mixture"), ("bare-50", "mixture")),
)
START = 18  # below it no wiring changes anything, but the searched ones
KNOWN: dict[int, Known] = {}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="*", choices=list(WIRINGS), default=list(WIRINGS))
    parser.add_argument("--extra", nargs="*", default=[], metavar="NAME=FILE", help="text that nothing is fitted to")
    parser.add_argument("--judge", nargs="*", default=["books", "web", "docs", "code"], help="embedded domains")
    parser.add_argument("--windows", type=int, default=16, help="of each judged domain")
    parser.add_argument("--calibration", type=int, default=72, help="windows of each fit")
    parser.add_argument("--length", type=int, default=256, help="tokens a window")
    parser.add_argument("--table", action="store_true", help="print the tables from the results, measure nothing")
    args = parser.parse_args()
    if args.table:
        print(table(json.loads(RESULTS.read_text())))
        return
    torch.set_float32_matmul_precision("medium")
    model, tokenizer = crosslayer.load_model("smollm2")
    documents: dict[str, Any] = embedded_domains()
    documents |= {name: read(Path(path)) for name, path in (pair.split("=", 1) for pair in args.extra)}
    judged = [name for name in documents if name in args.judge or name not in embedded_domains()]
    parts = {
        "judged": dict.fromkeys(judged, args.windows),
        "fit": dict.fromkeys(FITTED, args.calibration),
    }
    texts = split_domains(documents, tokenizer, parts=parts, length=args.length)
    for name in args.only:
        measure(model, name, texts, args)


def read(path: Path) -> list[str]:
    """Return the documents of a file."""
    data = path.read_bytes()
    return (lzma.decompress(data) if path.suffix == ".xz" else data).decode().split("\n<|doc|>\n")


@torch.no_grad()
def measure(model: Any, name: str, texts: dict[str, Windows], args: argparse.Namespace) -> None:
    """Fit a wiring on everything and judge it everywhere."""
    stored = load().get(name, {})
    settings = {
        **{key: vars(args)[key] for key in ("windows", "calibration", "length")},
        "matmul_precision": torch.get_float32_matmul_precision(),
    }
    earlier = stored.get("settings", settings)
    if settings != {"matmul_precision": "medium", **earlier}:  # older results do not say it
        raise SystemExit(f"{RESULTS.name} holds {name} with {earlier}, and not with {settings}; move it away")
    if "methods" not in stored:
        (method, groups, _), layers = WIRINGS[name], len(model.model.layers)
        plain = method_class(method).from_groups(parse_layers(groups, layers), layers)
        chosen = [dataclasses.replace(plain, compensation="attention")]
        save(name, {"methods": [to_entry(method) for method in chosen], "environment": environment().model_dump()})
        save(name, {"settings": settings})
        stored = load()[name]
    wanted = WIRINGS[name][2]
    judged = dict(sorted(texts["judged"].by_domain().items(), key=lambda pair: pair[0] in FITTED))  # unseen ones first
    if all(set(wanted) <= set(stored.get("cells", {}).get(domain, {})) for domain in judged):
        return
    methods = [load_method(entry) for entry in stored["methods"]]
    plan = merge_plans(methods, len(model.model.layers))
    sources = [[plan.queries[i], plan.keys[i], plan.values[i], i] for i in range(len(plan.keys))]
    lowest = min(min(j for j in row if j is not None) for row in sources if set(row) != {row[-1]})
    first = START if lowest >= START else lowest
    plain = Upper(convert_weights(model, []).model, first, args.length)
    known, pool = KNOWN.setdefault(first, Known(plain)), texts["fit"].by_domain()
    converted = {fit: fitted(model, methods, fit, pool, (known, first)) for fit in wanted}
    uppers = {fit: Upper(model, first, args.length) for fit, model in converted.items()}
    for domain, ids in judged.items():
        cells: dict[str, Any] = {fit: [] for fit in wanted if fit not in stored.get("cells", {}).get(domain, {})}
        started = time.perf_counter()
        for window in ids if cells else ():
            stream = known(window[None])
            original = plain.logits(stream)
            for fit, rows in cells.items():
                rows.append(compare(original.log_softmax(-1)[:-1], uppers[fit].logits(stream)[:-1], window[1:]))
        rows = [row for row, kind in enumerate(texts["judged"].domains) if kind == domain]
        cells = {fit: pack(losses, [texts["judged"].documents[row] for row in rows]) for fit, losses in cells.items()}
        save(name, {"cells": {domain: cells}})
        shown = ", ".join(
            f"{fit} {np.exp(np.subtract(c['after'], c['before']).mean()):.3f}" for fit, c in cells.items()
        )
        print(f"{name} judged on {domain}, {time.perf_counter() - started:.0f} s: {shown}", flush=True)


def fitted(model: Any, methods: list[Method], fit: str, pool: dict[str, torch.Tensor], below: tuple[Known, int]) -> Any:
    """Return the model with W_c fitted as `fit` says; a mixture has as many windows as a domain alone."""
    if fit.endswith("refit-o"):  # nothing is added
        methods = [dataclasses.replace(method, compensation=None) for method in methods]  # type: ignore[type-var]
    converted = from_known(convert_weights(model, methods).model, *below)
    if fit == "none":
        return converted
    text, how = [*fit.split(", "), "layerwise"][:2]
    mixture = {name: ids[: len(ids) // len(pool)] for name, ids in pool.items()}
    calibration = mixture if text == "mixture" else {text: pool[text]}
    started = time.perf_counter()
    fits = calibrate(from_known(convert_weights(model, []).model, *below), converted, calibration, how)
    left = [f"{w_c.layer}: {w_c.penalty:g}, {w_c.left_out:.2f}" for w_c in fits if w_c.penalty and w_c.left_out]
    print(f"fitted on {fit}, {time.perf_counter() - started:.0f} s; penalty, left: {'; '.join(left)}", flush=True)
    return converted


def pack(losses: list[dict[str, float]], documents: list[int]) -> dict[str, Any]:
    """Return the losses of each window as they are written."""
    means = {name: [round(window[name], 6) for window in losses] for name in losses[0]}
    return {**means, "documents": documents}


def load() -> dict[str, Any]:
    return json.loads(RESULTS.read_text()) if RESULTS.exists() else {}


def save(name: str, more: dict[str, Any]) -> None:
    """Merge into the file."""
    results = load()
    entry = results.setdefault(name, {})
    for domain, cells in more.pop("cells", {}).items():
        entry.setdefault("cells", {}).setdefault(domain, {}).update(cells)
    entry |= more
    RESULTS.write_text(json.dumps(results, indent=1) + "\n")


def table(results: dict[str, Any]) -> str:
    """Return a Markdown table for each wiring: perplexity ÷ the original's, fitted on × judged on, and the KL."""
    lines = []
    for name in WIRINGS:
        cells = results.get(name, {}).get("cells", {})
        if not cells:
            continue
        fits = [fit for fit in WIRINGS[name][2] if fit in next(iter(cells.values()))]
        lines += [f"| {name}: fitted on | {' | '.join(cells)} |", "|" + "---|" * (len(cells) + 1)]
        lines += [f"| {fit} | {' | '.join(_cell(judged, fit) for judged in cells.values())} |" for fit in fits]
        lines.append("")
    for one, other in COMPARED:
        cells, others = (results.get(name, {}).get("cells", {}) for name, _ in (one, other))
        shared = [domain for domain in cells if domain in others]
        unseen = [domain for domain in shared if domain not in FITTED]
        for chosen in [*([domain] for domain in shared), *([unseen] if len(unseen) > 1 else [])]:
            sides = (
                _joined([_losses(each[domain][fit]) for domain in chosen])
                for each, fit in ((cells, one[1]), (others, other[1]))
            )
            named = f"{', '.join(one)} − {', '.join(other)}"
            lines.append(f"{' + '.join(chosen)}: KL, {named}: {kl(*sides).change.text(signed=True)}")
    return "\n".join(lines)


MARKS = {"lower": "", "higher": " ††", "no difference seen": " †"}


def _cell(cells: dict[str, Any], fit: str) -> str:
    """Return ratio with interval, and KL; † where it is not told apart from none, †† where it is more."""
    with_fit, none = _losses(cells[fit]), _losses(cells["none"])
    mark = "" if fit == "none" else MARKS[kl(with_fit, none).change.verdict]
    return f"{perplexity(with_fit).change.text(2)}, {kl(with_fit).value:.2f}{mark}"


def _losses(cell: dict[str, Any]) -> Losses:
    return Losses({key: np.array(cell[key]) for key in ("before", "after", "kl")}, tuple(cell["documents"]))


def _joined(losses: list[Losses]) -> Losses:
    """Return the losses of several domains as one, whose documents are told apart."""
    documents = [1000 * number + document for number, each in enumerate(losses) for document in each.documents]
    means = {name: np.concatenate([each.means[name] for each in losses]) for name in ("before", "after", "kl")}
    return Losses(means, tuple(documents))


if __name__ == "__main__":
    main()
