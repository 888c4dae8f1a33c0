"""A setting measured: both sides run in turns, in an order that alternates, so that a pair meets the same moments.

Shapes: B batch, T tokens of the prompt, S tokens in the cache.
"""

import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from transformers import Cache, DynamicCache, PreTrainedModel, StaticCache
from transformers.cache_utils import DynamicLayer

from crosslayer.core.decoder.caches import cache_bytes
from crosslayer.core.transformers_versions import EMPTY_LAYER
from crosslayer.eviction.cache import EvictionCache
from crosslayer.eviction.running import NewCache
from crosslayer.verbs.bench.costs import Load, Operators, Rates, Structure
from crosslayer.verbs.bench.machine import measure_rates, operators, seconds
from crosslayer.verbs.bench.memory import Models, eager_skip, peak_memory
from crosslayer.verbs.bench.record import MEASURES, SIDES, BenchSettings, Row, Side
from crosslayer.verbs.bench.summary import WarmUp, row

EAGER_REPEATS = 2  # eager prefill is many times slower and nobody's choice: a figure to quote, without an interval


@contextmanager
def attention_of(models: Models, kind: str) -> Iterator[None]:
    """Run all models with the same attention implementation; the former ones come back at the end."""
    before = {side: model.config.get_text_config()._attn_implementation or "eager" for side, model in models.items()}
    try:
        for model in models.values():
            model.set_attn_implementation(kind)
        yield
    finally:
        for side, model in models.items():
            model.set_attn_implementation(before[side])


def static_copy(model: PreTrainedModel, cache: Cache, load: Load) -> StaticCache:
    """Return a static cache of the whole length that holds the states of a prompt in a dynamic cache."""
    static = StaticCache(config=model.config, max_cache_len=load.total)
    for number, layer in enumerate(cache.layers):
        if isinstance(layer, DynamicLayer) and layer.keys is not None and layer.values is not None:
            static.update(layer.keys[:, :, : load.context], layer.values[:, :, : load.context], number)
    return static


class SideBySide:
    """A setting: a warm-up of each side, which also counts bytes and operators, then pairs of timed runs."""

    def __init__(
        self,
        models: Models,
        structures: Mapping[Side, Structure],
        load: Load,
        settings: BenchSettings,
        new_cache: NewCache | None = None,
    ):
        self.models, self.structures, self.load, self.settings = models, structures, load, settings
        self.device = models["baseline"].device
        vocabulary = min(model.config.get_text_config().vocab_size for model in models.values())
        generator = torch.Generator().manual_seed(settings.seed)
        self.ids = torch.randint(0, vocabulary, (load.batch, load.total), generator=generator).to(self.device)  # (B, S)
        self.times: dict[str, dict[Side, list[float]]] = {}  # measure -> side -> seconds of each repeat
        for measure in (*MEASURES, "eager"):
            self.times[measure] = {side: [] for side in SIDES}
        self.evictions: dict[Side, NewCache] = {} if new_cache is None else {"candidate": new_cache}
        self.no_eager = "attention is eager already" if settings.attention == "eager" else None
        self.no_eager = "tokens are evicted" if self.evictions else self.no_eager

    def run(self, tick: Callable[[], None]) -> Row:
        """Return the row of the record; `tick` is called after the warm-up and after every round."""
        warm_ups: dict[Side, WarmUp] = {side: self._warm_up(side) for side in SIDES}
        rates: list[Rates] = []
        tick()
        self.no_eager = self.no_eager or eager_skip(self.models["baseline"], self.load)
        for repeat in range(self.settings.repeats):
            order = SIDES if repeat % 2 else SIDES[::-1]
            self._round(order)
            if repeat < EAGER_REPEATS and self.no_eager is None:
                with attention_of(self.models, "eager"):
                    for side in order:
                        self._time("eager", side, partial(self.prefill, side))
            if self.structures:
                baseline, attention = self.models["baseline"], self.settings.attention
                rates.append(measure_rates(self.structures["baseline"], self.load, baseline, attention))
            tick()
        return row(self.load, self.times, warm_ups, self.structures, rates, self.no_eager)

    def prefill(self, side: Side) -> Cache:
        """Run the prompt through a fresh dynamic cache, or one that evicts; only the last logits are computed."""
        model = self.models[side]
        cache = self.evictions[side]() if side in self.evictions else DynamicCache(config=model.config)
        options: dict[str, Any] = {"past_key_values": cache, "use_cache": True}
        if "logits_to_keep" in inspect.signature(model.forward).parameters:
            options["logits_to_keep"] = 1
        model(self.ids[:, : self.load.context], **options)
        return cache

    def decode(self, side: Side, cache: Cache) -> None:
        """Run every new token through a cache that holds the prompt."""
        for at in range(self.load.context, self.load.total):
            self.models[side](self.ids[:, at : at + 1], past_key_values=cache, use_cache=True)

    def static(self, side: Side, cache: Cache) -> Cache:
        """Return a static cache with the prompt: copied from the dynamic cache, or, if a window has cut that, run.

        A side that evicts has a single kind of cache, which the prompt fills again.
        """
        if side in self.evictions:
            return self.prefill(side)
        if all(type(layer) in (DynamicLayer, EMPTY_LAYER) for layer in cache.layers):  # states of all tokens, or none
            return static_copy(self.models[side], cache, self.load)
        filled = StaticCache(config=self.models[side].config, max_cache_len=self.load.total)
        self.models[side](self.ids[:, : self.load.context], past_key_values=filled, use_cache=True)
        return filled

    def _warm_up(self, side: Side) -> WarmUp:
        with peak_memory(self.device) as peak:
            dynamic = self.prefill(side)
            self.decode(side, dynamic)
        dynamic_bytes = _allocated(dynamic)
        static = self.static(side, dynamic)
        del dynamic
        self.decode(side, static)
        config, new_cache = self.models[side].config, self.evictions.get(side)
        kinds: tuple[Cache, Cache] = (DynamicCache(config=config), StaticCache(config=config, max_cache_len=2))
        if new_cache is not None:
            kinds = new_cache(), new_cache()
        counts = Operators(dynamic=self._operators(side, kinds[0]), static=self._operators(side, kinds[1]))
        return WarmUp(peak.bytes, peak.reason, dynamic_bytes, _allocated(static), counts)

    def _operators(self, side: Side, cache: Cache) -> int:
        """Return how many operators a decoding step runs, whatever the length."""
        model, token = self.models[side], self.ids[:, :1]
        model(token, past_key_values=cache, use_cache=True)
        return operators(lambda: model(token, past_key_values=cache, use_cache=True))

    def _round(self, order: tuple[Side, ...]) -> None:
        caches: dict[Side, Cache] = {}

        def prefill(side: Side) -> None:
            caches[side] = self.prefill(side)

        for side in order:
            self._time("ttft", side, partial(prefill, side))
        for side in order:
            self._time("tpot_dynamic", side, partial(self.decode, side, caches[side]), self.load.new_tokens)
        for side in order:
            static = self.static(side, caches.pop(side))
            self._time("tpot_static", side, partial(self.decode, side, static), self.load.new_tokens)

    def _time(self, measure: str, side: Side, work: Callable[[], Any], steps: int = 1) -> None:
        self.times[measure][side].append(seconds(work, self.device) / steps)


def _allocated(cache: Cache) -> int:
    """Return the bytes of a cache's states, with what is known of the tokens where some are evicted."""
    return cache_bytes(cache) + (cache.overhead_bytes() if isinstance(cache, EvictionCache) else 0)
