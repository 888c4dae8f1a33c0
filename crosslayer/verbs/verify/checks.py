"""The checks of `verify`: each runs a causal LM in another way and measures how far its logits are from the plain pass.

Shapes: B batch, T tokens, V vocabulary.
"""

import inspect
import math
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, DynamicCache, PreTrainedModel, StaticCache

from crosslayer.core.decoder.caches import cache_bytes
from crosslayer.core.transformers_versions import disable_checkpointing, enable_checkpointing
from crosslayer.probe.intercept import AttentionCall, stored_shares, visited
from crosslayer.verbs.verify.result import FAIL, NOT_APPLICABLE, PASS, Check
from crosslayer.verbs.verify.subject import FEW, NEW, Subject, widened

# Measured over 33 tokens of SmolLM2, of five retrofits of it and of tiny models of 25 families: at most 3e-5 in
# float32. More layers and other kernels need room; the mildest fault planted, positions off by 1 behind the cache,
# makes 0.85.
EXACT = {"float64": 1e-8, "float32": 1e-3}
# Lower precisions have no single number: the root mean square of what bfloat16's rounding does to the plain pass is
# 0.045 in SmolLM2, 0.01 to 0.04 in tiny models, 0.26 in SmolLM2 where all layers but the first borrow their values
# (arXiv 2410.17897). Two roundings were at most 1.4 times that from each other, √2 as if independent. Positions off
# by 1 make 0.094, unrelated logits 1.4.
ROUNDINGS, FLOOR, WEAK = 2, 0.005, 0.5
SENTENCE = 200  # characters of an error that are shown


@dataclass(frozen=True)
class Measurement:
    """What a check measured; `tolerance` None stands for that of the dtype."""

    difference: float
    reason: str = ""
    tolerance: float | None = None


class NotApplicable(Exception):
    """What a check asks for cannot be had from this model or on this machine; the text says why."""


def tolerance_of(dtype: str, rounding: float) -> tuple[float, str]:
    """Return what a dtype tolerates whose rounding moves the plain pass so far, and a note where that tells little."""
    tolerance = EXACT.get(dtype) or max(FLOOR, ROUNDINGS * rounding)
    return tolerance, f"weak: rounding alone moves logits by {rounding:.1f}" if tolerance > WEAK else ""


def judged(name: str, dtype: str | None, tolerance: float, check: Callable[[], Measurement], note: str = "") -> Check:
    """Run a check; whatever it raises is a row too. `note` is said where `tolerance` is used."""
    try:
        measured = check()
    except NotApplicable as reason:
        return Check(name=name, dtype=dtype, status=NOT_APPLICABLE, reason=str(reason))
    except Exception as error:
        return Check(name=name, dtype=dtype, status=FAIL, reason=f"{type(error).__name__}: {in_brief(error)}")
    limit, reasons = tolerance, [measured.reason, note]
    if measured.tolerance is not None:
        limit, reasons = measured.tolerance, [measured.reason]
    if not math.isfinite(measured.difference) or not math.isfinite(limit):
        reason = f"the difference is {measured.difference}, the tolerance {limit}"
        return Check(name=name, dtype=dtype, status=FAIL, reason=reason)
    return Check(
        name=name,
        dtype=dtype,
        status=PASS if measured.difference <= limit else FAIL,
        difference=measured.difference,
        tolerance=limit,
        reason="; ".join(reason for reason in reasons if reason),
    )


def in_brief(error: Exception) -> str:
    """Return an error's text as a short line."""
    text = " ".join(str(error).split())
    return text if len(text) <= SENTENCE else f"{text[:SENTENCE]} …"


SMALLEST = 1e-6  # of the largest gradient: a parameter with less has a gradient of rounding alone
TOLERANCE, ROUNDED_TOLERANCE = 1e-3, 0.05  # in float32 and float64, in lower precisions


@torch.no_grad()
def _token_by_token(subject: Subject) -> Measurement:
    return Measurement(subject.difference(subject.run_in_chunks([1] * subject.ids.shape[1])))


