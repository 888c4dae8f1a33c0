"""Measures candidates for a smaller cache, or a smaller model, against the original."""

import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from crosslayer.corpus.domains import shared_out, split_domains
from crosslayer.judge.candidate import Candidate, read_candidates
from crosslayer.judge.damage import MIN_WINDOWS
from crosslayer.judge.judge import STEPS, WARM_UP, Judge
from crosslayer.judge.retrieval import hidden_samples, retrieval_change
from crosslayer.judge.texts import DomainTexts, Texts
from crosslayer.models.load import model_facts, public_name, ready_model
from crosslayer.models.pair import causal_config
from crosslayer.output.progress import progress
from crosslayer.output.record import ModelFacts
from crosslayer.probe.tokens import check_ids, config_positions
from crosslayer.stats.bootstrap import Bootstrap
from crosslayer.stats.estimate import Estimate, new_domain
from crosslayer.stats.ratios import paired_ratio
from crosslayer.verbs.measure.result import NEW, MeasuredCandidate, Measurement, MeasureSettings, Row


def measure(
    model: PreTrainedModel | str | Path,
    tokenizer: PreTrainedTokenizerBase | None = None,
    *,
    candidates: Sequence[Any] | Mapping[str, Any] | None = None,
    text: DomainTexts = None,
    only: Sequence[str] = ("bytes", "kl", "needles", "time"),
    windows: int = 96,
    length: int = 256,
    context: int = 1024,
    lengths: Sequence[int] = (512, 1024),
    samples: int = 1,
    repeats: int = 5,
    seed: int = 0,
    bos: str = "auto",
    dtype: str | torch.dtype | None = None,
    device: str | torch.device | None = None,
) -> Measurement:
    """Judge smaller caches and smaller models against the original: bytes, KL, retrieval and time, in one table.

    All candidates read the same windows, answer the same questions and take turns on the clock.

    Args:
        model: the original: hub name, local folder, smollm2, qwen or gemma3. In Python also a loaded model.
        tokenizer: in Python, the tokenizer of a loaded model.
        candidates: a model (name or folder), bits of the cache (int8, int4, fp8, 8@0-11,4@12-29) or an eviction
            (h2o:0.5); repeatable; default fp8, int8 and int4. In Python also a loaded model, a `DepthPlan`, a class
            of caches, or a context manager around the model, in a list or by name.
        text: evaluation text, repeatable: one domain each, named by NAME=FILE; default all embedded domains. In
            Python also token ids (N, `length`), documents, sources, or a dict of these by domain.
        only: what is measured.
        windows: evaluation windows, all domains together; at least 16 per domain.
        length: tokens per window.
        context: tokens after which the cache's bytes are counted and a decoding step is timed.
        lengths: tokens of the texts in which numbers are hidden.
        samples: hidden numbers at each length and each of five depths.
        repeats: timed runs of each candidate.
        seed: random seed.
        bos: begin each window with the BOS token: auto (as the tokenizer does), yes or no.
        dtype: float32, bfloat16, …; default float32 on a CPU. In Python only if `model` is a name.
        device: cpu, cuda, …; default the GPU if there is one. In Python only if `model` is a name.

    Raises:
        ValueError: a candidate is unknown, an option is wrong, or there is too little text.

    """
    settings = MeasureSettings(
        only=tuple(only),  # type: ignore[arg-type]
        windows=windows,
        length=length,
        context=context,
        lengths=tuple(lengths),
        samples=samples,
        repeats=repeats,
        seed=seed,
        bos=bos,
    )
    judged = read_candidates(("fp8", "int8", "int4") if candidates is None else candidates)
    if "needles" in only and tokenizer is None and isinstance(model, PreTrainedModel):
        raise ValueError("a loaded model needs tokenizer=…, or leave needles out of `only`")
    limit = config_positions(causal_config("measure", model)) or 2**31
    if {"bytes", "time"} & set(only) and context > limit - WARM_UP - STEPS:
        most = limit - WARM_UP - STEPS
        raise ValueError(f"`context` must be at most {most}, the model's positions less the steps, got {context}")
    if "needles" in only and max(lengths) > limit:
        raise ValueError(f"`lengths` must be at most the model's {limit} positions, got {max(lengths)}")
    if "kl" in only and length > limit:
        raise ValueError(f"`length` must be at most the model's {limit} positions, got {length}")
    texts = Texts.load(text, None, seed)
    least = MIN_WINDOWS * len(texts.evaluation)
    if windows < least:
        raise ValueError(f"`windows` must be at least {least} ({MIN_WINDOWS} of each domain), got {windows}")
    started = time.perf_counter()
    loaded, tokenizer = ready_model(model, tokenizer, dtype=dtype, device=device)
    with progress("tokenizing the text", 0):
        parts = {"evaluation": shared_out(windows, texts.evaluation)}
        cut = split_domains(texts.domains, tokenizer, parts=parts, length=length, seed=seed, bos=bos)["evaluation"]
    check_ids(loaded, cut.ids)
    judge = Judge(loaded, tokenizer, cut, context, seed)
    rows: list[Row] = []
    if "bytes" in only:
        rows += _bytes(judge, judged)
    if "kl" in only:
        rows += _kl(judge, judged)
    if "needles" in only:
        rows += _needles(judge, judged, settings)
    if "time" in only:
        rows += _time(judge, judged, repeats)
    return Measurement(
        original=ModelFacts(**model_facts(loaded, public_name(model))),
        candidates=tuple(
            MeasuredCandidate(name=one.name, engines=one.engines, failed=judge.failed.get(one.name)) for one in judged
        ),
        rows=tuple(row for row in rows if row.candidate not in judge.failed),
        settings=settings,
        seconds=round(time.perf_counter() - started, 1),
    )


