"""A whole retrofit: choose layers, convert, calibrate, measure the damage, and return a report."""

import inspect
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from crosslayer.core.decoder.weights import to_config
from crosslayer.core.methods import Entry, merge_plans, to_entry
from crosslayer.corpus.domains import window_ranges
from crosslayer.corpus.windows import Windows
from crosslayer.judge.clock import random_ids, steps_in_turns
from crosslayer.judge.damage import by_domain
from crosslayer.judge.losses import logits_of, logits_uncompensated, losses
from crosslayer.judge.memory import Load, too_large
from crosslayer.judge.retrieval import LENGTHS, LONG_LENGTHS, QUICK_LENGTHS, measure_retrieval, prompt_tokens
from crosslayer.judge.texts import DomainTexts
from crosslayer.models.load import load_config, model_facts, public_name, ready_model
from crosslayer.models.origin import origin
from crosslayer.models.stored import round_to_stored
from crosslayer.output.progress import progress
from crosslayer.probe.intercept import evaluating, layer_stack, no_cache
from crosslayer.probe.tokens import check_ids, positions
from crosslayer.stats.times import StepTime
from crosslayer.verbs.retrofit import alternatives as beside
from crosslayer.verbs.retrofit.cache import CONTEXT, cache_record
from crosslayer.verbs.retrofit.convert import Converted, convert
from crosslayer.verbs.retrofit.options import RetrofitOptions
from crosslayer.verbs.retrofit.result import (
    Architecture,
    Calibration,
    Needles,
    RetrofitReport,
)
from crosslayer.verbs.retrofit.sentences import title
from crosslayer.verbs.retrofit.strategies import plain_method, strategy_of
from crosslayer.verbs.retrofit.strategy import Chosen, Strategy
from crosslayer.verbs.retrofit.texts import RetrofitTexts
from crosslayer.wiring.read import model_plan

ASKED = 1.1  # about how many passes a prompt with its answer takes
STEPS = 18  # timed decoding steps, with the two that warm up
LONGEST_STEP = 8192  # tokens before a timed decoding step, at most: both models read them as a prompt


def retrofit(
    model: PreTrainedModel | str | Path,
    text: DomainTexts = None,
    tokenizer: PreTrainedTokenizerBase | None = None,
    *,
    method: Entry | Sequence[Entry] | None = None,
    layers: str = "top-half",
    kv_budget: float | None = None,
    kv_context: int | None = None,
    kl_budget: float | None = None,
    read_budget: float | None = None,
    compensation: str | None = None,
    part: str | None = None,
    calibration_text: DomainTexts = None,
    windows: int = 96,
    calibration: int = 128,
    length: int = 512,
    quick: bool = False,
    full: bool = False,
    seed: int = 0,
    bos: str = "auto",
    dtype: str | torch.dtype | None = None,
    device: str | torch.device | None = None,
    sweep: Sequence[str] = (),
) -> RetrofitReport:
    """Share or remove layers of a pretrained model, compensate for it, and report memory saved and quality lost.

    Args:
        model: Hub name, local folder, smollm2 or qwen. In Python also a loaded model, which is not changed.
        text: evaluation text, repeatable: one domain each, named by NAME=FILE, or NAME=DATASET,config=…,split=…,
            column=…; default all embedded domains. In Python also token ids (N, `length`), documents, sources, or a
            dict of these by domain.
        tokenizer: in Python, the tokenizer of a loaded model.
        method: a method (`crosslayer methods` lists them) or a module of your own, on the layers of --layers; or a
            method with all its options as JSON: {"name": NAME, OPTION: VALUE}, or a list of these.
        layers: layers to convert (0-based): groups such as 18-21,22-25 or 18+20,19+21; top-half: blocks of 4, or
            top-half,size=3,count=6; or auto: chosen on text, such as auto:greedy,count=6, by similarity (default where
            possible), top-half-similarity (in the upper half only), greedy or distance (threshold=0.5: the least cosine
            of the last hidden states to the original's). count: how many layers become readers, or are dropped.
        kv_budget: instead of --method: search for the methods and layers that keep this share of the KV cache (0 to 1).
        kv_context: context length at which the cache is counted; default 2048, or twice the largest sliding window.
        kl_budget: instead of --method: search within this KL to the original, in nats/token; with a method whose
            layers choose tokens: who chooses for whom, with the fewest reads.
        read_budget: instead of --method: search which layers choose the tokens that others attend to, so that a
            decoding step reads this share of the cached bytes (0 to 1). The cache keeps its size.
        compensation: how to compensate for the change, by a linear map W_c of each converted layer's input: layerwise
            (default), ridge, zero, mean, lstsq or lmmse; refit (default where layers attend to
            another layer's states) fits W_c together with W_o, refit-o W_o alone; or none. Settings follow, such as
            layerwise,target=heads,bias: target, where the output of W_c is added (attention, the default where
            possible, heads, mlp, or heads-from-values, of the output of W_v), bias, and for mean groups=4, groups of
            windows with a mean each (v of Theorem 3.1).
        part: what to remove, where the method has a choice: attention, mlp or layer.
        calibration_text: text to fit and search on, repeatable; default --text, or embedded books, web and docs.
        windows: evaluation windows, all domains together; at least 16 per domain.
        calibration: calibration windows, all domains together.
        length: tokens per window.
        quick: a first estimate in a fraction of the time: the least windows, of 128 tokens, and a shorter search.
        full: also measure what quantized caches of both models cost instead (float8, 8 and 4 bits), time a decoding
            step of both after `kv_context` tokens, at most 8,192, and where tokens are chosen hide numbers in up to
            8,192 tokens.
        seed: random seed.
        bos: begin each window with the BOS token: auto (as the tokenizer does), yes or no.
        dtype: dtype to compute in, not to save in; default float32 on a CPU. In Python only if `model` is a name.
        device: cpu, cuda, …; default the GPU if there is one. In Python only if `model` is a name.
        sweep: KEY=VALUE,VALUE, repeatable: convert by every combination of values of method, layers or compensation,
            or of their settings size, count, threshold, target or groups, and write a table of their damage, but no
            model.

    Raises:
        ValueError: options contradict each other, the model or the configuration is not supported, or there is too
            little text.

    """
    arguments = locals() | {"method": plain_method(method)}
    options = options_of(**{name: arguments[name] for name in RetrofitOptions.model_fields})
    strategies, texts = _open_texts(options, model, text, calibration_text)
    loaded, tokenizer = ready_model(model, tokenizer, dtype=dtype, device=device)
    with evaluating(loaded):
        return _report(model, loaded, tokenizer, strategies, texts)


