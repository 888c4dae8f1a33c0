"""The checks of `verify`: each runs a causal LM in another way and compares its logits with those of the plain pass.

Shapes: B batch, T tokens, V vocabulary.
"""

import inspect
import math
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel, StaticCache

from crosslayer.cache.kv_cache import held_bytes
from crosslayer.core.checkpointing import disable_checkpointing, enable_checkpointing
from crosslayer.core.transformers_versions import CACHE
from crosslayer.models.load import auto_class
from crosslayer.probe.intercept import AttentionCall, visited
from crosslayer.probe.measures import working
from crosslayer.probe.model import attention_of, stored_states
from crosslayer.verbs.verify.result import FAIL, NOT_APPLICABLE, PASS, Check
from crosslayer.verbs.verify.subject import FEW, NEW, Subject
from crosslayer.wiring.kv_bits import stored_bytes

# Measured on 33 tokens of SmolLM2, of five retrofits of it and of tiny models of 25 families: at most 3e-5 in
# float32. More layers and other kernels need a margin; the mildest planted error, positions off by 1 after the cache,
# gives 0.85.
EXACT = {"float64": 1e-8, "float32": 1e-3}
# Lower precisions have no single tolerance: the root mean square change of the plain pass by rounding to bfloat16 is
# 0.045 in SmolLM2, 0.01 to 0.04 in tiny models, 0.26 in SmolLM2 if all layers read the first layer's values
# (arXiv 2410.17897). Two roundings differed by at most 1.4 times that, √2 as if independent. Positions off by 1 give
# 0.094, unrelated logits 1.4. Eager attention also rounds scores and weights: up to 5.3 times that in 48 runs.
ROUNDINGS, EAGER, FLOOR, WEAK = 2, 8, 0.005, 0.5
ADDED_UP = 1e-6  # of scores that beam search adds up in float32, whatever the dtype
# of the largest gradient: below this a gradient is rounding error
SMALLEST = 1e-6
TOLERANCE, ROUNDED_TOLERANCE = 1e-3, 0.05  # of gradients in float32 and float64, in lower precisions
SENTENCE = 200  # characters shown of an error


@dataclass(frozen=True)
class Measurement:
    """The result of a check; `tolerance` None means that of the dtype, times `factor`."""

    difference: float
    reason: str = ""
    tolerance: float | None = None
    factor: float = 1.0


class NotApplicable(Exception):
    """Raised by a check that this model or machine does not support; the message gives the reason."""


def tolerance_of(dtype: str, rounding: float) -> tuple[float, str]:
    """Return the tolerance of a dtype whose rounding changes the plain pass by `rounding`, and a note if it is weak."""
    tolerance = EXACT.get(dtype) or max(FLOOR, ROUNDINGS * rounding)
    # unrelated logits differ by 1.4, so that a tolerance near it would pass anything
    return tolerance, f"weak check: rounding alone changes logits by {rounding:.1f}" if tolerance > WEAK else ""


def judged(name: str, dtype: str | None, tolerance: float, check: Callable[[], Measurement], note: str = "") -> Check:
    """Run a check and return its row, also if it raises. `note` is added where `tolerance` is used."""
    try:
        measured = check()
    except NotApplicable as reason:
        return Check(name=name, dtype=dtype, status=NOT_APPLICABLE, reason=str(reason))
    except Exception as error:
        return Check(name=name, dtype=dtype, status=FAIL, reason=f"{type(error).__name__}: {in_brief(error)}")
    limit = tolerance * measured.factor
    reasons = [measured.reason, note]
    if measured.tolerance is not None:
        limit = measured.tolerance
        reasons = [measured.reason]
    # a record holds no NaN, and a NaN is no pass
    if not math.isfinite(measured.difference) or not math.isfinite(limit):
        reason = f"difference {measured.difference}, tolerance {limit}"
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
    """Return the message of an error as one short line."""
    text = " ".join(str(error).split())
    return text if len(text) <= SENTENCE else f"{text[:SENTENCE]} …"


