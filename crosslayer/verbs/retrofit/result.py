"""The report of a retrofit: configuration, memory saved and quality lost, with the converted model."""

from pathlib import Path
from typing import Any, Literal, Self

import torch
from pydantic import Field, PrivateAttr, model_validator
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from crosslayer.core.plan import STATES, DepthPlan
from crosslayer.environment import quiet_transformers
from crosslayer.judge.report import ALL, Measured, Row
from crosslayer.judge.rows import RETRIEVAL
from crosslayer.models.load import replaced
from crosslayer.output.manifest import write_manifest
from crosslayer.output.record import Frozen, ModelFacts
from crosslayer.stats.estimate import Estimate
from crosslayer.stats.times import StepTime
from crosslayer.verbs.retrofit.moments import Fit
from crosslayer.verbs.retrofit.options import RetrofitOptions

RETROFIT, ORIGINAL, UNFITTED = "retrofit", "original", "without the fit"  # names of candidates, or how they begin


class Architecture(ModelFacts):
    """The original model, with the class and size of the converted one."""

    origin: dict[str, str | list[str]] = Field(
        default_factory=dict, description="base_model, license and language for the card, where known"
    )
    retrofit_class: str
    parameters_after: int


class CurvePoint(Frozen):
    """The configuration after some steps of the search; KL in nats/token."""

    share: float = Field(description="of the original's cache that it keeps, or of its reads if tokens are chosen")
    kl_search: float = Field(description="KL on the search text, which ends by repeating its beginning")
    kl: Estimate = Field(description="on text that the search did not use; what is fitted, in each layer separately")
    layers: dict[str, int] = Field(description="how many layers each method acts on")


class SearchRecord(Frozen):
    """The course of the search."""

    passes: int = Field(description="configurations that were run over the search text")
    methods: list[str] = Field(description="(L,) the method that acts on each layer, or 'own'")
    curve: list[CurvePoint]
    baselines: list[Row] = Field(
        description="KL of configurations that were not searched, to the original and against the searched one, on "
        "text that the search did not use, fitted in the same way: fixed blocks in the top half of each method, or "
        "choosers at equal distances; their details have the share, as near to the search's as possible, and the groups"
    )


class Choice(Frozen):
    """How layers were chosen."""

    how: str = Field(description="as options (a whole method), search, auto, top-half, or `layers` as given")
    groups: list[list[int]] = Field(default_factory=list, description="groups of layers, if the method acts on groups")
    search: SearchRecord | None = None


class Weights(Frozen):
    """What became of the original's weights, by name."""

    dropped: list[str]
    changed: list[str]
    new: list[str]
    refitted: list[str] = Field(default=[], description="W_o that were refitted")


class Calibration(Frozen):
    """How W_c and W_o were fitted."""

    fit: str = Field(description="none, zero, mean, lstsq, ridge, layerwise, refit, refit-o")
    windows: dict[str, int] = Field(description="calibration windows by domain")
    layers: list[Fit] = Field(description="the error before and after the fit, by layer from the first")


class CacheRecord(Frozen):
    """Bytes of a dynamic cache for each of `context` tokens, in 16 bits, and how much of it a step reads."""

    context: int
    bytes_per_token_before: float
    bytes_per_token_after: float
    share: float = Field(description="after over before")
    read_share: float = Field(description="of the bytes that the original reads in a decoding step")
    layer_reads: list[float] = Field(
        default=[], description="(L,) the same by layer, where layers attend to chosen tokens; else empty"
    )


