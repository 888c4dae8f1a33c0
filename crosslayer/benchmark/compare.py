"""What a candidate costs beside a baseline: cache, time to first token, time per token, memory; measured and predicted.

Both sides run in turns, in an order that alternates, so that one pair meets the same moments of the machine. A ratio is
the median over pairs of candidate / baseline, with an interval whose ends are pairs too.

Shapes: B batch, T tokens of the prompt, S tokens in the cache.
"""

import inspect
import itertools
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import nn
from transformers import Cache, DynamicCache, PreTrainedModel, StaticCache
from transformers.cache_utils import DummyLayer, DynamicLayer

from crosslayer.benchmark.costs import Load, Rates, Structure, structure
from crosslayer.benchmark.machine import free_memory, measure_rates, operators, peak_memory, seconds
from crosslayer.benchmark.summary import SIDES, TIMES, Times, compared, coverage, row
from crosslayer.decoder.caches import cache_bytes
from crosslayer.environment import environment, quiet_transformers

ATTENTION = ("sdpa", "eager")
EAGER_REPEATS = 2  # eager prefill is many times slower and nobody's choice: a figure to quote, without an interval


@dataclass(frozen=True)
class Settings:
    """What is measured: every context (tokens of the prompt) with every batch size.

    Raises:
        ValueError: a number below 1, no context, no batch, or an attention that is not offered.

    """

    contexts: tuple[int, ...] = (512, 2048)
    batches: tuple[int, ...] = (1,)
    new_tokens: int = 64
    repeats: int = 5
    attention: str = "sdpa"
    seed: int = 0

    def __post_init__(self):
        numbers = {"context": self.contexts, "batch": self.batches}
        for name, values in {**numbers, "new-tokens": (self.new_tokens,), "repeats": (self.repeats,)}.items():
            wrong = [value for value in values if value < 1]
            if wrong or not values:
                raise ValueError(f"{name} is {wrong[0] if wrong else 'empty'}; it must be at least 1")
        if self.attention not in ATTENTION:
            raise ValueError(f"attention {self.attention!r} is not measured; use {' or '.join(ATTENTION)}")


