"""The loss of distillation: a model is trained towards the predictions of another, its teacher.

    loss = KL + λ · mean over layers ℓ and tokens of ‖x_ℓ − x°_ℓ‖² / ‖x°_ℓ‖²

x_ℓ is the input of layer ℓ, for all layers that both models have except the first, whose input is the embedding; and
the output of the final norm. Each token's distance is relative to the norm of the teacher's state, so that the few
tokens with states of a hundredfold norm do not dominate. No token is predicted across document boundaries.

Shapes: B batch, T tokens, R tokens with labels, C hidden.
"""

from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from crosslayer.core.decoder.configuration import CrossLayerConfig
from crosslayer.core.decoder.convert import to_config
from crosslayer.training.divergence import Head, divergence
from crosslayer.training.mixture import IGNORED


class Teacher:
    """A frozen model; another is trained towards its predictions and, with λ = `hidden` > 0, its hidden states.

    `layers` has the teacher's layer for each layer of the trained model, (L of the trained model,).
    """

    def __init__(self, model: PreTrainedModel, layers: tuple[int, ...], hidden: float = 0.0):
        self.model, self.layers, self.hidden = model.eval(), layers, hidden
        self.head = head_of(model)

    @torch.no_grad()
    def states(self, inputs: dict[str, Tensor]) -> tuple[Tensor, ...]:
        """Return the teacher's last hidden states, with λ > 0 after the input of each layer, (B, T, C) each."""
        return _states(self.model, inputs, self.hidden > 0)

    def loss(
        self, student: Any, inputs: dict[str, Any], autocast: AbstractContextManager[None]
    ) -> tuple[Tensor, Tensor]:
        """Return the mean loss of a model over the tokens with labels, and their number; products run in `autocast`."""
        counts = inputs["labels"][:, 1:] != IGNORED  # (B, T − 1): the token before each predicts it
        given = {name: value for name, value in inputs.items() if name != "labels"}
        with autocast:  # accelerate wraps only the forward of the trained model
            states, targets = _states(student, given, self.hidden > 0), self.states(given)
            loss = divergence(states[-1][:, :-1][counts], head_of(student), targets[-1][:, :-1][counts], self.head)
        if self.hidden:
            loss = loss + self.hidden * self._distance(states, targets, counts)
        return loss, counts.sum()

    def _distance(self, states: tuple[Tensor, ...], targets: tuple[Tensor, ...], counts: Tensor) -> Tensor:
        """Return the mean relative squared distance of the hidden states of layers that both models have."""
        pairs = [(states[own], targets[layer]) for own, layer in enumerate(self.layers)][1:]
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
