"""The waiver paper's two experiments on the embedded models, and what `crosslayer intervene` costs beside a diagnosis.

    python benchmarks/intervene.py             # both experiments on 32 sequences of 512 tokens
    python benchmarks/intervene.py --cost      # whole commands in turns: intervene and diagnose on smollm2
    python benchmarks/intervene.py --table     # print the tables of docs/results/evidence.md from the JSON

Figure 3 of the paper: position 255 of a causal model, isolated or not, behind a special or a random first token.
Figure 4: position 383 of a BERT-like encoder with the position row of 0, of 511 or a random row, between [CLS] and
[SEP] or random tokens. Intervals are Student's t over sequences.
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

import crosslayer
from crosslayer.corpus.documents import TextSource, load_documents
from crosslayer.corpus.windows import packed
from crosslayer.environment import environment
from crosslayer.output.panel import Line, Panel, save_svg
from crosslayer.output.progress import Progress
from crosslayer.output.summary import summarise
from crosslayer.verbs.intervene.kinds import Kind, PositionSwap, positions_of, waiver
from crosslayer.verbs.intervene.readings import Passes, Sample, change, loss_change

HERE = Path(__file__).parent
RESULTS, FIGURES = HERE / "results" / "intervene.json", HERE.parent / "docs" / "figures"
LENGTH, CAUSAL, ENCODER = 512, 255, 383
UPPER, LOWER = slice(12, 29), slice(1, 5)  # layers that the tables average over: SmolLM2's sink, MiniLM's
RANDOM_ROWS = 4


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sequences", type=int, default=32)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--cost", action="store_true")
    parser.add_argument("--table", action="store_true")
    args = parser.parse_args()
    if args.table:
        print(tables(json.loads(RESULTS.read_text())))
    elif args.cost:
        save({"cost": cost(args.repeats)})
    else:
        save(
            {
                "smollm2": smollm2(args.sequences),
                "minilm": minilm(args.sequences),
                "environment": environment().model_dump(),
            }
        )
        draw(json.loads(RESULTS.read_text()))


def smollm2(sequences: int) -> dict[str, Any]:
    """Return, for a special and a random first token, what isolating position 255 does."""
    model, tokenizer = crosslayer.load_model("smollm2")
    plain = packed(load_documents(TextSource()), tokenizer, sequences=sequences, length=LENGTH, bos="no").ids
    results = {}
    for start, tokens in (("special", model.config.bos_token_id), ("random", random_tokens(model, sequences, 1))):
        ids = plain.clone()
        ids[:, 0] = torch.as_tensor(tokens)
        results[start] = measured(f"smollm2 {start}", model, ids, waiver(CAUSAL), UPPER)
    return results


def minilm(sequences: int) -> dict[str, Any]:
    """Return, for special and random first and last tokens, what another position row at 383 does."""
    model, tokenizer = crosslayer.load_model("minilm")
    plain = packed(load_documents(TextSource()), tokenizer, sequences=sequences, length=LENGTH).ids
    rows = np.random.default_rng(0).choice(range(1, LENGTH - 1), RANDOM_ROWS, replace=False)
    results = {}
    for start in ("special", "random"):
        ids = plain.clone()  # with [CLS] and [SEP]
        if start == "random":
            ids[:, 0], ids[:, -1] = random_tokens(model, sequences, 2), random_tokens(model, sequences, 3)
        for row in (0, LENGTH - 1, *map(int, rows)):
            swap = PositionSwap(ENCODER, row)
            results[f"{start}, row {row}"] = measured(f"minilm {start} row {row}", model, ids, swap, LOWER)
    return results


def random_tokens(model, sequences: int, seed: int) -> torch.Tensor:
    return torch.randint(model.config.vocab_size, (sequences,), generator=torch.Generator().manual_seed(seed))


def measured(name: str, model, ids: torch.Tensor, intervention: Kind, layers: slice) -> dict[str, Any]:
    """Return what is kept of an intervention: by layer, and averaged over the named layers of each sequence.

    Unlike `crosslayer.intervene`, whose record holds means over sequences, this needs the sequences themselves.
    """
    (position,) = positions_of(intervention)
    with Progress(name, 2 * len(ids)) as steps:
        passes = Passes(model, 2 * len(ids), steps)
        after = passes.sample(ids, [position, 0], [intervention], position)
        before = passes.sample(ids, [position, 0], (), position)
    loss = loss_change(before.loss_behind, after.loss_behind, 0)
    averages = {}
    for side, sample in (("before", before), ("after", after)):
        for index, who in enumerate(("position", "first")):  # (N, L, P) → (N,)
            averages[f"{who}_{side}"] = summarise(sample.measures["attention_received"][:, layers, index].mean(axis=1))
        averages[f"peak_{side}"] = summarise(sample.measures["hidden_norm_ratio"][:, :, 0].max(axis=1))
        averages[f"drain_{side}"] = summarise(np.nanmedian(sample.measures["value_norm_ratio"][:, layers, 0], axis=1))
    return {
        "attention_received": by_layer(before, after, "attention_received", 0),
        "hidden_norm_ratio": by_layer(before, after, "hidden_norm_ratio", 0),
        "value_norm_ratio": by_layer(before, after, "value_norm_ratio", 0),
        "loss_behind": None if loss is None else loss.model_dump(),
        "first_token": by_layer(before, after, "attention_received", 1),
        "averages": averages,
        "sequences": len(ids),
    }


def by_layer(before: Sample, after: Sample, name: str, index: int) -> dict[str, Any]:
    """Summarise a measure, (N, L, P), at a position by its index, before and after."""
    return change(before.measures[name][..., index], after.measures[name][..., index]).model_dump()


def cost(repeats: int) -> dict[str, Any]:
    """Return the seconds of whole commands, in turns, and the ratio of pairs."""
    commands = {"diagnose": ["diagnose", "smollm2"], "intervene": ["intervene", "smollm2", "--waiver", "255"]}
    seconds: dict[str, list[float]] = {name: [] for name in commands}
    with tempfile.TemporaryDirectory() as folder:
        for _ in range(repeats):
            for name, words in commands.items():
                started = time.perf_counter()
                call = [sys.executable, "-m", "crosslayer", *words, "--out", f"{folder}/{name}", "--force"]
                subprocess.run(call, check=True, capture_output=True)
                seconds[name].append(time.perf_counter() - started)
    ratios = [ours / other for ours, other in zip(seconds["intervene"], seconds["diagnose"], strict=True)]
    print(f"intervene / diagnose: median {statistics.median(ratios):.2f}, {min(ratios):.2f} to {max(ratios):.2f}")
    return {"seconds": seconds, "ratios": ratios, "environment": environment().model_dump()}


def tables(results: dict[str, Any]) -> str:
    """Return the results as Markdown."""
    lines = [
        "| first token | position 255 | attention received, layers 12-28 | first token's | largest hidden norm "
        "÷ median | value norm ÷ median | loss behind it |",
        "|---|---|---|---|---|---|---|",
    ]
    for start, result in results["smollm2"].items():
        for side in ("before", "after"):
            averages, loss = result["averages"], result["loss_behind"]
            difference = "" if side == "before" else f" ({signed(loss['difference'])})"
            cells = [share(averages[f"position_{side}"]), share(averages[f"first_{side}"])]
            cells += [plain(averages[f"peak_{side}"], 1)]
            cells += [plain(averages[f"drain_{side}"], 2), f"{loss[side]['mean']:.3f}{difference}"]
            state = "as it is" if side == "before" else "isolated"
            lines.append(f"| {start} | {state} | {' | '.join(cells)} |")
    lines += [
        "",
        "| first and last token | row at position 383 | attention received, layers 1-4 | of position 0 |",
        "|---|---|---|---|",
    ]
    for start in ("special", "random"):
        group = {name: result for name, result in results["minilm"].items() if name.startswith(start)}
        own = next(iter(group.values()))["averages"]
        lines.append(f"| {start} | its own | {share(own['position_before'])} | {share(own['first_before'])} |")
        for name, result in group.items():
            row, averages = name.split("row ")[1], result["averages"]
            cells = [share(averages["position_after"]), share(averages["first_after"])]
            lines.append(f"| {start} | {row} | {' | '.join(cells)} |")
    if "cost" in results:
        ratios = results["cost"]["ratios"]
        lines += ["", f"Cost: {statistics.median(ratios):.2f} ({min(ratios):.2f}-{max(ratios):.2f}) of {len(ratios)}"]
    return "\n".join(lines)


def share(summary: dict[str, Any]) -> str:
    return f"{summary['mean']:.2%} ({summary['ci95'][0]:.2%}-{summary['ci95'][1]:.2%})"


def plain(summary: dict[str, Any], digits: int) -> str:
    return f"{summary['mean']:.{digits}f} ({summary['ci95'][0]:.{digits}f}-{summary['ci95'][1]:.{digits}f})"


def signed(summary: dict[str, Any]) -> str:
    return f"{summary['mean']:+.4f}; {summary['ci95'][0]:+.4f} to {summary['ci95'][1]:+.4f}"


def draw(results: dict[str, Any]) -> None:
    """Draw the two figures: attention received by layer."""
    FIGURES.mkdir(exist_ok=True)
    lines = [
        line(f"{start} first token, {word}", result["attention_received"][side])
        for start, result in results["smollm2"].items()
        for side, word in (("before", "as it is"), ("after", "isolated"))
    ]
    title, axis = "SmolLM2: attention that position 255 receives", "share of later tokens' attention"
    save_svg(Panel("waiver_smollm2", title, "", "layer", axis, lines), FIGURES)
    swaps = results["minilm"]
    lines = [line("its own row", swaps["special, row 0"]["attention_received"]["before"])]
    lines += [
        line(f"row {row}", swaps[f"special, row {row}"]["attention_received"]["after"]) for row in (0, LENGTH - 1)
    ]
    title, axis = "MiniLM: attention that position 383 receives", "share of the other tokens' attention"
    save_svg(Panel("swap_minilm", title, "", "layer", axis, lines), FIGURES)


def line(name: str, measure: dict[str, Any]) -> Line:
    low, high = ([pair[end] for pair in measure["ci95"]] for end in (0, 1))
    return Line(name, [float(i) for i in range(len(measure["mean"]))], measure["mean"], low, high)


def save(new: dict[str, Any]) -> None:
    results = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    RESULTS.write_text(json.dumps({**results, **new}, indent=1) + "\n")


if __name__ == "__main__":
    main()
