"""Optimizers of a training run: `train.optim` of transformers, or Muon for matrices; learning rates by name.

    Muon: O = orthogonalised momentum of a matrix's gradient;  W ← (1 − ηλ) W − 0.2 √max(rows, columns) · η O

torch's Muon, scaled so that its updates are as large as AdamW's and both use one learning rate. Embeddings, the head,
norms, vectors and the mixing weights of methods are trained by AdamW. Source: arXiv 2502.16982.
"""

import re
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.optim import AdamW, Muon, Optimizer
from transformers import TrainingArguments

from crosslayer.core.method import HeadMixer, Residual, StateReader
from crosslayer.training.recipe_parts import OptimizerPart

Groups = list[dict[str, Any]]


class MuonAndAdamW(Optimizer):
    """Muon for matrices and AdamW for all other parameters as one optimizer."""

    def __init__(self, matrices: Groups, others: Groups, adamw: Mapping[str, Any]):
        muon = [Muon(matrices, adjust_lr_fn="match_rms_adamw")] if matrices else []
        self.optimizers = [*muon, *([AdamW(others, **adamw)] if others else [])]
        super().__init__([group for optimizer in self.optimizers for group in optimizer.param_groups], {})
        self._share()

    def _share(self) -> None:
        """Make both use the parameter groups and the state of this optimizer."""
        groups = iter(self.param_groups)
        for optimizer in self.optimizers:
            optimizer.param_groups = [next(groups) for _ in optimizer.param_groups]
            optimizer.state = self.state

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Take a step with both."""
        assert closure is None
        for optimizer in self.optimizers:
            optimizer.step()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the state of both."""
        super().load_state_dict(state_dict)
        self._share()


def mixing_parameters(model: nn.Module) -> set[str]:
    """Return the names of the parameters that belong directly to a method's mixing modules."""
    return {
        f"{path}.{name}"
        for path, module in model.named_modules()
        if isinstance(module, HeadMixer | Residual | StateReader)
        for name, _ in module.named_parameters(recurse=False)
    }


def optimizer_of(
    model: Any,
    chosen: OptimizerPart,
    arguments: TrainingArguments,
    decayed: set[str],
    optimizer_class: Any,
    options: dict[str, Any],
) -> Optimizer:
    """Return the optimizer of a recipe, for the trainable parameters of a model.

    Weight decay applies to those named in `decayed`. Without Muon it is an `optimizer_class` with `options`, those of
    `train.optim`.
    """
    named = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    patterns = {name: next((each for each in chosen.rates if re.search(each, name)), None) for name in named}
    for pattern in chosen.rates:
        if pattern not in patterns.values():
            last = next(reversed(named))
            raise ValueError(f"optimizer.rates: {pattern!r} applies to no parameter; names are such as {last}")
    if chosen.name is None and options.keys() & {"params", "model", "optimizer_dict"}:
        raise ValueError(f"optimizer.rates: has no effect with train.optim: {arguments.optim}; remove one of the two")
    if chosen.name is not None and arguments.fsdp:
        raise ValueError("optimizer.name: muon needs whole matrices, but train.fsdp shards them; remove one of the two")
    head = model.get_output_embeddings()
    linear = [module for module in model.modules() if isinstance(module, nn.Linear) and module is not head]
    matrices = {id(module.weight) for module in linear} if chosen.name is not None else set()
    groups: dict[tuple[bool, float, float], dict[str, Any]] = {}  # matrix for Muon, rate, decay → parameters
    for name, parameter in named.items():
        rate = arguments.learning_rate * chosen.rates.get(patterns[name] or "", 1.0)
        decay = arguments.weight_decay if name in decayed else 0.0
        first = {"params": [], "lr": rate, "weight_decay": decay}
        groups.setdefault((id(parameter) in matrices, rate, decay), first)["params"].append(parameter)
    if chosen.name is None:
        return optimizer_class(list(groups.values()), **options)
    muon, adamw = ([group for key, group in groups.items() if key[0] == own] for own in (True, False))
    betas = (arguments.adam_beta1, arguments.adam_beta2)
    return MuonAndAdamW(muon, adamw, {"betas": betas, "eps": arguments.adam_epsilon})
