"""Training runs that never ran, with planted losses."""

import json

import numpy as np

from crosslayer.environment import environment
from crosslayer.training.record import Curve, Snapshot, TrainedDomain, TrainedModel, Validation
from crosslayer.verbs.train.result import TrainingRun

DOMAINS = {"books": 0.75, "code": 0.25}
STEPS = tuple(range(10, 210, 10))
METHODS = {
    "vanilla": [],
    "resformer": [{"name": "resformer", "mode": "learnable", "of": "values", "source": "first"}],
    "svformer": [{"name": "svformer", "anchors": [0]}],
    "cla": [{"name": "cla", "group": 2}],
    "mudd": [{"name": "mudd"}],
}


def run(variant="vanilla", seed=0, loss=3.0, gap=0.0, **changes):
    """Return a run whose final loss over the mixture is `loss`.

    Args:
        variant: a key of `METHODS`, or methods as a config holds them.
        seed: its seed.
        loss: of books it is 0.1 less, of code 0.3 more.
        gap: what is added to the training curve; a number, or one for each of `STEPS`.
        changes: `size`, `length`, `steps`, `parameters`, `seconds`, `fingerprint`, `snapshots`, `name`, `minimum` and
            `rate` of the learning rate, and `validation`: held-out losses of books and code, evenly over the steps.

    """
    methods = METHODS[variant] if isinstance(variant, str) else variant
    size, length = changes.get("size", "tiny"), changes.get("length", 64)
    steps, parameters = changes.get("steps", STEPS[-1]), changes.get("parameters", 1_000_000)
    losses = {"books": loss - 0.1, "code": loss + 0.3}
    noise = np.random.default_rng(seed).normal(0, 0.05, len(STEPS))  # of the text, which runs of a seed share
    curve = 3 + 2 * np.exp(-np.array(STEPS) / 50) + noise + gap
    planted = changes.get("validation")
    evaluated = (
        [Validation(step=step, losses={n: v + (200 - step) / 400 for n, v in losses.items()}) for step in (100, 200)]
        if planted is None
        else [
            Validation(step=(number + 1) * steps // len(planted), losses=dict.fromkeys(DOMAINS, value))
            for number, value in enumerate(map(float, planted))
        ]
    )
    recipe = {
        "name": changes.get("name", "planted"),
        "seed": seed,
        "model": {"size": size, "shape": {}, "method": methods or None, "start": None},
        "data": {"length": length, "domains": [{"name": name, "weight": share} for name, share in DOMAINS.items()]},
        "schedule": {"tokens": None, "steps": steps, "minimum": changes.get("minimum", 0.1)},
        "train": {"logging_steps": 10, "learning_rate": changes.get("rate", 1e-3)},
    }
    domains = [
        TrainedDomain(name=name, share=share, tokens=1000, documents=3, validation_tokens=640, passes=0.5,
                      fingerprint=changes.get("fingerprint", "f"))
        for name, share in DOMAINS.items()
    ]  # fmt: skip
    return TrainingRun(
        name=recipe["name"],
        seed=seed,
        recipe=recipe,
        model=TrainedModel(
            class_="CrossLayerForCausalLM", methods=methods, layers=4, parameters=parameters,
            flops_per_token=6.0 * parameters, kv_bytes_per_token=1024.0 if not methods else 768.0,
            kv_read_bytes_per_token=1024.0, dtype="bfloat16",
        ),
        domains=domains,
        curve=Curve(
            steps=list(STEPS), losses=curve.tolist(), learning_rates=[1e-3] * len(STEPS),
            gradient_norms=[1.0] * len(STEPS), tokens_per_second=[1e4] * len(STEPS),
        ),
        validation=evaluated,
        windows={name: [value] * 10 for name, value in losses.items()},
        snapshots=changes.get("snapshots", ()),
        steps=steps,
        tokens=steps * 8 * length,
        seconds=changes.get("seconds", 2.0 * steps / 200),
        peak_bytes=300_000_000,
        matrix_flops=1e11,
        environment=environment(),
    )  # fmt: skip


def snapshot(step, share, growth, layers=4):
    """Return a snapshot in which every layer gives the first token a share, and the stream grows by `growth`."""
    norms = np.linspace(1, growth, layers).tolist()
    return Snapshot(
        step=step, first_token_share=[share] * layers, sink_rate=[share / 2] * layers,
        value_norm_ratio=[1.0] * layers, hidden_norm_ratio=[1.0] * layers, stream_norm=norms,
    )  # fmt: skip


def written(folder, *runs):
    """Write the records of runs, each into a folder of its own; return these."""
    folders = []
    for number, entry in enumerate(runs):
        place = folder / f"{number:02}-{entry.seed}"
        place.mkdir(parents=True)
        (place / "record.json").write_text(json.dumps(entry.record()))
        folders.append(place)
    return folders