def bench(
    candidate: PreTrainedModel,
    baseline: PreTrainedModel,
    settings: Settings | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> dict[str, Any]:
    """Measure two causal language models on one device in turns; return what `BenchRecord` describes.

    `progress(done, total)` is called after every round. Times are in seconds, sizes in bytes.

    Raises:
        ValueError: a model is no causal language model, has fewer positions than a context, or nothing fits in memory.

    """
    settings = settings or Settings()
    models: dict[str, PreTrainedModel] = {"candidate": candidate, "baseline": baseline}
    check(models, settings)
    started, done = time.perf_counter(), itertools.count(1)
    loads = [Load(c, b, settings.new_tokens) for b in settings.batches for c in settings.contexts]
    total = len(loads) * (settings.repeats + 1)

    def tick() -> None:
        if progress is not None:
            progress(next(done), total)

    rows, skipped = [], []
    with torch.no_grad(), quiet_transformers(), attention_of(models, settings.attention):
        shapes, reason = _structures(models)
        for load in loads:
            word = too_large(models, shapes, load)
            if word is None:
                rows.append(_Comparison(models, shapes, load, settings).run(tick))
                continue
            skipped.append({"context": load.context, "batch": load.batch, "reason": word})
            for _ in range(settings.repeats + 1):
                tick()
    if not rows:
        raise ValueError(f"nothing was measured: {skipped[0]['reason']}")
    return {
        "schema": "crosslayer/bench/1",
        "models": {side: _describe(models[side]) for side in SIDES},
        "settings": asdict(settings),
        "rows": rows,
        "skipped": skipped,
        "no_prediction": reason,
        "interval_coverage": coverage(settings.repeats),
        "seconds": time.perf_counter() - started,
        "environment": environment(),
    }


def check(models: Mapping[str, PreTrainedModel], settings: Settings) -> None:
    """Refuse what cannot be measured, before anything runs; see `bench`."""
    for model in models.values():
        name, config = type(model).__name__, model.config.get_text_config()
        if not model.can_generate():
            raise ValueError(f"{name} is an encoder; bench measures causal language models, which keep a cache")
        limit, tokens = config.max_position_embeddings, model.get_input_embeddings()
        tables = [m.num_embeddings for m in model.modules() if isinstance(m, nn.Embedding) and m is not tokens]
        learned = any(limit <= count < limit + 8 for count in tables)  # rotary positions go on, learned ones end
        longest = max(settings.contexts) + (settings.new_tokens if learned else 0)
        if longest > limit:
            extra = f" + {settings.new_tokens} new tokens" if learned else ""
            raise ValueError(f"context {max(settings.contexts)}{extra} is above the {limit} positions of {name}")
    devices = {model.device for model in models.values()}
    if len(devices) > 1:
        raise ValueError(f"the models are on {' and '.join(map(str, devices))}; both must be on one device")


def _structures(models: dict[str, PreTrainedModel]) -> tuple[dict[str, Structure], str | None]:
    """Return both structures, or none and the reason."""
    try:
        return {side: structure(model) for side, model in models.items()}, None
    except ValueError as error:
        return {}, f"no prediction: {error}"


def _describe(model: PreTrainedModel) -> dict[str, Any]:
    config = model.config.get_text_config()
    return {
        "class": type(model).__name__,
        "layers": config.num_hidden_layers,
        "parameters": model.num_parameters(),
        "bytes": sum(p.numel() * p.element_size() for p in model.parameters()),
        "dtype": str(model.dtype).removeprefix("torch."),
        "device": model.device.type,
    }


@contextmanager
def attention_of(models: dict[str, PreTrainedModel], kind: str) -> Iterator[None]:
    """Run all models with one attention implementation; the former ones come back at the end.

    Raises:
        ValueError: a model does not have that implementation.

    """
    before = {side: model.config.get_text_config()._attn_implementation or "eager" for side, model in models.items()}
    try:
        for model in models.values():
            model.set_attn_implementation(kind)
        yield
    finally:
        for side, model in models.items():
            model.set_attn_implementation(before[side])


def too_large(models: dict[str, PreTrainedModel], shapes: dict[str, Structure], load: Load) -> str | None:
    """Return why a setting is skipped: the caches, a prompt's activations and logits would not fit in free memory."""
    free = free_memory(next(iter(models.values())).device)
    if free is None or not shapes:
        return None
    caches = [shape.cache_bytes(load.batch, load.total) for shape in shapes.values()]
    tokens = load.batch * load.context
    activations = max(tokens * (3 * shape.shape[0] + 4 * shape.shape[1]) * shape.itemsize for shape in shapes.values())
    logits = max(load.batch * model.config.get_text_config().vocab_size * 8 for model in models.values())
    need = sum(caches) + max(caches) + activations + logits
    if need <= free:
        return None
    setting = f"context {load.context}, batch {load.batch}"
    return f"{setting} needs about {need / 1e9:.1f} GB, and {free / 1e9:.1f} GB are free"


def eager_skip(model: PreTrainedModel, load: Load) -> str | None:
    """Return why eager attention is not run: two copies of one layer's maps exceed half of the free memory."""
    heads, free = model.config.get_text_config().num_attention_heads, free_memory(model.device)
    need = 2 * load.batch * heads * load.context**2 * 4
    if free is None or need <= free / 2:
        return None
    return f"skipped: eager maps need {need / 1e9:.1f} GB, more than half of the {free / 1e9:.1f} GB free"


def static_copy(model: PreTrainedModel, cache: Cache, load: Load) -> StaticCache:
    """Return a static cache of the whole length that holds the prompt's states of a dynamic one."""
    static = StaticCache(config=model.config, max_cache_len=load.total)
    for number, layer in enumerate(cache.layers):
        if isinstance(layer, DynamicLayer) and layer.keys is not None and layer.values is not None:
            static.update(layer.keys[:, :, : load.context], layer.values[:, :, : load.context], number)
    return static


class _Comparison:
    """One setting: a warm-up of each side, which also counts bytes and operators, then pairs of timed runs."""

    def __init__(
        self, models: dict[str, PreTrainedModel], shapes: dict[str, Structure], load: Load, settings: Settings
    ):
        self.models, self.shapes, self.load, self.settings = models, shapes, load, settings
        self.device = models["baseline"].device
        vocabulary = min(model.config.get_text_config().vocab_size for model in models.values())
        generator = torch.Generator().manual_seed(settings.seed)
        self.ids = torch.randint(0, vocabulary, (load.batch, load.total), generator=generator).to(self.device)
        self.times: Times = {name: {side: [] for side in SIDES} for name in (*TIMES, "eager")}
        self.no_eager = "attention is eager already" if settings.attention == "eager" else None

    def run(self, tick: Callable[[], None]) -> dict[str, Any]:
        """Return one row of the record."""
        facts = {side: self._first(side) for side in SIDES}
        rates = []
        tick()
        self.no_eager = self.no_eager or eager_skip(self.models["baseline"], self.load)
        for repeat in range(self.settings.repeats):
            self._round(SIDES if repeat % 2 else SIDES[::-1], repeat)
            rates += self._rates()
            tick()
        eager = {"skipped": self.no_eager} if self.no_eager else compared(self.times["eager"])
        return {**row(self.load, self.times, facts, self.shapes, rates), "eager": eager}

    def _rates(self) -> list[Rates]:
        if not self.shapes:
            return []
        return [measure_rates(self.shapes["baseline"], self.load, self.models["baseline"], self.settings.attention)]

    def prefill(self, side: str) -> Cache:
        """Run the prompt through a fresh dynamic cache; only the last logits are computed."""
        model = self.models[side]
        cache = DynamicCache(config=model.config)
        last = {"logits_to_keep": 1} if "logits_to_keep" in inspect.signature(model.forward).parameters else {}
        model(self.ids[:, : self.load.context], past_key_values=cache, use_cache=True, **last)
        return cache

    def decode(self, side: str, cache: Cache) -> None:
        """Run every new token through a cache that holds the prompt."""
        for at in range(self.load.context, self.load.total):
            self.models[side](self.ids[:, at : at + 1], past_key_values=cache, use_cache=True)

    def static(self, side: str, cache: Cache) -> Cache:
        """Return a static cache with the prompt: copied from the dynamic one, or, if a window has cut that, run."""
        if all(type(layer) in (DynamicLayer, DummyLayer) for layer in cache.layers):
            return static_copy(self.models[side], cache, self.load)
        filled = StaticCache(config=self.models[side].config, max_cache_len=self.load.total)
        self.models[side](self.ids[:, : self.load.context], past_key_values=filled, use_cache=True)
        return filled

    def _first(self, side: str) -> dict[str, Any]:
        """Warm a side up; return its peak memory, allocated bytes of both caches and operators of a decoding step."""
        with peak_memory(self.device) as peak:
            cache = self.prefill(side)
            self.decode(side, cache)
        facts: dict[str, Any] = {"peak": peak.bytes, "peak_reason": peak.reason, "dynamic": cache_bytes(cache)}
        static = self.static(side, cache)
        del cache
        self.decode(side, static)
        facts["static"] = cache_bytes(static)
        facts["operators"] = {kind: self._operators(side, kind) for kind in ("dynamic", "static")}
        return facts

    def _operators(self, side: str, kind: str) -> int:
        """Return how many operators a decoding step runs, whatever the length."""
        model, token = self.models[side], self.ids[:, :1]
        cache = DynamicCache(config=model.config)
        if kind == "static":
            cache = StaticCache(config=model.config, max_cache_len=2)
        model(token, past_key_values=cache, use_cache=True)
        return operators(lambda: model(token, past_key_values=cache, use_cache=True))

    def _round(self, order: tuple[str, ...], repeat: int) -> None:
        """Time each phase on both sides before the next phase."""
        caches: dict[str, Any] = {}
        for side in order:
            self._time("ttft", side, lambda side=side: caches.update({side: self.prefill(side)}))
        for name in ("tpot_dynamic", "tpot_static"):
            for side in order:
                cache = caches[side]
                if name == "tpot_static":
                    cache = self.static(side, caches.pop(side))
                self._time(name, side, lambda side=side, cache=cache: self.decode(side, cache), self.load.new_tokens)
        if repeat < EAGER_REPEATS and self.no_eager is None:
            with attention_of(self.models, "eager"):
                for side in order:
                    self._time("eager", side, lambda side=side: self.prefill(side))

    def _time(self, name: str, side: str, work: Callable[[], Any], steps: int = 1) -> None:
        self.times[name][side].append(seconds(work, self.device) / steps)
