"""What a retrofit is asked to do, checked as a whole: options that contradict or would do nothing are refused."""

import json
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from crosslayer.conversion.convert import MERGES
from crosslayer.conversion.moments import FITS
from crosslayer.diagnosis.groups import PAPER_SIZE
from crosslayer.method import TARGETS, Method, check_choice
from crosslayer.methods import load_method, to_entry
from crosslayer.methods.cla import CLA

DEFAULT_FIT = "layerwise"
METHODS = ("uniattn", "cla", "svformer", "drop")
DROPS = ("attention", "mlp", "layer")
SELECTS = ("similarity", "greedy")
Meter = Callable[[str, int], Any]  # what is done and how many steps → a context with `step(done, all)`


@dataclass(frozen=True)
class Request:
    """What to do; see `crosslayer retrofit --help`. `method` None leaves it to a budget.

    `method` is one of `METHODS`, whose layers are chosen here, or a whole method as `load_method` takes it: the name of
    a user's own module, or JSON such as {"name": "cla", "group": 3}.
    """

    method: str | None = None
    layers: str = "top-half"
    compensation: str | None = None
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
    kv_context: int | None = None

    def __post_init__(self):
        budgets = [budget for budget in (self.kv_budget, self.kl_budget) if budget is not None]
        if len(budgets) + (self.method is not None) != 1:
            raise ValueError("give --method, or --kv-budget or --kl-budget, which choose methods and layers themselves")
        for name, value, known in (
            ("compensation", self.compensation, ("none", *FITS, None)),
            ("drop", self.drop, DROPS),
            ("select", self.select, SELECTS),
            ("merge", self.merge, MERGES),
        ):
            check_choice("retrofit", name, value, known)
        for name, budget in (("kv", self.kv_budget), ("kl", self.kl_budget)):
            if budget is not None and not (math.isfinite(budget) and budget > 0):
                raise ValueError(f"--{name}-budget {budget} is no budget; it must be a number above 0")
        if self.kv_context is not None and self.kv_context < 2:
            raise ValueError(f"--kv-context {self.kv_context} is too short; it is a number of tokens, at least 2")
        if self.size < 2 or self.seed < 0 or self.groups < 1:
            raise ValueError("--size must be at least 2, --groups at least 1, --seed at least 0")
        if self.compensation == "layerwise" and self.merge != "first":
            raise ValueError(
                f"--compensation layerwise makes up for followers alone, and --merge {self.merge} also changes their "
                "leader; use ridge"
            )
        self._check_unused()

    def _check_unused(self) -> None:
        """Refuse an option that would do nothing beside the others."""
        dropping, own = self.method == "drop", self.own
        named = self.method is not None and own is None
        acts = {
            "layers": named,
            "drop": dropping,
            "select": dropping and self.layers == "auto",
            "size": named and self.layers == "top-half",
            "count": named and self.layers == "auto",
            "merge": self.method == "cla" or isinstance(own, CLA),
            "groups": self.fit == "mean",
            "calibration": self.fits,
            "target": self.fit != "none" and not dropping and own is None,
            "compensation": own is None or _compensated(own) or self.fit == "none",
        }
        for option, does in acts.items():
            if not does and getattr(self, option) != Request.__dataclass_fields__[option].default:
                raise ValueError(f"--{option} {getattr(self, option)} does nothing with these options; leave it out")
        check_choice("retrofit", "target", self.target, TARGETS)

    @property
    def own(self) -> Method | None:
        """The method itself where `method` gives it whole.

        Raises:
            ValueError: it is not known, or its options are wrong.

        """
        if self.method is None or self.method in METHODS:
            return None
        if not self.method.lstrip().startswith("{"):
            return load_method(self.method)
        try:
            entry = json.loads(self.method)
        except json.JSONDecodeError as error:
            raise ValueError(f"--method {self.method!r} is not JSON ({error}); write a name or an object") from None
        return load_method(entry)

    @property
    def fit(self) -> str:
        """How W_c is fitted: as asked, or by default wherever there can be one."""
        if self.compensation is not None:
            return self.compensation
        own = self.own
        possible = _compensated(own) if own is not None else self.method != "drop" or self.drop == "attention"
        if not possible:
            return "none"
        return DEFAULT_FIT if self.merge == "first" else "ridge"  # a leader that changes is in no layerwise target

    @property
    def writes(self) -> str | None:
        """Where W_c writes, None without it."""
        return None if self.fit == "none" else self.target

    @property
    def fits(self) -> bool:
        """Whether W_c is fitted to calibration text."""
        return self.fit not in ("none", "zero")


def _compensated(method: Method) -> bool:
    return to_entry(method).get("compensation") is not None
