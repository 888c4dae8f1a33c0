"""A whole retrofit: choose layers, rewire, calibrate, measure the damage, and put everything into one record."""

import dataclasses
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel, PreTrainedTokenizerBase
from transformers.cache_utils import DynamicLayer

from crosslayer.conversion.choose import CONTEXT, CacheShare, entries
from crosslayer.conversion.damage import Losses, by_domain, logits_of, logits_without, losses
from crosslayer.conversion.moments import check_enough
from crosslayer.conversion.request import Meter, Request
from crosslayer.conversion.rewire import Retrofit, retrofit
from crosslayer.conversion.search import plan_by_damage
from crosslayer.conversion.texts import Texts
from crosslayer.corpus.windows import Windows
from crosslayer.decoder.caches import cache_bytes
from crosslayer.decoder.weights import to_config
from crosslayer.diagnosis.groups import PAPER_SIZE, Groups, paper_groups, similar_groups
from crosslayer.diagnosis.scan import diagnose
from crosslayer.environment import environment
from crosslayer.method import Method
from crosslayer.methods import merge_plans, to_entry
from crosslayer.plan import DepthPlan, parse_layers
from crosslayer.probe import measures as m
from crosslayer.probe.intercept import no_cache
from crosslayer.probe.stream import LayerStream, streams
from crosslayer.probe.tokens import check_ids
from crosslayer.probe.what_if import Wiring, look, what_if

STEP = 64  # tokens of the forward pass that shows what a cache allocates


@dataclass(frozen=True)
class Outcome:
    """The retrofit and what `record.json` holds of it."""

    made: Retrofit
    record: dict[str, Any]


