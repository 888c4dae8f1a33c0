"""One measured configuration: candidate and baseline run alternately, so that a pair sees the same machine load.

Shapes: B batch, T tokens of the prompt, S tokens in the cache.
"""

import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any
from unittest import mock

import torch
from torch.nn import functional
from transformers import Cache, DynamicCache, PreTrainedModel, StaticCache
from transformers.cache_utils import DynamicLayer

from crosslayer.core.decoder.caches import cache_bytes
from crosslayer.core.sixteen_bits import DTYPE
from crosslayer.core.transformers_versions import CACHE, EMPTY_LAYER
from crosslayer.eviction.cache import EvictionCache
from crosslayer.eviction.running import NewCache
from crosslayer.machine import peak_memory, seconds
from crosslayer.stats.times import TimeComparison, compare_times
from crosslayer.verbs.bench.memory import Load, Models, read_plans
from crosslayer.verbs.bench.record import MEASURES, ROLES, BenchSettings, Both, Bytes, CacheBytes, PeakMemory, Role, Row

WARM_UP = 2  # steps that are not counted


@contextmanager
def attention_of(models: Models, kind: str) -> Iterator[None]:
    """Run all models with the same attention implementation; restores the former ones at the end."""
    before = {role: model.config.get_text_config()._attn_implementation or "eager" for role, model in models.items()}
    try:
        for model in models.values():
            model.set_attn_implementation(kind)
        yield
    finally:
        for role, model in models.items():
            model.set_attn_implementation(before[role])


def static_copy(model: PreTrainedModel, cache: Cache, load: Load) -> StaticCache:
    """Return a static cache of the full length with the prompt's states copied from a dynamic cache."""
    static = StaticCache(config=model.config, max_cache_len=load.total)
    for number, layer in enumerate(cache.layers):
        if isinstance(layer, DynamicLayer) and layer.keys is not None and layer.values is not None:
            static.update(layer.keys[:, :, : load.context], layer.values[:, :, : load.context], number)
    return static


@dataclass(frozen=True)
class WarmUp:
    """Bytes that a model's first run allocates: peak memory, and both caches."""

    peak: int | None
    peak_reason: str | None
    dynamic: tuple[int, int]  # allocated, and in 16 bits
    static: tuple[int, int]


