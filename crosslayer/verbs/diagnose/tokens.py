"""The tokens that receive most attention, the MLP's largest channels, and the norms of a learned position table."""

from collections import defaultdict

import numpy as np
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from crosslayer.probe.intercept import position_embedding
from crosslayer.probe.measures import working
from crosslayer.verbs.diagnose.result import PositionTable, TopToken

PER_SEQUENCE, SHOWN = 10, 5
STANDS_OUT = 1.5  # times the median norm: above this a row of a position table is an outlier
FIRST = -1  # stands for the token at the first position, whatever it is


def top_tokens(shares: np.ndarray, ids: np.ndarray, tokenizer: PreTrainedTokenizerBase | None) -> list[list[TopToken]]:
    """Return, for each layer, the tokens that receive most attention, counting the ten largest a' of each sequence.

    `shares` is (N, L, T), `ids` (N, T). Occurrences of a token are summed, except that the first position is counted
    separately; shares are means over sequences. A layer without attention has an empty list.
    """
    return [_of_layer(of_layer, ids, tokenizer) for of_layer in shares.swapaxes(0, 1)]


def _of_layer(shares: np.ndarray, ids: np.ndarray, tokenizer: PreTrainedTokenizerBase | None) -> list[TopToken]:
    """Return the top tokens of a layer from its shares, (N, T)."""
    if np.isnan(shares).any():
        return []
    total: dict[int, float] = defaultdict(float)
    positions: dict[int, set[int]] = defaultdict(set)
    for sequence, tokens in zip(shares, ids, strict=True):
        for position in np.argsort(-sequence)[:PER_SEQUENCE]:
            token = FIRST if position == 0 else int(tokens[position])
            total[token] += float(sequence[position]) / len(ids)
            positions[token].add(int(position))
    tops = []
    for token in sorted(total, key=lambda token: -total[token])[:SHOWN]:
        text, occurrences = _text(token, ids, tokenizer), sorted(positions[token])
        tops.append(TopToken(token=text, first=token == FIRST, share=total[token], positions=occurrences))
    return tops


def _text(token: int, ids: np.ndarray, tokenizer: PreTrainedTokenizerBase | None) -> str:
    """Return a token as text; "first token" for the first position if the sequences begin with different tokens."""
    if token == FIRST:
        if len(set(ids[:, 0].tolist())) > 1:
            return "first token"
        token = int(ids[0, 0])
    if tokenizer is None:
        return str(token)
    text = tokenizer.decode([token])
    assert isinstance(text, str)
    return text


def top_channels(channels: np.ndarray) -> list[list[tuple[int, float, float]]]:
    """Return index, mean value and mean ratio of each layer's largest channels, from values and ratios (N, L, 2, C)."""
    tops = []
    for means in channels.mean(axis=0):  # NaN where a layer has no MLP
        order = [] if np.isnan(means).any() else np.argsort(-means[1])[:SHOWN].tolist()
        tops.append([(channel, float(means[0, channel]), float(means[1, channel])) for channel in order])
    return tops


def position_table(model: PreTrainedModel) -> PositionTable | None:
    """Return the row norms of a learned absolute position table; None if the model has no such table."""
    embedding = position_embedding(model)
    if embedding is None:
        return None
    name, table = embedding
    norms = working(table.weight.detach()).norm(dim=-1).double().cpu().numpy()  # (rows,)
    median = float(np.median(norms))
    outliers = [int(row) for row in np.argsort(-norms) if norms[row] > STANDS_OUT * median]  # largest first
    return PositionTable(name=name, norms=norms.tolist(), median=median, outliers=outliers[:10])
