"""Shared choice: one layer of a group chooses tokens by its attention, and the others attend only to these.

    U_n = softmax over the chosen tokens (Q_n K_nᵀ / √d) V_n,  chosen by the first layer of n's group (core/choice.py)

Flows: the choice of K tokens, for each new token and key-value head. Reads: K tokens in a reader; all of them in a
chooser, all keys and the values of K tokens if it attends to its own choice. Cache: unchanged. Source: Kascade (arXiv
2512.16391), for pretrained models without training. New here: a choice for every token of a prompt, so that cached and
uncached runs agree.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

from crosslayer.core.choice import ChoiceMethod
from crosslayer.core.options import group_sources, sharing_groups
from crosslayer.core.plan import DepthPlan


@dataclass(frozen=True)
class SharedChoice(ChoiceMethod):
    """The layers of a group attend to tokens that its first layer, the chooser, chooses."""

    def plan(self, layers: int) -> DepthPlan:
        """Let the layers of a group attend to the choice of its first layer."""
        self.check_options(layers)
        sources = group_sources(self.name(), "groups", self.groups, layers)
        choices: list[int | None] = [None] * layers
        for layer in (layer for group in self.groups for layer in group):
            if sources[layer] != layer or layer in self.sparse_choosers:
                choices[layer] = sources[layer]
        own = tuple(range(layers))
        chosen = None if choices == [None] * layers else self.count
        return DepthPlan(own, own, own, own, choices=tuple(choices), chosen=chosen)

    @classmethod
    def from_groups(cls, groups: Sequence[Sequence[int]], layers: int) -> Self:
        """Let the first layer of each group choose."""
        return cls(groups=sharing_groups("shared_choice", groups))

    @classmethod
    def example(cls, layers: int) -> Self:
        """Let every third layer choose for the layers up to the next chooser."""
        firsts = range(0, layers - 1, 3)
        groups = (tuple(range(first, stop)) for first, stop in zip(firsts, [*firsts[1:], layers], strict=True))
        return cls(groups=tuple(groups), sinks=1, window=2, least=0)