DEFAULTS = {name: parameter.default for name, parameter in inspect.signature(retrofit).parameters.items()}


def options_of(**given: Any) -> RetrofitOptions:
    """Return the options of a retrofit; those that are not given are at their default."""
    return RetrofitOptions(**{name: DEFAULTS[name] for name in RetrofitOptions.model_fields} | given)


def _open_texts(
    options: RetrofitOptions,
    model: PreTrainedModel | str | Path,
    text: DomainTexts,
    calibration_text: DomainTexts,
) -> tuple[dict[str, Strategy], RetrofitTexts]:
    """Open the texts and check all that can be checked before the model is loaded, for each variant of a sweep."""
    source = model.config if isinstance(model, PreTrainedModel) else load_config(str(model))
    config = to_config(source)
    strategies = {name: strategy_of(each, config) for name, each in options.variants().items()}
    for strategy in strategies.values():
        strategy.check(source, strategy.options.changed(DEFAULTS))
    with progress("reading the text", 0):
        texts = RetrofitTexts.load(text, calibration_text, options.seed)
    for strategy in strategies.values():
        strategy.options = texts.checked_options(strategy, source, DEFAULTS)
    texts.window_counts(*strategies.values())  # raises for what is wrong with them
    return strategies, texts


def _report(
    source: PreTrainedModel | str | Path,
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase | None,
    strategies: Mapping[str, Strategy],
    texts: RetrofitTexts,
) -> RetrofitReport:
    """Retrofit a model, which was loaded from `source` or is `source` itself; of a sweep the first variant."""
    strategy, starts = next(iter(strategies.values())), {"read": time.perf_counter()}  # of phases
    options = strategy.options
    with progress("tokenizing the text", 0):
        windows = texts.windows(tokenizer, *strategies.values())
    for cut in windows.values():
        check_ids(model, cut.ids)
    _announce_time(model, tokenizer, [*strategies.values()], windows)
    calibration = strategy.calibration(windows)
    seen = texts.calibration if windows.keys() & {"calibration", "choice", "search"} else ()

    starts["choose"] = time.perf_counter()
    made = [_converted(source, model, each, windows, starts) for each in strategies.values()]
    (methods, choice), converted, stored = made[0]

    starts["damage"], evaluation, seed = time.perf_counter(), windows["evaluation"], options.seed  # with hidden numbers
    compared = [beside.Compared(name, one.model) for name, (_, one, _) in zip(strategies, made, strict=True)]
    runs = {str(number): logits_of(one.model) for number, one in enumerate(compared)}
    if converted.fits:
        runs["without"] = logits_uncompensated(converted.model, converted.refitted)
    measured = losses(logits_of(model), runs, evaluation)
    without = measured.pop("without", None)
    damage = by_domain(measured["0"], without, frozenset(seen), seed)
    needles = None if options.sweep else _needles(model, converted.model, tokenizer, strategy)
    cache = cache_record(model, converted.model, options.kv_context)
    starts["step"] = time.perf_counter()
    step = _step(model, converted.model, cache.context) if options.full else None
    starts["alternatives"] = time.perf_counter()
    judged, alternatives = beside.Judged(evaluation, cache.context, tokenizer if needles else None, seed), ()
    if options.sweep:
        alternatives = beside.rows_of(model, compared, [*measured.values()], judged)
    elif options.full:
        alternatives = beside.measure_alternatives(model, converted.model, judged)

    report = RetrofitReport(
        architecture=Architecture(
            **model_facts(model, public_name(source)),
            origin=origin(model),
            retrofit_class=type(converted.model).__name__,
            parameters_after=converted.model.num_parameters(),
        ),
        methods=[to_entry(method) for method in methods],
        title=title(methods),
        plan=model_plan(converted.model).plan if strategy.wired else merge_plans(methods, len(layer_stack(model))),
        choice=choice,
        weights=converted.weights,
        calibration=_calibration(converted, strategy, calibration),
        cache=cache,
        damage=damage,
        step=step,
        needles=needles,
        alternatives=alternatives,
        settings=options,
        judged=list(texts.evaluation),
        fitted=list(seen),
        windows=window_ranges(windows),
        seconds=_seconds(starts),
    )
    return report.of_model(converted.model, tokenizer, stored)


