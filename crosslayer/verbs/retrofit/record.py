"""What `record.json` of a retrofit holds."""

from pydantic import Field

from crosslayer.output.record import Frozen
from crosslayer.stats import Interval
from crosslayer.verbs.needles.lookup import Lookup
from crosslayer.verbs.retrofit.moments import Fit


class Architecture(Frozen):
    """The model before and after."""

    name: str = Field(description="the original's name, without the folders above it")
    origin: dict[str, str | list[str]] = Field(
        default_factory=dict, description="base_model, license and language for the card, as far as they are known"
    )
    source_class: str = Field(description="class of the original")
    retrofit_class: str = Field(description="class of the retrofit")
    layers: int = Field(description="L, of the original")
    parameters_before: int
    parameters_after: int
    dtype: str


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


class TextsRecord(Frozen):
    """Names of the domains that were read."""

    judged: list[str] = Field(description="on which the damage was measured")
    fitted: list[str] = Field(description="to which W_c or the choice of layers was fitted")


class Seconds(Frozen):
    """How long each phase took."""

    choose: float
    rewire: float = Field(description="conversion and calibration")
    damage: float = Field(description="losses on text, and hidden numbers")
    all: float
