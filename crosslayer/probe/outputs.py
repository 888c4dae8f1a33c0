"""What each sublayer adds to the residual stream, and the gradient of the loss by it: norms by layer.

Shapes: L layers, T tokens, C hidden.
"""

from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import PreTrainedModel

from crosslayer.probe.intercept import evaluating, layer_stack, no_cache
from crosslayer.probe.measures import hidden_norms
from crosslayer.probe.stream import LayerStream, streams

SUBLAYERS = ("attention", "mlp")


def output_norms(model: PreTrainedModel, ids: Tensor) -> dict[str, np.ndarray]:
    """Run a causal model forward and backward over token ids (T,); no gradient of a weight is kept.

    Returns:
        "attention_output_norm" and "mlp_output_norm" (L,): mean L2 norm over tokens of what the sublayer adds;
        "attention_gradient_norm" and "mlp_gradient_norm" (L,): the same of the gradient by it of the tokens' summed
        cross-entropy, in nats. NaN if a layer has no such sublayer.
    """
    outputs: dict[tuple[str, int], Tensor] = {}

    def see(stream: LayerStream) -> None:
        for sublayer, update in zip(SUBLAYERS, stream.updates, strict=True):
            if update is not None:
                outputs[sublayer, stream.layer] = update

    ids = ids[None].to(next(model.parameters()).device)  # (1, T)
    embedding: nn.Module = model.get_input_embeddings()
    needing = embedding.register_forward_hook(_need_gradient)
    try:
        with torch.enable_grad(), evaluating(model), streams(model, see):
            logits = model(input_ids=ids, **no_cache(model)).logits[0]  # (T, V)
            loss = functional.cross_entropy(logits[:-1].float(), ids[0, 1:], reduction="sum")
            gradients = torch.autograd.grad(loss, list(outputs.values()), allow_unused=True)
    finally:
        needing.remove()
    norms = {
        f"{sublayer}_{what}_norm": np.full(len(layer_stack(model)), np.nan)
        for what in ("output", "gradient")
        for sublayer in SUBLAYERS
    }
    for ((sublayer, layer), output), gradient in zip(outputs.items(), gradients, strict=True):
        norms[f"{sublayer}_output_norm"][layer] = _mean_norm(output.detach())
        if gradient is not None:
            norms[f"{sublayer}_gradient_norm"][layer] = _mean_norm(gradient)
    return norms


def _need_gradient(_: nn.Module, args: Any, output: Tensor) -> Tensor:
    """Let gradients reach the outputs of frozen layers too."""
    return output if output.requires_grad else output.requires_grad_()


def _mean_norm(states: Tensor) -> float:
    return float(hidden_norms(states.reshape(-1, states.shape[-1])).mean())
