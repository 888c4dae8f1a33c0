"""Fits a codec to a model, and measures it: bytes, KL by domain, time."""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import numpy as np
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from crosslayer.cache.running import prefill
from crosslayer.codec.chain import Chain
from crosslayer.codec.codec import Codec
from crosslayer.codec.fit import tokens_needed
from crosslayer.codec.quality import Way, coded, costs_and_sizes, exact, numbers_found, rounded, stored
from crosslayer.codec.states import CodedLayer, read_shapes
from crosslayer.corpus.domains import (
    FIT_ONLY,
    FITTED,
    DomainTexts,
    Texts,
    embedded_domains,
    shared_out,
    split_domains,
)
from crosslayer.corpus.windows import Windows
from crosslayer.extras import check_extra
from crosslayer.judge.announce import announce
from crosslayer.judge.hidden import Sample
from crosslayer.judge.judge import Judge
from crosslayer.judge.report import JudgedModel, Row
from crosslayer.judge.retrieval import DEPTHS, hidden_samples
from crosslayer.judge.rows import bytes_row, retrieval_rows, time_row, window_rows
from crosslayer.judge.tasks.harness import Tasks, read_tasks, task_names
from crosslayer.machine import seconds
from crosslayer.models.load import model_facts, public_name, ready_model
from crosslayer.models.pair import causal_config
from crosslayer.output.progress import progress
from crosslayer.probe.model import check_ids, config_positions, unwrapped
from crosslayer.verbs.fit_codec.fitting import Fitting
from crosslayer.verbs.fit_codec.result import CodecReport, CodecSettings

PROMPT = 640  # tokens of a stored prompt
# For calibration, if the model needs no more. At an eighth, a codec of SmolLM2 has a KL of 0.00066 with them, and of
# 0.00098 with 30.
WINDOWS = 48
# Shares that are measured beside the one that is asked for, in units of it: a fit also serves coarser steps.
SMALLER = (0.5, 0.25)
ROUNDED = {"fp8": "fp8", "int4": "4"}
# About what all takes, in readings of all windows and in decoding steps for a hidden number: 32 for each of six caches,
# the original's, those of three codecs, and two rounded ones.
READ, ANSWERED = 6, 192
# Of each domain that is measured on, beside those that are. They set the step, so that the bytes asked for are met on
# text of that kind, not only on the text that a codec is fitted to.
STEP_WINDOWS = 2


def fit_codec(
    model: PreTrainedModel | str | Path,
    tokenizer: PreTrainedTokenizerBase | None = None,
    *,
    share: float = 0.125,
    kl: float | None = None,
    calibration_text: DomainTexts = None,
    text: DomainTexts = None,
    calibration: int | None = None,
    length: int = 512,
    windows: int = 24,
    prompt: int | None = None,
    continued: int = 128,
    numbers: int = 20,
    tasks: Sequence[str] = (),
    limit: int | None = None,
    repeats: int = 5,
    seed: int = 0,
    bos: str = "auto",
    dtype: str | None = None,
    device: str | None = None,
) -> CodecReport:
    """Fit a codec that compresses a model's KV caches for storage, and measure the cost.

    The model does not change. Fitting needs forward passes only. The result's `codec` encodes and decodes caches;
    `load_codec` loads it from the output folder.

    Args:
        model: hub name, local folder, smollm2, qwen or gemma3. In Python also a loaded model.
        tokenizer: in Python, the tokenizer of a loaded model.
        share: size of a stored prompt of `prompt` tokens, as a share of the 16-bit cache.
        kl: maximum KL in nats per token, instead of `share`.
        calibration_text: text that the codec is fitted to, repeatable: one domain each, named by NAME=FILE; default:
            embedded books, web, docs, python, formulas, reasoning and dialogue. In Python also a dict of documents, or
            of token ids (N, `length`), by domain.
        text: evaluation text, in the same form (token ids have the shape (N, `prompt` + `continued`)); default: the
            other embedded domains.
        calibration: calibration windows; default: 48, or as many as the model needs, whose codec has more matrices.
        length: tokens per calibration window.
        windows: evaluation windows, all domains together.
        prompt: tokens of a stored prompt; default: 640, or as many as the model's sliding windows hold.
        continued: tokens after the stored prompt over which KL is measured.
        numbers: hidden numbers to ask for, in stored texts of `prompt` tokens; a multiple of 5.
        tasks: lm-eval tasks for the codec: each context is stored before its last token is read.
        limit: use only the first N items of each task; default: all.
        repeats: timed runs of prefill, encoding and decoding, alternating.
        seed: random seed.
        bos: begin each window with the BOS token: auto (as the tokenizer does), yes or no.
        dtype: float32, bfloat16, …; default: float32 on a CPU. In Python only if `model` is a name.
        device: cpu, cuda, …; default: the GPU if there is one. In Python only if `model` is a name.

    Raises:
        ValueError: an option is wrong, there is too little text, the model is not a causal LM, or it has shared or
            chosen layers, MLA, or cross-attention.
    """
    source = unwrapped(model)
    check_extra("store", "a codec", "pcodec")
    settings = CodecSettings(
        share=None if kl is not None else share,
        kl=kl,
        calibration=calibration,
        length=length,
        windows=windows,
        prompt=PROMPT if prompt is None else prompt,
        continued=continued,
        numbers=numbers,
        tasks=task_names(tasks),
        limit=limit,
        repeats=repeats,
        seed=seed,
        bos=bos,
    )
    asked = _asked(settings, source, tokenizer)
    texts = CodecTexts.load(calibration_text, text, seed)
    started = time.perf_counter()
    loaded, tokenizer = ready_model(source, tokenizer, dtype=dtype, device=device)
    job = CodecJob.of(loaded, tokenizer, public_name(source), texts, settings, prompt)
    original = job.task_results(asked)  # what is wrong with a task is raised before the fit, which would be lost
    fitting = Fitting(loaded, tokenizer, job.shapes, job.settings.prompt).fit(job.fit.ids, job.step.ids, seed)
    chain = fitting.chain(share) if kl is None else fitting.chain_at(kl, job.step)
    codec = fitting.codec(chain)
    fitted = time.perf_counter() - started
    rows = job.rows(fitting, chain, codec, asked, original)
    return job.report(codec, rows, fitting.per_token, fitted, started)


