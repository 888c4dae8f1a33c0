"""All ways to store a cache that `benchmarks/codecs.py` measures, each made when it is needed."""

import time
from collections.abc import Callable
from contextlib import nullcontext
from copy import copy
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import PreTrainedModel

from codec_rivals.parts import with_bytes, with_fixed_lengths, without_depth, without_metric, without_steps
from codec_rivals.rivals import Aqua, Integers, Kvtc, bases_of, ways_of
from crosslayer.codec.codec import Codec
from crosslayer.codec.fit import BASIS, Calibration, calibrate, fit_chain_at
from crosslayer.codec.quality import Way, coded, rounded
from crosslayer.codec.states import read_shapes
from crosslayer.verbs.fit_codec.fitting import Fitting

BUDGETS, CUT = (25.0, 12.5, 6.25, 3.125), (12.5, 6.25)  # % of the 16-bit cache; of the codec without a part
EXACT = {"0": (0, 0), "1": (1, 0), "4": (4, 0), "4+128": (4, 128)}  # tokens at the start and at the end
PARTS = ("depth", "metric", "steps", "entropy")
AQUA_BITS, INTEGERS = (2, 3, 4), ("8", "4", "3", "2", "fp8")


class Made(NamedTuple):
    """Ways that are measured together, and the parameters that they need."""

    ways: dict[str, Way]
    parameters: int


class Ways:
    """The ways for a model, fitted to windows of tokens (N, T); `held_out` (N, T) decides their numbers of bytes.

    Attributes:
        seconds: of the processor, for what several ways share.
        codecs: whole codecs that were made, by unit.
    """

    def __init__(
        self, model: PreTrainedModel, ids: Tensor, held_out: Tensor, prompt: int, seed: int, tokenizer: Any = None
    ):
        self.model, self.ids, self.held_out, self.prompt, self.seed = model, ids, held_out, prompt, seed
        self.tokenizer = tokenizer  # which a codec that is saved remembers
        self.codecs: dict[str, Codec] = {}
        self.shapes = read_shapes(model)
        if any(shape.holds(prompt) < prompt for shape in self.shapes):
            least = min(shape.window or prompt + 1 for shape in self.shapes)
            raise SystemExit(f"--prompt must be below {least}, the model's window, got {prompt}")
        self.seconds: dict[str, float] = {}
        self._shared: dict[str, Any] = {}

    def shared(self, name: str, make: Callable[[], Any]) -> Any:
        """Return what several ways share, made once."""
        if name not in self._shared:
            started, before = time.process_time(), sum(self.seconds.values())
            self._shared[name] = make()
            inner = sum(self.seconds.values()) - before
            self.seconds[name] = round(time.process_time() - started - inner, 2)
        return self._shared[name]

    @property
    def data(self) -> Calibration:
        """What forward passes gave."""
        return self.shared(
            "calibration", lambda: calibrate(self.model, self.shapes, self.ids, self.held_out, self.seed)
        )

    def fitting(self, without: str = "") -> Fitting:
        """Return what a codec is fitted to, without a part."""
        if not without:
            plain = Fitting(self.model, self.tokenizer, self.shapes, self.prompt)
            return self.shared("fitting", lambda: plain.weigh(self.data, self.ids))
        fitting = copy(self.fitting())
        change = {"metric": without_metric, "steps": without_steps, "depth": lambda data: data}[without]
        fitting.data = self.shared(f"data without {without}", lambda: change(fitting.data))
        return fitting

    def codec(self, budget: float, without: str = "") -> Made:
        """Return the codec, or the codec without a part; below `BASIS`, its matrices are those of `BASIS`."""
        part = "" if without == "entropy" else without
        fitting, share = self.fitting(part), max(budget / 100, BASIS)
        with without_depth() if without == "depth" else nullcontext():
            chain = self.shared(
                f"chain at {100 * share:g} %{f' without {part}' if part else ''}",
                lambda: fit_chain_at(fitting.data, share * fitting.per_token - fitting.fixed),
            )
        wanted = budget / 100 * fitting.per_token - fitting.fixed
        if without == "entropy":
            chain = with_bytes(chain, fitting.data, wanted, with_fixed_lengths)
        else:
            chain = with_bytes(chain, fitting.data, wanted)
        codec = fitting.codec(chain)
        if not without:
            self.codecs[f"codec@{budget:g}"] = codec
        return Made({without or "codec": coded(codec)}, chain.numbers)

    def kvtc(self, budget: float) -> Made:
        """Return KVTC, whose bytes with four exact tokens are the budget."""
        exact, per_token = EXACT["4"][0] / self.prompt, self.fitting().per_token
        bases = self.shared("KVTC's components", lambda: bases_of(self.data, self.seed))
        every = max(1, len(self.held_out) * (self.prompt - 1) // self.prompt)
        states = torch.cat([own[::every] for own in self.data.held_out[0]], 1)  # about as many tokens as a prompt has
        rival = Kvtc(bases, (budget / 100 - exact) / (1 - exact) * per_token, states)
        return Made(ways_of(rival, self.shapes, {f"kvtc-{n}": ends for n, ends in EXACT.items()}), rival.parameters)

    def aqua(self, bits: int) -> Made:
        """Return AQUA-KV."""
        rival = Aqua(self.data, bits)
        return Made(ways_of(rival, self.shapes, {f"aqua-{n}": EXACT[n] for n in ("0", "4")}), rival.parameters)

    def integers(self, bits: int) -> Made:
        """Return integers of keys before rotation."""
        rival = Integers(self.data, bits)
        return Made(ways_of(rival, self.shapes, {"unrotated-int": (0, 0)}), rival.parameters)

    def quantized(self, bits: str) -> Made:
        """Return the package's quantized cache."""
        return Made({"fp8" if bits == "fp8" else "int": rounded(self.model, bits)}, 0)

    def units(self) -> dict[str, Callable[[], Made]]:
        """Return what makes the ways, by name and budget or bits."""
        made: dict[str, Callable[[], Made]] = {}
        for budget in BUDGETS:
            made[f"codec@{budget:g}"] = lambda budget=budget: self.codec(budget)
        for part in PARTS:
            for budget in CUT:
                made[f"{part}@{budget:g}"] = lambda part=part, budget=budget: self.codec(budget, part)
        for bits in INTEGERS:
            name = "fp8" if bits == "fp8" else f"int@{bits}"
            made[name] = lambda bits=bits: self.quantized(bits)
        made["unrotated-int@4"] = lambda: self.integers(4)
        for bits in AQUA_BITS:
            made[f"aqua@{bits}"] = lambda bits=bits: self.aqua(bits)
        for budget in BUDGETS:
            made[f"kvtc@{budget:g}"] = lambda budget=budget: self.kvtc(budget)
        return made
