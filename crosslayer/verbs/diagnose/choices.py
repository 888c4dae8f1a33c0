"""Could layers share the choice of the tokens to attend to? What each layer's choice recovers of the others' attention.

Shapes: L layers, S tokens of a sequence.
"""

from collections.abc import Sequence

import numpy as np
from scipy.stats import rankdata

from crosslayer.core.choice import ChoiceMethod, TokenChoice
from crosslayer.core.plan import TokenCount
from crosslayer.output.panel import Heat, Line, Panel
from crosslayer.probe.intercept import AttentionCall
from crosslayer.probe.maps import choice_sums
from crosslayer.probe.shapes import LayerShape
from crosslayer.verbs.diagnose.curves import SHARE, numbers
from crosslayer.verbs.diagnose.result import ChosenTokens

SHARES = (1 / 16, 1 / 8, 1 / 4)  # of the tokens so far, that are chosen
ROUNDING = 1e-9
SHOWN = 1 / 8  # in the heat map


def measure_choices(
    calls: Sequence[AttentionCall], shapes: Sequence[LayerShape | None]
) -> dict[float, dict[str, np.ndarray]]:
    """Return the fields of `ChosenTokens` of a sequence, by share; NaN for layers that cannot choose.

    Raises:
        ValueError: fewer than two layers have full causal attention and equal heads, or the sequence is too short.
    """
    plain = [shape for shape in shapes if shape is not None and shape.can_choose]
    able = [call for call in calls if shapes[call.layer] == plain[0] and call.position_bias is None] if plain else []
    if len(able) < 2:
        raise ValueError("`choices` needs two layers with full causal attention and equal heads, and there are none")
    layers, index = len(shapes), [call.layer for call in able]
    measured = {}
    for share in SHARES:
        sinks, window = ChoiceMethod.sinks, ChoiceMethod.window
        sums = choice_sums(able, TokenChoice(TokenCount(share, sinks + window), sinks, window))
        if not sums.rows:
            raise ValueError(
                f"`choices` needs longer sequences, since all tokens of {calls[0].key.shape[2]} are chosen"
            )
        recovered = sums.recovered / sums.rows  # (N, H, N, H)
        first = (sums.first / sums.rows).mean(-1)  # (N,)
        own, best = recovered.diagonal(dim1=1, dim2=3).mean(-1), recovered.amax(1).mean(-1)  # (N, N), chooser first
        square = {"recovered": own, "best_heads": best, "without_first": (own - first) / (1 - first)}
        fields = {}
        for name, matrix in square.items():
            full = np.full((layers, layers), np.nan)
            full[np.ix_(index, index)] = matrix.cpu().numpy()
            fields[name] = full
        common = np.full(layers, np.nan)
        common[index[1:]] = (sums.common[1:].mean(-1) / sums.kept).cpu().numpy()
        measured[share] = {**fields, "common": common}
    return measured


def choice_panels(chosen: Sequence[ChosenTokens]) -> list[Panel]:
    """Return the figures: what each layer's choice recovers for each layer above, and by the distance of the two."""
    (shown,) = [one for one in chosen if one.share == SHOWN]
    z = [
        [value if chooser <= reader else None for reader, value in enumerate(row)]
        for chooser, row in enumerate(shown.without_first.mean)
    ]
    heat = Heat(numbers(z), numbers(z), z, "attention", SHARE, square=True)
    sentence = (
        f"Share of a layer's attention, the first token set aside, that falls on the {shown.share:.1%} of tokens that "
        "another layer would choose; the diagonal is its own choice. A bright row: a layer whose choice serves those "
        "above."
    )
    axes = ("layer that attends", "layer that chooses")
    square = Panel("chosen_tokens", "Attention recovered by another layer's choice", sentence, *axes, heat=heat)
    lines = []
    for one in chosen:
        matrix, means = one.without_first.array(), []  # (L, L), chooser first
        for distance in range(len(matrix) // 2 + 1):
            diagonal = matrix.diagonal(distance)
            means.append(None if np.isnan(diagonal).all() else float(np.nanmean(diagonal)))
        lines.append(Line(f"{one.share:.1%} of the tokens", numbers(means), means))
    sentence = "The same, averaged over layers, by how far below the layer that chooses is; 0 is a layer's own choice."
    axes = ("distance in layers", "share of attention")
    return [
        square,
        Panel("chosen_by_distance", "Attention recovered, by distance", sentence, *axes, lines, bounds=SHARE),
    ]


def choice_sentence(chosen: Sequence[ChosenTokens], similarity: np.ndarray) -> str:
    """Return what choices recover, and whether they are shared where maps are alike; `similarity` (L, L) is of maps."""
    (shown,) = [one for one in chosen if one.share == SHOWN]
    recovered = shown.without_first.array()
    choosing = np.flatnonzero(~np.isnan(recovered.diagonal()))
    nearest = "layer below" if len(choosing) == len(recovered) else "nearest layer below that can choose"
    own, below = recovered.diagonal()[choosing].mean(), recovered[choosing[:-1], choosing[1:]].mean()
    pairs = np.triu_indices(len(recovered), 1)
    kept = (recovered / recovered.diagonal())[pairs]  # of what a reader's own choice recovers
    sentence = (
        f"With {shown.share:.1%} of the tokens, the first set aside, a layer's own choice recovers {own:.0%} of its "
        f"attention, the choice of the {nearest} {below:.0%}; the two have "
        f"{np.nanmean(shown.common.array()):.0%} of their tokens in common."
    )
    known = ~np.isnan(kept) & ~np.isnan(similarity[pairs])
    if np.ptp(kept[known]) < ROUNDING:  # all tokens are always chosen
        return sentence
    rank = np.corrcoef(rankdata(similarity[pairs][known]), rankdata(kept[known]))[0, 1]
    return f"{sentence} Choices are shared where maps are alike with a rank correlation of {rank:.2f}."
