"""What the package's own operators of torch have in common: registration, Triton kernels, and when they do not serve.

An operator has a definition in operators that autograd and `torch.func` know. It runs instead under `torch.func`, for
double backward, for several backward passes at once, and in what is exported, which has to run elsewhere.
"""

import functools
import importlib
import sys
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import _get_current_dispatch_mode

_LIBRARY = torch.library.Library("crosslayer", "FRAGMENT")


def register(schema: str, kernel: Callable[..., Any], fake: Callable[..., Any]) -> None:
    """Register `crosslayer::name` for all devices by its schema, with the shapes that it returns (`fake`)."""
    name = schema.partition("(")[0]
    _LIBRARY.define(schema)
    _LIBRARY.impl(name, kernel, "CompositeExplicitAutograd")
    torch.library.register_fake(f"crosslayer::{name}", fake, lib=_LIBRARY)


def register_gradient(name: str, run: Callable[..., Any]) -> None:
    """Register what `crosslayer::name` runs where autograd may be at work: a call of a `torch.autograd.Function`.

    Its forward pass calls the kernel by `without_gradient`. (`torch.library.register_autograd` flattens lists of
    tensors in Python, which takes as long as a small read.)
    """
    _LIBRARY.impl(name, run, "Autograd")


def without_gradient(operator: Callable[..., Any], *args: Any) -> Any:
    """Call the kernel of an operator."""
    with torch._C._AutoDispatchBelowAutograd():
        return operator(*args)


def uses_definition() -> bool:
    """Return whether the definition has to run: for `torch.func`, forward-mode gradients and export."""
    transformed = torch._C._are_functorch_transforms_active() or torch.autograd.forward_ad._current_level >= 0
    return transformed or torch.compiler.is_exporting()


def is_inference() -> bool:
    """Return whether only numbers are wanted, eagerly: no gradient, no graph, and no dispatch mode that counts."""
    return not (torch.is_grad_enabled() or torch.compiler.is_compiling() or is_intercepted() or uses_definition())


def differentiates_definition(grad: Tensor) -> bool:
    """Return whether a backward pass is to go through the definition: it is differentiated itself, or batched."""
    if is_compiled_autograd():
        return False
    batched = torch._C._functorch.is_legacy_batchedtensor(grad)  # pyright: ignore[reportAttributeAccessIssue]
    return torch.is_grad_enabled() or uses_definition() or batched


def gradients_of_definition(
    definition: Callable[..., Tensor], inputs: Sequence[Tensor], grad: Tensor, needed: Sequence[bool]
) -> list[Tensor | None]:
    """Return the gradients of the inputs that need one, which can be differentiated where that is asked for."""
    again = torch.is_grad_enabled()
    with torch.enable_grad():
        inputs = [tensor.view_as(tensor) for tensor in inputs]  # stop here, although inputs may depend on inputs
        output = definition(*inputs)
    required = [tensor for tensor, need in zip(inputs, needed, strict=True) if need]
    gradients = iter(torch.autograd.grad(output, required, grad, create_graph=again, allow_unused=True))
    return [next(gradients) if need else None for need in needed]


def is_compiled_autograd() -> bool:
    """Return whether torch compiles the backward pass, as a whole."""
    module = sys.modules.get("torch._dynamo.compiled_autograd")
    return module is not None and module.in_compiled_autograd_region


def is_intercepted() -> bool:
    """Return whether a dispatch mode is active, which must see operators and may bring tensors without data."""
    return _get_current_dispatch_mode() is not None


def triton_kernels(name: str, device: torch.device) -> ModuleType | None:
    """Return a module of `crosslayer.core.kernels`, None where the device or Triton is not there."""
    return _kernels(name) if device.type == "cuda" else None


@functools.cache
def _kernels(name: str) -> ModuleType | None:
    from torch.utils._triton import has_triton

    return importlib.import_module(f"crosslayer.core.kernels.{name}") if has_triton() else None