def _asked(settings: CodecSettings, source: Any, tokenizer: PreTrainedTokenizerBase | None) -> Tasks | None:
    if not settings.tasks:
        return None
    # now, since only a model that is given by name brings its tokenizer
    if tokenizer is None and isinstance(source, PreTrainedModel):
        raise ValueError("a loaded model needs tokenizer=… for `tasks`")
    return read_tasks(settings.tasks)


@dataclass(frozen=True)
class CodecTexts:
    """Documents, or token ids, by domain: those that a codec is fitted to, and those that it is measured on."""

    fitted: dict[str, Any]
    judged: dict[str, Any]

    @classmethod
    def load(cls, calibration_text: DomainTexts, text: DomainTexts, seed: int) -> Self:
        """Read what is given; without text, the embedded domains that the codec is not fitted to."""
        judged = Texts.load(text or None, None, seed)
        if calibration_text:
            calibration = Texts.load(calibration_text, None, seed)
            fitted = {name: calibration.domains[name] for name in calibration.calibration}
        else:
            fitted = dict(embedded_domains((*FITTED, *FIT_ONLY)))
        unseen = {name: judged.domains[name] for name in judged.evaluation if text or name not in fitted}
        if not unseen:
            raise ValueError("`text` must be given: the codec is fitted to all embedded domains")
        return cls(fitted, unseen)

    def windows(
        self, settings: CodecSettings, tokenizer: PreTrainedTokenizerBase | None
    ) -> tuple[Windows, Windows, Windows]:
        """Return the windows to fit the codec to, those to measure it on, and those that set its step."""
        assert settings.calibration is not None
        how: dict[str, Any] = {"tokenizer": tokenizer, "seed": settings.seed, "bos": settings.bos}
        parts = {"fit": shared_out(settings.calibration, tuple(self.fitted))}
        fit = split_domains(self.fitted, parts=parts, length=settings.length, **how)["fit"]
        parts = {
            "windows": shared_out(settings.windows, tuple(self.judged)),
            "step": dict.fromkeys(self.judged, STEP_WINDOWS),
        }
        cut = split_domains(self.judged, parts=parts, length=settings.prompt + settings.continued, **how)
        return fit, cut["windows"], cut["step"]


