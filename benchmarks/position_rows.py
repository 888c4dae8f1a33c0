"""Whether the norm of a row of the position table makes an encoder's waiver, or its direction (docs/papers/waiver.md).

    python benchmarks/position_rows.py     # a quarter of an hour on a core; writes results/position_rows.json

Position 383 of MiniLM gets each of 32 random rows, scaled to the norms 0.5, 1, 2 and 2.36 (that of row 0, the longest),
and rows 0 and 511 likewise. The measure is the attention that the position receives from all other tokens, a mean over
layers 1-4. Rows and documents are both samples, so intervals draw both again (a crossed bootstrap).
"""

import json
from pathlib import Path
from typing import Any

import numpy as np

import crosslayer
from crosslayer.corpus.documents import TextSource, load_documents
from crosslayer.corpus.windows import packed
from crosslayer.environment import environment
from crosslayer.verbs.intervene.kinds import PositionSwap
from crosslayer.verbs.intervene.readings import sample

RESULTS = Path(__file__).parent / "results" / "position_rows.json"
SEQUENCES, LENGTH, POSITION = 16, 512, 383
ROWS, NORMS, LAYERS = 32, (0.5, 1.0, 2.0, 2.36), slice(1, 5)
DRAWS = 10_000


def received(model, ids, interventions=()) -> list[float]:
    """Return the attention that the position receives in each sequence, (N,)."""
    read = sample(model, ids, [POSITION], interventions)
    return read.measures["attention_received"][:, LAYERS, 0].mean(axis=1).tolist()


def summary(values: np.ndarray, own: np.ndarray, documents: np.ndarray) -> dict[str, Any]:
    """Return the attention that rows (R, N) receive: the mean, and the ratio to the position's own row (N,)."""
    rng, names = np.random.default_rng(0), np.unique(documents)
    means, ratios, twice = [], [], []
    for _ in range(DRAWS):
        drawn_rows = rng.integers(len(values), size=len(values))
        drawn = np.concatenate([np.flatnonzero(documents == name) for name in rng.choice(names, len(names))])
        some, before = values[np.ix_(drawn_rows, drawn)].mean(axis=1), own[drawn].mean()  # (R,)
        means.append(some.mean())
        ratios.append(np.median(some / before))
        twice.append((some > 2 * before).mean())
    by_row = values.mean(axis=1) / own.mean()  # (R,)
    found = {
        "mean": (values.mean(), means),
        "median_ratio": (np.median(by_row), ratios),
        "above_twice": ((by_row > 2).mean(), twice),
    }
    intervals = {name: [float(value), *np.quantile(draws, [0.025, 0.975])] for name, (value, draws) in found.items()}
    return {**intervals, "largest_ratio": float(by_row.max()), "largest": float(values.mean(axis=1).max())}


def main() -> None:
    model, tokenizer = crosslayer.load_model("minilm")
    windows = packed(load_documents(TextSource()), tokenizer, sequences=SEQUENCES, length=LENGTH)
    documents = np.array(windows.documents)
    table = model.get_parameter("embeddings.position_embeddings.weight")
    others = [row for row in range(1, LENGTH - 1) if row != POSITION]
    rows = sorted(np.random.default_rng(0).choice(others, ROWS, replace=False).tolist())
    own = received(model, windows.ids)
    values: dict[str, dict[str, list[float]]] = {}
    for row in (0, LENGTH - 1, *rows):
        swaps = {norm: PositionSwap(POSITION, row, norm) for norm in NORMS}
        values[str(row)] = {str(norm): received(model, windows.ids, [swap]) for norm, swap in swaps.items()}
        print(row, {norm: f"{np.mean(some) / np.mean(own):.2f}" for norm, some in values[str(row)].items()}, flush=True)
    result = {
        "own": own,
        "values": values,  # by row, then by norm: one for each sequence
        "rows": rows,
        "norms_of_rows": {str(row): table[row].norm().item() for row in (0, POSITION, LENGTH - 1, *rows)},
        "documents": documents.tolist(),
        "summary": {
            str(norm): summary(np.array([values[str(row)][str(norm)] for row in rows]), np.array(own), documents)
            for norm in NORMS
        },
        "environment": environment().model_dump(),
    }
    RESULTS.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result["summary"], indent=1))


if __name__ == "__main__":
    main()
