"""Times of a training step, variant and baseline in one process and in turn.

The times that runs logged are of other minutes, and often of other neighbors on the machine. Two steps that follow each
other share both, so their ratio is of the models.
"""

import time
from collections.abc import Callable, Mapping

import torch

from crosslayer.core.decoder import CrossLayerConfig, CrossLayerForCausalLM
from crosslayer.stats.times import TimeComparison, compare_times
from crosslayer.verbs.compare.read import NamedRun

MODEL = "model/config.json"  # in a run's folder, which may have its record only
Key = tuple[str, str]  # labels of configuration and variant
Step = Callable[[], float]


def step_times(runs: Mapping[Key, NamedRun], baseline: str, rounds: int) -> dict[Key, TimeComparison]:
    """Return the times of a step of each variant and of its configuration's baseline, over alternating `rounds`.

    `runs` holds one run of each. A step is forward, backward and AdamW on a batch of its recipe, with random tokens and
    initial weights, which cost what others do.

    Raises:
        ValueError: the run's folder has its record only.
    """
    for entry in runs.values():
        if not (entry.folder / MODEL).is_file():
            raise ValueError(f"`step_rounds` needs a model of each variant, and {entry.folder.name} has none; use 0")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    times: dict[Key, TimeComparison] = {}
    pairs = [(key, (key[0], baseline)) for key in runs if key[1] != baseline and (key[0], baseline) in runs]
    for key, reference in pairs:
        steps = [_step(runs[each], device) for each in (key, reference)]
        seconds: tuple[list[float], list[float]] = ([], [])
        # Round −1 warms up. The second of two steps finds warm caches, so both take turns.
        for turn in range(-1, rounds):
            for which in (0, 1) if turn % 2 else (1, 0):
                duration = steps[which]()
                if turn >= 0:
                    seconds[which].append(duration)
        times[key] = compare_times(*seconds)
    return times


def _step(entry: NamedRun, device: str) -> Step:
    """Return a function that runs a training step of a run's model, and returns its seconds."""
    config, recipe = CrossLayerConfig.from_pretrained(entry.folder / "model"), entry.run.recipe
    model = CrossLayerForCausalLM(config).train()
    model.to(torch.device(device))  # type: ignore[bad-argument-type]  # transformers wraps it
    # This rate moves the weights as little as it can: random tokens might blow them up.
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-9)
    shape = (recipe["train"].get("per_device_train_batch_size", 8), recipe["data"]["length"])
    tokens = torch.randint(model.config.vocab_size, shape, device=device)  # (B, T)

    def step() -> float:
        # Waiting for the GPU before and after gives the time of its work and not of the launch.
        if device == "cuda":
            torch.cuda.synchronize()
        started = time.perf_counter()
        with torch.autocast(device, torch.bfloat16, enabled=bool(recipe["train"].get("bf16"))):
            loss = model(tokens, labels=tokens, use_cache=False).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if device == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter() - started

    return step
