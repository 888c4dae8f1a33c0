"""The report of a retrofit: configuration, memory saved and quality lost, with the converted model."""

from pathlib import Path
from typing import Any, Literal, Self

import torch
from pydantic import Field, PrivateAttr, model_validator
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from crosslayer.core.plan import STATES, DepthPlan
from crosslayer.environment import quiet_transformers
from crosslayer.judge.damage import Domains
from crosslayer.judge.retrieval import Retrieval, count_retrieved
from crosslayer.models.load import replaced
from crosslayer.output.manifest import write_manifest
from crosslayer.output.record import Frozen, ModelFacts, columns
from crosslayer.output.result import Result
from crosslayer.stats.estimate import Estimate
from crosslayer.stats.times import StepTime
from crosslayer.verbs.retrofit.moments import Fit
from crosslayer.verbs.retrofit.options import RetrofitOptions
from crosslayer.wiring.kv_bits import KINDS


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


class MeasuredBaseline(Frozen):
    """What the search is compared with: blocks of equal size in the top half, or choosers at equal distances."""

    method: str
    groups: list[list[int]]
    share: float = Field(description="as that of the curve, and as near to the search's as possible")
    kl: Estimate = Field(description="nats/token, on text that the search did not use, fitted in the same way")
    change: Estimate = Field(description="KL of the searched configuration minus the baseline's, paired")


class SearchRecord(Frozen):
    """The course of the search."""

    passes: int = Field(description="configurations that were run over the search text")
    methods: list[str] = Field(description="(L,) the method that acts on each layer, or 'own'")
    curve: list[CurvePoint]
    baselines: list[MeasuredBaseline]


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


class Needles(Frozen):
    """Which numbers hidden in long texts each model retrieves: the same questions, in the same order."""

    original: tuple[Retrieval, ...] = Field(min_length=1)
    retrofit: tuple[Retrieval, ...] = Field(min_length=1)


class Alternative(Frozen):
    """A cache of the original or the retrofit, on a few windows; or a sweep's variant, on all."""

    of: str = Field(description="original, retrofit, or the swept options with their values")
    kv_bits: str | None = Field(description="8, 4, fp8, or None: not quantized")
    share: float = Field(description="bytes over those of the original's 16-bit cache, at the report's context")
    kl: Estimate = Field(description="to the original, in nats/token")
    kl_by_domain: dict[str, float] = Field(description="its mean on the windows of each domain")
    change: Estimate = Field(description="its KL minus that of the retrofit that is not quantized, paired")
    needles: tuple[Retrieval, ...] = Field(description="empty where no numbers were asked for")

    @property
    def name(self) -> str:
        """What it is, in words."""
        return self.of if self.kv_bits is None else f"{self.of}, {KINDS[self.kv_bits]}"


class RetrofitReport(Result):
    """The report of a retrofit.

    Except for a sweep, `save` also writes the model with its tokenizer, card and manifest. The record holds neither
    model nor tokenizer: a report that was read from a folder has neither, and cannot be saved.

    Shapes: D domains, the worst unseen one first; L layers of the original.
    """

    schema_: Literal["crosslayer/retrofit/17"] = Field(default="crosslayer/retrofit/17", alias="schema")
    architecture: Architecture
    methods: list[dict[str, Any]] = Field(description="name and options of each method, as in a config")
    title: str = Field(description="the methods with their options, as a line of text")
    plan: DepthPlan
    choice: Choice
    weights: Weights
    calibration: Calibration
    cache: CacheRecord
    damage: Domains
    step: StepTime | None = Field(
        default=None, description="time of a decoding step; None without `full`, or if the context is too long"
    )
    needles: Needles | None = Field(
        default=None, description="None if the model's context or tokenizer does not allow it"
    )
    alternatives: tuple[Alternative, ...] = Field(
        default=(), description="the retrofit, and quantized caches of both models; empty without `full`"
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
        """Raise for methods without a name, and for entries that do not match the original's layers."""
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
        return self

    _model: PreTrainedModel | None = PrivateAttr(None)
    _tokenizer: PreTrainedTokenizerBase | None = PrivateAttr(None)
    _dtype: torch.dtype | None = PrivateAttr(None)  # in which the model's weights are saved

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
        return tuple(domain.name for domain in self.damage.domains)

    def frame(self) -> dict[str, list[Any]]:
        """Return the damage by domain as columns (kl_value, kl_low, …), which `pandas.DataFrame` takes."""
        return columns(domain.model_dump() for domain in self.damage.domains)

    @property
    def changed_layers(self) -> list[int]:
        """Layers that read other layers' states, attend to chosen tokens, or have no attention or MLP."""
        vectors = [self.plan.sources(state) for state in (*STATES, "mlps")]
        changed = []
        for layer, chooser in enumerate(self.plan.choices):
            if chooser is not None or any(vector[layer] != layer for vector in vectors):
                changed.append(layer)
        return changed

    def headline(self) -> dict[str, Any]:
        """Return the figures for the last printed line of the command."""
        worst = self.damage.domains[0]
        return {
            "method": "+".join(entry["name"] for entry in self.methods),
            "layers": self.changed_layers,
            "kv_share": round(self.cache.share, 6),
            "read_share": round(self.cache.read_share, 6),
            "worst_domain": worst.name,
            "seen": worst.seen,
            "perplexity_before": round(worst.perplexity_before, 4),
            "perplexity_after": round(worst.perplexity_after, 4),
            "perplexity_ratio_ci95": [round(end, 4) for end in worst.ratio.interval or ()],
            "kl": round(worst.kl.value, 5),
            **({"quick": True} if self.settings.quick else {}),
            "needles": None if self.needles is None else count_retrieved(self.needles.retrofit),
            "seconds": round(sum(self.seconds.values()), 1),
        }

    def write_files(self, folder: Path) -> None:
        """Also write the model with its tokenizer, card and manifest; of a sweep, only record, page and figures."""
        if self.settings.sweep:
            super().write_files(folder)
            return
        model = self.model
        saved = {weight: weight.data.to(self._dtype) for weight in model.parameters()}  # shared where it is the same
        with quiet_transformers(), replaced(saved):
            model.save_pretrained(folder)
            if self._tokenizer is not None:
                self._tokenizer.save_pretrained(folder)
        super().write_files(folder)
        self.sibling("card").write_card(self, folder, self._tokenizer is not None)
        write_manifest(folder, model)  # of all files in the folder
