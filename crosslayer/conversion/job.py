"""A whole retrofit: choose layers, rewire, calibrate, measure the damage, and put everything into a receipt."""

import time
from pathlib import Path

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from crosslayer.conversion.cache import CacheShare, allocated
from crosslayer.conversion.calibrate import NORMED, inputs
from crosslayer.conversion.choose import choose
from crosslayer.conversion.damage import by_domain
from crosslayer.conversion.losses import logits_of, logits_without, losses
from crosslayer.conversion.moments import REFITS, check_enough
from crosslayer.conversion.options import RetrofitOptions, plain_method
from crosslayer.conversion.record import (
    Architecture,
    CacheRecord,
    Calibration,
    Domains,
    Needles,
    Seconds,
    TextsRecord,
    Weights,
)
from crosslayer.conversion.request import Request
from crosslayer.conversion.result import Receipt
from crosslayer.conversion.rewire import Rewired, rewire
from crosslayer.conversion.texts import Text, Texts
from crosslayer.conversion.title import title
from crosslayer.corpus.windows import Windows
from crosslayer.decoder.weights import to_config
from crosslayer.diagnosis.groups import PAPER_SIZE
from crosslayer.environment import environment
from crosslayer.method import Method
from crosslayer.methods import Entry, merge_plans, to_entry
from crosslayer.models.load import Ready, load_config, ready_model
from crosslayer.models.origin import origin
from crosslayer.needles.lookup import look_up
from crosslayer.output.progress import Meter, Silent
from crosslayer.output.record import Environment
from crosslayer.probe.intercept import evaluating
from crosslayer.probe.tokens import check_ids
from crosslayer.probe.what_if import look


def retrofit(
    model: PreTrainedModel | str | Path,
    text: Text = None,
    tokenizer: PreTrainedTokenizerBase | None = None,
    *,
    method: Entry | None = None,
    layers: str = "top-half",
    kv_budget: float | None = None,
    kv_context: int | None = None,
    kl_budget: float | None = None,
    compensation: str | None = None,
    target: str | None = None,
    groups: int = 1,
    merge: str = "first",
    part: str | None = None,
    bias: bool = False,
    select: str | None = None,
    size: int = PAPER_SIZE,
    count: int | None = None,
    threshold: float = 0.5,
    calibration_text: Text = None,
    windows: int = 96,
    calibration: int = 128,
    length: int = 512,
    needles: bool = True,
    seed: int = 0,
    bos: str = "auto",
    dtype: str | torch.dtype | None = None,
    device: str | torch.device | None = None,
    progress: Meter = Silent,
) -> Receipt:
    """Give a pretrained model of a family that converts another wiring, and say what that saves and costs.

    Args:
        model: a model, which is left as it is, or the name of what `load_model` loads.
        text: text to judge on: token ids (N, `length`), documents, sources, or these by domain; None: six domains.
        tokenizer: of a model that is loaded already; not needed for token ids.
        method: a method's name or class, whose layers are then chosen; or a whole method. Or a budget instead.
        layers: groups such as "18-21,22-25" (0-based), "top-half" or "auto".
        kv_budget: search for this share of the cache.
        kv_context: tokens at which the cache is counted.
        kl_budget: search within this KL, in nats a token.
        compensation: how W_c is fitted: none, zero, mean, lstsq, lmmse, ridge, layerwise; refit, refit-o: W_o as well.
        target: where W_c writes.
        groups: v of Theorem 3.1, for compensation "mean".
        merge: what becomes of pretrained weights that a group shares.
        part: what of a layer the method acts on.
        bias: whether W_c has a bias.
        select: how layers="auto" chooses: similarity, greedy, correlation, distance; None: as the method allows.
        size: layers of a block of top-half.
        count: layers that layers="auto" lets follow another, or acts on.
        threshold: the least cosine of the last hidden states to the original's, for select "distance".
        calibration_text: text to fit W_c and the choice of layers to. None: `text`, or three embedded domains.
        windows: windows to judge on, of all domains.
        calibration: windows to fit to, of all domains.
        length: tokens of a window.
        needles: ask both models for numbers hidden in long texts, ten at each of 256, 512, 1,024 and 2,048 tokens.
        seed: of all that is drawn.
        bos: first token of a window: auto, yes or no.
        dtype: of a model that is named.
        device: of a model that is named.
        progress: shows what is being done.

    Raises:
        ValueError: options contradict each other, model or wiring is not possible, or there is too little text.

    """
    asked = locals()
    asked["method"] = plain_method(method)
    options = RetrofitOptions(**{name: asked[name] for name in RetrofitOptions.model_fields})
    request, texts = _read(options, model, text, calibration_text, progress)
    ready = ready_model(model, tokenizer, dtype=dtype, device=device, meter=progress)
    return Job(ready, request, texts, progress).receipt()