class Job:
    """Runs a request on a model; `meter` shows progress."""

    def __init__(self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, request: Request, meter: Meter):
        self.model, self.tokenizer, self.request, self.meter = model, tokenizer, request, meter
        self.layers = to_config(model.config).num_hidden_layers  # says which families can be converted
        self.seconds: dict[str, float] = {}
        self.choice: dict[str, Any] = {}

    def run(self, texts: Texts) -> Outcome:
        """Do everything but writing."""
        started = time.perf_counter()
        self._check_early(texts)
        given = texts.windows(self.tokenizer, self.request)
        for windows in given.values():
            check_ids(self.model, windows.ids)
        methods = self._timed("choose", lambda: self._choose(given))
        made = self._timed("convert and calibrate", lambda: self._convert(methods, given))
        found = self._timed("damage", lambda: self._damage(made, given["evaluation"]))
        self.seconds["all"] = time.perf_counter() - started
        seen = texts.seen(self.request)
        return Outcome(made, self._record(made, by_domain(found, seen, self.request.seed), given))

    def _check_early(self, texts: Texts) -> None:
        """Refuse too little calibration text before any search."""
        request = self.request
        if request.fits:
            sizes = [count for count in texts.parts(request)["calibration"].values() if count]
            check_enough(self.model.config.hidden_size, sizes, request.length, request.fit)

    def _timed(self, name: str, work: Callable[[], Any]) -> Any:
        started = time.perf_counter()
        result = work()
        self.seconds[name] = time.perf_counter() - started
        return result

    def _choose(self, given: dict[str, Windows]) -> list[Method]:
        request = self.request
        own = request.own
        if own is not None:
            self.choice = {"how": "as given", "groups": []}
            look(self.model).check(own.plan(self.layers))
            return [own]
        if request.method is None:
            methods, self.choice = plan_by_damage(self.model, given, request, self.meter)
            return methods
        if request.layers == "auto":
            groups = self._auto(given["choice"].ids)
        elif request.layers == "top-half":
            groups = paper_groups(look(self.model).shapes, request.size)
            if not groups:
                raise ValueError(f"the top half has no {request.size} neighbouring layers of one mask; name the layers")
            groups = [[i] for group in groups for i in group[1:]] if request.method == "drop" else groups
        else:
            groups = parse_layers(request.layers, self.layers)
        self.choice = {"how": request.layers, "groups": groups}
        methods = entries(request.method, groups, self.layers, request.writes, request.drop)
        look(self.model).check(merge_plans(methods, self.layers))  # says which layers may not share, and why
        return methods

    def _auto(self, ids: Tensor) -> Groups:
        """Choose by similarity: of maps without the first column for sharing, of input and output for dropping."""
        request = self.request
        count = request.count or max(1, self.layers // 2 // PAPER_SIZE * (PAPER_SIZE - 1))
        if count >= self.layers:
            raise ValueError(f"--count {count}: the model has {self.layers} layers, and one must stay")
        if request.method == "drop" and request.drop == "mlp":
            raise ValueError("--layers auto ranks attention and whole layers; name the layers whose MLP goes")
        if request.method == "drop" and request.select == "greedy":
            return [[layer] for layer in sorted(_greedy(self.model, ids, count, request.drop))]
        found = diagnose(self.model, ids, progress=self.meter)
        if request.method == "drop":
            turned = found.attention_io_similarity if request.drop == "attention" else found.layer_io_similarity
            ranked = np.argsort(-turned, kind="stable")
            return [[int(layer)] for layer in sorted(ranked[:count])]
        groups = similar_groups(found.map_similarity_without_first, look(self.model).shapes, count)
        reached = sum(len(group) - 1 for group in groups)
        if reached < count:
            raise ValueError(f"--count {count}: masks allow at most {reached} layers to follow another")
        return groups

    def _convert(self, methods: list[Method], given: dict[str, Windows]) -> Retrofit:
        request = self.request
        with self.meter("calibrating", self.layers) as bar:
            return retrofit(
                self.model,
                methods,
                calibration=given["calibration"].by_domain() if request.fits else None,
                fit=request.compensation if request.fits else "zero",
                groups=request.groups,
                merge=request.merge,
                progress=bar.step,
                share_weights=True,
            )

    def _damage(self, made: Retrofit, windows: Windows) -> dict[str, Losses]:
        runs = {"after": logits_of(made.model)}
        if made.fits:
            runs["without"] = logits_without(made.model)
        with self.meter("measuring the damage", len(windows)) as bar:
            return losses(logits_of(self.model), runs, windows, bar.step)

    def _record(self, made: Retrofit, found: dict[str, Any], given: dict[str, Windows]) -> dict[str, Any]:
        request = self.request
        context = CacheShare(look(self.model).shapes, request.kv_context).context
        before, after = (allocated(model, context) for model in (self.model, made.model))
        read = given["calibration"].by_domain() if request.fits else {}
        fit = made.fit if made.fits else request.fit
        return {
            "schema": "crosslayer/retrofit/2",
            "model": {
                "class": type(self.model).__name__,
                "retrofit_class": type(made.model).__name__,
                "layers": self.layers,
                "parameters_before": sum(p.numel() for p in self.model.parameters()),
                "parameters_after": sum(p.numel() for p in made.model.parameters()),
                "dtype": str(self.model.dtype).removeprefix("torch."),
            },
            "methods": [to_entry(method) for method in made.methods],
            "plan": dataclasses.asdict(merge_plans(made.methods, self.layers)),
            "choice": self.choice,
            "weights": {"dropped": made.dropped, "merged": made.merged, "new": made.new},
            "calibration": {
                "fit": fit,
                "windows": {name: len(ids) for name, ids in read.items()},
                "layers": [dataclasses.asdict(fit) for fit in made.fits],
            },
            "cache": {
                "context": context,
                "bytes_per_token_before": before,
                "bytes_per_token_after": after,
                "share": after / before,
            },
            "damage": found,
            "settings": {**dataclasses.asdict(request), "compensation": fit},
            "seconds": self.seconds,
            "environment": environment(),
        }


@torch.no_grad()
def allocated(model: PreTrainedModel, context: int = CONTEXT) -> float:
    """Return the bytes that a dynamic cache allocates for each of `context` tokens.

    A short prompt shows what each layer stores; a cache is then filled with so many tokens of it, in two steps, so that
    a sliding window is cut as in decoding. Nothing is computed for a long context, and one layer is filled at a time.
    """
    cache = DynamicCache(config=model.config)
    ids = torch.arange(STEP, device=model.device)[None] % model.config.vocab_size
    model(input_ids=ids, past_key_values=cache, use_cache=True, logits_to_keep=1)
    total = 0
    for index, layer in enumerate(cache.layers):
        if not isinstance(layer, DynamicLayer) or layer.keys is None or layer.values is None:
            continue
        filled = DynamicCache(config=model.config)
        for count in (context - 1, 1):
            keys, values = (state[:, :, :1].expand(-1, -1, count, -1) for state in (layer.keys, layer.values))
            filled.update(keys, values, index)  # (1, H_kv, count, D)
        total += cache_bytes(filled)
    return total / context


@torch.no_grad()
def _greedy(model: PreTrainedModel, ids: Tensor, count: int, drop: str) -> list[int]:
    """Drop one at a time whatever turns the stream least, measured with those before it already gone."""
    wiring, dropped = look(model), []
    while len(dropped) < count:
        found = _turns(model, ids, drop, _without(dropped, drop, wiring), wiring)
        dropped.append(max((i for i in found if i not in dropped), key=found.__getitem__))
    return dropped


def _turns(model: PreTrainedModel, ids: Tensor, drop: str, plan: DepthPlan, wiring: Wiring) -> dict[int, float]:
    """Return by layer the mean cosine of the stream before and after what would be dropped."""
    found: dict[int, list[float]] = {}

    def see(stream: LayerStream) -> None:
        after = stream.after_attention if drop == "attention" else stream.after
        if after is not None:
            found.setdefault(stream.layer, []).append(float(m.mean_cosine(stream.before, after)))

    whole = plan == DepthPlan.identity(plan.layers)
    with nullcontext() if whole else what_if(model, plan, wiring), streams(model, see):
        for sequence in ids:
            model.base_model(input_ids=sequence[None].to(model.device), **no_cache(model))
    return {layer: float(np.mean(values)) for layer, values in found.items()}


def _without(layers: list[int], drop: str, wiring: Wiring) -> DepthPlan:
    return merge_plans(entries("drop", [[i] for i in layers], len(wiring.shapes), None, drop), len(wiring.shapes))
