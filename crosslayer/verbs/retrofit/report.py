"""Measures a retrofit against its original, and makes its report."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from crosslayer.core.method import Method
from crosslayer.core.methods import to_entry
from crosslayer.corpus.domains import window_ranges
from crosslayer.judge.announce import announce
from crosslayer.judge.candidate import Candidate
from crosslayer.judge.clock import Load
from crosslayer.judge.damage import Losses
from crosslayer.judge.report import Against, Row
from crosslayer.judge.retrieval import DEPTHS, LENGTHS, LONG_LENGTHS, QUICK_LENGTHS, SAMPLES, askable_samples
from crosslayer.judge.rows import window_rows
from crosslayer.models.load import model_facts, origin
from crosslayer.probe.model import positions
from crosslayer.verbs.retrofit.cache import CONTEXT, MEASURED, WINDOWS, cache_record, other_caches, stored_row
from crosslayer.verbs.retrofit.convert import Converted
from crosslayer.verbs.retrofit.original import Original
from crosslayer.verbs.retrofit.page import title
from crosslayer.verbs.retrofit.result import RETROFIT, UNFITTED, Architecture, Calibration, Choice, RetrofitReport
from crosslayer.verbs.retrofit.strategy import Strategy
from crosslayer.verbs.retrofit.texts import RetrofitTexts

STEPS = 18  # timed decoding steps, with the two that warm up
# Tokens before a timed decoding step, at most: both models read them as a prompt.
LONGEST_STEP = 8192


@dataclass(frozen=True)
class Variant:
    """A converted model of a retrofit, or of one combination of a sweep, and how it came about."""

    strategy: Strategy
    methods: list[Method]
    choice: Choice
    converted: Converted


def report_of(original: Original, variants: Mapping[str, Variant], texts: RetrofitTexts) -> RetrofitReport:
    """Measure the converted models, by name, and return the report; of a sweep it has the first variant's facts."""
    first = next(iter(variants.values()))
    strategy, converted = first.strategy, first.converted
    options = strategy.options
    candidates = []
    for name, variant in variants.items():
        candidates.append(Candidate(name if options.sweep else RETROFIT, variant.converted.model))

    with original.seconds.timed("damage"):  # with hidden numbers
        cache = cache_record(original, converted.model, options.kv_context)
        # the same model without the fit: a copy would take the memory of a model
        without = [Candidate(UNFITTED, converted.model, converted.uncompensated)] if converted.fits else []
        rows = damage_rows(original.judge.kl([*candidates, *without], "measuring the damage"), options.seed)
        rows += [stored_row(original, candidate, cache.context) for candidate in candidates]
        samples = []
        if not options.sweep:  # each variant would take minutes of answers
            lengths = hidden_lengths(strategy)
            samples = askable_samples(converted.model, original.tokenizer, lengths, options.seed)
        rows += original.judge.retrieval(candidates, samples)

    step, caches = None, ()
    if options.full and not options.sweep:
        with original.seconds.timed("step"):
            load = Load(min(cache.context, LONGEST_STEP), new_tokens=STEPS)
            step = original.judge.step(candidates[0], load)
        with original.seconds.timed("caches"):
            caches = other_caches(original, converted.model, cache.context, samples)

    # a variant of a sweep may read text that the first one does not
    purposes = {purpose for variant in variants.values() for purpose in variant.strategy.purposes}
    calibrated = {domain: len(ids) for domain, ids in strategy.calibration(original.windows).items()}
    report = RetrofitReport(
        architecture=Architecture(
            **dict(model_facts(original.model, original.name)),
            origin=origin(original.model),
            retrofit_class=type(converted.model).__name__,
            parameters_after=converted.model.num_parameters(),
        ),
        methods=[to_entry(method) for method in first.methods],
        title=title(first.methods),
        plan=converted.plan,
        choice=first.choice,
        weights=converted.weights,
        calibration=Calibration(fit=converted.fit or strategy.fit, windows=calibrated, layers=converted.fits),
        cache=cache,
        rows=tuple(rows),
        step=step,
        caches=caches,
        settings=options.model_copy(update=dict.fromkeys(strategy.idle)),  # a record names what had an effect
        judged=list(texts.evaluation),
        fitted=list(texts.calibration if purposes & {"calibration", "choice", "search"} else ()),
        windows=window_ranges(original.windows),
        seconds=dict(original.seconds),
    )
    return report.holding(converted.model, original.tokenizer, original.dtype)


def damage_rows(losses: Mapping[str, Losses], seed: int) -> list[Row]:
    """Return the damage of the retrofit, or of a sweep's variants, and of the retrofit without the fit."""
    (first, first_losses), *others = losses.items()
    rows = window_rows(first, first_losses, seed)
    for name, other_losses in others:
        rows += window_rows(name, other_losses, seed)
        # the fit's gain is of the retrofit against the model without it, a variant's difference is its own
        if name == UNFITTED:
            rows += window_rows(first, first_losses, seed, other_losses, Against.UNFITTED)
        else:
            rows += window_rows(name, other_losses, seed, first_losses, Against.FIRST)
    return rows


def hidden_lengths(strategy: Strategy) -> Sequence[int]:
    """Return the lengths of texts in which numbers are hidden."""
    if strategy.options.quick:
        return QUICK_LENGTHS
    return LONG_LENGTHS if strategy.options.full and strategy.needs_long_text else LENGTHS


def announce_time(original: Original, strategies: Sequence[Strategy]) -> None:
    """Show about how long the retrofit will take, from one measured forward pass, if it is a minute or more."""
    tokens = {purpose: windows.ids.numel() for purpose, windows in original.windows.items()}
    # the original, each variant, and the first without compensation
    forwarded = (len(strategies) + 1 + strategies[0].fits) * tokens["evaluation"]
    layers = original.model.config.num_hidden_layers
    forwarded += sum(strategy.forwarded(tokens, layers) for strategy in strategies)
    options = strategies[0].options
    if original.tokenizer is not None and not options.sweep:
        # the original and the retrofit answer; with `full` also the original with a quantized cache
        asked = [length for length in hidden_lengths(strategies[0]) if length <= positions(original.model)]
        forwarded += (3 if options.full else 2) * len(DEPTHS) * SAMPLES * sum(asked)
    if options.full and not options.sweep:
        forwarded += 2 * min(options.kv_context or CONTEXT, LONGEST_STEP)
        # quantized caches beside both models as they are
        forwarded += (len(MEASURED) + 2) * min(WINDOWS, len(original.windows["evaluation"])) * options.length
    announce(original.model, original.windows["evaluation"].ids, forwarded)
