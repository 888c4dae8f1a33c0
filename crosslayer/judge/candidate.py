"""What is judged: a model, and the way it keeps its cache."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers import Cache, PreTrainedModel

from crosslayer.cache.policies import POLICIES
from crosslayer.cache.running import CacheOptions, NewCache
from crosslayer.core.plan import DepthPlan
from crosslayer.models.embedded import EMBEDDED
from crosslayer.models.load import load_config, public_name
from crosslayer.probe.model import unwrapped
from crosslayer.probe.what_if import what_if
from crosslayer.wiring.kv_bits import KINDS

Around = Callable[[PreTrainedModel], AbstractContextManager[Any]]  # gives a function that makes a cache, or anything
BITS = {name: bits for bits, name in KINDS.items()}  # int4 → 4
WHAT = (
    f"a model (its name or folder), bits of the cache ({', '.join(BITS)}, or by layer: 8@0-11,4@12-29), an eviction "
    f"({', '.join(f'{name}:0.5' for name in POLICIES)})"
)


@dataclass(frozen=True)
class Candidate:
    """A model and the way it keeps its cache.

    Attributes:
        name: in tables.
        model: a loaded model or a name; None: the original.
        around: a context manager around the model that makes its cache smaller; None: the model's own cache.
        scores: whether the context manager also changes a pass without a cache, which scores a text. Otherwise a text
            is read token by token, with the context manager's cache.
        engines: those that can serve it.
    """

    name: str
    model: PreTrainedModel | str | Path | None = None
    around: Around | None = None
    scores: bool = True
    engines: tuple[str, ...] = ("transformers",)

    @contextmanager
    def running(self, model: PreTrainedModel) -> Iterator[NewCache | None]:
        """Run the model with the candidate's cache; gives a function that makes an empty one, None for the model's."""
        with nullcontext() if self.around is None else self.around(model) as given:
            yield given if callable(given) else None  # type: ignore[misc]


def candidate_of(given: Any, name: str | None = None) -> Candidate:
    """Return a candidate from a name, or in Python from a model, a plan, a cache class or a context manager."""
    given = unwrapped(given)
    if isinstance(given, Candidate):
        return given
    if isinstance(given, PreTrainedModel):
        return Candidate(name or public_name(given), given, engines=_engines(given.config))
    if isinstance(given, DepthPlan):
        return Candidate(name or "plan", around=lambda model: what_if(model, given))
    if isinstance(given, type) and issubclass(given, Cache):
        return Candidate(name or given.__name__, around=lambda model: _with_class(model, given), scores=False)
    # After models and classes, which can be called too.
    if not isinstance(given, str | Path) and callable(given):
        return Candidate(name or getattr(given, "__name__", type(given).__name__), around=given, scores=False)  # type: ignore[arg-type]
    if not isinstance(given, str | Path):
        raise ValueError(
            f"a candidate must be {WHAT}, a plan, a cache class or a context manager, got {type(given).__name__}"
        )

    text = str(given)
    is_eviction = text.partition(":")[0] in POLICIES
    is_bits = text in BITS or text[:1].isdigit() or text.partition("@")[0] in BITS
    # A folder that exists is a model, even if it is called `h2o` or `4`.
    if not Path(text).exists() and (is_eviction or is_bits):
        smaller = CacheOptions(evict=text) if is_eviction else CacheOptions(kv_bits=BITS.get(text, text))
        # Reads both texts, so that what cannot be read is refused before a model is loaded.
        smaller.sentences()
        # vLLM takes fp8 for all layers, or for all but some (--kv-cache-dtype-skip-layers).
        is_fp8 = all(part.startswith("fp8") for part in text.split(","))
        engines = ("transformers", "vLLM") if is_fp8 else ("transformers",)
        return Candidate(name or text, around=smaller.running, engines=engines)
    # A mistyped word such as int5 would be looked up on the hub, which takes seconds and says less.
    if not Path(text).expanduser().is_dir() and "/" not in text and text not in EMBEDDED:
        raise ValueError(f"a candidate must be {WHAT}, got {text!r}")
    return Candidate(name or public_name(text), text, engines=_engines(load_config(text)))


def read_candidates(given: Sequence[Any] | Mapping[str, Any]) -> list[Candidate]:
    """Return the candidates of a list, or of a mapping with a name for each; names must differ."""
    if isinstance(given, Mapping):
        candidates = [candidate_of(item, name) for name, item in given.items()]
    else:
        candidates = [candidate_of(item) for item in given]
    if not candidates:
        raise ValueError(f"`candidates` is empty; name at least one: {WHAT}")
    # A row, and what a judge remembers, is found by the candidate's name.
    names = [candidate.name for candidate in candidates]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise ValueError(f"two candidates are named {twice[0]!r}; give a mapping of names to candidates")
    return candidates


def _engines(config: Any) -> tuple[str, ...]:
    """Return the engines that can serve a model of this type."""
    if config.model_type != "crosslayer":
        return "transformers", "vLLM", "llama.cpp"
    return ("transformers",) if config.plan.beyond_sharing else ("transformers", "vLLM")


@contextmanager
def _with_class(model: PreTrainedModel, cls: type[Cache]) -> Iterator[NewCache]:
    """Give a function that makes an empty cache of a class: `cls(config)`, or `cls()` where it takes nothing."""

    def new_cache() -> Cache:
        try:
            return cls(config=model.config)  # type: ignore[call-arg]
        except TypeError:
            return cls()  # type: ignore[call-arg]

    # A class that cannot be built fails here, before the model reads anything.
    new_cache()
    yield new_cache