def _read(
    options: RetrofitOptions, model: PreTrainedModel | str | Path, text: Text, calibration_text: Text, progress: Meter
) -> tuple[Request, Texts]:
    """Open the texts, and refuse what can be refused before the model is loaded."""
    config = to_config(model.config if isinstance(model, PreTrainedModel) else load_config(str(model)))
    request = Request(options, config.has_post_norms)
    with progress("reading the text", 0):
        texts = Texts.load(text, calibration_text, options.seed)
    if request.fit in REFITS and config.has_post_norms:
        raise ValueError(NORMED)
    width = inputs(config, request.fit)
    parts = texts.parts(request)  # says if there are too few windows
    if request.fits:
        sizes = [count for count in parts["calibration"].values() if count]
        check_enough(width, sizes, request.options.length, request.fit)
    return request, texts


class Job:
    """A request on a model that is ready."""

    def __init__(self, ready: Ready, request: Request, texts: Texts, progress: Meter):
        self.model, self.tokenizer, self.name = ready.model, ready.tokenizer, ready.name
        self.share_weights = ready.loaded_here
        self.request, self.texts, self.progress = request, texts, progress
        self.layers = self.model.config.num_hidden_layers

    def receipt(self) -> Receipt:
        """Do everything."""
        with evaluating(self.model):
            return self._receipt()

    def _receipt(self) -> Receipt:
        started = time.perf_counter()
        windows = self._windows()
        choosing = time.perf_counter()
        methods, choice = choose(self.model, self.request, windows, self.progress)
        rewiring = time.perf_counter()
        rewired = self._rewire(methods, windows)
        judging = time.perf_counter()
        damage = self._judge(rewired, windows["evaluation"])
        needles = self._needles(rewired) if self.request.options.needles else None
        done = time.perf_counter()
        seconds = Seconds(
            choose=rewiring - choosing, rewire=judging - rewiring, damage=done - judging, all=done - started
        )
        receipt = Receipt(
            architecture=self._architecture(rewired),
            methods=[to_entry(method) for method in methods],
            title=title(methods),
            plan=merge_plans(methods, self.layers),
            choice=choice,
            weights=Weights(
                dropped=rewired.dropped, merged=rewired.merged, new=rewired.new, refitted=list(rewired.refitted)
            ),
            calibration=self._calibration(rewired, windows),
            cache=self._cache(rewired.model),
            damage=damage,
            needles=needles,
            options=self.request.options,
            texts=TextsRecord(judged=list(self.texts.judging), fitted=list(self.texts.read(self.request))),
            seconds=seconds,
            environment=Environment(**environment()),
        )
        return receipt.of_model(rewired.model, self.tokenizer)

    def _windows(self) -> dict[str, Windows]:
        """Cut the windows of every purpose."""
        with self.progress("cutting the text into tokens", 0):
            windows = self.texts.windows(self.tokenizer, self.request)
        for part in windows.values():
            check_ids(self.model, part.ids)
        return windows

    def _rewire(self, methods: list[Method], windows: dict[str, Windows]) -> Rewired:
        request, fit = self.request, self.request.fit_of(methods)
        with self.progress("calibrating", self.layers) as bar:
            return rewire(
                self.model,
                methods,
                calibration=windows["calibration"].by_domain() if request.fits else None,
                fit=None if fit == "none" else fit,
                groups=request.options.groups,
                merge=request.options.merge,
                progress=bar.step,
                share_weights=self.share_weights,
            )

    def _judge(self, rewired: Rewired, windows: Windows) -> Domains:
        """Measure the damage, with what was fitted and, where anything was, without."""
        runs = {"after": logits_of(rewired.model)}
        if rewired.fits:
            runs["without"] = logits_without(rewired.model, rewired.refitted)
        with self.progress("measuring the damage", len(windows)) as bar:
            measured = losses(logits_of(self.model), runs, windows, bar.step)
        seen = self.texts.seen(self.request)
        return by_domain(measured["after"], measured.get("without"), seen, self.request.options.seed)

    def _needles(self, rewired: Rewired) -> Needles | None:
        """Ask both models for numbers hidden in long texts."""
        seed = self.request.options.seed
        retrofit = look_up(rewired.model, self.tokenizer, seed, self.progress)
        if not retrofit:
            return None
        return Needles(original=look_up(self.model, self.tokenizer, seed, self.progress), retrofit=retrofit)

    def _architecture(self, rewired: Rewired) -> Architecture:
        return Architecture(
            name=self.name,
            origin=origin(self.model),
            source_class=type(self.model).__name__,
            retrofit_class=type(rewired.model).__name__,
            layers=self.layers,
            parameters_before=sum(parameter.numel() for parameter in self.model.parameters()),
            parameters_after=sum(parameter.numel() for parameter in rewired.model.parameters()),
            dtype=str(self.model.dtype).removeprefix("torch."),
        )

    def _calibration(self, rewired: Rewired, windows: dict[str, Windows]) -> Calibration:
        fit = rewired.fit if rewired.fits and rewired.fit is not None else self.request.fit
        domains = windows["calibration"].by_domain() if self.request.fits else {}
        return Calibration(fit=fit, windows={name: len(ids) for name, ids in domains.items()}, layers=rewired.fits)

    def _cache(self, rewired: PreTrainedModel) -> CacheRecord:
        context = CacheShare(look(self.model).shapes, self.request.options.kv_context).context
        before, after = allocated(self.model, context), allocated(rewired, context)
        return CacheRecord(
            context=context, bytes_per_token_before=before, bytes_per_token_after=after, share=after / before
        )
