"""The model of a retrofit with its text, read once for all steps."""

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from crosslayer.corpus.windows import Windows
from crosslayer.judge.judge import Judge
from crosslayer.probe.what_if import Sublayers, find_sublayers
from crosslayer.wiring.kv_bits import REFERENCE_DTYPE
from crosslayer.wiring.read import model_plan
from crosslayer.wiring.result import ModelPlan


class Seconds(dict[str, float]):
    """Seconds of each phase of a retrofit."""

    @contextmanager
    def timed(self, phase: str) -> Iterator[None]:
        """Add what the block takes to a phase; the variants of a sweep have the same ones."""
        started = time.perf_counter()
        yield  # of a retrofit that fails there is no report, so its seconds need not be noted
        self[phase] = round(self.get(phase, 0.0) + time.perf_counter() - started, 2)


@dataclass(frozen=True)
class Original:
    """A pretrained model that is to be retrofitted."""

    model: PreTrainedModel  # in evaluation mode
    windows: Mapping[str, Windows]  # by purpose: "evaluation", and what a strategy needs to choose and to fit
    tokenizer: PreTrainedTokenizerBase | None = None  # None: no hidden numbers are asked for
    name: str = ""  # in reports
    dtype: torch.dtype = torch.float32  # in which what is made of it is saved
    seed: int = 0  # of the bootstrap, and of hidden numbers
    is_kept: bool = True  # whether the caller has the model too, so that a retrofit must not share its weights
    seconds: Seconds = field(default_factory=Seconds)

    @cached_property
    def sublayers(self) -> Sublayers:
        """The shape of each layer's attention, and the modules that write to the stream."""
        return find_sublayers(self.model)

    @cached_property
    def plan(self) -> ModelPlan:
        """What its cache holds, in 16 bits, and what a step reads."""
        return model_plan(self.model, dtype=REFERENCE_DTYPE)

    @cached_property
    def judge(self) -> Judge:
        """Compares candidates with it on the evaluation text."""
        return Judge(self.model, self.windows["evaluation"], self.tokenizer, catches=False)
