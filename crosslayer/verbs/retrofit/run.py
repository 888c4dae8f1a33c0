"""A whole retrofit: choose layers, convert, calibrate, measure the damage, and return a report."""

import inspect
import json
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from crosslayer.core.decoder.configuration import CrossLayerConfig
from crosslayer.core.decoder.convert import to_config
from crosslayer.core.method import Method
from crosslayer.core.methods import Entry, load_methods, method_class, method_names, to_entry
from crosslayer.corpus.domains import DomainTexts, window_ranges
from crosslayer.judge.announce import announce
from crosslayer.judge.candidate import Candidate
from crosslayer.judge.clock import Load
from crosslayer.judge.damage import Losses
from crosslayer.judge.report import Against, Row
from crosslayer.judge.retrieval import DEPTHS, LENGTHS, LONG_LENGTHS, QUICK_LENGTHS, SAMPLES, askable_samples
from crosslayer.judge.rows import window_rows
from crosslayer.models.load import load_config, model_facts, origin, public_name, ready_model, stored_dtype
from crosslayer.output.progress import progress
from crosslayer.probe.model import check_ids, evaluating, positions, unwrapped
from crosslayer.verbs.retrofit.cache import CONTEXT, MEASURED, WINDOWS, cache_record, other_caches, stored_row
from crosslayer.verbs.retrofit.choosers import Choosers
from crosslayer.verbs.retrofit.convert import Converted, convert
from crosslayer.verbs.retrofit.options import ONE_OF, RetrofitOptions
from crosslayer.verbs.retrofit.original import Original
from crosslayer.verbs.retrofit.page import title
from crosslayer.verbs.retrofit.result import RETROFIT, UNFITTED, Architecture, Calibration, RetrofitReport
from crosslayer.verbs.retrofit.search import LayerSearch
from crosslayer.verbs.retrofit.strategy import Chosen, Given, Layers, Named, Strategy
from crosslayer.verbs.retrofit.texts import RetrofitTexts

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
    """Share or remove layers of a pretrained model, compensate for that, and report memory saved and quality lost.

    Args:
        model: Hub name, local folder, smollm2, qwen or gemma3. In Python also a loaded model, which is not changed.
        text: evaluation text, repeatable: one domain each, named by NAME=FILE, or NAME=DATASET,config=…,split=…,
            column=…; default: all embedded domains. In Python also token ids (N, `length`), documents, sources, or a
            dict of these by domain.
        tokenizer: in Python, the tokenizer of a loaded model.
        method: a method (`crosslayer methods` lists them) or your own module, applied to --layers; or a method with
            all its options as JSON: {"name": NAME, OPTION: VALUE}, or a list of these.
        layers: layers to convert (0-based): groups such as 18-21,22-25 or 18+20,19+21; top-half: blocks of 4, or
            top-half,size=3,count=6; auto: chosen by similarity on text, such as auto,count=6; or
            auto:top-half-similarity: only in the upper half. count: how many layers become readers or are dropped.
        kv_budget: instead of --method: search for the methods and layers that keep this share of the KV cache (0 to 1).
        kv_context: context length at which the cache is counted; default: 2048, or twice the largest sliding window.
        kl_budget: instead of --method: search for the smallest cache within this KL to the original, in nats/token.
            With a method whose layers choose tokens: search which layers choose for which, for the fewest reads.
        read_budget: instead of --method: search which layers choose tokens for which, so that a decoding step reads
            this share of the cached bytes (0 to 1). The cache keeps its size.
        compensation: how to compensate for the change. A linear map W_c of each converted layer's input is fitted by
            layerwise (default), ridge, mean or lstsq; zero leaves it at zero. refit (default if layers read another
            layer's states) fits W_c and W_o together, refit-o only W_o; none fits nothing. Settings follow, as in
            layerwise,target=heads. target: where W_c's output is added: attention (default if possible), heads, mlp,
            or heads-from-values (a map of the output of W_v). groups=4, for mean: groups of windows, each with its own
            mean (v of Theorem 3.1).
        part: what to remove, if the method offers a choice: attention, mlp or layer.
        calibration_text: text to fit and search on, repeatable; default: --text, or embedded books, web and docs.
        windows: evaluation windows, all domains together; at least 16 per domain.
        calibration: calibration windows, all domains together.
        length: tokens per window.
        quick: a first estimate in a fraction of the time: the fewest windows, of 128 tokens each, and a shorter search.
        full: also measure quantized caches of both models (float8, 8 and 4 bits), and time a decoding step of both
            after `kv_context` tokens, at most 8,192. If layers choose tokens, also run the needle test at up to
            8,192 tokens.
        seed: random seed.
        bos: begin each window with the BOS token: auto (as the tokenizer does), yes or no.
        dtype: dtype for computing, not for saving; default: float32 on a CPU. In Python only if `model` is a name.
        device: cpu, cuda, …; default: the GPU if there is one. In Python only if `model` is a name.
        sweep: KEY=VALUE,VALUE, repeatable: convert with every combination of values of method, layers or compensation,
            or of their settings size, count, target or groups. Writes a table of the damage, but no
            model.

    Raises:
        ValueError: options contradict each other, the model or the configuration is not supported, or there is too
            little text.
    """
    arguments = locals() | {"method": plain_method(method)}
    options = options_of(**{name: arguments[name] for name in RetrofitOptions.model_fields})
    model = unwrapped(model)
    is_loaded = isinstance(model, PreTrainedModel)
    config = model.config if is_loaded else load_config(str(model))
    decoder = to_config(config)  # raises for a model that cannot be converted
    strategies = {name: strategy_of(each, decoder) for name, each in options.variants().items()}
    for strategy in strategies.values():  # all checks that need neither text nor weights
        strategy.check(strategy.options.changed(DEFAULTS))
    with progress("reading the text", 0):
        texts = RetrofitTexts.load(text, calibration_text, options.seed)
    for strategy in strategies.values():
        strategy.options = texts.checked_options(strategy, DEFAULTS)  # `quick` decides how much text is used
    texts.window_counts(*strategies.values())  # raises for what is wrong with them
    loaded, tokenizer = ready_model(model, tokenizer, dtype=dtype, device=device)
    seconds: dict[str, float] = {}
    with _timed(seconds, "read"), progress("tokenizing the text", 0):
        cut = texts.windows(tokenizer, *strategies.values())
    name, stored = public_name(model), loaded.dtype if is_loaded else stored_dtype(loaded, config)
    original = Original(loaded, cut, tokenizer, name, stored, options.seed, is_loaded)
    for used in cut.values():
        check_ids(loaded, used.ids)
    with evaluating(loaded):
        _announce_time(original, [*strategies.values()])
        return _report(original, strategies, texts, seconds)


