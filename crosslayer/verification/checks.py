"""The checks of `verify`: each runs a causal LM in another way and measures how far its logits are from the plain pass.

    |logits − logits of the plain pass| / std(logits of the plain pass), both in one dtype

The largest one counts in float32, the root mean square in lower precisions.

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
from transformers import AutoModelForCausalLM, Cache, DynamicCache, PreTrainedModel, StaticCache

from crosslayer.decoder.caches import cache_bytes
from crosslayer.probe.intercept import AttentionCall, stored_states, visited

BEAMS, NEW = 3, 6  # beam search: beams, new tokens
FEW = 12  # tokens where all of them would take long: gradients, the prompt of beam search


@dataclass(frozen=True)
class Subject:
    """A copy of the model in one dtype, ids (1, T), and the logits (T, V) of the plain pass, in float32 or float64."""

    model: PreTrainedModel
    ids: Tensor
    dtype: str
    backend: str
    full: Tensor

    @property
    def exact(self) -> bool:
        """Whether rounding is too small to change what a model says."""
        return self.dtype in ("float32", "float64")

    def difference(self, logits: Tensor, full: Tensor | None = None) -> float:
        """Return how far logits (…, T, V) are from the plain pass's, in standard deviations of those.

        That is the largest difference; where rounding is large the root mean square, since the largest of a million
        roundings says little: it varies by a factor of three from one way of computing to the next.
        """
        full = self.full if full is None else full
        gaps = _wide(logits).reshape(full.shape) - full
        found = gaps.abs().max() if self.exact else gaps.square().mean().sqrt()
        return (found / self.full.std()).item()


@dataclass(frozen=True)
class Found:
    """What a check measured; `tolerance` None stands for that of the dtype."""

    difference: float
    reason: str = ""
    tolerance: float | None = None


class NotApplicable(Exception):
    """What a check asks for cannot be had from this model or on this machine; the text says why."""


@torch.no_grad()
def _token_by_token(subject: Subject) -> Found:
    return Found(subject.difference(_steps(subject, [1] * subject.ids.shape[1])))


@torch.no_grad()
def _chunked(subject: Subject) -> Found:
    count = subject.ids.shape[1]
    sizes = [count // 3, 1, count // 4]
    return Found(subject.difference(_steps(subject, [*sizes, count - sum(sizes)])))


@torch.no_grad()
def _static(subject: Subject) -> Found:
    _needs_fullgraph(subject.model)
    count = subject.ids.shape[1]
    cache = StaticCache(config=subject.model.config, max_cache_len=count + 3)
    return Found(subject.difference(_steps(subject, [count - 4, 1, 1, 1, 1], cache)))


@torch.no_grad()
def _left_padded(subject: Subject) -> Found:
    """A batch of the ids and of their beginning, padded on the left: prefill and four steps through a cache."""
    model, ids, count = subject.model, subject.ids, subject.ids.shape[1]
    pad = count // 3
    short = ids[:, : count - pad]
    batch = torch.cat([ids, torch.cat([ids[:, :pad], short], 1)])  # any id will do for padding, the mask hides it
    mask = torch.ones_like(batch)
    mask[1, :pad] = 0
    positions = (mask.cumsum(-1) - 1).clamp_min(0)
    takes = "position_ids" in inspect.signature(model.forward).parameters
    cache, found = DynamicCache(config=model.config), []
    for start, end in [(0, count - 4), *((i, i + 1) for i in range(count - 4, count))]:
        given = {"position_ids": positions[:, start:end]} if takes else {}
        options = {"attention_mask": mask[:, :end], "past_key_values": cache, "use_cache": True, **given}
        found.append(model(batch[:, start:end], **options).logits)
    logits = torch.cat(found, 1)
    gaps = [subject.difference(logits[0]), subject.difference(logits[1, pad:], subject.full[: count - pad])]
    return Found(torch.tensor(gaps).max().item())  # unlike Python's, this max keeps a NaN


@torch.no_grad()
def _beam_search(subject: Subject) -> Found:
    """Beam search through the cache: its scores are those of a plain pass and, in float32, its tokens those without.

    Lower precisions may take another of two tokens that are as likely, so that there only the scores are compared.
    """
    model: Any = subject.model
    start = subject.ids[:, :FEW]
    options = {"attention_mask": torch.ones_like(start), "return_dict_in_generate": True, "output_scores": True}
    found = model.generate(start, use_cache=True, **options)
    logits = _wide(model(found.sequences, use_cache=False).logits)[:, start.shape[1] - 1 : -1]  # (beams, NEW, V)
    chosen = found.sequences[:, start.shape[1] :, None]
    scores = logits.log_softmax(-1).gather(-1, chosen)[..., 0].sum(-1)
    reason = "of the scores, for each token"
    if subject.exact:
        plain = model.generate(start, use_cache=False, **options)
        if not torch.equal(plain.sequences, found.sequences):
            raise ValueError("beam search gives other tokens with a cache than without")
        reason = "of the scores, for each token; the tokens are equal"
    gap = (_wide(found.sequences_scores) - scores).abs().max() / NEW / subject.full.std()
    return Found(gap.item(), reason)


@torch.no_grad()
def _compiled(subject: Subject) -> Found:
    _needs_fullgraph(subject.model)
    if subject.backend == "inductor":
        _needs_compiler(subject.ids.device)
    torch._dynamo.reset()
    try:
        compiled = torch.compile(subject.model, backend=subject.backend, fullgraph=True)
        return Found(subject.difference(compiled(subject.ids, use_cache=False).logits), subject.backend)
    finally:
        torch._dynamo.reset()


def _checkpointed(subject: Subject) -> Found:
    """Gradients of every parameter with and without non-reentrant activation checkpointing.

    The same operations run again, so that on a CPU they are equal; kernels that add in any order need the tolerance.
    """
    if not subject.model.supports_gradient_checkpointing:
        raise NotApplicable(f"{type(subject.model).__name__} has no activation checkpointing")
    model = subject.model.train()
    try:
        plain = _gradients(subject)
        model.activation_checkpointing_enable({"use_reentrant": False})
        again = _gradients(subject)
    finally:
        model.activation_checkpointing_disable()
        model.eval()
    least = 1e-6 * max(gradient.abs().max().item() for gradient in plain.values() if gradient is not None)
    gaps = {name: _gap(name, plain[name], again[name], least) for name in plain}
    worst = max(gaps, key=lambda name: (math.isnan(gaps[name]), gaps[name]))
    reason = f"of the largest gradient of {worst}; {len(gaps)} parameters"
    return Found(gaps[worst], reason, 1e-3 if subject.exact else 0.05)


@torch.no_grad()
def _save_and_load(subject: Subject) -> Found:
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
        one, two = subject.model.state_dict(), again.state_dict()
        other = [name for name in one if name not in two or not torch.equal(one[name], two[name])]
        if other:
            raise ValueError(f"{len(other)} weights differ after loading, such as {other[0]}")
        return Found(subject.difference(again(subject.ids, use_cache=False).logits), "must be the same bits", 0.0)


@torch.no_grad()
def _eager_and_sdpa(subject: Subject) -> Found:
    model = subject.model
    if not model._supports_sdpa:
        raise NotApplicable(f"{type(model).__name__} has no SDPA attention")
    before, found = model.config._attn_implementation or "eager", {}
    try:
        for kind in ("eager", "sdpa"):
            model.set_attn_implementation(kind)
            if model.config._attn_implementation != kind:
                raise NotApplicable(f"{type(model).__name__} cannot change its attention")
            found[kind] = _wide(model(subject.ids, use_cache=False).logits)[0]
    finally:
        model.set_attn_implementation(before)
    return Found(subject.difference(found["eager"], found["sdpa"]))


@torch.no_grad()
def _cache_bytes(subject: Subject) -> Found:
    """Allocated bytes after a prefill and one step, against the plan.

    The step is there for sliding windows: after a prefill alone a window is a view of all tokens' states.
    """
    model, count = subject.model, subject.ids.shape[1]
    predicted = _predicted_bytes(model, count)
    cache = DynamicCache(config=model.config)
    _steps(subject, [count - 1, 1], cache)
    found = cache_bytes(cache)
    return Found(abs(found - predicted), f"bytes; allocated {found:,}, by the plan {predicted:,}", 0.0)


CHECKS: dict[str, Callable[[Subject], Found]] = {
    "cache, token by token": _token_by_token,
    "cache, uneven chunks": _chunked,
    "static cache": _static,
    "left-padded batch": _left_padded,
    "beam search": _beam_search,
    "compiled": _compiled,
    "checkpointed gradients": _checkpointed,
    "save and load": _save_and_load,
    "eager and SDPA": _eager_and_sdpa,
    "cache bytes": _cache_bytes,
}


def _wide(tensor: Tensor) -> Tensor:
    """Return a tensor in float32 at least."""
    return tensor if tensor.dtype == torch.float64 else tensor.float()


def _steps(subject: Subject, sizes: list[int], cache: Cache | None = None) -> Tensor:
    """Run the ids in chunks of `sizes` tokens through a cache; return logits (1, T, V)."""
    model = subject.model
    cache = DynamicCache(config=model.config) if cache is None else cache
    chunks = subject.ids.split(sizes, 1)
    return torch.cat([model(chunk, past_key_values=cache, use_cache=True).logits for chunk in chunks], 1)


def _needs_fullgraph(model: PreTrainedModel) -> None:
    if not model._can_compile_fullgraph:
        raise NotApplicable(f"transformers says that {type(model).__name__} cannot be compiled as one graph")


def _needs_compiler(device: torch.device) -> None:
    """Refuse where inductor has nothing to compile its kernels with."""
    from torch._inductor.cpp_builder import get_cpp_compiler
    from torch._inductor.exc import InvalidCxxCompiler
    from torch.utils._triton import has_triton

    if device.type == "cuda" and not has_triton():
        raise NotApplicable("Triton is not installed, with which inductor compiles")
    try:
        get_cpp_compiler()
    except InvalidCxxCompiler:
        raise NotApplicable("there is no C++ compiler, with which inductor compiles") from None


def _gradients(subject: Subject) -> dict[str, Tensor | None]:
    """Return the gradient of the mean loss for every parameter; None where it has no part in it."""
    named, ids = dict(subject.model.named_parameters()), subject.ids[:, :FEW]
    with torch.random.fork_rng():  # the same dropout each time
        torch.manual_seed(0)
        loss = subject.model(ids, labels=ids, use_cache=False).loss
        found = torch.autograd.grad(loss, list(named.values()), allow_unused=True)
    return dict(zip(named, found, strict=True))


def _gap(name: str, one: Tensor | None, two: Tensor | None, least: float) -> float:
    """Return the largest difference of two gradients, relative to the largest entry, or to `least` if that is more.

    Where a gradient is zero but for rounding, as a key's bias, only `least` gives the difference a scale.
    """
    if one is None and two is None:
        return 0.0
    if one is None or two is None:
        raise ValueError(f"{name} has a gradient only {'with' if one is None else 'without'} checkpointing")
    return (_wide(one - two).abs().max() / max(one.abs().max().item(), least)).item()


def _predicted_bytes(model: PreTrainedModel, tokens: int) -> int:
    """Return the bytes of the states that the plan stores for a sequence: every layer that attends, in a stock model.

    What a key and a value are like is seen in the calls of attention.
    """
    config = model.config.get_text_config(decoder=True)
    if "linear_attention" in (getattr(config, "layer_types", None) or ()) or "kv_lora_rank" in config.to_dict():
        raise NotApplicable("the cache keeps states of another kind than keys and values")
    calls: dict[int, AttentionCall] = {}
    with visited(model, lambda call: calls.update({call.layer: call})):
        model(torch.zeros(1, 2, dtype=torch.long, device=model.device), use_cache=False)
    total = 0
    for layer, call in calls.items():
        sizes = {"keys": call.key[0, :, 0].nbytes, "values": call.value[0, :, 0].nbytes}
        kept = tokens if call.window is None else min(tokens, call.window)
        total += kept * sum(sizes[state] for state in stored_states(config, layer))
    return total
