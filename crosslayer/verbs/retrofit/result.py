"""The report of a retrofit: what it is, what it saves and what it costs, with the model that it is about.

Its fields are what `record.json` holds.
"""

import json
from pathlib import Path
from typing import Any, Literal, Self

import numpy as np
from pydantic import Field, PrivateAttr, model_validator
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from crosslayer.core.plan import STATES, DepthPlan
from crosslayer.environment import quiet_transformers
from crosslayer.output.folder import whole_folder
from crosslayer.output.manifest import write_manifest
from crosslayer.output.record import Frozen, ModelFacts
from crosslayer.output.result import Result
from crosslayer.stats import Interval
from crosslayer.verbs.needles.lookup import Lookup, count_found
from crosslayer.verbs.retrofit.moments import Fit
from crosslayer.verbs.retrofit.request import RetrofitOptions


class Architecture(ModelFacts):
    """The original, and what the retrofit is beside it."""

    origin: dict[str, str | list[str]] = Field(
        default_factory=dict, description="base_model, license and language for the card, as far as they are known"
    )
    retrofit_class: str
    parameters_after: int


class CurvePoint(Frozen):
    """The wiring after some picks of the search; KL in nats a token."""

    share: float = Field(description="of the original's cache that it keeps")
    kl_search: float = Field(description="KL on the text that was searched on, which ends as it began")
    kl: float = Field(description="KL on text that was not searched, each layer repaired by itself")
    kl_ci95: Interval
    layers: dict[str, int] = Field(description="how many layers each method acts on")


class FixedBlocks(Frozen):
    """Blocks of equal size in the top half, of the size nearest to the search's share: the search's yardstick."""

    method: str
    blocks: list[list[int]]
    share: float
    kl: float = Field(description="nats a token, on text that was not searched, repaired in the same way")
    kl_ci95: Interval
    search_minus_fixed: float = Field(description="KL of the search's wiring minus that of the blocks, paired")
    search_minus_fixed_ci95: Interval


class SearchRecord(Frozen):
    """How the search went."""

    passes: int = Field(description="wirings that were run over the text that was searched on")
    kinds: list[str] = Field(description="(L,) the method that acts on each layer, or 'own'")
    curve: list[CurvePoint]
    fixed: list[FixedBlocks]


class Choice(Frozen):
    """How layers were chosen."""

    how: str = Field(description="as options (a whole method), search, auto, top-half, or the layers that were named")
    groups: list[list[int]] = Field(default_factory=list, description="groups of layers, where a method acts on groups")
    search: SearchRecord | None = None


class Weights(Frozen):
    """What became of the original's weights, by name."""

    dropped: list[str]
    merged: list[str]
    new: list[str]
    refitted: list[str] = Field(default=[], description="W_o that were fitted anew")


class Calibration(Frozen):
    """How W_c and W_o were fitted."""

    fit: str = Field(description="none, zero, mean, lstsq, lmmse, ridge, layerwise, refit or refit-o")
    windows: dict[str, int] = Field(description="windows that were fitted to, by domain")
    layers: list[Fit] = Field(description="what they do in each layer that was fitted, from below")


class CacheRecord(Frozen):
    """Bytes that a dynamic cache allocates for each of `context` tokens."""

    context: int
    bytes_per_token_before: float
    bytes_per_token_after: float
    share: float = Field(description="after over before")


class Damage(Frozen):
    """Perplexities, their ratio and the KL to the original (nats a token), with 95 % intervals over windows."""

    perplexity_before: float
    perplexity_after: float
    ratio: float
    ratio_ci95: Interval
    kl: float
    kl_ci95: Interval
    windows: int
    documents: int
    strata: int = Field(description="within which windows are drawn; 1: windows are taken as independent")


class Gain(Frozen):
    """What W_c changes: the damage of the same wiring without it, and the KL with it minus that (below 0: it helps)."""

    without: Damage
    kl: float
    kl_ci95: Interval


class DomainDamage(Damage):
    """The damage on a domain."""

    name: str
    seen: bool = Field(description="whether anything was fitted to text of this domain")
    gain: Gain | None = Field(description="None where there is no fitted W_c")


class Domains(Frozen):
    """The damage by domain, the worst that nothing was fitted to first, and on all windows together."""

    domains: list[DomainDamage] = Field(min_length=1)
    all: Damage


