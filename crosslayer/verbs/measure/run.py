"""Measures candidates for a smaller cache, or a smaller model, against the original."""

import itertools
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from crosslayer.corpus.domains import DomainTexts, Texts, shared_out, split_domains
from crosslayer.environment import quiet_transformers
from crosslayer.judge.announce import announce
from crosslayer.judge.candidate import BITS, Candidate, read_candidates
from crosslayer.judge.clock import Load, random_ids
from crosslayer.judge.damage import MIN_WINDOWS
from crosslayer.judge.judge import Judge
from crosslayer.judge.report import JudgedModel, Row
from crosslayer.judge.retrieval import DEPTHS, NEW_TOKENS, hidden_samples
from crosslayer.judge.tasks.harness import Tasks, read_tasks, task_names
from crosslayer.models.load import model_facts, public_name, ready_model
from crosslayer.models.pair import causal_config
from crosslayer.output.progress import progress
from crosslayer.probe.model import check_ids, config_positions, unwrapped
from crosslayer.verbs.measure import exact_layers as exact
from crosslayer.verbs.measure.result import Measurement, MeasureSettings

STEPS = 16  # decoding steps of a timed run, whose mean is one time
OF_LOADS = {"bytes": ("bytes",), "time": ("ttft", "tpot_dynamic")}  # the quantities of an aspect of runs


