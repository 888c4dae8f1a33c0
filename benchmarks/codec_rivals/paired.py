"""The same windows for all ways: their exact caches, what a way costs on them, and paired ratios.

Shapes: N windows, T tokens, V vocabulary.
"""

import math
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from crosslayer.cache.running import prefill
from crosslayer.codec.quality import Way
from crosslayer.core.transformers_versions import CACHE
from crosslayer.stats.bootstrap import Bootstrap

REACH = 1.1  # how far beyond its bytes a way's curve is continued
LEAST = 1e-7  # of a KL in a logarithm

Row = Mapping[str, Any]


class Prompts:
    """Windows of tokens (N, T): the exact caches of their prompts, and the log-probabilities behind, in a folder."""

    def __init__(self, model: PreTrainedModel, ids: Tensor, prompt: int, folder: Path):
        self.model, self.ids, self.prompt, self.folder = model, ids.to(model.device), prompt, folder

    @torch.no_grad()
    def read(self) -> float:
        """Let the exact model read all windows; return its processor seconds."""
        started = time.process_time()
        for index, row in enumerate(self.ids):
            cache = prefill(self.model, row[None, : self.prompt])
            layers: list[Any] = list(cache.layers)
            tensors = {f"keys.{at}": layer.keys.clone() for at, layer in enumerate(layers)}
            tensors |= {f"values.{at}": layer.values.clone() for at, layer in enumerate(layers)}
            save_file(tensors | {"exact": self._continued(cache, index)}, self.folder / f"{index}.safetensors")
        return time.process_time() - started

    @torch.no_grad()
    def measure(self, ways: Mapping[str, Way]) -> tuple[dict[str, np.ndarray], dict[str, float]]:
        """Return KL and bytes (N, 2) of each way, and its processor seconds for coding and decoding."""
        found = {name: np.zeros((len(self.ids), 2)) for name in ways}
        took = dict.fromkeys(ways, 0.0)
        for index in range(len(self.ids)):
            tensors = load_file(self.folder / f"{index}.safetensors", str(self.model.device))
            cache = DynamicCache(config=self.model.config)
            for layer in range(len(cache.layers)):
                cache.update(tensors[f"keys.{layer}"], tensors[f"values.{layer}"], layer)
            exact = tensors["exact"]
            for name, way in ways.items():
                started = time.process_time()
                stored, size = way(cache, self.ids[index : index + 1, : self.prompt])
                took[name] += time.process_time() - started
                other = self._continued(stored, index)
                found[name][index] = float((exact.exp() * (exact - other)).sum(-1).mean()), size
        return found, took

    def _continued(self, cache: Any, index: int) -> Tensor:
        """Return the log-probabilities (T, V) of the tokens behind a cache, which takes them in."""
        ids = self.ids[index : index + 1, self.prompt :]
        return self.model(ids, use_cache=True, **{CACHE: cache}).logits[0].float().log_softmax(-1)


def row_of(way: str, unit: str, values: np.ndarray, raw: int, documents: Sequence[int]) -> dict[str, Any]:
    """Return what is recorded of a way, from its KL and bytes (N, 2); `raw` bytes has the 16-bit cache."""
    found = Bootstrap(tuple(documents)).mean(values[:, 0])
    return {
        "way": way,
        "setting": unit.partition("@")[2],
        "unit": unit,
        "share": rounded(values[:, 1].mean() / raw),
        "kl": [rounded(end) for end in (found.value, *(found.interval or ()))],
        "kl_by_window": [rounded(value) for value in values[:, 0]],
        "share_by_window": [rounded(size / raw) for size in values[:, 1]],
    }


def rounded(value: float) -> float:
    """Return a number with six digits."""
    return float(f"{float(value):.6g}")


def picked(row: Row, windows: Sequence[int]) -> dict[str, Any]:
    """Return a row of some windows only."""
    kl, shares = (np.array(row[name])[list(windows)] for name in ("kl_by_window", "share_by_window"))
    means = {"share": rounded(shares.mean()), "kl": [rounded(kl.mean())]}
    return {**row, **means, "kl_by_window": kl.tolist(), "share_by_window": shares.tolist()}


def cost_at(rows: Sequence[Row], shares: np.ndarray) -> tuple[np.ndarray, float] | None:
    """Return log KL (N,) of a way at shares (N,) of bytes, out of its rows, and the mean share at which it is read.

    Between two rows, and up to `REACH` beyond the last, log KL is linear in log bytes, window by window. A way without
    so few bytes is read where it has the fewest. None: it has fewer bytes only.
    """
    rows = sorted(rows, key=lambda row: row["share"])
    sizes = np.log([row["share_by_window"] for row in rows])  # (rows, N)
    costs = np.log(np.maximum([row["kl_by_window"] for row in rows], LEAST))
    wanted, means, reach = np.log(shares), sizes.mean(1), math.log(REACH)
    if wanted.mean() > means[-1] + reach:
        return None
    if wanted.mean() < means[0] - reach or len(rows) == 1:
        return costs[0], rows[0]["share"]
    at = int(np.clip(np.searchsorted(means, wanted.mean()), 1, len(rows) - 1))
    slope = (costs[at] - costs[at - 1]) / (sizes[at] - sizes[at - 1])
    return costs[at - 1] + slope * (wanted - sizes[at - 1]), rounded(shares.mean())


def ratio_of(row: Row, others: Sequence[Row], documents: Sequence[int]) -> dict[str, Any] | None:
    """Return the ratio of a row's KL to that of another way's rows, the geometric mean over windows."""
    found = cost_at(others, np.array(row["share_by_window"]))
    if found is None:
        return None
    change = np.log(np.maximum(row["kl_by_window"], LEAST)) - found[0]
    ratio = Bootstrap(tuple(documents)).ratio(change)
    facts = {"share": row["share"], "other_share": found[1], "better_on": int((change < 0).sum()), "of": len(change)}
    return facts | {"ratio": [rounded(end) for end in (ratio.value, *(ratio.interval or ()))]}


def ratios(rows: Sequence[Row], documents: Sequence[int]) -> list[dict[str, Any]]:
    """Return the ratio of the codec to each other way, at each of the codec's budgets."""
    found = []
    for row in (row for row in rows if row["way"] == "codec"):
        for name in dict.fromkeys(other["way"] for other in rows if other["way"] != "codec"):
            ratio = ratio_of(row, [other for other in rows if other["way"] == name], documents)
            found += [] if ratio is None else [{"codec": row["setting"], "other": name, **ratio}]
    return found


def matrix(rows: Sequence[Row], domains: Sequence[str], documents: Sequence[int], share: float) -> list[dict[str, Any]]:
    """Return KL and bytes of each fit on each domain, and the ratio to the mixed fit at equal bytes."""
    cells = []
    for row in rows:
        for tested in ("all", *dict.fromkeys(domains)) if row["setting"] == f"{share:g}" else ():
            windows = [at for at, name in enumerate(domains) if tested in ("all", name)]
            own, mixed = picked(row, windows), [picked(one, windows) for one in rows if one["way"] == "mixed"]
            cell = {"fitted": row["way"], "tested": tested, "share": own["share"], "kl": own["kl"][0]}
            if mixed and row["way"] != "mixed" and len(windows) > 1:
                cell |= ratio_of(own, mixed, [documents[at] for at in windows]) or {}
            cells.append(cell)
    return cells