class RetrofitReport(Measured):
    """The report of a retrofit.

    Candidates of the rows are the retrofit, or the variants of a sweep, and the retrofit without what was fitted.
    Except for a sweep, `save` also writes the model with its tokenizer, card and manifest. The record holds neither
    model nor tokenizer: a report that was read from a folder has neither, and cannot be saved.

    Shapes: D domains, the worst unseen one first; L layers of the original.
    """

    schema_: Literal["crosslayer/retrofit/19"] = Field(default="crosslayer/retrofit/19", alias="schema")
    architecture: Architecture
    methods: list[dict[str, Any]] = Field(description="name and options of each method, as in a config")
    title: str = Field(description="the methods with their options, as a line of text")
    plan: DepthPlan
    choice: Choice
    weights: Weights
    calibration: Calibration
    cache: CacheRecord
    step: StepTime | None = Field(
        default=None, description="time of a decoding step; None without `full`, or if the context is too long"
    )
    caches: tuple[Row, ...] = Field(
        default=(),
        description="rows of the retrofit, the first, and of quantized caches of both models, on a few windows; empty "
        "without `full`",
    )
    settings: RetrofitOptions = Field(description="all options")
    judged: list[str] = Field(description="evaluation domains")
    fitted: list[str] = Field(description="calibration domains: W_c was fitted or layers were chosen on them")
    windows: dict[str, dict[str, tuple[int, int]]] = Field(
        description="first and count by purpose and domain, in the list of windows that a domain is cut into"
    )
    seconds: dict[str, float] = Field(description="of each phase")

    @model_validator(mode="after")
    def _check_layers(self) -> Self:
        """Raise for methods without a name, entries that do not match the original's layers, and missing rows."""
        layers = self.architecture.layers
        if not all(isinstance(method.get("name"), str) for method in self.methods):
            raise ValueError("a method has no name")
        if self.plan.layers != layers:
            raise ValueError(f"the plan has {self.plan.layers} layers, the original has {layers}")
        outside = [fit.layer for fit in self.calibration.layers if not 0 <= fit.layer < layers]
        if outside:
            raise ValueError(f"calibration has a layer {outside[0]}, the original has {layers} layers")
        if self.choice.search is not None and len(self.choice.search.methods) != layers:
            raise ValueError(f"the search has {len(self.choice.search.methods)} layers, the original has {layers}")
        for scope in (ALL, *self.judged):
            for quantity in ("KL", "perplexity"):
                row = self.row(self.candidate, quantity, scope)
                if row is None or None in (row.change, row.original, row.value):
                    raise ValueError(f"rows: {quantity} of {scope!r} is missing")
        return self

    _model: PreTrainedModel | None = PrivateAttr(None)
    _tokenizer: PreTrainedTokenizerBase | None = PrivateAttr(None)
    _dtype: torch.dtype | None = PrivateAttr(None)  # in which the model's weights are saved

    def holding(self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None, dtype: torch.dtype) -> Self:
        """Return this report, which then saves the converted model, its weights in `dtype`."""
        self._model, self._tokenizer, self._dtype = model, tokenizer, dtype
        return self

    @property
    def model(self) -> PreTrainedModel:
        """The converted model.

        Raises:
            ValueError: this report was read from a folder; load the model with `crosslayer.load_model`.
        """
        if self._model is None:
            raise ValueError(
                "this report was read from a record, which holds no model; load the model from its folder: "
                "crosslayer.load_model(FOLDER)"
            )
        return self._model

    @property
    def tokenizer(self) -> PreTrainedTokenizerBase | None:
        """The tokenizer of the model, or None."""
        return self._tokenizer

    @property
    def kv_share(self) -> float:
        """Share of the original's KV cache that the retrofit allocates, 0 to 1."""
        return self.cache.share

    @property
    def domains(self) -> tuple[str, ...]:
        """Names of the evaluation domains, (D,)."""
        by_kl = sorted(self.judged, key=lambda domain: -self.of("KL", domain).value)
        # sorting is stable: unseen domains come first, each kind with its worst first
        return tuple(sorted(by_kl, key=lambda domain: domain in self.fitted))

    @property
    def candidate(self) -> str:
        """The name of the retrofit in the rows; of a sweep, that of the first variant."""
        if not self.rows:
            raise ValueError("rows: there are none")
        return self.rows[0].candidate

    def of(self, quantity: str, scope: str = ALL) -> Estimate:
        """Return the change of a quantity of the retrofit on windows, against the original."""
        row = self.row(self.candidate, quantity, scope)
        assert row is not None and row.change is not None, "every report has it"
        return row.change

    @property
    def changed_layers(self) -> list[int]:
        """Layers that read other layers' states, attend to chosen tokens, or have no attention or MLP."""
        vectors = [self.plan.sources(state) for state in (*STATES, "mlps")]
        changed = []
        for layer, chooser in enumerate(self.plan.choices):
            if chooser is not None or any(vector[layer] != layer for vector in vectors):
                changed.append(layer)
        return changed

    def next_command(self, model: str | None = None, out: str | None = None) -> str | None:
        """Return the command that checks the model; None for a sweep, which saves none."""
        return None if self.settings.sweep else super().next_command(model, out)

    def headline(self) -> dict[str, Any]:
        """Return the figures for the last printed line of the command."""
        worst, numbers = self.domains[0], self.row(self.candidate, RETRIEVAL)
        perplexity = self.row(self.candidate, "perplexity", worst)
        assert perplexity is not None and perplexity.change is not None
        return {
            "method": "+".join(entry["name"] for entry in self.methods),
            "layers": self.changed_layers,
            "kv_share": round(self.cache.share, 6),
            "read_share": round(self.cache.read_share, 6),
            "worst_domain": worst,
            "seen": worst in self.fitted,
            "perplexity_before": round(perplexity.original or 0.0, 4),
            "perplexity_after": round(perplexity.value or 0.0, 4),
            "perplexity_ratio_ci95": [round(end, 4) for end in perplexity.change.interval or ()],
            "kl": round(self.of("KL", worst).value, 5),
            **({"quick": True} if self.settings.quick else {}),
            "needles": None if numbers is None else numbers.hits,
            "seconds": round(sum(self.seconds.values()), 1),
        }

    def write_files(self, folder: Path) -> None:
        """Also write the model with its tokenizer, card and manifest; of a sweep, only record, page and figures."""
        if self.settings.sweep:
            super().write_files(folder)
            return
        model = self.model
        # weights are shared where their dtype is the same, so that saving needs no second model
        saved = {weight: weight.data.to(self._dtype) for weight in model.parameters()}
        with quiet_transformers(), replaced(saved):
            model.save_pretrained(folder)
            if self._tokenizer is not None:
                self._tokenizer.save_pretrained(folder)
        super().write_files(folder)
        self.sibling("card").write_card(self, folder, self._tokenizer is not None)
        # last, as the manifest has the hashes of all files in the folder
        write_manifest(folder, model)