def measure(
    model: PreTrainedModel | str | Path,
    tokenizer: PreTrainedTokenizerBase | None = None,
    *,
    candidates: Sequence[Any] | Mapping[str, Any] | None = None,
    text: DomainTexts = None,
    only: Sequence[str] = ("bytes", "kl", "needles", "time"),
    tasks: Sequence[str] = (),
    limit: int | None = None,
    exact_layers: int = 0,
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
    """Compare smaller caches and smaller models with the original: bytes, KL, retrieval and time, in one table.

    All candidates read the same windows and answer the same questions; their timed runs alternate.

    Args:
        model: the original: hub name, local folder, smollm2, qwen or gemma3. In Python also a loaded model.
        tokenizer: in Python, the tokenizer of a loaded model.
        candidates: a model (name or folder), bits of the cache (int8, int4, fp8, 8@0-11,4@12-29) or an eviction
            (h2o:0.5); repeatable; default: fp8, int8 and int4. In Python also a loaded model, a `DepthPlan`, a class
            of caches, or a context manager around the model, in a list or by name.
        text: evaluation text, repeatable: one domain each, named by NAME=FILE, or NAME=DATASET,config=…,split=…,
            column=…; default: all embedded domains. In Python also token ids (N, `length`), documents, sources, or a
            dict of these by domain.
        only: what to measure: bytes, kl, needles, tasks, time.
        tasks: lm-eval tasks, or groups of tasks as in papers, for all candidates.
        limit: use only the first N items of each task; default: all.
        exact_layers: also measure each quantized cache with this many layers kept in 16 bits: those whose quantization
            alone costs the most KL. For fp8, also print the options for vLLM.
        windows: evaluation windows, all domains together; at least 16 per domain.
        length: tokens per window.
        context: tokens in the cache when its bytes are counted and a decoding step is timed.
        lengths: tokens per text with hidden numbers.
        samples: hidden numbers at each length and each of five depths.
        repeats: timed runs of each candidate.
        seed: random seed.
        bos: begin each window with the BOS token: auto (as the tokenizer does), yes or no.
        dtype: float32, bfloat16, …; default: float32 on a CPU. In Python only if `model` is a name.
        device: cpu, cuda, …; default: the GPU if there is one. In Python only if `model` is a name.

    Raises:
        ValueError: a candidate is unknown, an option is wrong, or there is too little text.
    """
    model = unwrapped(model)
    settings = MeasureSettings.of(
        only=tuple(dict.fromkeys((*only, *(("tasks",) if tasks else ())))),
        tasks=task_names(tasks),
        limit=limit,
        exact_layers=exact_layers,
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
    only = settings.only
    # All that can be refused without the model is refused here, before minutes of loading and tokenizing.
    if exact_layers and not any(candidate.name in BITS for candidate in judged):
        raise ValueError(f"`exact_layers` needs a candidate that quantizes the whole cache: {', '.join(BITS)}")
    if {"needles", "tasks"} & set(only) and tokenizer is None and isinstance(model, PreTrainedModel):
        raise ValueError("a loaded model needs tokenizer=…, or leave needles and tasks out of `only`")
    if "tasks" in only and not tasks:
        raise ValueError("`only` tasks needs `tasks`, such as arc_easy,piqa")
    most = config_positions(causal_config("measure", model)) or 2**31
    if {"bytes", "time"} & set(only) and context > most - STEPS:
        raise ValueError(
            f"`context` must be at most {most - STEPS}, the model's positions minus the steps, got {context}"
        )
    for aspect, option, tokens in (("needles", "lengths", max(lengths)), ("kl", "length", length)):
        if aspect in only and tokens > most:
            raise ValueError(f"`{option}` must be at most the model's {most} positions, got {tokens}")
    texts = Texts.load(text, None, seed)
    least = MIN_WINDOWS * len(texts.evaluation)
    if windows < least:
        raise ValueError(f"`windows` must be at least {least} ({MIN_WINDOWS} of each domain), got {windows}")
    started = time.perf_counter()
    # Tasks first, since a mistyped name or data that is away is found at once.
    asked = read_tasks(settings.tasks) if "tasks" in only else None
    loaded, tokenizer = ready_model(model, tokenizer, dtype=dtype, device=device)
    with progress("tokenizing the text", 0):
        parts = {"evaluation": shared_out(windows, texts.evaluation)}
        cut = split_domains(texts.domains, tokenizer, parts=parts, length=length, seed=seed, bos=bos)["evaluation"]
    check_ids(loaded, cut.ids)
    judge = Judge(loaded, cut, tokenizer)
    with quiet_transformers():
        _announce(judge, len(judged), settings)
        # First, since the candidates with exact layers are judged with the others, in the same turns.
        more, prices = exact.exact_layers(judge, judged, exact_layers, seed) if exact_layers else ([], [])
        judged = [*judged, *more]
        rows = [*_rows(judge, judged, settings, asked), *prices]
    return Measurement(
        original=JudgedModel(name=(name := public_name(model)), model=model_facts(loaded, name)),
        candidates=tuple(map(judge.described, judged)),
        rows=tuple(row for row in rows if row.candidate not in judge.failed),
        settings=settings,
        seconds=round(time.perf_counter() - started, 1),
    )


def _announce(judge: Judge, candidates: int, settings: MeasureSettings) -> None:
    """Say how long all will take, without the tasks, whose texts are not counted."""
    rounds = settings.repeats + 1 if "time" in settings.only else int("bytes" in settings.only)
    texts = len(DEPTHS) * settings.samples * ("needles" in settings.only)
    tokens = settings.windows * settings.length * ("kl" in settings.only)
    tokens += rounds * settings.context + texts * sum(settings.lengths)
    # Most answers end early, with the number: half of their tokens, roughly.
    steps = rounds * STEPS + texts * len(settings.lengths) * NEW_TOKENS // 2

    assert judge.windows is not None
    models, priced = 1 + candidates, 0
    if settings.exact_layers:
        # Each candidate once more with its layers exact, and each of its layers alone on a few windows.
        models = 1 + 2 * candidates
        priced = candidates * len(exact.quantizable(judge.original)) * exact.FEW * settings.length
    announce(judge.original, judge.windows.ids, models * tokens + priced, models * steps)


def _rows(judge: Judge, candidates: Sequence[Candidate], settings: MeasureSettings, asked: Tasks | None) -> list[Row]:
    """Return the rows of all aspects that are measured."""
    only = settings.only
    rows: list[Row] = []
    if {"bytes", "time"} & set(only):
        # Bytes are those that each cache holds after the context; the run that warms up has them.
        load = Load(settings.context, new_tokens=STEPS)
        repeats = settings.repeats if "time" in only else 0
        ids = random_ids([judge.original], load, settings.seed)
        done = itertools.count(1)
        with progress("counting bytes and timing" if repeats else "counting bytes", repeats + 1) as bar:
            measured = judge.at_load(candidates, load, ids, repeats, tick=lambda: bar.step(next(done), repeats + 1))
        quantities = [quantity for aspect in only for quantity in OF_LOADS.get(aspect, ())]
        rows += [row for row in measured if row.quantity in quantities]
    if "kl" in only:
        rows += judge.damage(candidates, settings.seed)
    if "needles" in only:
        assert judge.tokenizer is not None
        samples = hidden_samples(judge.tokenizer, settings.lengths, settings.samples, settings.seed)
        rows += judge.retrieval(candidates, samples)
    if asked is not None:
        rows += judge.tasks(candidates, asked, settings.limit)
    return rows
