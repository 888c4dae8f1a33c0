"""Fits a codec to a model, and measures it: bytes, KL by domain, time."""

import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from crosslayer.codec.chain import Chain
from crosslayer.codec.codec import Codec, model_print, tokenizer_print
from crosslayer.codec.fit import BASIS, Calibration, calibrate, fit_chain_at, with_rate
from crosslayer.codec.judge import Way, coded, judge, prefill, rounded
from crosslayer.codec.states import LayerShape, read_shapes
from crosslayer.corpus.documents import TextSource, load_documents
from crosslayer.corpus.domains import FITTED, embedded_domains, shared_out, split_domains
from crosslayer.corpus.windows import Windows
from crosslayer.extras import check_extra
from crosslayer.machine import seconds
from crosslayer.models.load import model_facts, public_name, ready_model
from crosslayer.output.progress import progress
from crosslayer.output.record import ModelFacts
from crosslayer.probe.tokens import check_ids, config_positions
from crosslayer.stats.bootstrap import Bootstrap
from crosslayer.stats.ratios import paired_ratio
from crosslayer.verbs.fit_codec.result import CodecReport, CodecRow, CodecSettings, CodecTimes

DomainTexts = TextSource | Sequence[TextSource] | Mapping[str, Any] | None
OTHERS = (0.5, 0.25)  # shares that are measured beside the one that is asked for, in units of it
ROUNDED = {"fp8": "fp8", "int4": "4"}
FOR_STEP = 2  # windows of each domain that is measured on, beside those that are: they set the step
TRIES, CLOSE = 5, 0.1  # of a search for a KL
SLOPE = 2.5  # of the logarithm of KL over that of the bytes
LEAST = 0.1  # of the codes' bytes, of what is measured beside


def fit_codec(
    model: PreTrainedModel | str | Path,
    tokenizer: PreTrainedTokenizerBase | None = None,
    *,
    share: float = 0.125,
    kl: float | None = None,
    calibration_text: DomainTexts = None,
    text: DomainTexts = None,
    calibration: int = 30,
    length: int = 512,
    windows: int = 24,
    prompt: int = 640,
    continued: int = 128,
    repeats: int = 5,
    seed: int = 0,
    bos: str = "auto",
    dtype: str | None = None,
    device: str | None = None,
) -> CodecReport:
    """Fit a codec that stores finished caches of a model in few bytes, and measure what that costs.

    The model stays as it is. Fitting takes forward passes only. The result's `codec` encodes and decodes caches; saved,
    it is `codec.safetensors`, which `load_codec` reads.

    Args:
        model: hub name, local folder, smollm2, qwen or gemma3. In Python also a loaded model.
        tokenizer: in Python, the tokenizer of a loaded model.
        share: bytes of a stored prompt of `prompt` tokens, of the 16-bit cache's.
        kl: nats per token that storing may cost, instead of `share`.
        calibration_text: text that the codec is fitted to, repeatable: one domain each, named by NAME=FILE; default
            books, web and docs of the embedded text. In Python also token ids (N, `length`) or documents by domain.
        text: text that it is measured on, likewise; default the other embedded domains. In Python also token ids
            (N, `prompt` + `continued`) or documents by domain.
        calibration: windows that it is fitted to.
        length: tokens of each.
        windows: windows that it is measured on, all domains together.
        prompt: tokens of a stored prompt.
        continued: tokens behind it over which KL is measured.
        repeats: times that prefill, encoding and decoding are timed in turns.
        seed: random seed.
        bos: begin each window with the BOS token: auto (as the tokenizer does), yes or no.
        dtype: float32, bfloat16, …; default float32 on a CPU. In Python only if `model` is a name.
        device: cpu, cuda, …; default the GPU if there is one. In Python only if `model` is a name.

    Raises:
        ValueError: an option is wrong, there is too little text, or the model has shared or chosen layers, MLA, or
            cross-attention.

    """
    check_extra("store", "a codec", "constriction")
    numbers = {"calibration": calibration, "length": length, "windows": windows, "prompt": prompt}
    more = {"continued": continued, "repeats": repeats, "seed": seed, "bos": bos}
    settings = CodecSettings(share=None if kl is not None else share, kl=kl, **numbers, **more)
    fitted_to = _domains(calibration_text, FITTED, seed)
    measured_on = _domains(text, tuple(name for name in embedded_domains() if name not in fitted_to), seed)
    started = time.perf_counter()
    loaded, tokenizer = ready_model(model, tokenizer, dtype=dtype, device=device)
    limit = config_positions(loaded.config) or 2**31
    if prompt + continued > limit:
        raise ValueError(f"`prompt` and `continued` must be at most {limit} together, got {prompt + continued}")
    shapes = read_shapes(loaded)
    with progress("tokenizing the text", 0):
        cut: dict[str, Any] = {"tokenizer": tokenizer, "seed": seed, "bos": bos}
        own = split_domains(fitted_to, parts={"fit": shared_out(calibration, list(fitted_to))}, length=length, **cut)
        parts = {"windows": shared_out(windows, list(measured_on)), "step": dict.fromkeys(measured_on, FOR_STEP)}
        other = split_domains(measured_on, parts=parts, length=prompt + continued, **cut)
        judged, step = other["windows"], other["step"].ids
    check_ids(loaded, own["fit"].ids)
    data = calibrate(loaded, shapes, own["fit"].ids, step[:, :prompt], seed)
    per_token = 2 * sum(shape.width for shape in shapes)
    fixed = _fixed(shapes, prompt)
    prints = model_print(loaded), None if tokenizer is None else tokenizer_print(tokenizer)
    chain = _fitted(data, settings.share or BASIS, per_token, fixed)
    if kl is not None:
        chain = _at_kl(loaded, chain, data, step, settings, (per_token, fixed), prints)
    codec = Codec(chain, *prints)
    fitting = time.perf_counter() - started
    ways: dict[str, Way] = {"codec": coded(codec)}
    rate = float(chain.bits(*data.held_out).mean()) / 8
    for part in OTHERS:
        other = with_rate(chain, data, max(part * (rate + fixed) - fixed, LEAST * rate))
        ways[f"codec × {part:g}"] = coded(Codec(other, *prints))
    ways |= {name: rounded(loaded, bits) for name, bits in ROUNDED.items()}
    report = CodecReport(
        model=ModelFacts(**model_facts(loaded, public_name(model))),
        rows=tuple(_rows(judge(loaded, judged.ids, prompt, ways), judged, prompt * per_token)),
        fitted_to=tuple(fitted_to),
        parameters=chain.numbers,
        bytes_per_token=per_token,
        times=_times(loaded, codec, judged.ids[:1, :prompt].to(loaded.device), repeats),
        settings=settings,
        fitting=round(fitting, 1),
        seconds=round(time.perf_counter() - started, 1),
    )
    report._codec = codec
    return report


