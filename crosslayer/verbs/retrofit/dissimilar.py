"""Pairs of layers whose cached states are most dissimilar, taken while the model still ends up where it did.

As arXiv 2410.18517 and its code have it: keys and values are averaged over sequences, position by position; two layers
are as far apart as the mean over heads and positions of the Euclidean distances of their keys, and of their values, and
half the sum of both. Pairs are tried from the farthest on. In each the upper layer follows the lower (or what that
follows itself, and the upper layer's own followers come along). A pair stays if the last hidden states, all positions
of a sequence as one vector, have a cosine to the original's above a threshold, in the mean over sequences.

Shapes: N sequences, T tokens, C hidden, H key-value heads, D head size, L layers.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.nn import functional
from transformers import PreTrainedModel

from crosslayer.core.plan import DepthPlan
from crosslayer.probe.intercept import AttentionCall, no_cache, visited
from crosslayer.probe.measures import working
from crosslayer.probe.shapes import LayerShape, may_share
from crosslayer.probe.what_if import look, what_if
from crosslayer.verbs.diagnose.groups import Groups

States = dict[int, tuple[Tensor, Tensor]]  # keys and values by layer, (H, T, D) each


@torch.no_grad()
def dissimilar_groups(
    model: PreTrainedModel,
    ids: Tensor,
    plan_of: Callable[[Groups], DepthPlan],
    count: int,
    threshold: float,
    step: Callable[[int, int], None],
) -> Groups:
    """Return groups with `count` followers in all, each led by its lowest layer, chosen on token ids (N, T).

    `plan_of` makes the wiring of groups of layers, `threshold` is the least cosine of the last hidden states to the
    original's, and `step` is called after each pair that is taken with (taken, `count`).

    Raises:
        ValueError: fewer pairs stay above the threshold.

    """
    sublayers = look(model)
    pairs = ranked_pairs(averaged_caches(model, ids), sublayers.shapes)
    original = [_last_hidden(model, sequence) for sequence in ids]
    leader: dict[int, int] = {}  # of each follower
    for upper, lower in pairs:
        if len(leader) == count:
            break
        if upper in leader:
            continue
        end = leader.get(lower, lower)  # nobody follows a follower
        candidate = {layer: end if other == upper else other for layer, other in leader.items()} | {upper: end}
        with what_if(model, plan_of(_groups(candidate)), sublayers):
            last = [_last_hidden(model, sequence) for sequence in ids]
        cosines = [functional.cosine_similarity(*pair, dim=0) for pair in zip(last, original, strict=True)]
        if float(torch.stack(cosines).mean()) > threshold:
            leader = candidate
            step(len(leader), count)
    if len(leader) < count:
        raise ValueError(
            f"`count` {count}: {len(leader)} layers can follow another with a cosine above `threshold` {threshold:g}; "
            "lower either"
        )
    return _groups(leader)


@torch.no_grad()
def averaged_caches(model: PreTrainedModel, ids: Tensor) -> States:
    """Return each layer's keys (after rotary embedding) and values, averaged over the sequences."""
    sums: States = {}

    def see(call: AttentionCall) -> None:
        keys, values = working(call.key[0]), working(call.value[0])
        if call.layer in sums:
            keys, values = sums[call.layer][0] + keys, sums[call.layer][1] + values
        sums[call.layer] = keys, values

    with visited(model, see):
        for sequence in ids:
            model.base_model(input_ids=sequence[None].to(model.device), **no_cache(model))
    return {layer: (keys / len(ids), values / len(ids)) for layer, (keys, values) in sums.items()}


def ranked_pairs(states: States, shapes: Sequence[LayerShape | None]) -> list[tuple[int, int]]:
    """Return the pairs (upper, lower) of layers that may share, the farthest apart first."""
    distances = {}
    for upper in states:
        for lower in states:
            if lower < upper and may_share(shapes[upper], shapes[lower]):
                both = zip(states[upper], states[lower], strict=True)  # keys, and values
                distances[upper, lower] = float(sum((own - other).norm(dim=-1).mean() for own, other in both) / 2)
    return sorted(distances, key=lambda pair: -distances[pair])


def _groups(leader: dict[int, int]) -> Groups:
    """Return each leader with its followers, in rising order."""
    followers: dict[int, list[int]] = {}
    for layer in sorted(leader):
        followers.setdefault(leader[layer], []).append(layer)
    return [[first, *rest] for first, rest in sorted(followers.items())]


def _last_hidden(model: PreTrainedModel, sequence: Tensor) -> Tensor:
    """Return what the final norm returns for a sequence (T,), as a single vector (T·C,)."""
    output = model.base_model(input_ids=sequence[None].to(model.device), **no_cache(model))
    return working(output.last_hidden_state).flatten()