@torch.no_grad()
def _chunked(subject: Subject) -> Measurement:
    count = subject.ids.shape[1]
    sizes = [count // 3, 1, count // 4]
    return Measurement(subject.difference(subject.run_in_chunks([*sizes, count - sum(sizes)])))


@torch.no_grad()
def _static(subject: Subject) -> Measurement:
    _needs_fullgraph(subject.model)
    count = subject.ids.shape[1]
    cache = StaticCache(config=subject.model.config, max_cache_len=count + 3)
    return Measurement(subject.difference(subject.run_in_chunks([count - 4, 1, 1, 1, 1], cache)))


@torch.no_grad()
def _left_padded(subject: Subject) -> Measurement:
    """A batch of the ids and of their beginning, padded on the left: prefill and four steps through a cache."""
    model, ids, count = subject.model, subject.ids, subject.ids.shape[1]
    pad = count // 3
    short = ids[:, : count - pad]
    batch = torch.cat([ids, torch.cat([ids[:, :pad], short], 1)])  # any id will do for padding, the mask hides it
    mask = torch.ones_like(batch)
    mask[1, :pad] = 0
    positions = (mask.cumsum(-1) - 1).clamp_min(0)
    takes_positions = "position_ids" in inspect.signature(model.forward).parameters
    cache, chunks = DynamicCache(config=model.config), []
    for start, end in [(0, count - 4), *((i, i + 1) for i in range(count - 4, count))]:
        options: dict[str, Any] = {"attention_mask": mask[:, :end], "past_key_values": cache, "use_cache": True}
        if takes_positions:
            options["position_ids"] = positions[:, start:end]
        chunks.append(model(batch[:, start:end], **options).logits)
    logits = torch.cat(chunks, 1)  # (2, size, V) each -> (2, T, V)
    gaps = [subject.difference(logits[0]), subject.difference(logits[1, pad:], subject.full[: count - pad])]
    return Measurement(torch.tensor(gaps).max().item())  # unlike Python's, this max keeps a NaN


@torch.no_grad()
def _beam_search(subject: Subject) -> Measurement:
    """Beam search through the cache: its scores are those of a plain pass and, in float32, its tokens those without.

    Lower precisions may take another of two tokens that are as likely, so that there only the scores are compared.
    """
    model: Any = subject.model
    start = subject.ids[:, :FEW]
    options = {"attention_mask": torch.ones_like(start), "return_dict_in_generate": True, "output_scores": True}
    cached = model.generate(start, use_cache=True, **options)  # sequences (beams, FEW + NEW)
    logits = widened(model(cached.sequences, use_cache=False).logits)[:, start.shape[1] - 1 : -1]  # (beams, NEW, V)
    chosen = cached.sequences[:, start.shape[1] :, None]  # (beams, NEW, 1)
    scores = logits.log_softmax(-1).gather(-1, chosen)[..., 0].sum(-1)  # (beams, NEW, 1) -> (beams,)
    reason = "of the scores, for each token"
    if subject.exact:
        plain = model.generate(start, use_cache=False, **options)
        if not torch.equal(plain.sequences, cached.sequences):
            raise ValueError("beam search gives other tokens with a cache than without")
        reason = "of the scores, for each token; the tokens are equal"
    gap = (widened(cached.sequences_scores) - scores).abs().max() / NEW / subject.full.std()
    return Measurement(gap.item(), reason)


@torch.no_grad()
def _compiled(subject: Subject) -> Measurement:
    _needs_fullgraph(subject.model)
    if subject.backend == "inductor":
        from torch._inductor.cpp_builder import get_cpp_compiler
        from torch._inductor.exc import InvalidCxxCompiler
        from torch.utils._triton import has_triton

        if subject.ids.device.type == "cuda" and not has_triton():
            raise NotApplicable("Triton is not installed, with which inductor compiles")
        try:
            get_cpp_compiler()
        except InvalidCxxCompiler:
            raise NotApplicable("there is no C++ compiler, with which inductor compiles") from None
    torch._dynamo.reset()
    try:
        compiled = torch.compile(subject.model, backend=subject.backend, fullgraph=True)
        return Measurement(subject.difference(compiled(subject.ids, use_cache=False).logits), subject.backend)
    finally:
        torch._dynamo.reset()


def _checkpointed_gradients(subject: Subject) -> Measurement:
    """Compare gradients of every parameter with and without non-reentrant activation checkpointing.

    The same operations run again, so that on a CPU they are equal; kernels that add in any order need the tolerance.
    """
    if not subject.model.supports_gradient_checkpointing:
        raise NotApplicable(f"{type(subject.model).__name__} has no activation checkpointing")
    model = subject.model.train()
    try:
        plain = _gradients(subject)
        enable_checkpointing(model, {"use_reentrant": False})
        checkpointed = _gradients(subject)
    finally:
        disable_checkpointing(model)
        model.eval()
    scale = SMALLEST * max(gradient.abs().max().item() for gradient in plain.values() if gradient is not None)
    gaps = {name: _gap(name, plain[name], checkpointed[name], scale) for name in plain}
    worst = max(gaps, key=lambda name: (math.isnan(gaps[name]), gaps[name]))
    reason = f"of the largest gradient of {worst}; {len(gaps)} parameters"
    return Measurement(gaps[worst], reason, TOLERANCE if subject.exact else ROUNDED_TOLERANCE)


@torch.no_grad()
def _save_and_load(subject: Subject) -> Measurement:
    """Save as safetensors and load: weights and logits are the same bits."""
    with tempfile.TemporaryDirectory() as folder:
        subject.model.save_pretrained(folder)
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            folder,
            dtype=subject.model.dtype,
            attn_implementation=subject.model.config._attn_implementation,
            use_safetensors=True,
            output_loading_info=True,
        )
        again, info = loaded
        again = again.to(subject.ids.device).eval()
        odd = {key: sorted(map(str, info[key])) for key in ("missing_keys", "unexpected_keys", "mismatched_keys")}
        if any(odd.values()):
            raise ValueError("; ".join(f"{key}: {names[0]}" for key, names in odd.items() if names))
        before, after = subject.model.state_dict(), again.state_dict()
        changed = [name for name in before if name not in after or not torch.equal(before[name], after[name])]
        if changed:
            raise ValueError(f"{len(changed)} weights differ after loading, such as {changed[0]}")
        return Measurement(subject.difference(again(subject.ids, use_cache=False).logits), "must be the same bits", 0.0)