class Needles(Frozen):
    """Which numbers that are hidden in long texts each model finds: the same questions, in the same order."""

    original: tuple[Lookup, ...] = Field(min_length=1)
    retrofit: tuple[Lookup, ...] = Field(min_length=1)


SHIM_FILE = "modeling_shim.py"
SHIM = '''"""Lets `trust_remote_code=True` find the installed package: pip install crosslayer."""

import crosslayer


class CrossLayerConfig(crosslayer.CrossLayerConfig):
    pass


class CrossLayerForCausalLM(crosslayer.CrossLayerForCausalLM):
    config_class = CrossLayerConfig
'''
AUTO_MAP = {
    "AutoConfig": "modeling_shim.CrossLayerConfig",
    "AutoModelForCausalLM": "modeling_shim.CrossLayerForCausalLM",
}


class RetrofitReport(Result):
    """What a retrofit is, saves and costs; its fields are what `record.json` holds, and two reports compare by them.

    The model and its tokenizer are in no record: a report that was read from a folder knows neither.

    Shapes: D domains, the worst that nothing was fitted to first; L layers of the original.
    """

    schema_: Literal["crosslayer/retrofit/6"] = Field(default="crosslayer/retrofit/6", alias="schema")
    architecture: Architecture
    methods: list[dict[str, Any]] = Field(description="name and options of each method, as a config has them")
    title: str = Field(description="the methods with the options that were set, in words")
    plan: DepthPlan
    choice: Choice
    weights: Weights
    calibration: Calibration
    cache: CacheRecord
    damage: Domains
    needles: Needles | None = Field(
        default=None, description="None where none were asked for, or the model's positions or tokens do not allow it"
    )
    settings: RetrofitOptions = Field(description="what was asked for")
    judged: list[str] = Field(description="domains on which the damage was measured")
    fitted: list[str] = Field(description="domains to which W_c or the choice of layers was fitted")
    seconds: dict[str, float] = Field(description="of each phase")

    @model_validator(mode="after")
    def _check_layers(self) -> Self:
        """Refuse methods without a name, and what is not of the original's layers."""
        layers = self.architecture.layers
        if not all(isinstance(method.get("name"), str) for method in self.methods):
            raise ValueError("a method has no name")
        if self.plan.layers != layers:
            raise ValueError(f"the plan has {self.plan.layers} layers, and the original {layers}")
        outside = [fit.layer for fit in self.calibration.layers if not 0 <= fit.layer < layers]
        if outside:
            raise ValueError(f"layer {outside[0]} is compensated, and the original has {layers} layers")
        if self.choice.search is not None and len(self.choice.search.kinds) != layers:
            raise ValueError(f"the search names {len(self.choice.search.kinds)} layers, and the original has {layers}")
        return self

    _model: PreTrainedModel | None = PrivateAttr(None)
    _tokenizer: PreTrainedTokenizerBase | None = PrivateAttr(None)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, RetrofitReport) and self.record() == other.record()

    def of_model(self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None) -> "RetrofitReport":
        """Return the same report with the model that it is about."""
        report = self.model_copy()
        report._model, report._tokenizer = model, tokenizer
        return report

    @property
    def model(self) -> PreTrainedModel:
        """The converted model.

        Raises:
            ValueError: this report was read from a folder; the message says how to load the model.

        """
        if self._model is None:
            raise ValueError(
                "this report was read from a record, which holds no model; load it from its folder: "
                "crosslayer.load_model(FOLDER)"
            )
        return self._model

    @property
    def tokenizer(self) -> PreTrainedTokenizerBase | None:
        """The tokenizer of the model, None where there was none."""
        return self._tokenizer

    @property
    def takes_shim(self) -> bool:
        """Whether the model is of a class of ours, which a shim lets other tools find."""
        return self.architecture.retrofit_class == "CrossLayerForCausalLM"

    @property
    def kv_share(self) -> float:
        """Share of the original's cache bytes that the retrofit allocates, 0 to 1."""
        return self.cache.share

    @property
    def domains(self) -> tuple[str, ...]:
        """Names of the domains on which the damage was measured, (D,)."""
        return tuple(domain.name for domain in self.damage.domains)

    @property
    def seen(self) -> np.ndarray:
        """Whether anything was fitted to text of the domain, (D,) bool."""
        return np.array([domain.seen for domain in self.damage.domains])

    @property
    def perplexity_ratio(self) -> np.ndarray:
        """Perplexity after over before, of each domain, (D,)."""
        return np.array([domain.ratio for domain in self.damage.domains])

    @property
    def perplexity_ratio_ci95(self) -> np.ndarray:
        """Ends of the 95 % interval of `perplexity_ratio`, (D, 2)."""
        return np.array([domain.ratio_ci95 for domain in self.damage.domains])

    @property
    def kl(self) -> np.ndarray:
        """KL of the retrofit to the original, of each domain, in nats a token, (D,)."""
        return np.array([domain.kl for domain in self.damage.domains])

    @property
    def kl_ci95(self) -> np.ndarray:
        """Ends of the 95 % interval of `kl`, in nats a token, (D, 2)."""
        return np.array([domain.kl_ci95 for domain in self.damage.domains])

    @property
    def compensation_gain(self) -> np.ndarray:
        """KL with W_c minus KL without it, in nats a token, below 0 where W_c helps, (D,); NaN without a fitted W_c."""
        gains = [domain.gain for domain in self.damage.domains]
        return np.array([np.nan if gain is None else gain.kl for gain in gains])

    @property
    def fit_r2(self) -> np.ndarray:
        """Share of the squared error that W_c takes away on its calibration text, (L,); NaN without a fitted W_c."""
        left = {fit.layer: fit.token_after / fit.token_before for fit in self.calibration.layers if fit.token_before}
        return np.array([1 - left.get(layer, np.nan) ** 2 for layer in range(self.architecture.layers)])

    @property
    def fit_r2_left_out(self) -> np.ndarray:
        """The same on text that was left out in turn (below 0: worse than no W_c), (L,); NaN where none was."""
        left = {fit.layer: fit.left_out for fit in self.calibration.layers if fit.left_out is not None}
        return np.array([1 - left.get(layer, np.nan) ** 2 for layer in range(self.architecture.layers)])

    @property
    def changed_layers(self) -> list[int]:
        """Layers of the original that do not own everything."""
        vectors = [self.plan.sources(state) for state in (*STATES, "mlps")]
        return [layer for layer in range(self.plan.layers) if any(vector[layer] != layer for vector in vectors)]

    def headline(self) -> dict[str, Any]:
        """Return the few figures that the last line of the command line holds."""
        worst = self.damage.domains[0]
        return {
            "method": "+".join(entry["name"] for entry in self.methods),
            "layers": self.changed_layers,
            "kv_share": round(self.cache.share, 6),
            "worst_domain": worst.name,
            "seen": worst.seen,
            "perplexity_before": round(worst.perplexity_before, 4),
            "perplexity_after": round(worst.perplexity_after, 4),
            "perplexity_ratio_ci95": [round(end, 4) for end in worst.ratio_ci95],
            "kl": round(worst.kl, 5),
            "needles": None if self.needles is None else count_found(self.needles.retrofit),
            "seconds": round(sum(self.seconds.values()), 1),
        }

    def save(self, folder: str | Path, force: bool = False, remote_code_shim: bool = False) -> Path:
        """Write the model's folder, whole or not at all: weights, tokenizer, card, record, page, figures and manifest.

        Args:
            folder: what is written.
            force: replace an existing folder of results.
            remote_code_shim: add an `auto_map` to the config and the file it names, for tools that load by remote code.

        Returns:
            the path of the page.

        Raises:
            ValueError: the folder exists and `force` is not set, it cannot be written, there is no model, or a shim is
                asked for a model that needs none.

        """
        model, target = self.model, Path(folder)
        if remote_code_shim and not self.takes_shim:
            raise ValueError(f"a shim is for models of crosslayer; this is a stock {type(model).__name__}")
        with whole_folder(target, force) as partial:
            with quiet_transformers():
                model.save_pretrained(partial)
                if self._tokenizer is not None:
                    self._tokenizer.save_pretrained(partial)
            if remote_code_shim:
                (partial / SHIM_FILE).write_text(SHIM, encoding="utf-8")
                config = json.loads((partial / "config.json").read_text(encoding="utf-8"))
                config["auto_map"] = AUTO_MAP
                (partial / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
            self._write(partial)
            card = self.sibling("card").model_card(self, self._tokenizer is not None)
            (partial / "README.md").write_text(card, encoding="utf-8")
            write_manifest(partial, model)  # of all that lies there
        return target / "report.html"
