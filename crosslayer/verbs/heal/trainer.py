"""The trainer of a stage that is distilled: the loss is how far the model is from the original, its teacher.

    loss = KL + λ · mean over layers ℓ and tokens of ‖x_ℓ − x°_ℓ‖² / ‖x°_ℓ‖²

x_ℓ is what layer ℓ reads, of those layers that both models have but the first, whose input is the embedding; behind
the last layer it is the final norm's output. Each token's distance is relative to the teacher's own state, so that the
few tokens whose states are hundreds of times as long do not decide. Nothing is predicted over the borders of documents.

Shapes: B batch, T tokens, R tokens that count, C hidden.
"""

from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from crosslayer.core.decoder.configuration import CrossLayerConfig
from crosslayer.core.decoder.weights import to_config
from crosslayer.verbs.heal.divergence import Head, divergence
from crosslayer.verbs.train.mixture import IGNORED
from crosslayer.verbs.train.trainer import CrossLayerTrainer


class Teacher:
    """The original, which stays as it is: a retrofit is trained towards its predictions and, with λ = `hidden`, states.

    `layers` is (L of the retrofit,): the layer of the original that each of its layers is.
    """

    def __init__(self, model: PreTrainedModel, layers: tuple[int, ...], hidden: float = 0.0):
        self.model, self.layers, self.hidden = model.eval(), layers, hidden
        self.head = head_of(model)

    @torch.no_grad()
    def states(self, inputs: dict[str, Tensor]) -> tuple[Tensor, ...]:
        """Return the original's last states, and with λ > 0 before them what each layer reads, (B, T, C) each."""
        return _states(self.model, inputs, self.hidden > 0)


class DistillTrainer(CrossLayerTrainer):
    """Trains towards `teacher`, which must be set before training; validation losses are those of the text."""

    teacher: Teacher

    def compute_loss(
        self, model: nn.Module, inputs: dict[str, Any], return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        """Return the loss over the tokens that have labels; of batches that are accumulated, each by its tokens."""
        assert not return_outputs, "validation has a loss of its own"
        labels = inputs["labels"]
        counts = labels[:, 1:] != IGNORED  # (B, T − 1): the token before each predicts it
        given = {name: value for name, value in inputs.items() if name != "labels"}
        student: Any = self.accelerator.unwrap_model(model)
        with self.accelerator.autocast():  # accelerate itself wraps the forward of the model that trains, and no more
            states, targets = _states(student, given, self.teacher.hidden > 0), self.teacher.states(given)
            loss = divergence(
                states[-1][:, :-1][counts], head_of(student), targets[-1][:, :-1][counts], self.teacher.head
            )
        if self.teacher.hidden:
            loss = loss + self.teacher.hidden * self._distance(states, targets, counts)
        if num_items_in_batch is not None:
            loss = loss * (counts.sum() / num_items_in_batch)
        return loss

    def _distance(self, states: tuple[Tensor, ...], targets: tuple[Tensor, ...], counts: Tensor) -> Tensor:
        """Return the mean relative squared distance of states of the layers that both have."""
        pairs = [(states[own], targets[layer]) for own, layer in enumerate(self.teacher.layers)][1:]
        pairs.append((states[-1], targets[-1]))
        distances = []
        for state, target in pairs:
            near, far = state[:, :-1][counts].float(), target[:, :-1][counts].float()  # (R, C)
            distances.append(((near - far).square().sum(-1) / far.square().sum(-1)).mean())
        return torch.stack(distances).mean()


def head_of(model: nn.Module) -> Head:
    """Return what makes logits of a model's last hidden states; families that convert have no more than that."""
    assert isinstance(model, nn.Module)
    config: Any = model.config
    translated = config if isinstance(config, CrossLayerConfig) else to_config(config)
    embeddings: Any = model.get_output_embeddings()  # type: ignore[operator]
    return Head(embeddings.weight, translated.final_logit_softcapping)


def _states(model: Any, inputs: dict[str, Tensor], every: bool) -> tuple[Tensor, ...]:
    """Return the final norm's output, last, and before it, where `every` is set, what each layer reads; no logits."""
    output = model.get_decoder()(**inputs, use_cache=False, output_hidden_states=every)
    return output.hidden_states if every else (output.last_hidden_state,)
