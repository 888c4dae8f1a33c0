"""Fits a codec to a model, and measures it: bytes, KL by domain, time."""

import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from crosslayer.cache.running import prefill
from crosslayer.codec.chain import BLOCK, Chain
from crosslayer.codec.codec import Codec
from crosslayer.codec.fingerprint import model_print, tokenizer_print
from crosslayer.codec.fit import BASIS, Calibration, calibrate, fit_chain_at, tokens_needed, weighed, with_rate
from crosslayer.codec.format import HASH, HEAD
from crosslayer.codec.judge import Way, coded, exact, judge, numbers_found, rounded, stored
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
from crosslayer.judge.tasks.harness import read_tasks, task_names
from crosslayer.machine import seconds
from crosslayer.models.load import model_facts, public_name, ready_model
from crosslayer.output.progress import progress
from crosslayer.probe.model import check_ids, config_positions, unwrapped
from crosslayer.verbs.fit_codec.result import CodecReport, CodecSettings

PROMPT = 640  # tokens of a stored prompt
WINDOWS = 48  # for calibration, if the model needs no more
OTHERS = (0.5, 0.25)  # shares that are measured beside the one that is asked for, in units of it
ROUNDED = {"fp8": "fp8", "int4": "4"}
READ, ANSWERED = 6, 192  # about what all takes, in readings of all windows and in decoding steps for a hidden number
STEP_WINDOWS = 2  # of each domain that is measured on, beside those that are: they set the step
TRIES, CLOSE = 5, 0.1  # of a search for a KL
SLOPE = 2.5  # of the logarithm of KL over that of the bytes
LEAST = 0.1  # of the codes' bytes, of what is measured beside
CLASSES = 30  # of channels, as a rule: each takes four bytes in the header of a block


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
        ValueError: an option is wrong, there is too little text, or the model has shared or chosen layers, MLA, or
            cross-attention.
    """
    model = unwrapped(model)
    check_extra("store", "a codec", "pcodec")
    cut = {"calibration": calibration, "length": length, "windows": windows, "continued": continued}
    more = {"numbers": numbers, "tasks": task_names(tasks), "limit": limit, "repeats": repeats}
    sizes = {"share": None if kl is not None else share, "kl": kl, "prompt": PROMPT if prompt is None else prompt}
    settings = CodecSettings(**sizes, **cut, **more, seed=seed, bos=bos)  # type: ignore[arg-type]
    if tasks and tokenizer is None and isinstance(model, PreTrainedModel):
        raise ValueError("a loaded model needs tokenizer=… for `tasks`")
    asked = read_tasks(settings.tasks) if tasks else None
    own, others = _domains(calibration_text, text, seed)
    started = time.perf_counter()
    loaded, tokenizer = ready_model(model, tokenizer, dtype=dtype, device=device)
    shapes = read_shapes(loaded)
    prompt, windows_needed = _stored_tokens(shapes, prompt), _calibration(shapes, length, calibration)
    settings = settings.model_copy(update={"prompt": prompt, "calibration": windows_needed})
    if prompt + continued > (most := config_positions(loaded.config) or 2**31):
        raise ValueError(f"`prompt` and `continued` must be at most {most} together, got {prompt + continued}")
    with progress("tokenizing the text", 0):
        fit, judged, step = _windows(own, others, settings, tokenizer)
        samples = [] if tokenizer is None else hidden_samples(tokenizer, [prompt], numbers // len(DEPTHS), seed)
    check_ids(loaded, fit.ids)
    announce(loaded, judged.ids, READ * (fit.ids.numel() + judged.ids.numel()), ANSWERED * len(samples))
    exactly = None
    if asked is not None:  # what is wrong with a task is raised before the fit, which would be lost
        strict = Judge(loaded, tokenizer=tokenizer, catches=False)
        exactly = strict.task_results(stored("original", exact), asked, limit)
    data = calibrate(loaded, shapes, fit.ids, step.ids[:, :prompt], seed)
    fitting = Fitting(loaded, tokenizer, data, fit.ids, prompt)
    chain = fitting.chain(settings.share or BASIS)
    if kl is not None:
        chain = fitting.chain_at(kl, chain, step)
    codec, took = fitting.codec(chain), time.perf_counter() - started
    smaller = {f"codec × {part:g}": fitting.codec(fitting.smaller(chain, part)) for part in OTHERS}
    ways = {name: coded(one) for name, one in {"codec": codec, **smaller}.items()}
    if any(shape.window is None for shape in shapes):  # only layers without a window are rounded
        ways |= {name: rounded(loaded, bits) for name, bits in ROUNDED.items()}
    rows = fitting.rows(ways, judged, samples, seed)
    scorer = Judge(loaded, tokenizer=tokenizer)
    if asked is not None:
        rows += scorer.tasks([stored(name, ways[name]) for name in ("codec", *smaller)], asked, limit, exactly)
    name = public_name(model)
    report = CodecReport(
        original=JudgedModel(name=name, model=model_facts(loaded, name)),
        candidates=tuple(
            JudgedModel(name=way, engines=("transformers",), failed=scorer.failed.get(way)) for way in ways
        ),
        rows=(*rows, *_times(loaded, codec, judged.ids[:1, :prompt].to(loaded.device), repeats)),
        settings=settings,
        fitted_to=tuple(own),
        parameters=chain.numbers,
        bytes_per_token=fitting.per_token,
        fitting=round(took, 1),
        seconds=round(time.perf_counter() - started, 1),
    )
    report._codec = codec
    return report


def _stored_tokens(shapes: Sequence[CodedLayer], prompt: int | None) -> int:
    """Return the tokens of a stored prompt, which all layers must hold."""
    most = min((shape.window - 1 for shape in shapes if shape.window is not None), default=2**31)
    if prompt is not None and prompt > most:
        raise ValueError(f"`prompt` must be at most {most}, which all layers of the model hold, got {prompt}")
    return min(PROMPT, most) if prompt is None else prompt


def _calibration(shapes: Sequence[CodedLayer], length: int, windows: int | None) -> int:
    """Return how many calibration windows to take: as given, else enough; the first token of each is not fitted to.

    Raises:
        ValueError: too few are given, which the fit itself would find out after it has read all of them.
    """
    needed = -(-tokens_needed(shapes) // (length - 1))
    if windows is not None and windows < needed:
        raise ValueError(f"`calibration` must be at least {needed} windows of {length} tokens, got {windows}")
    return windows or max(WINDOWS, needed)


def _domains(calibration_text: DomainTexts, text: DomainTexts, seed: int) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the documents to fit the codec to, and those to measure it on, by domain."""
    judged = Texts.load(text or None, None, seed)
    if calibration_text:
        fitted = Texts.load(calibration_text, None, seed)
        own = {name: fitted.domains[name] for name in fitted.calibration}
    else:
        own = dict(embedded_domains((*FITTED, *FIT_ONLY)))
    others = {name: judged.domains[name] for name in judged.evaluation if text or name not in own}
    if not others:
        raise ValueError("`text` must be given: the codec is fitted to all embedded domains")
    return own, others