@torch.no_grad()
def _eager_and_sdpa(subject: Subject) -> Measurement:
    model = subject.model
    if not model._supports_sdpa:
        raise NotApplicable(f"{type(model).__name__} has no SDPA attention")
    before, logits = model.config._attn_implementation or "eager", {}
    try:
        for kind in ("eager", "sdpa"):
            model.set_attn_implementation(kind)
            if model.config._attn_implementation != kind:
                raise NotApplicable(f"{type(model).__name__} cannot change its attention")
            logits[kind] = widened(model(subject.ids, use_cache=False).logits)[0]
    finally:
        model.set_attn_implementation(before)
    return Measurement(subject.difference(logits["eager"], logits["sdpa"]))


@torch.no_grad()
def _cache_bytes(subject: Subject) -> Measurement:
    """Allocated bytes after a prefill and a step, against the plan.

    The step is there for sliding windows: after a prefill alone a window is a view of all tokens' states.
    """
    model, count = subject.model, subject.ids.shape[1]
    predicted = _predicted_bytes(model, count)
    cache = DynamicCache(config=model.config)
    subject.run_in_chunks([count - 1, 1], cache)
    allocated = cache_bytes(cache)
    return Measurement(abs(allocated - predicted), f"bytes; allocated {allocated:,}, by the plan {predicted:,}", 0.0)


CHECKS: dict[str, Callable[[Subject], Measurement]] = {
    "cache, token by token": _token_by_token,
    "cache, uneven chunks": _chunked,
    "static cache": _static,
    "left-padded batch": _left_padded,
    "beam search": _beam_search,
    "compiled": _compiled,
    "checkpointed gradients": _checkpointed_gradients,
    "save and load": _save_and_load,
    "eager and SDPA": _eager_and_sdpa,
    "cache bytes": _cache_bytes,
}


def _needs_fullgraph(model: PreTrainedModel) -> None:
    if not model._can_compile_fullgraph:
        raise NotApplicable(f"transformers says that {type(model).__name__} cannot be compiled as one graph")


def _gradients(subject: Subject) -> dict[str, Tensor | None]:
    """Return the gradient of the mean loss for every parameter; None where it has no part in it."""
    named, ids = dict(subject.model.named_parameters()), subject.ids[:, :FEW]
    with torch.random.fork_rng():  # the same dropout each time
        torch.manual_seed(0)
        loss = subject.model(ids, labels=ids, use_cache=False).loss
        gradients = torch.autograd.grad(loss, list(named.values()), allow_unused=True)
    return dict(zip(named, gradients, strict=True))


def _gap(name: str, plain: Tensor | None, checkpointed: Tensor | None, scale: float) -> float:
    """Return the largest difference of two gradients, relative to the largest entry, or to `scale` if that is more.

    Where a gradient is zero but for rounding, as a key's bias, only `scale` makes the difference comparable.
    """
    if plain is None and checkpointed is None:
        return 0.0
    if plain is None or checkpointed is None:
        raise ValueError(f"{name} has a gradient only {'with' if plain is None else 'without'} checkpointing")
    largest = max(plain.abs().max().item(), scale)
    return (widened(plain - checkpointed).abs().max() / largest).item()


def _predicted_bytes(model: PreTrainedModel, tokens: int) -> int:
    """Return the bytes of the states that the plan stores for a sequence: every layer that attends, in a stock model.

    What a key and a value are like is seen in the calls of attention.
    """
    config = model.config.get_text_config(decoder=True)
    options = config.to_dict()
    if "linear_attention" in (options.get("layer_types") or ()) or "kv_lora_rank" in options:
        raise NotApplicable("the cache keeps states of another kind than keys and values")
    calls: dict[int, AttentionCall] = {}
    with visited(model, lambda call: calls.update({call.layer: call})):
        model(torch.zeros(1, 2, dtype=torch.long, device=model.device), use_cache=False)
    total = 0
    for layer, call in calls.items():
        sizes = {"keys": call.key[0, :, 0].nbytes, "values": call.value[0, :, 0].nbytes}
        kept = tokens if call.window is None else min(tokens, call.window)
        total += round(kept * sum(share * sizes[state] for state, share in stored_shares(config, layer).items()))
    return total