@torch.no_grad()
def _in_chunks(subject: Subject, by_token: bool) -> Measurement:
    """Run the ids with a cache: token by token, or in chunks of different sizes."""
    count = subject.ids.shape[1]
    if by_token:
        sizes = [1] * count
    else:
        # a prefill, a step and two chunks: positions and masks differ in each
        sizes = [count // 3, 1, count // 4]
        sizes.append(count - sum(sizes))
    return Measurement(subject.difference(subject.run_in_chunks(sizes)))


@torch.no_grad()
def _static(subject: Subject) -> Measurement:
    _needs_fullgraph(subject.model)
    count = subject.ids.shape[1]
    # longer than the text: the entries behind it must not be seen
    cache = StaticCache(config=subject.model.config, max_cache_len=count + 3)
    return Measurement(subject.difference(subject.run_in_chunks([count - 4, 1, 1, 1, 1], cache)))


@torch.no_grad()
def _left_padded(subject: Subject) -> Measurement:
    """Run the ids and a left-padded prefix of them as a batch: prefill and four steps with a cache."""
    model = subject.model
    ids = subject.ids
    count = ids.shape[1]
    pad = count // 3
    short = ids[:, : count - pad]
    # padding may be any id, since the mask hides it
    batch = torch.cat([ids, torch.cat([ids[:, :pad], short], 1)])
    mask = torch.ones_like(batch)
    mask[1, :pad] = 0
    positions = (mask.cumsum(-1) - 1).clamp_min(0)
    # a model without them, such as one with ALiBi, counts positions by the mask
    takes_positions = "position_ids" in inspect.signature(model.forward).parameters
    cache = subject.new_cache()
    chunks = []
    for start, end in [(0, count - 4), *((i, i + 1) for i in range(count - 4, count))]:
        options: dict[str, Any] = {"attention_mask": mask[:, :end], CACHE: cache, "use_cache": True}
        if takes_positions:
            options["position_ids"] = positions[:, start:end]
        chunks.append(model(batch[:, start:end], **options).logits)
    logits = torch.cat(chunks, 1)  # (2, size, V) each -> (2, T, V)
    gaps = [subject.difference(logits[0]), subject.difference(logits[1, pad:], subject.full[: count - pad])]
    # unlike Python's, this max keeps a NaN
    return Measurement(torch.tensor(gaps).max().item())


@torch.no_grad()
def _beam_search(subject: Subject) -> Measurement:
    """Compare the scores of beam search with a cache to a plain pass and, in float32, its tokens to those without.

    In lower precisions rounding may decide between two equally likely tokens, so only the scores are compared.
    """
    model: Any = subject.model
    start = subject.ids[:, :FEW]
    options = {"attention_mask": torch.ones_like(start), "return_dict_in_generate": True, "output_scores": True}
    # `generate` makes a plain cache itself
    cache = {} if subject.bits is None else {CACHE: subject.new_cache()}
    cached = model.generate(start, use_cache=True, **cache, **options)  # sequences (beams, FEW + NEW)
    logits = working(model(cached.sequences, use_cache=False).logits)[:, start.shape[1] - 1 : -1]  # (beams, NEW, V)
    chosen = cached.sequences[:, start.shape[1] :, None]  # (beams, NEW, 1)
    scores = logits.log_softmax(-1).gather(-1, chosen)[..., 0].sum(-1)  # (beams, NEW, 1) -> (beams,)
    reason = "scores per token"
    if subject.exact:
        plain = model.generate(start, use_cache=False, **options)
        if not torch.equal(plain.sequences, cached.sequences):
            raise ValueError("beam search gives different tokens with and without a cache")
        reason = "scores per token; same tokens with and without a cache"
    gap = (working(cached.sequences_scores) - scores).abs().max() / NEW / subject.full.std()
    return Measurement(gap.item(), reason, ADDED_UP if subject.dtype == "float64" else None)


@torch.no_grad()
def _compiled(subject: Subject) -> Measurement:
    _needs_fullgraph(subject.model)
    if subject.backend == "inductor":
        from torch._inductor.cpp_builder import get_cpp_compiler
        from torch._inductor.exc import InvalidCxxCompiler
        from torch.utils._triton import has_triton

        if subject.ids.device.type == "cuda" and not has_triton():
            raise NotApplicable("inductor needs Triton, which is not installed")
        try:
            get_cpp_compiler()
        except InvalidCxxCompiler:
            raise NotApplicable("inductor needs a C++ compiler, which is not installed") from None
    # graphs of other models of the same class count towards dynamo's limit of recompilations, an error with `fullgraph`
    torch._dynamo.reset()
    try:
        compiled = torch.compile(subject.model, backend=subject.backend, fullgraph=True)
        return Measurement(subject.difference(compiled(subject.ids, use_cache=False).logits), subject.backend)
    finally:
        torch._dynamo.reset()


def _checkpointed_gradients(subject: Subject) -> Measurement:
    """Compare gradients of every parameter with and without non-reentrant activation checkpointing.

    The same operations run twice, so on a CPU the gradients are equal; kernels that add in any order need a tolerance.
    """
    if not subject.model.supports_gradient_checkpointing:
        raise NotApplicable(f"{type(subject.model).__name__} has no activation checkpointing")
    # transformers checkpoints in training only
    model = subject.model.train()
    try:
        plain = _gradients(subject)
        enable_checkpointing(model, {"use_reentrant": False})
        checkpointed = _gradients(subject)
    finally:
        disable_checkpointing(model)
        model.eval()

    # The gap of two gradients is relative to the largest entry. Some gradients are zero up to rounding, such as that of
    # a key's bias: their gaps are relative to a share of the largest gradient of all.
    least = SMALLEST * max(gradient.abs().max().item() for gradient in plain.values() if gradient is not None)
    gaps = {}
    for name, expected in plain.items():
        gradient = checkpointed[name]
        if expected is not None and gradient is not None:
            gap = working(expected - gradient).abs().max() / max(expected.abs().max().item(), least)
            gaps[name] = gap.item()
        elif expected is None and gradient is None:
            gaps[name] = 0.0
        else:
            side = "with" if expected is None else "without"
            raise ValueError(f"{name} has a gradient only {side} checkpointing")
    # a NaN, which is neither more nor less, comes first
    worst = max(gaps, key=lambda name: (math.isnan(gaps[name]), gaps[name]))
    reason = f"relative to the largest gradient of {worst}; {len(gaps)} parameters"
    return Measurement(gaps[worst], reason, TOLERANCE if subject.exact else ROUNDED_TOLERANCE)


@torch.no_grad()
def _save_and_load(subject: Subject) -> Measurement:
    """Save as safetensors and load again: weights and logits must be bit-identical."""
    with tempfile.TemporaryDirectory() as folder:
        subject.model.save_pretrained(folder)
        loaded: Any = auto_class(subject.model.config).from_pretrained(
            folder,
            dtype=subject.model.dtype,
            attn_implementation=subject.model.config._attn_implementation,
            use_safetensors=True,
            output_loading_info=True,
        )
        reloaded, info = loaded
        reloaded = reloaded.to(subject.ids.device).eval()
        problems = {key: sorted(map(str, info[key])) for key in ("missing_keys", "unexpected_keys", "mismatched_keys")}
        if any(problems.values()):
            raise ValueError("; ".join(f"{key}: {names[0]}" for key, names in problems.items() if names))
        before = subject.model.state_dict()
        after = reloaded.state_dict()
        changed = [name for name in before if name not in after or not torch.equal(before[name], after[name])]
        if changed:
            raise ValueError(f"weights that differ after loading: {len(changed)}, such as {changed[0]}")
        return Measurement(
            subject.difference(reloaded(subject.ids, use_cache=False).logits), "must be bit-identical", 0.0
        )


@torch.no_grad()
def _eager_and_sdpa(subject: Subject) -> Measurement:
    model = subject.model
    if not model._supports_sdpa:
        raise NotApplicable(f"{type(model).__name__} has no SDPA attention")
    logits = []
    for implementation in ("eager", "sdpa"):
        with attention_of([model], implementation):
            # some classes keep their own, whatever is set
            if model.config._attn_implementation != implementation:
                raise NotApplicable(f"{type(model).__name__} cannot switch its attention implementation")
            logits.append(working(model(subject.ids, use_cache=False).logits)[0])
    factor = 1.0 if subject.exact else EAGER / ROUNDINGS
    return Measurement(subject.difference(*logits), factor=factor)


@torch.no_grad()
def _cache_bytes(subject: Subject) -> Measurement:
    """Compare the bytes that the cache allocates after a prefill and one step with the plan.

    The plan stores keys and values of some layers, a stock model's of all. Their sizes are read from attention calls.
    """
    model = subject.model
    bits = subject.bits
    tokens = subject.ids.shape[1]
    config = model.config.get_text_config(decoder=True)
    options = config.to_dict()
    if "linear_attention" in (options.get("layer_types") or ()) or "kv_lora_rank" in options:
        raise NotApplicable("the cache does not hold plain keys and values (linear or latent attention)")
    calls: dict[int, AttentionCall] = {}
    with visited(model, lambda call: calls.update({call.layer: call})):
        model(torch.zeros(1, 2, dtype=torch.long, device=model.device), use_cache=False)

    predicted = 0
    for layer, call in calls.items():
        held = tokens if call.window is None else min(tokens, call.window)
        # a sliding window is not quantized
        kind = None if bits is None or call.window is not None else bits.at(layer)
        sizes = {}
        for state, tensor in (("keys", call.key), ("values", call.value)):
            sizes[state] = held * tensor[0, :, 0].nbytes
            if kind is not None and bits is not None:
                _, heads, _, size = tensor.shape
                sizes[state] = heads * stored_bytes(kind, size, tokens, tensor.itemsize, bits.recent)
        predicted += sum(sizes[state] for state in stored_states(config, layer))

    # sliding windows need the step: after a prefill alone, a window is a view of the states of all tokens
    cache = subject.new_cache()
    subject.run_in_chunks([tokens - 1, 1], cache)
    allocated = held_bytes(cache).allocated
    return Measurement(abs(allocated - predicted), f"bytes: {allocated:,} allocated, {predicted:,} predicted", 0.0)


CHECKS: dict[str, Callable[[Subject], Measurement]] = {
    "cache, token by token": partial(_in_chunks, by_token=True),
    "cache, uneven chunks": partial(_in_chunks, by_token=False),
    "static cache": _static,
    "left-padded batch": _left_padded,
    "beam search": _beam_search,
    "compiled": _compiled,
    "checkpointed gradients": _checkpointed_gradients,
    "save and load": _save_and_load,
    "eager and SDPA": _eager_and_sdpa,
    "cache bytes": _cache_bytes,
}
# the others run without a cache, or with a static one
WITH_BITS = ("cache, token by token", "cache, uneven chunks", "left-padded batch", "beam search", "cache bytes")


def _needs_fullgraph(model: PreTrainedModel) -> None:
    if not model._can_compile_fullgraph:
        raise NotApplicable(f"transformers does not support compiling {type(model).__name__} as one graph")


def _gradients(subject: Subject) -> dict[str, Tensor | None]:
    """Return the gradient of the mean loss by parameter; None for a parameter that does not affect the loss."""
    parameters = dict(subject.model.named_parameters())
    ids = subject.ids[:, :FEW]
    # the same dropout each time
    with torch.random.fork_rng():
        torch.manual_seed(0)
        loss = subject.model(ids, labels=ids, use_cache=False).loss
        gradients = torch.autograd.grad(loss, list(parameters.values()), allow_unused=True)
    return dict(zip(parameters, gradients, strict=True))
