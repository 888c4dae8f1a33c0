"""The waiver paper's two experiments on the embedded models, and what `crosslayer intervene` costs beside a diagnosis.

    python benchmarks/intervene.py             # both experiments on 24 sequences of 512 tokens
    python benchmarks/intervene.py --cost      # whole commands in turns: intervene and diagnose on smollm2
    python benchmarks/intervene.py --table     # print the tables of docs/papers/waiver.md from the JSON

Figure 3 of the paper: position 255 of a causal model, isolated or not, behind <|im_start|>, <|endoftext|>, a random
token, or the fixed beginning of the chat template (3.3.1); behind the first, positions 64, 128 and 383 too. Figure 4:
position 383 of a BERT-like encoder with the position row of 0, of 511 or a random row, between [CLS] and [SEP] or
random tokens; and with row 0 and a random row scaled to the norms 0.5, 1 and 2. Intervals are over documents.
"""

import argparse
import itertools
import json
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

import crosslayer
from crosslayer.corpus.documents import TextSource, load_documents
from crosslayer.corpus.windows import Windows, packed
from crosslayer.environment import environment
from crosslayer.output.chart import save_svg
from crosslayer.output.panel import Line, Panel
from crosslayer.output.progress import Progress
from crosslayer.stats.bootstrap import Ends, measure, over_documents, plain
from crosslayer.verbs.intervene.kinds import Kind, PositionSwap, positions_of, waiver
from crosslayer.verbs.intervene.readings import Sample, change, sample

HERE = Path(__file__).parent
RESULTS, FIGURES = HERE / "results" / "waiver.json", HERE.parent / "docs" / "figures"
LENGTH, CAUSAL, ENCODER = 512, 255, 383
POSITIONS = (CAUSAL, 64, 128, 383)  # isolated behind a special first token, one at a time
NORMS = (0.5, 1.0, 2.0)  # of a row of the position table
UPPER, LOWER = slice(12, 29), slice(1, 5)  # layers that the tables average over: SmolLM2's sink, MiniLM's
RANDOM_ROWS = 4


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sequences", type=int, default=24)
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
    """Return, behind each beginning, what isolating position 255 does, and behind a special token others too."""
    model, tokenizer = crosslayer.load_model("smollm2")
    cut: dict[str, Any] = {"sequences": sequences, "length": LENGTH, "bos": "no"}
    text, results = load_documents(TextSource()), {}
    plain, chat = packed(text, tokenizer, **cut), packed(text, tokenizer, prefix="chat", **cut)
    first = {
        "special": model.config.bos_token_id,
        "endoftext": tokenizer.convert_tokens_to_ids("<|endoftext|>"),
        "random": random_tokens(model, sequences, 1),
    }
    for start, tokens in first.items():
        windows = replace(plain, ids=plain.ids.clone())
        windows.ids[:, 0] = torch.as_tensor(tokens)
        changes = {f"position {k}": waiver(k) for k in (POSITIONS if start == "special" else (CAUSAL,))}
        results[start] = measured(f"smollm2 {start}", model, windows, changes, UPPER)
    results["chat"] = measured("smollm2 chat", model, chat, {f"position {CAUSAL}": waiver(CAUSAL)}, UPPER)
    return results


def minilm(sequences: int) -> dict[str, Any]:
    """Return, for special and random first and last tokens, what another position row at 383 does."""
    model, tokenizer = crosslayer.load_model("minilm")
    plain = packed(load_documents(TextSource()), tokenizer, sequences=sequences, length=LENGTH)
    drawn = np.random.default_rng(0).choice(range(1, LENGTH - 1), RANDOM_ROWS, replace=False).tolist()
    results = {}
    for start in ("special", "random"):
        windows = replace(plain, ids=plain.ids.clone())  # with [CLS] and [SEP]
        if start == "random":
            for index, seed in ((0, 2), (-1, 3)):
                windows.ids[:, index] = random_tokens(model, sequences, seed)
        changes = {f"row {row}": PositionSwap(ENCODER, row) for row in (0, LENGTH - 1, *drawn)}
        if start == "special":
            for row in (0, drawn[0]):
                for norm in NORMS:
                    changes[f"row {row}, norm {norm}"] = PositionSwap(ENCODER, row, norm)
        results[start] = measured(f"minilm {start}", model, windows, changes, LOWER)
    return results


def random_tokens(model, sequences: int, seed: int) -> torch.Tensor:
    return torch.randint(model.config.vocab_size, (sequences,), generator=torch.Generator().manual_seed(seed))


def measured(name: str, model, windows: Windows, changes: dict[str, Kind], layers: slice) -> dict[str, Any]:
    """Return what is kept of interventions: by layer, and averaged over the named layers of each sequence.

    Unlike `crosslayer.intervene`, whose record holds means over sequences, this needs the sequences themselves.
    """
    positions = sorted({0, *(position for change in changes.values() for position in positions_of(change))})
    results, over = {}, over_documents(windows.documents)
    total, done = (1 + len(changes)) * len(windows), itertools.count(1)
    with Progress(name, total) as steps:
        read = partial(sample, model, windows.ids, positions, tick=lambda: steps.step(next(done), total))
        before = read(loss_from=positions[0])
        for named, intervention in changes.items():
            after = read([intervention], loss_from=positions[0])
            position = positions_of(intervention)[0]
            results[named] = compared(before, after, (position, positions.index(position)), layers, over)
    return {"documents": list(windows.documents), "changes": results}


