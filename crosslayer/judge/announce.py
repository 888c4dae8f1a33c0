"""Says how long a command will take, before it starts."""

import torch
from torch import Tensor
from transformers import PreTrainedModel

from crosslayer.judge.clock import Load, run
from crosslayer.machine import seconds
from crosslayer.output.progress import progress
from crosslayer.probe.model import no_cache


@torch.no_grad()
def announce(model: PreTrainedModel, ids: Tensor, tokens: float, steps: float = 0) -> None:
    """Show how long reading and decoding take, by the first of windows (N, T), if it is a minute or more."""
    window = ids[:1].to(model.device)
    # The least of three, since the first pass is slower.
    passes = [seconds(lambda: model(input_ids=window, **no_cache(model)), model.device) for _ in range(3)]
    # With all logits, which are most of the work in a small model.
    total = tokens * min(passes) / window.numel()
    if steps:
        timed = run(model, Load(window.shape[1] - 1, new_tokens=1), window, static=False)
        total += steps * timed.seconds["tpot_dynamic"]
    if total >= 60:
        with progress(f"this will take about {round(total / 60)} min", 0):
            pass
