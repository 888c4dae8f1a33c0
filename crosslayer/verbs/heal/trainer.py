"""The trainer of a distillation stage; the teacher is the original model.

    loss = KL + λ · mean over layers ℓ and tokens of ‖x_ℓ − x°_ℓ‖² / ‖x°_ℓ‖²

x_ℓ is the input of layer ℓ, for all layers that both models have except the first, whose input is the embedding; and
the output of the final norm. Each token's distance is relative to the norm of the teacher's state, so that the few
tokens with states of a hundredfold norm do not dominate. No token is predicted across document boundaries.

Shapes: B batch, T tokens, R tokens with labels, C hidden.
"""

from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from crosslayer.core.decoder.configuration import CrossLayerConfig
from crosslayer.core.decoder.weights import to_config
from crosslayer.training.mixture import IGNORED
from crosslayer.verbs.heal.divergence import Head, divergence
from crosslayer.verbs.train.trainer import CrossLayerTrainer


class Teacher:
    """The frozen original: a retrofit is trained towards its predictions and, with λ = `hidden` > 0, its hidden states.

    `layers` has the original's layer for each layer of the retrofit, (L of the retrofit,).
    """

    def __init__(self, model: PreTrainedModel, layers: tuple[int, ...], hidden: float = 0.0):
        self.model, self.layers, self.hidden = model.eval(), layers, hidden
        self.head = head_of(model)

    @torch.no_grad()
    def states(self, inputs: dict[str, Tensor]) -> tuple[Tensor, ...]:
        """Return the original's last hidden states, with λ > 0 after the input of each layer, (B, T, C) each."""
        return _states(self.model, inputs, self.hidden > 0)


class DistillTrainer(CrossLayerTrainer):
    """Trains towards `teacher`, which must be set before training; validation uses the loss of the text."""

    teacher: Teacher

    def compute_loss(
        self, model: nn.Module, inputs: dict[str, Any], return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        """Return the mean loss over tokens with labels; accumulated batches are weighted by their tokens."""
        assert not return_outputs, "validation uses another loss"
        labels = inputs["labels"]
        counts = labels[:, 1:] != IGNORED  # (B, T − 1): the token before each predicts it
        model_inputs = {name: value for name, value in inputs.items() if name != "labels"}
        student: Any = self.accelerator.unwrap_model(model)
        with self.accelerator.autocast():  # accelerate wraps only the forward of the trained model
            states, targets = _states(student, model_inputs, self.teacher.hidden > 0), self.teacher.states(model_inputs)
            loss = divergence(
                states[-1][:, :-1][counts], head_of(student), targets[-1][:, :-1][counts], self.teacher.head
            )
        if self.teacher.hidden:
            loss = loss + self.teacher.hidden * self._distance(states, targets, counts)
        if num_items_in_batch is not None:
            loss = loss * (counts.sum() / num_items_in_batch)
        return loss

    def _distance(self, states: tuple[Tensor, ...], targets: tuple[Tensor, ...], counts: Tensor) -> Tensor:
        """Return the mean relative squared distance of the hidden states of layers that both models have."""
        pairs = [(states[own], targets[layer]) for own, layer in enumerate(self.teacher.layers)][1:]
        pairs.append((states[-1], targets[-1]))
        distances = []
        for state, target in pairs:
            own, teacher = state[:, :-1][counts].float(), target[:, :-1][counts].float()  # (R, C)
            distances.append(((own - teacher).square().sum(-1) / teacher.square().sum(-1)).mean())
        return torch.stack(distances).mean()


def head_of(model: nn.Module) -> Head:
    """Return the language-model head; in all supported families it is a weight and maybe a soft cap."""
    assert isinstance(model, nn.Module)
    config: Any = model.config
    translated = config if isinstance(config, CrossLayerConfig) else to_config(config)
    embeddings: Any = model.get_output_embeddings()  # type: ignore[operator]
    return Head(embeddings.weight, translated.final_logit_softcapping)


def _states(model: Any, inputs: dict[str, Tensor], every: bool) -> tuple[Tensor, ...]:
    """Return the final norm's output, and before it, if `every` is set, the input of each layer."""
    output = model.get_decoder()(**inputs, use_cache=False, output_hidden_states=every)
    return output.hidden_states if every else (output.last_hidden_state,)