def _bytes(judge: Judge, candidates: Sequence[Candidate]) -> list[Row]:
    """Return the bytes that each cache holds after the context."""
    original, rows = judge.held_bytes(None), []
    assert original is not None
    with progress("counting bytes", len(candidates)) as bar:
        for done, candidate in enumerate(candidates, 1):
            held = judge.held_bytes(candidate)
            if held is not None:
                share = Estimate(value=held / original, n=1, over="caches", how="counted", none=1.0)
                facts = {"original": original, "value": held, "change": share}
                rows.append(Row(quantity="bytes", unit="bytes", candidate=candidate.name, better="lower", **facts))
            bar.step(done, len(candidates))
    return rows


def _kl(judge: Judge, candidates: Sequence[Candidate]) -> list[Row]:
    """Return KL and the ratio of perplexities, of all windows and by domain, and the KL that a new domain may have."""
    rows: list[Row] = []
    for name, own in judge.kl(candidates).items():
        domains = list(dict.fromkeys(own.domains))
        for scope, losses in [("all", own), *((domain, own.of(domain)) for domain in domains)]:
            bootstrap = Bootstrap(losses.documents)
            facts: dict[str, Any] = {"candidate": name, "scope": scope, "better": "lower"}
            kl, ratio = bootstrap.mean(losses.kl), bootstrap.ratio(losses.after - losses.before)
            rows.append(Row(quantity="KL", unit="nats/token", original=0.0, value=kl.value, change=kl, **facts))
            before, after = float(np.exp(losses.before.mean())), float(np.exp(losses.after.mean()))
            rows.append(Row(quantity="perplexity", unit="", original=before, value=after, change=ratio, **facts))
        if len(domains) > 1:
            kl = new_domain([own.of(domain).kl.mean() for domain in domains], least=0.0)
            rows.append(Row(quantity="KL", unit="nats/token", candidate=name, scope=NEW, change=kl, better="lower"))
    return rows


def _needles(judge: Judge, candidates: Sequence[Candidate], settings: MeasureSettings) -> list[Row]:
    """Return the share of hidden numbers that each candidate finds, of all and at each length."""
    assert judge.tokenizer is not None
    samples = hidden_samples(judge.tokenizer, settings.lengths, settings.samples, settings.seed)
    original, rows = judge.retrieved(None, samples), []
    assert original is not None
    for candidate in candidates:
        found = judge.retrieved(candidate, samples)
        if found is None:
            continue
        for length in (None, *settings.lengths):
            rows_of = [number for number, sample in enumerate(samples) if length in (None, sample.length)]
            ours, theirs = [found[number] for number in rows_of], [original[number] for number in rows_of]
            rows.append(
                Row(
                    quantity="retrieval",
                    unit="share",
                    candidate=candidate.name,
                    scope="all" if length is None else str(length),
                    original=sum(theirs) / len(theirs),
                    value=sum(ours) / len(ours),
                    change=retrieval_change(ours, theirs),
                    better="higher",
                )
            )
    return rows


def _time(judge: Judge, candidates: Sequence[Candidate], repeats: int) -> list[Row]:
    """Return the seconds of a decoding step, and their ratio over pairs."""
    rows = []
    for name, pairs in judge.step_times(candidates, repeats).items():
        own, original = (list(times) for times in zip(*pairs, strict=True))
        ratio = paired_ratio(own, original)
        medians: dict[str, Any] = {"original": float(np.median(original)), "value": float(np.median(own))}
        rows.append(Row(quantity="step", unit="s", candidate=name, change=ratio, better="lower", **medians))
    return rows