class Rounds:
    """Measures a configuration: a warm-up of each model, which also counts bytes, then timed pairs."""

    def __init__(
        self,
        models: Models,
        load: Load,
        settings: BenchSettings,
        new_cache: NewCache | None = None,
    ):
        self.models, self.load, self.settings = models, load, settings
        self.device = models["baseline"].device
        vocabulary = min(model.config.get_text_config().vocab_size for model in models.values())
        generator = torch.Generator().manual_seed(settings.seed)
        self.ids = torch.randint(0, vocabulary, (load.batch, load.total), generator=generator).to(self.device)  # (B, S)
        self.times: dict[str, dict[Role, list[float]]] = {}  # measure -> role -> seconds of each repeat
        for measure in MEASURES:
            self.times[measure] = {role: [] for role in ROLES}
        self.smaller: dict[Role, NewCache] = {} if new_cache is None else {"candidate": new_cache}

    def run(self, tick: Callable[[], None]) -> Row:
        """Return the row of the record; `tick` is called after the warm-up and after every round."""
        warm_ups: dict[Role, WarmUp] = {role: self._warm_up(role) for role in ROLES}
        tick()
        for repeat in range(self.settings.repeats):
            self._round(ROLES if repeat % 2 else ROLES[::-1])
            tick()
        candidate, baseline = (warm_ups[role] for role in ROLES)
        shares = None
        if self.load.attention == "eager" and not self.smaller:
            shares = Both(candidate=self.softmax_share("candidate"), baseline=self.softmax_share("baseline"))
        return Row(
            context=self.load.context,
            batch=self.load.batch,
            attention=self.load.attention,
            cache=CacheBytes(
                dynamic=_bytes(*zip(candidate.dynamic, baseline.dynamic, strict=True)),
                static=_bytes(*zip(candidate.static, baseline.static, strict=True)),
            ),
            reads=None if self.smaller else read_bytes(self.models, self.load),
            ttft=compare_times(**self.times["ttft"]),
            tpot_dynamic=compare_times(**self.times["tpot_dynamic"]),
            tpot_static=compare_times(**self.times["tpot_static"]),
            peak_memory=PeakMemory(
                candidate=candidate.peak, baseline=baseline.peak, reason=candidate.peak_reason or baseline.peak_reason
            ),
            softmax_share=shares,
        )

    def softmax_share(self, role: Role) -> float:
        """Return which share of the time of a prompt softmax takes."""
        taken, softmax = [], functional.softmax

        def timed(*args: Any, **kwargs: Any) -> torch.Tensor:
            results: list[torch.Tensor] = []
            taken.append(seconds(lambda: results.append(softmax(*args, **kwargs)), self.device))
            return results[0]

        with mock.patch.object(functional, "softmax", timed):
            total = seconds(partial(self.prefill, role), self.device)
        return sum(taken) / total

    def prefill(self, role: Role) -> Cache:
        """Run the prompt through a fresh cache, dynamic or smaller; only the last logits are computed."""
        model = self.models[role]
        cache = self._empty(role)
        options: dict[str, Any] = {CACHE: cache, "use_cache": True}
        if "logits_to_keep" in inspect.signature(model.forward).parameters:
            options["logits_to_keep"] = 1
        model(self.ids[:, : self.load.context], **options)
        return cache

    def steps(self) -> TimeComparison:
        """Return the time of a decoding step with a dynamic cache: the prompt runs once, then both take turns."""
        caches = {role: self.prefill(role) for role in ROLES}
        for step in range(self.load.new_tokens):
            for role in ROLES if step % 2 else ROLES[::-1]:
                at = self.load.context + step
                self._time("tpot_dynamic", role, partial(self._step, role, caches[role], at))
        return compare_times(*(self.times["tpot_dynamic"][role][WARM_UP:] for role in ROLES))

    def decode(self, role: Role, cache: Cache) -> None:
        """Run every new token through a cache that holds the prompt."""
        for at in range(self.load.context, self.load.total):
            self._step(role, cache, at)

    def _step(self, role: Role, cache: Cache, at: int) -> None:
        self.models[role](self.ids[:, at : at + 1], **{CACHE: cache}, use_cache=True)

    def _empty(self, role: Role) -> Cache:
        return self.smaller[role]() if role in self.smaller else DynamicCache(config=self.models[role].config)

    def static(self, role: Role, cache: Cache) -> Cache:
        """Return a static cache with the prompt: copied from the dynamic cache, or run again if a window has cut it.

        A model with a smaller cache has only one kind of it, which the prompt fills again.
        """
        if role in self.smaller:
            return self.prefill(role)
        if all(type(layer) in (DynamicLayer, EMPTY_LAYER) for layer in cache.layers):  # states of all tokens, or none
            return static_copy(self.models[role], cache, self.load)
        filled = StaticCache(config=self.models[role].config, max_cache_len=self.load.total)
        self.models[role](self.ids[:, : self.load.context], **{CACHE: filled}, use_cache=True)
        return filled

    def _warm_up(self, role: Role) -> WarmUp:
        with peak_memory(self.device) as peak:
            dynamic = self.prefill(role)
            self.decode(role, dynamic)
        sizes = _sizes(dynamic)
        static = self.static(role, dynamic)
        del dynamic
        self.decode(role, static)
        return WarmUp(peak.bytes, peak.reason, sizes, _sizes(static))

    def _round(self, order: tuple[Role, ...]) -> None:
        caches: dict[Role, Cache] = {}

        def prefill(role: Role) -> None:
            caches[role] = self.prefill(role)

        for role in order:
            self._time("ttft", role, partial(prefill, role))
        for role in order:
            self._time("tpot_dynamic", role, partial(self.decode, role, caches[role]), self.load.new_tokens)
        for role in order:
            static = self.static(role, caches.pop(role))
            self._time("tpot_static", role, partial(self.decode, role, static), self.load.new_tokens)

    def _time(self, measure: str, role: Role, work: Callable[[], Any], steps: int = 1) -> None:
        self.times[measure][role].append(seconds(work, self.device) / steps)


def _sizes(cache: Cache) -> tuple[int, int]:
    """Return the bytes of states, and of positions and sums that eviction stores: allocated, and in 16 bits."""
    overhead = cache.overhead_bytes() if isinstance(cache, EvictionCache) else 0
    return cache_bytes(cache) + overhead, cache_bytes(cache, sixteen=True) + overhead


def read_bytes(models: Models, load: Load) -> Bytes | None:
    """Return the bytes that the last step reads, by the plans; None if a model has no plan."""
    plans, in_16_bits = (read_plans(models, load, dtype) for dtype in (None, DTYPE))
    if not plans:
        return None
    return _bytes(*([plan[role].read_bytes for role in ROLES] for plan in (plans, in_16_bits)))


def _bytes(counts: Sequence[int], in_16_bits: Sequence[int]) -> Bytes:
    ratio, share = (one[0] / one[1] for one in (counts, in_16_bits))
    return Bytes(candidate=counts[0], baseline=counts[1], ratio=ratio, share=share)