def _windows(
    fitted: dict[str, Any], judged: dict[str, Any], settings: CodecSettings, tokenizer: PreTrainedTokenizerBase | None
) -> tuple[Windows, Windows, Windows]:
    """Return the windows to fit the codec to, those to measure it on, and those that set its step."""
    assert settings.calibration is not None
    how: dict[str, Any] = {"tokenizer": tokenizer, "seed": settings.seed, "bos": settings.bos}
    fit = {"fit": shared_out(settings.calibration, tuple(fitted))}
    parts = {"windows": shared_out(settings.windows, tuple(judged)), "step": dict.fromkeys(judged, STEP_WINDOWS)}
    cut = split_domains(judged, parts=parts, length=settings.prompt + settings.continued, **how)
    return split_domains(fitted, parts=fit, length=settings.length, **how)["fit"], cut["windows"], cut["step"]


class Fitting:
    """What all codecs of a model share: what calibration gave, and how many bytes of a token no step changes."""

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase | None,
        data: Calibration,
        ids: Tensor,
        prompt: int,
    ):
        self.model, self.tokenizer, self.prompt, shapes = model, tokenizer, prompt, data.shapes
        self.prints = model_print(model), None if tokenizer is None else tokenizer_print(tokenizer)
        self.per_token = 2 * sum(shape.width for shape in shapes)
        # a byte for the step, four for the token, a share of the first token, and of the header
        header = HEAD.size + 2 * len(shapes) + 4 * CLASSES + HASH
        self.fixed = 1 + 4 + self.per_token / prompt + header / BLOCK
        self.data = weighed(data, model, ids, BASIS * self.per_token - self.fixed)

    def codec(self, chain: Chain) -> Codec:
        """Return the codec of a chain."""
        return Codec(chain, *self.prints)

    def chain(self, share: float, base: Chain | None = None) -> Chain:
        """Return a chain for a share of the 16-bit cache, from one that was fitted for more bytes if there is one."""
        if base is None or share > BASIS:
            base = fit_chain_at(self.data, max(share, BASIS) * self.per_token - self.fixed)
        return with_rate(base, self.data, share * self.per_token - self.fixed)

    def smaller(self, chain: Chain, part: float) -> Chain:
        """Return a chain for a part of another's bytes."""
        rate = chain.bytes_per_token(*self.data.held_out)
        return with_rate(chain, self.data, max(part * (rate + self.fixed) - self.fixed, LEAST * rate))

    def rows(self, ways: Mapping[str, Way], windows: Windows, samples: Sequence[Sample], seed: int) -> list[Row]:
        """Return the bytes and the damage of each way to store a prompt, and the hidden numbers that it leaves."""
        rows = []
        costs, sizes = judge(self.model, windows, self.prompt, ways)
        for way in ways:
            rows.append(bytes_row("bytes", float(np.mean(sizes[way])), self.prompt * self.per_token, candidate=way))
            rows += window_rows(way, costs[way], seed)
        if self.tokenizer is not None and samples:
            found = numbers_found(self.model, self.tokenizer, samples, {"original": exact, **ways})
            for way in ways:
                rows += retrieval_rows(way, samples, found[way], found["original"])
        return rows

    def chain_at(self, kl: float, base: Chain, windows: Windows) -> Chain:
        """Return the chain at which storing a prompt costs a KL, on windows that nothing was fitted to."""
        chain, share = base, BASIS
        for _ in range(TRIES):
            found, _ = judge(self.model, windows, self.prompt, {"codec": coded(self.codec(chain))})
            cost = found["codec"].means["kl"].mean()
            if abs(np.log(cost / kl)) < CLOSE:
                break
            share = float(np.clip(share * (cost / kl) ** (1 / SLOPE), (self.fixed + 1) / self.per_token, 0.9))
            chain = self.chain(share, base)
        return chain


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
        for repeat in range(-1, repeats):
            for name, call in work.items():
                taken = seconds(call, model.device)
                times[name] += [taken] if repeat >= 0 else []
            bar.step(repeat + 1, repeats)
    return [time_row(name, times[name], times["prefill"], candidate="codec") for name in ("encoding", "decoding")]
