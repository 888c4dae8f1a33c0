"""What a retrofit is asked to do, checked as a whole: options that contradict or would do nothing are refused."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from crosslayer.method import TARGETS, check_choice
from crosslayer.probe.verdict import PAPER_SIZE
from crosslayer.retrofit.convert import MERGES
from crosslayer.retrofit.moments import FITS

METHODS = ("uniattn", "cla", "svformer", "drop")
DROPS = ("attention", "mlp", "layer")
SELECTS = ("similarity", "greedy")
Meter = Callable[[str, int], Any]  # what is done and how many steps → a context with `step(done, all)`


@dataclass(frozen=True)
class Request:
    """What to do; see `crosslayer retrofit --help`. `method` None leaves it to a budget."""

    method: str | None = None
    layers: str = "top-half"
    compensation: str = "layerwise"
    kv_budget: float | None = None
    kl_budget: float | None = None
    drop: str = "attention"
    select: str = "similarity"
    size: int = PAPER_SIZE
    count: int | None = None
    merge: str = "first"
    target: str = "attention"
    groups: int = 1
    windows: int = 96
    calibration: int = 128
    length: int = 512
    seed: int = 0
    bos: str = "auto"

    def __post_init__(self):
        budgets = [budget for budget in (self.kv_budget, self.kl_budget) if budget is not None]
        if len(budgets) + (self.method is not None) != 1:
            raise ValueError("give --method, or --kv-budget or --kl-budget, which choose methods and layers themselves")
        for name, value, known in (
            ("method", self.method, (*METHODS, None)),
            ("compensation", self.compensation, ("none", *FITS)),
            ("drop", self.drop, DROPS),
            ("select", self.select, SELECTS),
            ("merge", self.merge, MERGES),
        ):
            check_choice("retrofit", name, value, known)
        for name, budget in (("kv", self.kv_budget), ("kl", self.kl_budget)):
            if budget is not None and not (math.isfinite(budget) and budget > 0):
                raise ValueError(f"--{name}-budget {budget} is no budget; it must be a number above 0")
        if self.size < 2 or self.seed < 0 or self.groups < 1:
            raise ValueError("--size must be at least 2, --groups at least 1, --seed at least 0")
        self._check_unused()

    def _check_unused(self) -> None:
        """Refuse an option that would do nothing beside the others."""
        dropping, named = self.method == "drop", self.method is not None
        acts = {
            "layers": named,
            "drop": dropping,
            "select": dropping and self.layers == "auto",
            "size": named and self.layers == "top-half",
            "count": named and self.layers == "auto",
            "merge": self.method == "cla",
            "groups": self.compensation == "mean",
            "target": self.compensation != "none" and not dropping,
        }
        for option, does in acts.items():
            if not does and getattr(self, option) != Request.__dataclass_fields__[option].default:
                raise ValueError(f"--{option} {getattr(self, option)} does nothing with these options; leave it out")
        check_choice("retrofit", "target", self.target, TARGETS)

    @property
    def writes(self) -> str | None:
        """Where W_c writes, None without it."""
        return None if self.compensation == "none" else self.target

    @property
    def fits(self) -> bool:
        """Whether W_c is fitted to calibration text."""
        return self.compensation not in ("none", "zero")
