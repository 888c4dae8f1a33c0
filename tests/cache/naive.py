"""Eviction as a loop over tokens and heads with lists, against which the real one is tested."""

import math

import torch
from torch import Tensor

from crosslayer.cache.eviction import BLOCK


class Naive:
    """An attention function that reads texts without padding, of a single call each, by one policy."""

    def __init__(self, policy: str, keep):
        self.policy, self.keep = policy, keep  # keep(tokens seen) -> tokens kept
        self.kept: dict[int, list] = {}  # layer -> of each row and key-value head, what was kept after the last token

    def __call__(self, module, query, key, value, attention_mask, scaling=None, **_):
        batch, heads, length, size = query.shape
        out = torch.zeros(batch, length, heads, size, dtype=query.dtype)
        shared = key.shape[1]
        groups, self.kept[module.layer_idx] = heads // shared, []
        for row in range(batch):
            for head in range(shared):
                queries = [query[row, head * groups + g] * scaling for g in range(groups)]
                pieces, kept = self._head(queries, key[row, head], value[row, head])
                self.kept[module.layer_idx].append(kept)
                for g, piece in enumerate(pieces):
                    out[row, :, head * groups + g] = piece
        return out, None

    def _head(self, queries: list[Tensor], keys: Tensor, values: Tensor):
        held: list[int] = []
        received = [0.0] * len(keys)
        out = [torch.zeros_like(values) for _ in queries]
        for token in range(len(keys)):
            held.append(token)
            for g, query in enumerate(queries):
                weights = torch.softmax(keys[held] @ query[token], 0)
                out[g][token] = weights @ values[held]
                for position, weight in zip(held, weights.tolist(), strict=True):
                    received[position] += weight
            seen = token + 1
            if seen % BLOCK == 0 and len(held) > self.keep(seen):
                held = self._choose(held, received, seen, self.keep(seen), len(queries))
        return out, held

    def _choose(self, held, received, seen, keep, groups):
        if self.policy == "h2o":
            latest = [token for token in held if token >= seen - keep // 2]
            others = sorted((token for token in held if token not in latest), key=lambda token: -received[token])
            return sorted(latest + others[: keep - len(latest)])
        if self.policy == "streaming":
            first = [token for token in held if token < 4]
        else:
            assert self.policy == "sinks", f"write {self.policy} as a loop here"
            first = [token for token in held if received[token] / (seen - token) / groups > 0.3]
        others = [token for token in held if token not in first]
        return sorted(first + others[len(others) - (keep - len(first)) :])


def share(fraction: float):
    """Return the rule that evicts a share."""
    return lambda seen: math.ceil(seen - fraction * seen)


def capacity(tokens: int):
    """Return the rule that keeps at most so many tokens."""
    return lambda seen: tokens - BLOCK