@dataclass(frozen=True)
class CodecJob:
    """A model, the windows that its codec is fitted to and measured on, and what is asked."""

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase | None
    name: str
    shapes: list[CodedLayer]
    settings: CodecSettings
    fitted_to: tuple[str, ...]
    fit: Windows
    judged: Windows
    step: Windows
    samples: Sequence[Sample]
    judge: Judge  # notes which ways fail on tasks

    @classmethod
    def of(
        cls,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase | None,
        name: str,
        texts: CodecTexts,
        settings: CodecSettings,
        prompt: int | None,
    ) -> Self:
        """Decide what the model leaves open in the settings, cut the windows, and say how long it will take.

        `prompt` are the tokens of a stored prompt that are asked for, None for the default.
        """
        causal_config("fit-codec", model)  # an encoder has no cache
        shapes = read_shapes(model)

        # a sliding layer no longer holds all of a longer prompt
        most = min((shape.window - 1 for shape in shapes if shape.window is not None), default=2**31)
        if prompt is not None and prompt > most:
            raise ValueError(f"`prompt` must be at most {most}, which all layers of the model hold, got {prompt}")
        tokens = min(PROMPT, most) if prompt is None else prompt

        # too few windows: the fit itself would find this out after it has read all of them
        length, windows = settings.length, settings.calibration
        needed = -(-tokens_needed(shapes) // (length - 1))  # the first token of each is not fitted to
        if windows is not None and windows < needed:
            raise ValueError(f"`calibration` must be at least {needed} windows of {length} tokens, got {windows}")
        settings = settings.model_copy(update={"prompt": tokens, "calibration": windows or max(WINDOWS, needed)})

        positions = config_positions(model.config) or 2**31
        if tokens + settings.continued > positions:
            both = tokens + settings.continued
            raise ValueError(f"`prompt` and `continued` must be at most {positions} together, got {both}")

        samples: Sequence[Sample] = []
        with progress("tokenizing the text", 0):
            fit, judged, step = texts.windows(settings, tokenizer)
            if tokenizer is not None:
                by_depth = settings.numbers // len(DEPTHS)
                samples = hidden_samples(tokenizer, [tokens], by_depth, settings.seed)
        check_ids(model, fit.ids)
        announce(model, judged.ids, READ * (fit.ids.numel() + judged.ids.numel()), ANSWERED * len(samples))
        judge = Judge(model, tokenizer=tokenizer)
        return cls(model, tokenizer, name, shapes, settings, tuple(texts.fitted), fit, judged, step, samples, judge)

    def task_results(self, asked: Tasks | None) -> Any:
        """Return what lm-eval returns of the original, None without tasks; what is wrong with a task is raised."""
        if asked is None:
            return None
        strict = Judge(self.model, tokenizer=self.tokenizer, catches=False)
        return strict.task_results(stored("original", exact), asked, self.settings.limit)

    def rows(self, fitting: Fitting, chain: Chain, codec: Codec, asked: Tasks | None, original: Any) -> list[Row]:
        """Measure all ways to store a prompt: bytes, damage, hidden numbers, tasks, and the codec's times.

        The ways are the codec, the same with fewer bytes, and rounded caches; `original` is what `task_results` gave.
        """
        codecs = {"codec": codec}
        for part in SMALLER:
            # from `chain`: that of the codec is on the CPU, the data that it is fitted to on the model's device
            codecs[f"codec × {part:g}"] = fitting.codec(fitting.smaller(chain, part))
        ways: dict[str, Way] = {name: coded(candidate) for name, candidate in codecs.items()}
        if any(shape.window is None for shape in self.shapes):  # only layers without a window are rounded
            ways |= {name: rounded(self.model, bits) for name, bits in ROUNDED.items()}

        rows: list[Row] = []
        costs, sizes = costs_and_sizes(self.model, self.judged, self.settings.prompt, ways)
        for way in ways:
            size = float(np.mean(sizes[way]))
            rows.append(bytes_row("bytes", size, self.settings.prompt * fitting.per_token, candidate=way))
            rows += window_rows(way, costs[way], self.settings.seed)
        if self.tokenizer is not None and self.samples:
            is_found = numbers_found(self.model, self.tokenizer, self.samples, {"original": exact, **ways})
            for way in ways:
                rows += retrieval_rows(way, self.samples, is_found[way], is_found["original"])
        if asked is not None:
            candidates = [stored(name, ways[name]) for name in codecs]
            rows += self.judge.tasks(candidates, asked, self.settings.limit, original)
        prompt = self.judged.ids[:1, : self.settings.prompt].to(self.model.device)
        return [*rows, *_times(self.model, codec, prompt, self.settings.repeats)]

    def report(self, codec: Codec, rows: Sequence[Row], per_token: int, fitted: float, started: float) -> CodecReport:
        """Return the report with the codec; `fitted` are the seconds of the fit, `started` is when all began."""
        ways = dict.fromkeys(row.candidate for row in rows)  # each once, in their order
        report = CodecReport(
            original=JudgedModel(name=self.name, model=model_facts(self.model, self.name)),
            candidates=tuple(
                JudgedModel(name=way, engines=("transformers",), failed=self.judge.failed.get(way)) for way in ways
            ),
            rows=tuple(rows),
            settings=self.settings,
            fitted_to=self.fitted_to,
            parameters=codec.chain.numbers,
            bytes_per_token=per_token,
            fitting=round(fitted, 1),
            seconds=round(time.perf_counter() - started, 1),
        )
        return report.holding(codec)


def _times(model: PreTrainedModel, codec: Codec, ids: Tensor, repeats: int) -> list[Row]:
    """Time prefill, encoding and decoding alternately, after each has run once."""
    cache = prefill(model, ids)
    data = codec.encode(cache, ids)
    work = {
        "prefill": lambda: prefill(model, ids),
        "encoding": lambda: codec.encode(cache, ids),
        "decoding": lambda: codec.decode(data, model.device, model.dtype),
    }
    times: dict[str, list[float]] = {name: [] for name in work}
    with progress("timing", repeats) as bar:
        for repeat in range(-1, repeats):  # the first run of each warms up
            for name, call in work.items():
                taken = seconds(call, model.device)
                if repeat >= 0:
                    times[name].append(taken)
            bar.step(repeat + 1, repeats)
    return [time_row(name, times[name], times["prefill"], candidate="codec") for name in ("encoding", "decoding")]