def _converted(
    source: PreTrainedModel | str | Path,
    model: PreTrainedModel,
    strategy: Strategy,
    windows: Mapping[str, Windows],
    starts: dict[str, float],
) -> tuple[Chosen, Converted, torch.dtype]:
    """Choose layers, convert and fit; the weights are rounded to the dtype in which they will be saved."""
    chosen = strategy.choose(model, windows)
    starts["convert"] = time.perf_counter()
    converted = convert(
        model,
        chosen.methods,
        calibration=strategy.calibration(windows) or None,
        fit=strategy.fit_of(chosen.methods),
        groups=strategy.asked.groups,
        share_weights=model is not source or bool(strategy.options.sweep),
    )
    return chosen, converted, round_to_stored(converted.model, model, source)


def _seconds(starts: Mapping[str, float]) -> dict[str, float]:
    """Return how long each phase took, the last until now."""
    times = [*starts.values(), time.perf_counter()]
    return {phase: round(end - start, 2) for phase, (start, end) in zip(starts, pairwise(times), strict=True)}


def _announce_time(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase | None,
    strategies: Sequence[Strategy],
    windows: Mapping[str, Windows],
) -> None:
    """Show about how long the retrofit will take, from one measured forward pass, if it is a minute or more."""
    window = windows["evaluation"].ids[:1].to(model.device)
    passes = []
    with torch.no_grad():
        for _ in range(3):  # the first warms up
            before = time.perf_counter()
            model(input_ids=window, **no_cache(model))
            passes.append(time.perf_counter() - before)
    tokens = {purpose: cut.ids.numel() for purpose, cut in windows.items()}
    first, options = strategies[0], strategies[0].options
    # the original, each variant, and the first without compensation
    forwarded = (len(strategies) + 1 + first.fits) * tokens["evaluation"]
    forwarded += sum(strategy.forwarded(tokens, model.config.num_hidden_layers) for strategy in strategies)
    if tokenizer is not None and not options.sweep:
        asked = [length for length in _lengths(first) or LENGTHS if length <= positions(model)]
        forwarded += ASKED * (3 if options.full else 2) * prompt_tokens(asked)
    if options.full:
        forwarded += 2 * min(options.kv_context or CONTEXT, LONGEST_STEP)
        forwarded += (len(beside.MEASURED) + 2) * min(beside.WINDOWS, len(windows["evaluation"])) * options.length
    seconds = min(passes) / window.numel() * forwarded
    if seconds >= 60:
        with progress(f"this will take about {round(seconds / 60)} min", 0):
            pass


def _lengths(strategy: Strategy) -> Sequence[int] | None:
    """Return the lengths at which hidden numbers are asked for; None: the usual ones."""
    if strategy.options.quick:
        return QUICK_LENGTHS
    return LONG_LENGTHS if strategy.options.full and strategy.needs_long_text else None


def _needles(
    model: PreTrainedModel,
    converted: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase | None,
    strategy: Strategy,
) -> Needles | None:
    """Ask both models for hidden numbers; None if they cannot be asked."""
    seed, lengths = strategy.options.seed, _lengths(strategy)
    retrieved = measure_retrieval(converted, tokenizer, seed, lengths=lengths)
    if not retrieved:
        return None
    return Needles(original=measure_retrieval(model, tokenizer, seed, lengths=lengths), retrofit=retrieved)


def _step(model: PreTrainedModel, converted: PreTrainedModel, context: int) -> StepTime | None:
    """Time a decoding step; None if a model has too few positions, or there is too little memory."""
    load = Load(min(context, LONGEST_STEP), new_tokens=STEPS)
    if load.context > min(map(positions, (model, converted))) or too_large([converted, model], load) is not None:
        return None
    with progress("timing a decoding step", 0), suppress(torch.OutOfMemoryError):
        time = steps_in_turns([converted, model], load, random_ids([converted, model], load))
        return StepTime(context=load.context, batch=load.batch, time=time)
    return None


def _calibration(converted: Converted, strategy: Strategy, windows: Mapping[str, Tensor]) -> Calibration:
    """Return how weights were fitted, on windows (N, T) by domain."""
    fit = converted.fit if converted.fits and converted.fit is not None else strategy.fit
    return Calibration(fit=fit, windows={name: len(ids) for name, ids in windows.items()}, layers=converted.fits)