DEFAULTS = {name: parameter.default for name, parameter in inspect.signature(retrofit).parameters.items()}


def options_of(**given: Any) -> RetrofitOptions:
    """Return the options of a retrofit; those that are not given are at their default."""
    return RetrofitOptions(**{name: DEFAULTS[name] for name in RetrofitOptions.model_fields} | given)


def strategy_of(options: RetrofitOptions, config: CrossLayerConfig | None = None) -> Strategy:
    """Return how methods and layers are chosen: a budget chooses what the method, or any method, lets it search.

    `config` is the model's, as of a crosslayer decoder; None: not known.
    """
    named = _named(options.method)
    names, spaces = " and ".join(one.name() for one in named), {one.search_space() for one in named}
    if len(named) > 1 and "choosers" in spaces:
        raise ValueError(f"`method` must be one method if layers choose tokens, got {names}")
    has_budget = options.kl_budget is not None or options.read_budget is not None
    if has_budget and ("choosers" in spaces or not named and options.read_budget is not None):
        way: type[Strategy] = Choosers
    elif not named:
        way = LayerSearch
    elif has_budget:
        raise ValueError(ONE_OF)
    elif options.kv_budget is not None:
        raise ValueError(f"`kv_budget` chooses methods and layers itself; remove it, or `method` {names}")
    else:
        way = Layers if isinstance(named[0], type) else Given
    return way(options, named, config)


def plain_method(method: Entry | Sequence[Entry] | None) -> str | dict[str, Any] | list[dict[str, Any]] | None:
    """Return a method, or several, as plain data, as options hold it; of a class its name."""
    if isinstance(method, Sequence) and not isinstance(method, str):
        return [to_entry(one) for one in load_methods(method)]
    if isinstance(method, type):
        return method.name()
    if isinstance(method, Method):
        return to_entry(method)
    return dict(method) if isinstance(method, Mapping) else method


def _named(value: str | dict[str, Any] | list[dict[str, Any]] | None) -> list[Named]:
    """Return whole methods, or the class of a method whose layers are to be chosen."""
    if value is None:
        return []
    if not isinstance(value, str):
        return [*load_methods(value)]
    if value.lstrip().startswith(("{", "[")):
        try:
            return [*load_methods(json.loads(value))]
        except (json.JSONDecodeError, RecursionError) as error:
            raise ValueError(
                f"`method` must be a name, a JSON object or a list, got {value[:80]!r} ({error})"
            ) from None
    cls = method_class(value)
    if cls.takes_groups():
        return [cls]
    if value in method_names():  # a user's own may adapt weights in `inherit`
        known = [name for name in method_names() if method_class(name).takes_groups()]
        names = f"{', '.join(known)}, or options as JSON"
        raise ValueError(f"`method` must be one of {names}, got {value!r}; crosslayer train has the others")
    return [*load_methods(value)]


