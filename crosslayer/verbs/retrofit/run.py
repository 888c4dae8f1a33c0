"""A whole retrofit: choose layers, convert, calibrate, measure the damage, and put everything into a report."""

import time
from pathlib import Path

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from crosslayer.core.decoder.weights import to_config
from crosslayer.core.methods import Entry, merge_plans, to_entry
from crosslayer.corpus.windows import Windows
from crosslayer.models.load import load_config, model_facts, public_name, ready_model
from crosslayer.models.origin import origin
from crosslayer.output.progress import Meter, Silent
from crosslayer.probe.intercept import evaluating
from crosslayer.probe.tokens import check_ids
from crosslayer.probe.what_if import find_sublayers
from crosslayer.verbs.needles.lookup import look_up
from crosslayer.verbs.retrofit.cache import CacheShare, allocated
from crosslayer.verbs.retrofit.calibrate import NORMED, inputs
from crosslayer.verbs.retrofit.choose import choose
from crosslayer.verbs.retrofit.convert import Converted, convert
from crosslayer.verbs.retrofit.damage import by_domain, logits_of, logits_without, losses
from crosslayer.verbs.retrofit.moments import REFITS, check_enough
from crosslayer.verbs.retrofit.request import Request, RetrofitOptions, plain_method
from crosslayer.verbs.retrofit.result import (
    Architecture,
    CacheRecord,
    Calibration,
    Domains,
    Needles,
    RetrofitReport,
)
from crosslayer.verbs.retrofit.texts import DomainTexts, Texts
from crosslayer.verbs.retrofit.words import title


def retrofit(
    model: PreTrainedModel | str | Path,
    text: DomainTexts = None,
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
    size: int = 4,
    count: int | None = None,
    threshold: float = 0.5,
    calibration_text: DomainTexts = None,
    windows: int = 96,
    calibration: int = 128,
    length: int = 512,
    needles: bool = True,
    seed: int = 0,
    bos: str = "auto",
    dtype: str | torch.dtype | None = None,
    device: str | torch.device | None = None,
    progress: Meter = Silent,
) -> RetrofitReport:
    """Share or remove layers of a pretrained model, fit what makes up for it, and report memory saved and quality lost.

    Args:
        model: hub name, local folder, or smollm2 (embedded). In Python also a loaded model, which is left as it is.
        text: text to judge on, repeatable: each is a domain, which NAME=FILE names; default all embedded domains. In
            Python also token ids (N, `length`), documents, sources, or these by domain.
        tokenizer: in Python, of a loaded model.
        method: a method (`crosslayer methods` lists them) or a module of your own, whose layers are then chosen; or
            whole, as JSON: {"name": NAME, OPTION: VALUE}.
        layers: groups such as 18-21,22-25 or 18+20,19+21 (0-based), top-half or auto.
        kv_budget: instead of a method: search for this share of the cache.
        kv_context: tokens at which the cache is counted; default 2048, or twice the largest window.
        kl_budget: or search within this KL, in nats a token.
        compensation: what makes up for it: refit (default where layers attend to borrowed states: W_c, and their W_o
            anew), refit-o (their W_o alone), or W_c by layerwise (default elsewhere), ridge (default with merge), zero,
            mean, lstsq or lmmse; or none.
        target: where W_c writes: attention (default where possible), heads or mlp.
        groups: groups of windows with a mean of their own, for compensation mean (v of Theorem 3.1).
        merge: what a group's first layer becomes, as the method knows: first, and more.
        part: what of a layer goes, where the method has a choice: attention, mlp or layer.
        bias: give W_c a bias.
        select: how layers auto chooses: similarity (default where possible), greedy, correlation or distance.
        size: layers of a block of top-half.
        count: layers that follow another, or go, with layers auto.
        threshold: least cosine of the last hidden states to the original's, for select distance.
        calibration_text: text to fit and search on, repeatable; default: text, or embedded books, web and docs.
        windows: windows to measure the damage on; at least 16 a domain.
        calibration: windows to fit to, of all domains.
        length: tokens of a window.
        needles: ask both models for 40 numbers hidden in texts of 256 to 2,048 tokens.
        seed: seed of all that is drawn at random.
        bos: first token: auto (as the tokenizer has it), yes or no.
        dtype: float32, bfloat16, …; default float32 on a CPU. In Python for models that are named.
        device: cpu, cuda, …; default the GPU, or the CPU where there is none. In Python for models that are named.
        progress: in Python, shows what is being done.

    Raises:
        ValueError: options contradict each other, model or wiring is not possible, or there is too little text.

    """
    asked = locals()
    asked["method"] = plain_method(method)
    options = RetrofitOptions(**{name: asked[name] for name in RetrofitOptions.model_fields})
    request, texts = _read(options, model, text, calibration_text, progress)
    loaded, words = ready_model(model, tokenizer, dtype=dtype, device=device, meter=progress)
    with evaluating(loaded):
        return _report(model, loaded, words, request, texts, progress)


