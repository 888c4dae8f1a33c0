"""The components of a training run's `record.json`: losses in nats per token, times in seconds."""

import math
import re
from collections.abc import Collection, Mapping, Sequence
from statistics import fmean
from typing import Any, Literal

from pydantic import Field

from crosslayer.output.record import Frozen, SameLengths

KEY = re.compile(r"snapshot_(\w+)_layer_(\d+)")  # of a measure in the log


class TrainedModel(Frozen):
    """The trained model; `flops_per_token` are of a forward and a backward pass, KV bytes are in `dtype`."""

    class_: str = Field(validation_alias="class", serialization_alias="class")
    methods: list[dict[str, Any]]
    layers: int
    parameters: int = Field(ge=1)
    flops_per_token: float = Field(ge=0, description="three times a forward pass, with attention over all positions")
    kv_bytes_per_token: float = Field(ge=0, description="stored in the cache")
    kv_read_bytes_per_token: float = Field(ge=0, description="read by a new token, per cached token")
    dtype: str


class TrainedDomain(Frozen):
    """A text domain; `passes` is how often the run read it."""

    name: str
    share: float = Field(gt=0, le=1)
    tokens: int = Field(ge=1)
    documents: int = Field(ge=1)
    validation_tokens: int = Field(ge=1, description="evaluated: windows × tokens per window")
    passes: float = Field(gt=0)
    fingerprint: str = Field(description="of the text, the tokenizer and the order of rows")


class Curve(SameLengths):
    """The logged entries; a loss is the mean since the previous entry."""

    steps: list[int]
    losses: list[float]
    learning_rates: list[float]
    gradient_norms: list[float | None]
    tokens_per_second: list[float]


def curve_of(history: Sequence[Mapping[str, Any]]) -> Curve:
    """Return the curve from a trainer's log."""
    losses = [entry for entry in history if "loss" in entry]
    return Curve(
        steps=[int(entry["step"]) for entry in losses],
        losses=[entry["loss"] for entry in losses],
        learning_rates=[entry["learning_rate"] for entry in losses],
        gradient_norms=[entry.get("grad_norm") for entry in losses],
        tokens_per_second=[entry["tokens_per_second"] for entry in losses],
    )


def training_seconds(history: Sequence[Mapping[str, Any]]) -> float:
    """Return the seconds of training steps from a trainer's log, also over resumed sections of a run."""
    # from speeds, since times of a clock would count evaluations, and the pause before a run is resumed
    tokens = 0
    seconds = 0.0
    for entry in history:
        if "loss" in entry:
            seconds += (entry["tokens"] - tokens) / entry["tokens_per_second"]
            tokens = entry["tokens"]
    return seconds


class StageRun(Frozen):
    """The training of a stage."""

    parameters: Literal["compensation", "all", "lora"]
    trained: int = Field(ge=1, description="number of trained parameters")
    steps: int = Field(ge=1)
    planned: int = Field(ge=1, description="steps of the schedule; more than `steps` where it ended early")
    tokens: int = Field(ge=1, description="training tokens, with padding")
    seconds: float = Field(ge=0, description="of training steps only")
    curve: Curve


class Outcome(Frozen):
    """The outcome of a stage: its training run, or why it was skipped, or why it stopped before its end."""

    run: StageRun | None = None
    skipped: str | None = Field(default=None, description="why the stage was skipped")
    stopped: str | None = Field(
        default=None, description="why training failed; the figures are those of the state before"
    )


class Validation(Frozen):
    """Validation losses of each domain after a step."""

    step: int
    losses: dict[str, float]


def validations_in(history: Sequence[Mapping[str, Any]], domains: Collection[str]) -> tuple[Validation, ...]:
    """Return the evaluations in a trainer's log."""
    by_step: dict[int, dict[str, float]] = {}
    for entry in history:
        for name in domains:
            if f"eval_{name}_loss" in entry:
                by_step.setdefault(entry["step"], {})[name] = entry[f"eval_{name}_loss"]
    return tuple(Validation(step=step, losses=losses) for step, losses in by_step.items())


Layers = list[float | None]


def mean_of_known(values: Sequence[float | None]) -> float | None:
    """Return the mean of the values that are not None; None if there is no such value."""
    known = [value for value in values if value is not None]
    return fmean(known) if known else None


class DepthMixing(Frozen):
    """What each sublayer's input takes from the embedding and earlier outputs; None where a source comes later."""

    readers: list[str]
    weights: list[Layers] = Field(description="(readers, sources), mean over tokens")


class Snapshot(SameLengths):
    """Measures of a few held-out windows after a step, by layer; None where a layer lacks the sublayer."""

    step: int
    first_token_share: Layers = Field(description="share of attention")
    sink_rate: Layers = Field(description="share of heads that give the first token more than 0.3")
    value_norm_ratio: Layers = Field(description="norm of the first token's value over the median")
    hidden_norm_ratio: Layers = Field(description="norm of the first token's hidden state over the median")
    stream_norm: Layers = Field(description="mean norm of the residual stream")
    entropy: Layers = Field(default=[], description="of the attention that tokens receive, nats")
    token_similarity: Layers = Field(default=[], description="mean cosine of different tokens' hidden states")
    attention_output_norm: Layers = Field(default=[], description="mean norm of what attention adds")
    mlp_output_norm: Layers = Field(default=[], description="mean norm of what the MLP adds")
    attention_gradient_norm: Layers = Field(default=[], description="of the gradient of the summed loss by the former")
    mlp_gradient_norm: Layers = Field(default=[], description="of the gradient of the summed loss by the latter")


def snapshots_in(history: Sequence[dict[str, Any]]) -> tuple[Snapshot, ...]:
    """Return the snapshots in a log; of two after the same step, the later one."""
    by_step: dict[int, dict[str, dict[int, float | None]]] = {}
    for entry in history:
        for key, value in entry.items():
            match = KEY.fullmatch(key)
            if match is not None:
                # NaN where a layer lacks the sublayer; the log's file has null for it
                finite = value if value is not None and math.isfinite(value) else None
                by_step.setdefault(entry["step"], {}).setdefault(match[1], {})[int(match[2])] = finite
    snapshots = []
    for step, measures in by_step.items():
        by_name = {name: [layers[layer] for layer in sorted(layers)] for name, layers in measures.items()}
        snapshots.append(Snapshot(step=step, **by_name))
    return tuple(snapshots)
