"""Which tokens and positions attract attention: top tokens by layer, and the rows of a learned position table."""

from collections import defaultdict
from typing import Any

import numpy as np
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from crosslayer.probe.measures import working
from crosslayer.probe.tokens import position_embedding

PER_SEQUENCE, SHOWN = 10, 5


def top_tokens(
    shares: np.ndarray, ids: np.ndarray, tokenizer: PreTrainedTokenizerBase | None
) -> list[list[dict[str, Any]]]:
    """Return, by layer, the tokens that hold most of the importance among each sequence's ten largest a'.

    `shares` is (N, L, T), `ids` (N, T). Occurrences of one token are added up, the first position kept apart; `share`
    is the mean over sequences.
    """
    result = []
    for layer in range(shares.shape[1]):
        if np.isnan(shares[0, layer]).any():
            result.append([])
            continue
        total: dict[tuple[int, bool], float] = defaultdict(float)
        places: dict[tuple[int, bool], set[int]] = defaultdict(set)
        for one, tokens in zip(shares[:, layer], ids, strict=True):
            for position in np.argsort(-one)[:PER_SEQUENCE]:
                key = (-1, True) if position == 0 else (int(tokens[position]), False)
                total[key] += float(one[position]) / len(ids)
                places[key].add(int(position))
        best = sorted(total, key=lambda key: -total[key])[:SHOWN]
        result.append([_entry(key, total[key], sorted(places[key]), ids, tokenizer) for key in best])
    return result


def _entry(key: tuple[int, bool], share: float, places: list[int], ids: np.ndarray, tokenizer) -> dict[str, Any]:
    token, first = key
    same = len(set(ids[:, 0].tolist())) == 1
    if first and not same:
        text = "first token"
    else:
        number = int(ids[0, 0]) if first else token
        text = tokenizer.decode([number]) if tokenizer is not None else str(number)
    return {"token": text, "first": first, "share": share, "positions": places}


def position_table(model: PreTrainedModel) -> dict[str, Any] | None:
    """Return the norms of the rows of a learned absolute position table, None where the model has none.

    `outliers` are the rows whose norm is above 1.5 times the median, largest first.
    """
    embedding = position_embedding(model)
    if embedding is None:
        return None
    name, table = embedding
    norms = working(table.weight.detach()).norm(dim=-1).double().cpu().numpy()
    median = float(np.median(norms))
    outliers = [int(row) for row in np.argsort(-norms) if norms[row] > 1.5 * median]
    return {"name": name, "norms": norms.tolist(), "median": median, "outliers": outliers[:10]}
