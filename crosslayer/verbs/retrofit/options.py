"""What a retrofit is asked for: plain options, checked against one another as far as that needs no method."""

import math
from collections.abc import Mapping
from typing import Annotated, Any, Self

from pydantic import Field, model_validator

from crosslayer.core.method import Method
from crosslayer.core.methods import Entry, to_entry
from crosslayer.core.options import check_choice
from crosslayer.output.record import Options, Seed
from crosslayer.verbs.diagnose.groups import PAPER_SIZE
from crosslayer.verbs.retrofit.moments import ALONE, FITS, REFITS

SELECTS = ("similarity", "greedy", "correlation", "distance")
Budget = Annotated[float, Field(allow_inf_nan=True)] | None  # our own message says what a budget is


class RetrofitOptions(Options):
    """The options of `crosslayer retrofit`, with its defaults; `request.py` says what they mean for a method.

    Raises:
        ValueError: an option is out of range, or two contradict each other.

    """

    method: str | dict[str, Any] | None = Field(
        default=None,
        description="a method's name, whose layers are then chosen by `layers`; or a whole method as a config has it: "
        "the name of a module, a mapping or its JSON such as {'name': …, 'group': 3}. None: a budget chooses",
    )
    layers: str = Field(
        default="top-half", description="groups such as 18-21,22-25 or 18+20,19+21 (0-based), top-half or auto"
    )
    kv_budget: Budget = Field(default=None, description="search for this share of the cache")
    kv_context: int | None = Field(
        default=None, description="tokens at which the cache is counted; None: 2048, or twice the largest window"
    )
    kl_budget: Budget = Field(default=None, description="search within this KL, in nats a token")
    compensation: str | None = Field(
        default=None,
        description="what makes up for it: none, zero, mean, lstsq, lmmse, ridge or layerwise fit W_c; refit W_o as "
        "well, and refit-o W_o alone, of layers that attend to borrowed states. None: what suits the method",
    )
    bias: bool = Field(default=False, description="whether W_c has a bias")
    target: str | None = Field(default=None, description="where W_c writes; None: the method's first choice")
    groups: int = Field(default=1, ge=1, description="v: groups of windows with a mean of their own, for mean")
    merge: str = Field(default="first", description="what becomes of pretrained weights that a group shares")
    part: str | None = Field(
        default=None, description="what of a layer a method acts on; None: the method's first choice"
    )
    select: str | None = Field(
        default=None,
        description="how auto chooses layers: similarity (of maps, or of what enters and leaves), greedy (the same, "
        "step by step), correlation (canonical, of what enters and leaves), or distance (of cached states). None: the "
        "first of them that the method allows",
    )
    threshold: float = Field(
        default=0.5, ge=-1, le=1, description="least cosine of the last hidden states to the original's, for distance"
    )
    size: int = Field(default=PAPER_SIZE, description="layers of a block of top-half")
    count: int | None = Field(default=None, ge=1, description="layers that auto lets follow another, or acts on")
    windows: int = Field(default=96, description="windows on which the damage is measured, of all domains")
    calibration: int = Field(default=128, ge=1, description="windows to which W_c is fitted, of all domains")
    length: int = Field(default=512, ge=2, description="tokens of a window")
    needles: bool = Field(default=True, description="whether both models are asked for numbers hidden in long texts")
    seed: Seed = Field(default=0, description="of the windows that are drawn, and of the bootstrap")
    bos: str = Field(default="auto", description="first token of a window: auto (as the tokenizer has it), yes or no")

    @model_validator(mode="after")
    def _check(self) -> Self:
        choosers = [value for value in (self.method, self.kv_budget, self.kl_budget) if value is not None]
        if len(choosers) != 1:
            raise ValueError("give `method`, or `kv_budget` or `kl_budget`, which choose methods and layers themselves")
        check_choice("retrofit", "compensation", self.compensation, ("none", *FITS, None))
        check_choice("retrofit", "select", self.select, (*SELECTS, None))
        for name, budget in (("kv", self.kv_budget), ("kl", self.kl_budget)):
            if budget is not None and not (math.isfinite(budget) and budget > 0):
                raise ValueError(f"`{name}_budget` {budget} is no budget; it must be a number above 0")
        if self.kv_context is not None and self.kv_context < 2:
            raise ValueError(f"`kv_context` {self.kv_context} is too short; it is a number of tokens, at least 2")
        if self.size < 2:
            raise ValueError(f"`size` {self.size} is too small; a block has at least 2 layers")
        if self.compensation in REFITS and self.target not in (None, "attention"):
            raise ValueError(
                f"`compensation` {self.compensation} refits W_o beside a W_c that writes to the stream; use `target` "
                "attention"
            )
        if self.compensation in ALONE and self.merge != "first":
            raise ValueError(
                f"`compensation` {self.compensation} makes up for followers alone, and `merge` {self.merge} also "
                "changes their leader; use ridge"
            )
        return self

    def changed(self) -> dict[str, Any]:
        """Return the options that are not at their default."""
        return self.model_dump(exclude_defaults=True)


def plain_method(method: Entry | None) -> str | dict[str, Any] | None:
    """Return a method as the plain data that options hold; a class is its name."""
    if isinstance(method, type):
        return method.name()
    if isinstance(method, Method):
        return to_entry(method)
    return dict(method) if isinstance(method, Mapping) else method