def compared(
    before: Sample, after: Sample, measured_at: tuple[int, int], layers: slice, over: Ends | None
) -> dict[str, Any]:
    """Return the change at a position, given with its number among the measured ones, and at the first token."""
    (position, at), result = measured_at, {"averages": {}}
    for side, read in (("before", before), ("after", after)):
        averages = {}
        for index, who in ((at, "position"), (0, "first")):  # (N, L, P) → (N,)
            averages[who] = read.measures["attention_received"][:, layers, index].mean(axis=1)
        averages["peak"] = read.measures["hidden_norm_ratio"][:, :, at].max(axis=1)
        averages["drain"] = np.nanmedian(read.measures["value_norm_ratio"][:, layers, at], axis=1)
        averages["first_drain"] = np.nanmedian(read.measures["value_norm_ratio"][:, layers, 0], axis=1)
        averages["last_row"] = read.last[:, layers, position].mean(axis=1)
        result["averages"] |= {f"{who}_{side}": measure(values, over).model_dump() for who, values in averages.items()}
        result[f"by_head_{side}"] = plain(read.measures["attention_by_head"][:, :, at].mean(axis=0))  # (L, H)
    for name in ("attention_received", "hidden_norm_ratio", "value_norm_ratio"):
        result[name] = change(before.measures[name][..., at], after.measures[name][..., at], over).model_dump()
    if before.loss_behind is not None and after.loss_behind is not None:
        result["loss_behind"] = change(before.loss_behind[:, at], after.loss_behind[:, at], over).model_dump()
    return result


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
        "| first token | position | | attention received, layers 12-28 | first token's | last row's | largest hidden "
        "norm ÷ median | value norm ÷ median | first token's | loss behind it |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for start, group in results["smollm2"].items():
        for named, result in group["changes"].items():
            for side in ("before", "after"):
                averages, loss = result["averages"], result["loss_behind"]
                difference = "" if side == "before" else f" ({signed(loss['difference'])})"
                cells = [share(averages[f"{who}_{side}"]) for who in ("position", "first", "last_row")]
                cells += [number(averages[f"peak_{side}"], 1)]
                cells += [number(averages[f"{who}_{side}"], 2) for who in ("drain", "first_drain")]
                cells += [f"{loss[side]['mean']:.3f}{difference}"]
                state = "as it is" if side == "before" else "isolated"
                lines.append(f"| {start} | {named} | {state} | {' | '.join(cells)} |")
            lines.append(f"heads of layers 12-28, attention received: {heads(result)}")
    lines += [
        "",
        "| first and last token | row at position 383 | attention received, layers 1-4 | of position 0 |",
        "|---|---|---|---|",
    ]
    for start, group in results["minilm"].items():
        own = next(iter(group["changes"].values()))["averages"]
        lines.append(f"| {start} | its own | {share(own['position_before'])} | {share(own['first_before'])} |")
        for name, result in group["changes"].items():
            cells = [share(result["averages"][f"{who}_after"]) for who in ("position", "first")]
            lines.append(f"| {start} | {name} | {' | '.join(cells)} |")
    if "cost" in results:
        ratios = results["cost"]["ratios"]
        lines += ["", f"Cost: {statistics.median(ratios):.2f} ({min(ratios):.2f}-{max(ratios):.2f}) of {len(ratios)}"]
    return "\n".join(lines)


def heads(result: dict[str, Any]) -> str:
    """Return quantiles over the heads of the upper layers, before and after, and how many have a sink."""
    texts = []
    for side in ("before", "after"):
        of = np.array(result[f"by_head_{side}"], dtype=float)[UPPER].ravel()
        low, middle, high = np.quantile(of, [0.1, 0.5, 0.9])
        texts.append(f"{side} {low:.2%}, {middle:.2%}, {high:.2%} (above 10%: {(of > 0.1).sum()} of {len(of)})")
    return "; ".join(texts)


def share(summary: dict[str, Any]) -> str:
    return f"{summary['mean']:.2%} ({summary['ci95'][0]:.2%}-{summary['ci95'][1]:.2%})"


def number(summary: dict[str, Any], digits: int) -> str:
    return f"{summary['mean']:.{digits}f} ({summary['ci95'][0]:.{digits}f}-{summary['ci95'][1]:.{digits}f})"


def signed(summary: dict[str, Any]) -> str:
    return f"{summary['mean']:+.4f}; {summary['ci95'][0]:+.4f} to {summary['ci95'][1]:+.4f}"


def draw(results: dict[str, Any]) -> None:
    """Draw the two figures: attention received by layer."""
    FIGURES.mkdir(exist_ok=True)
    lines = [
        line(f"{start} first token, {word}", group["changes"][f"position {CAUSAL}"]["attention_received"][side])
        for start, group in results["smollm2"].items()
        for side, word in (("before", "as it is"), ("after", "isolated"))
        if start in ("special", "random")
    ]
    title, axis = "SmolLM2: attention that position 255 receives", "share of later tokens' attention"
    save_svg(Panel("waiver_smollm2", title, "", "layer", axis, lines), FIGURES)
    swaps = results["minilm"]["special"]["changes"]
    lines = [line("its own row", swaps["row 0"]["attention_received"]["before"])]
    lines += [line(f"row {row}", swaps[f"row {row}"]["attention_received"]["after"]) for row in (0, LENGTH - 1)]
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
