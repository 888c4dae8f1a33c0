"""What the errors of each layer cost in the end: KL of the predictions of a model for which that layer alone is stored.

The metric counts an error relative to the stream that it is added to, which leaves out what later layers make of it:
in Gemma 3 270M, two of 18 layers then had three quarters of the damage. So each layer's metric is scaled to the KL that
its errors cost. KLs of single layers add up.

Shapes: T tokens, W numbers of a layer for each token, L layers.
"""

from copy import deepcopy
from dataclasses import replace

import torch
from torch import Tensor
from transformers import PreTrainedModel

from crosslayer.codec.chain import Chain, code_layers, step_sizes
from crosslayer.codec.fit import PART, Calibration, quick_fit
from crosslayer.codec.judge import continued
from crosslayer.codec.states import new_cache, read_states
from crosslayer.judge.clock import prefill
from crosslayer.output.progress import progress
from crosslayer.probe.intercept import evaluating

WINDOWS = 6  # of calibration text
FACTOR_POWER = 0.75  # of KL over squared error in a metric's factor; below 1, as six windows leave it uncertain


def weighed(calibration: Calibration, model: PreTrainedModel, ids: Tensor, bytes_per_token: float) -> Calibration:
    """Return a calibration whose metrics say what errors cost in KL, from windows (N, T) of calibration text.

    `bytes_per_token` are those of the codes whose errors are measured.
    """
    chain, _ = quick_fit(calibration, bytes_per_token)
    few = ids[:: max(1, len(ids) // WINDOWS)][:WINDOWS]
    factors = layer_costs(model, calibration, chain, few).clamp_min(1e-12).log() * FACTOR_POWER
    factors = (factors - factors.mean()).exp().tolist()
    metric = [own * factor for own, factor in zip(calibration.metric, factors, strict=True)]
    return replace(calibration, metric=metric)


@torch.no_grad()
def layer_costs(model: PreTrainedModel, calibration: Calibration, chain: Chain, ids: Tensor) -> Tensor:
    """Return of each layer the KL that its errors cost over these errors in the calibration's metric, (L,)."""
    shapes, count = calibration.shapes, ids.shape[1] // PART
    found = torch.zeros(2, len(shapes), dtype=torch.float64)
    with evaluating(model), progress("measuring what layers cost", len(ids)) as bar:
        for done, row in enumerate(ids.to(model.device), 1):
            before, after = row[None, :-count], row[None, -count:]
            cache = prefill(model, before)
            states = [read_states(cache, 0, layer, 0, before.shape[1], shape)[0] for layer, shape in enumerate(shapes)]
            steps = step_sizes(chain.importance.steps(states, shapes, before.shape[1]))
            _, stored = code_layers(chain.layers, states, steps)
            for own, back in zip(states, stored, strict=True):
                if len(own) == len(steps):  # it holds the first token, which is stored as it is
                    back[0] = own[0]
            decoded = new_cache([stored], shapes, [0], before.shape[1], model.dtype)
            exact = continued(model, deepcopy(cache), after)
            for layer, (root, _) in enumerate(calibration.roots):
                mixed = deepcopy(cache)
                mixed.layers[layer] = decoded.layers[layer]  # the model adds to it, and it is not used again
                other = continued(model, mixed, after)
                error = (states[layer] - stored[layer]) @ root / steps[len(steps) - len(stored[layer]) :, None]
                found[0, layer] += float((exact.exp() * (exact - other)).sum(-1).mean())
                found[1, layer] += float(error.square().sum(1).mean())
            bar.step(done, len(ids))
    return found[0] / found[1].clamp_min(1e-30)
