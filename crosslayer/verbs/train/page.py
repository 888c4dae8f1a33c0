"""The page of a training run, from its record alone."""

from statistics import fmean

from crosslayer.output.formatting import UNKNOWN, readable_bytes
from crosslayer.output.page import Page
from crosslayer.output.panel import Line, Panel
from crosslayer.training.record import mean_of_known
from crosslayer.verbs.train.result import TrainingRun

LINES = 6  # of a figure with a line for each snapshot
UNIT = "nats per token"
# of snapshots: measure, title, sentence, axis
BY_LAYER = (
    ("first_token_share", "Attention on the first token", "Share of all attention.", "share"),
    ("stream_norm", "Residual stream", "Mean norm over tokens.", "norm"),
    ("attention_output_norm", "What attention adds", "Mean norm over tokens.", "norm"),
    ("mlp_output_norm", "What the MLP adds", "Mean norm over tokens.", "norm"),
    ("attention_gradient_norm", "Gradient at attention's output", "Of the summed loss; mean norm over tokens.", "norm"),
    ("mlp_gradient_norm", "Gradient at the MLP's output", "Of the summed loss; mean norm over tokens.", "norm"),
)
BY_STEP = (
    ("entropy", "Entropy of attention during training", "Entropy of the attention that tokens receive, in nats."),
    ("token_similarity", "Over-smoothing during training", "Mean cosine of different tokens' hidden states."),
)


def layout(record: TrainingRun) -> Page:
    """Return the page."""
    methods = "+".join(str(entry["name"]) for entry in record.model.methods) or "no method"
    last = record.validation[-1].losses
    curve = record.curve
    memory = [] if record.peak_bytes is None else [("Peak memory", readable_bytes(record.peak_bytes), "of the process")]

    head = ["domain", "share", "tokens", "documents", "passes", "validation tokens", "validation loss"]
    rows = []
    for domain in record.domains:
        counts = [f"{domain.share:.1%}", f"{domain.tokens:,}", f"{domain.documents:,}", f"{domain.passes:.2f}"]
        rows.append([domain.name, *counts, f"{domain.validation_tokens:,}", f"{last[domain.name]:.4f}"])
    if len(rows) > 1:
        rows.append(["mean", *[""] * 5, f"{fmean(last.values()):.4f}"])

    return Page(
        title=f"Training of {record.name}",
        subtitle=(
            f"{methods} · {record.model.parameters:,} parameters · {record.tokens:,} tokens in {record.steps:,} steps "
            f"· seed {record.seed}"
        ),
        cards=[
            ("Training loss", f"{curve.losses[-1]:.3f}" if curve.losses else UNKNOWN, "nats per token, last logged"),
            ("Validation loss", f"{fmean(last.values()):.3f}", "nats per token, mean over domains"),
            ("Time", f"{record.seconds / 60:.1f} min", "training steps only"),
            *memory,
        ],
        panels=[*_curves(record), *_snapshots(record)],
        tables=[("Text", head, rows)],
    )


def sentences(record: TrainingRun) -> list[str]:
    """Return the final losses, repeated text and speed."""
    last = record.validation[-1].losses
    order = sorted(last, key=lambda name: last[name])
    # of a single domain both ends are the same
    ends = " to ".join(dict.fromkeys(f"{name} {last[name]:.4f}" for name in (order[0], order[-1])))
    mean = f"{fmean(last.values()):.4f} on average over {len(last)} domains, " if len(last) > 1 else ""
    lines = [f"Validation loss after {record.steps:,} steps, in nats per token: {mean}{ends}."]
    repeated = [f"{domain.name} {domain.passes:.1f} times" for domain in record.domains if domain.passes > 1]
    if repeated:
        lines.append(f"Text was repeated: the run read {', '.join(repeated)}.")
    # a run too short to log a loss has no seconds
    rate = record.tokens / record.seconds if record.seconds else 0.0
    flops = rate * record.model.flops_per_token
    lines.append(
        f"{rate:,.0f} tokens per second, {flops / 1e9:,.1f} GFLOP/s (three times the forward pass): "
        f"{flops / record.matrix_flops:.0%} of a large matrix product on this machine."
    )
    stored, read = (f"{size:,.0f}" for size in (record.model.kv_bytes_per_token, record.model.kv_read_bytes_per_token))
    lines.append(f"KV cache: {stored} bytes stored and {read} read for each token, in {record.model.dtype}.")
    return lines


def _curves(record: TrainingRun) -> list[Panel]:
    """Return losses and the gradient norm by step, if there are at least two steps."""
    logged = [float(step) for step in record.curve.steps]
    evaluated = [float(entry.step) for entry in record.validation]
    training = [Line("training", logged, record.curve.losses)]
    validation = [
        Line(domain.name, evaluated, [entry.losses[domain.name] for entry in record.validation])
        for domain in record.domains
    ]
    norm = [Line("norm", logged, record.curve.gradient_norms)]
    since = "Each point is the mean since the previous one."
    held_out = "Held-out text of each domain."
    panels = [
        Panel("training_loss", "Training loss", since, "step", UNIT, training),
        Panel("validation_loss", "Validation loss", held_out, "step", UNIT, validation),
        Panel("gradient_norm", "Gradient norm", "All parameters, before clipping.", "step", "norm", norm, log_y=True),
    ]
    return [panel for panel in panels if len(panel.lines[0].x) > 1]


def _snapshots(record: TrainingRun) -> list[Panel]:
    """Return sinks, norms and gradients by layer, one line per step, and means over layers by step."""
    shown = record.snapshots
    if not shown:
        return []
    if len(shown) > LINES:
        shown = (shown[0], shown[len(shown) // 2], shown[-1])
    layers = [float(layer) for layer in range(record.model.layers)]
    panels = []
    for name, title, sentence, axis in BY_LAYER:
        # a measure that was not taken is an empty list
        lines = [Line(f"step {taken.step}", layers, getattr(taken, name)) for taken in shown if getattr(taken, name)]
        if lines:
            panels.append(Panel(name, title, sentence, "layer", axis, lines, log_y=axis == "norm"))
    steps = [float(taken.step) for taken in record.snapshots]
    for name, title, sentence in BY_STEP:
        means = [mean_of_known(getattr(taken, name)) for taken in record.snapshots]
        if len(steps) > 1 and means[0] is not None:
            lines = [Line("", steps, means)]
            panels.append(Panel(f"{name}_by_step", title, sentence, "step", "mean over layers", lines))
    return panels