def _report(
    original: Original, strategies: Mapping[str, Strategy], texts: RetrofitTexts, seconds: dict[str, float]
) -> RetrofitReport:
    """Retrofit a model and measure it; of a sweep the first variant. `seconds` is by phase."""
    made = {name: _converted(original, each, seconds) for name, each in strategies.items()}
    windows = window_ranges(original.windows)
    strategy = next(iter(strategies.values()))
    (methods, choice), converted = next(iter(made.values()))
    options, model = strategy.options, converted.model
    purposes = {purpose for each in strategies.values() for purpose in each.purposes}
    seen = texts.calibration if purposes & {"calibration", "choice", "search"} else ()
    with _timed(seconds, "damage"):  # with hidden numbers
        cache = cache_record(original, model, options.kv_context)
        names = {name if options.sweep else RETROFIT: one.model for name, (_, one) in made.items()}
        candidates = [Candidate(name, one) for name, one in names.items()]
        without = [Candidate(UNFITTED, model, converted.uncompensated)] if converted.fits else []
        found = original.judge.kl([*candidates, *without], "measuring the damage")
        rows = damage_rows(found, options.seed)
        rows += [stored_row(original, one, cache.context) for one in candidates]
        samples = [] if options.sweep else askable_samples(model, original.tokenizer, _lengths(strategy), options.seed)
        rows += original.judge.retrieval(candidates, samples)
    step, caches, context = None, (), cache.context
    if options.full and not options.sweep:
        with _timed(seconds, "step"):
            step = original.judge.step(candidates[0], Load(min(context, LONGEST_STEP), new_tokens=STEPS))
        with _timed(seconds, "caches"):
            caches = other_caches(original, model, context, samples)
    calibrated = {name: len(ids) for name, ids in strategy.calibration(original.windows).items()}
    report = RetrofitReport(
        architecture=Architecture(
            **dict(model_facts(original.model, original.name)),
            origin=origin(original.model),
            retrofit_class=type(model).__name__,
            parameters_after=model.num_parameters(),
        ),
        methods=[to_entry(method) for method in methods],
        title=title(methods),
        plan=converted.plan,
        choice=choice,
        weights=converted.weights,
        calibration=Calibration(fit=converted.fit or strategy.fit, windows=calibrated, layers=converted.fits),
        cache=cache,
        rows=tuple(rows),
        step=step,
        caches=caches,
        settings=options.model_copy(update=dict.fromkeys(strategy.idle)),  # a record names what had an effect
        judged=list(texts.evaluation),
        fitted=list(seen),
        windows=windows,
        seconds=seconds,
    )
    report._model = model
    report._tokenizer = original.tokenizer
    report._dtype = original.dtype
    return report


def damage_rows(found: Mapping[str, Losses], seed: int) -> list[Row]:
    """Return the damage of the retrofit, or of a sweep's variants, and of the retrofit without the fit."""
    (first, own), *others = found.items()
    rows = window_rows(first, own, seed)
    for name, losses in others:
        rows += window_rows(name, losses, seed)
        if name == UNFITTED:
            rows += window_rows(first, own, seed, losses, Against.UNFITTED)
        else:
            rows += window_rows(name, losses, seed, own, Against.FIRST)
    return rows


def _converted(original: Original, strategy: Strategy, seconds: dict[str, float]) -> tuple[Chosen, Converted]:
    """Choose layers, convert and fit; the weights are rounded to the dtype in which they will be saved."""
    with _timed(seconds, "choose"):
        chosen = strategy.choose(original)
    with _timed(seconds, "convert"):
        converted = convert(
            original.model,
            chosen.methods,
            calibration=strategy.calibration(original.windows) or None,
            fit=strategy.fit_of(chosen.methods),
            groups=strategy.asked.groups,
            share_weights=not original.is_kept or bool(strategy.options.sweep),
        )
        for weight in converted.model.parameters():
            rounded = weight.data.to(original.dtype).to(weight.dtype)
            if not torch.equal(rounded, weight.data):  # others may share memory with the original
                weight.data = rounded
    return chosen, converted


def _announce_time(original: Original, strategies: Sequence[Strategy]) -> None:
    """Show about how long the retrofit will take, from one measured forward pass, if it is a minute or more."""
    tokens = {purpose: cut.ids.numel() for purpose, cut in original.windows.items()}
    # the original, each variant, and the first without compensation
    forwarded = (len(strategies) + 1 + strategies[0].fits) * tokens["evaluation"]
    forwarded += sum(strategy.forwarded(tokens, original.layers) for strategy in strategies)
    options = strategies[0].options
    if original.tokenizer is not None and not options.sweep:
        asked = [length for length in _lengths(strategies[0]) if length <= positions(original.model)]
        forwarded += (3 if options.full else 2) * len(DEPTHS) * SAMPLES * sum(asked)
    if options.full and not options.sweep:
        forwarded += 2 * min(options.kv_context or CONTEXT, LONGEST_STEP)
        forwarded += (len(MEASURED) + 2) * min(WINDOWS, len(original.windows["evaluation"])) * options.length
    announce(original.model, original.windows["evaluation"].ids, forwarded)


@contextmanager
def _timed(seconds: dict[str, float], phase: str) -> Iterator[None]:
    """Add what the block takes to the seconds of a phase."""
    started = time.perf_counter()
    yield
    seconds[phase] = round(seconds.get(phase, 0.0) + time.perf_counter() - started, 2)


def _lengths(strategy: Strategy) -> Sequence[int]:
    """Return the lengths at which hidden numbers are asked for."""
    if strategy.options.quick:
        return QUICK_LENGTHS
    return LONG_LENGTHS if strategy.options.full and strategy.needs_long_text else LENGTHS
