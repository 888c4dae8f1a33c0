"""Gradients of a model are the same with and without activation checkpointing."""

import math

import torch
from torch import Tensor

from crosslayer.core.transformers_versions import disable_checkpointing, enable_checkpointing
from crosslayer.verbs.verify.judge import Measurement, NotApplicable
from crosslayer.verbs.verify.subject import FEW, Subject, widened

SMALLEST = 1e-6  # of the largest gradient: a parameter with less has a gradient of rounding alone
TOLERANCE, ROUNDED_TOLERANCE = 1e-3, 0.05  # in float32 and float64, in lower precisions


def checkpointed_gradients(subject: Subject) -> Measurement:
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