def _read(
    options: RetrofitOptions,
    model: PreTrainedModel | str | Path,
    text: DomainTexts,
    calibration_text: DomainTexts,
    progress: Meter,
) -> tuple[Request, Texts]:
    """Open the texts, and refuse what can be refused before the model is loaded."""
    config = to_config(model.config if isinstance(model, PreTrainedModel) else load_config(str(model)))
    request = Request(options, config.has_post_norms)
    with progress("reading the text", 0):
        texts = Texts.load(text, calibration_text, options.seed)
    if request.fit in REFITS and config.has_post_norms:
        raise ValueError(NORMED)
    parts = texts.parts(request)  # says if there are too few windows
    if request.fits:
        sizes = [count for count in parts["calibration"].values() if count]
        check_enough(inputs(config, request.fit), sizes, options.length, request.fit)
    return request, texts


def _report(
    source: PreTrainedModel | str | Path,
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase | None,
    request: Request,
    texts: Texts,
    progress: Meter,
) -> RetrofitReport:
    """Do what was requested on a model that was loaded from a source, or is the source itself."""
    options, started = request.options, time.perf_counter()
    with progress("cutting the text into tokens", 0):
        windows = texts.windows(tokenizer, request)
    for part in windows.values():
        check_ids(model, part.ids)
    calibration = windows["calibration"].by_domain() if request.fits else {}
    fitted = texts.fitted if windows.keys() & {"calibration", "choice", "search"} else ()
    choosing = time.perf_counter()
    methods, choice = choose(model, request, windows, progress)
    converting = time.perf_counter()
    fit = request.fit_of(methods)
    with progress("calibrating", model.config.num_hidden_layers) as bar:
        converted = convert(
            model,
            methods,
            calibration=calibration or None,
            fit=None if fit == "none" else fit,
            groups=options.groups,
            merge=options.merge,
            progress=bar.step,
            share_weights=model is not source,
        )
    judging = time.perf_counter()
    damage = _judge(model, converted, windows["evaluation"], frozenset(fitted), options.seed, progress)
    needles, found = None, look_up(converted.model, tokenizer, options.seed, progress) if options.needles else ()
    if found:
        needles = Needles(original=look_up(model, tokenizer, options.seed, progress), retrofit=found)
    seconds = {
        "read": choosing - started,
        "choose": converting - choosing,
        "convert": judging - converting,  # conversion and calibration
        "damage": time.perf_counter() - judging,  # losses on text, and hidden numbers
    }
    report = RetrofitReport(
        architecture=Architecture(
            **model_facts(model, public_name(source)),
            origin=origin(model),
            retrofit_class=type(converted.model).__name__,
            parameters_after=converted.model.num_parameters(),
        ),
        methods=[to_entry(method) for method in methods],
        title=title(methods),
        plan=merge_plans(methods, model.config.num_hidden_layers),
        choice=choice,
        weights=converted.weights,
        calibration=Calibration(
            fit=converted.fit if converted.fits and converted.fit is not None else request.fit,
            windows={name: len(ids) for name, ids in calibration.items()},
            layers=converted.fits,
        ),
        cache=_cache(model, converted.model, options.kv_context),
        damage=damage,
        needles=needles,
        settings=options,
        judged=list(texts.judging),
        fitted=list(fitted),
        seconds={name: round(seconds, 2) for name, seconds in seconds.items()},
    )
    return report.of_model(converted.model, tokenizer)


def _judge(
    model: PreTrainedModel, converted: Converted, windows: Windows, seen: frozenset[str], seed: int, progress: Meter
) -> Domains:
    """Measure the damage, with what was fitted and, where anything was, without."""
    runs = {"after": logits_of(converted.model)}
    if converted.fits:
        runs["without"] = logits_without(converted.model, converted.refitted)
    with progress("measuring the damage", len(windows)) as bar:
        measured = losses(logits_of(model), runs, windows, bar.step)
    return by_domain(measured["after"], measured.get("without"), seen, seed)


def _cache(model: PreTrainedModel, converted: PreTrainedModel, context: int | None) -> CacheRecord:
    context = CacheShare(find_sublayers(model).shapes, context).context
    before, after = allocated(model, context), allocated(converted, context)
    return CacheRecord(
        context=context, bytes_per_token_before=before, bytes_per_token_after=after, share=after / before
    )