def _domains(text: DomainTexts, default: Sequence[str], seed: int) -> Mapping[str, Tensor | Iterable[str]]:
    """Return documents, or token ids, by domain."""
    if text is None or (isinstance(text, Sequence) and not text):
        if not default:
            raise ValueError("`text` must be given: the codec is fitted to all embedded domains")
        return embedded_domains(default)
    sources = [text] if isinstance(text, TextSource) else text
    named = sources if isinstance(sources, Mapping) else {source.describe(): source for source in sources}
    return {name: load_documents(own, seed) if isinstance(own, TextSource) else own for name, own in named.items()}


def _fixed(shapes: Sequence[LayerShape], prompt: int) -> float:
    """Return the bytes of a token of a prompt that no step changes: its step, its id, its share of the first token."""
    return 1 + 4 + 2 * sum(shape.width for shape in shapes) / prompt + 14 * len(shapes) / 256


def _fitted(data: Calibration, share: float, per_token: int, fixed: float, base: Chain | None = None) -> Chain:
    """Return a chain of so many bytes, from one that was fitted for more bytes where there is one."""
    if base is None or share > BASIS:
        base = fit_chain_at(data, max(share, BASIS) * per_token - fixed)
    return with_rate(base, data, share * per_token - fixed)


def _at_kl(
    model: PreTrainedModel,
    base: Chain,
    data: Calibration,
    ids: Tensor,
    settings: CodecSettings,
    sizes: tuple[int, float],
    prints: tuple[str, str | None],
) -> Chain:
    """Return the chain at which storing a prompt costs what is asked for, on windows that nothing was fitted to."""
    kl, chain, share = settings.kl or 0.0, base, BASIS
    for _ in range(TRIES):
        cost = judge(model, ids, settings.prompt, {"codec": coded(Codec(chain, *prints))})["codec"][:, 0].mean()
        if abs(np.log(cost / kl)) < CLOSE:
            break
        share = float(np.clip(share * (cost / kl) ** (1 / SLOPE), (sizes[1] + 1) / sizes[0], 0.9))
        chain = _fitted(data, share, *sizes, base)
    return chain


def _rows(found: Mapping[str, np.ndarray], windows: Windows, size: int) -> list[CodecRow]:
    """Return a row of each way on all windows, and on those of each domain."""
    rows = []
    domains = np.array(windows.domains)
    documents = np.array(windows.documents)
    for name, values in found.items():
        for scope in ("all", *dict.fromkeys(windows.domains)):
            picked = np.ones(len(values), bool) if scope == "all" else domains == scope
            cost = Bootstrap(tuple(documents[picked])).mean(values[picked, 0]) if picked.sum() > 1 else None
            if cost is not None:
                share = float(values[picked, 1].mean() / size)
                rows.append(CodecRow(way=name, scope=scope, share=share, kl=cost))
    return rows


def _times(model: PreTrainedModel, codec: Codec, ids: Tensor, repeats: int) -> CodecTimes:
    """Time prefill, encoding and decoding in turns."""
    cache = prefill(model, ids)
    data = codec.encode(cache, ids)
    codec.decode(data, model.device, model.dtype)
    times: dict[str, list[float]] = {"prefill": [], "encode": [], "decode": []}
    with progress("timing", repeats) as bar:
        for done in range(repeats):
            times["prefill"].append(seconds(lambda: prefill(model, ids), model.device))
            times["encode"].append(seconds(lambda: codec.encode(cache, ids), model.device))
            times["decode"].append(seconds(lambda: codec.decode(data, model.device, model.dtype), model.device))
            bar.step(done + 1, repeats)
    medians = {name: float(np.median(own)) for name, own in times.items()}
    encode, decode = (paired_ratio(times[name], times["prefill"]) for name in ("encode", "decode"))
    return CodecTimes(**medians, encode_ratio=encode, decode_ratio=decode)
