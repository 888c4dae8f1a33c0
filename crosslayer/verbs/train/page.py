"""The page of a training run, from its record alone."""

from crosslayer.output.page import Page, Table
from crosslayer.output.panel import Line, Panel
from crosslayer.verbs.train.result import TrainingRun

LINES = 6  # of a figure with a line for each look


def layout(record: TrainingRun) -> Page:
    """Return the parts of the page."""
    return Page(
        title=f"Training of {record.name}",
        subtitle=_subtitle(record),
        cards=_cards(record),
        words=sentences(record),
        panels=[
            panel
            for panel in (_training(record), _validation(record), _norms(record), *_looks(record))
            if panel is not None
        ],
        tables=[_domains(record), _facts(record)],
    )


def sentences(record: TrainingRun) -> list[str]:
    """Return how the run went."""
    last = record.validation[-1].losses
    ends = ", ".join(f"{name} {loss:.4f}" for name, loss in last.items())
    words = [f"Validation loss after {record.steps:,} steps, in nats a token: {ends}."]
    repeated = [f"{domain.name} {domain.passes:.1f} times" for domain in record.domains if domain.passes > 1]
    if repeated:
        words.append(f"Text came again: the run went through {', '.join(repeated)}.")
    rate = record.tokens / record.seconds if record.seconds else 0.0
    flops = _flops(record)
    words.append(
        f"{rate:,.0f} tokens a second, {flops / 1e9:,.1f} GFLOP/s by three times the forward pass's count: "
        f"{flops / record.matrix_flops:.0%} of what a large product of matrices reaches on this machine."
    )
    return words


def _flops(record: TrainingRun) -> float:
    return record.tokens * record.model.flops_per_token / record.seconds if record.seconds else 0.0


def _subtitle(record: TrainingRun) -> str:
    names = "+".join(str(entry["name"]) for entry in record.model.methods) or "no method"
    return (
        f"{names} · {record.model.parameters:,} parameters · {record.tokens:,} tokens in {record.steps:,} steps · "
        f"seed {record.seed}"
    )


def _cards(record: TrainingRun) -> list[tuple[str, str, str]]:
    last = record.validation[-1].losses
    worst = max(last, key=lambda name: last[name])
    minutes = record.seconds / 60
    return [
        ("Training loss", f"{record.curve.losses[-1]:.3f}" if record.curve.losses else "—", "the last that was logged"),
        ("Validation loss", f"{last[worst]:.3f}", f"{worst}, the highest of {len(last)}"),
        ("Time", f"{minutes:.1f} min", "of training steps"),
    ]


def _training(record: TrainingRun) -> Panel | None:
    curve = record.curve
    if len(curve.steps) < 2:
        return None
    line = Line("training", [float(step) for step in curve.steps], curve.losses)
    words = "Each point is the mean since the point before."
    return Panel("training_loss", "Training loss", words, "step", "nats a token", [line])


def _validation(record: TrainingRun) -> Panel | None:
    if len(record.validation) < 2:
        return None
    x = [float(entry.step) for entry in record.validation]
    lines = [
        Line(domain.name, x, [entry.losses[domain.name] for entry in record.validation]) for domain in record.domains
    ]
    words = "Text that is held out, domain by domain."
    return Panel("validation_loss", "Validation loss", words, "step", "nats a token", lines)


def _norms(record: TrainingRun) -> Panel | None:
    curve = record.curve
    if len(curve.steps) < 2:
        return None
    x = [float(step) for step in curve.steps]
    lines = [Line("norm", x, curve.gradient_norms)]
    words = "Of all parameters together, before it is clipped."
    return Panel("gradient_norm", "Norm of the gradient", words, "step", "norm", lines, log_y=True)


def _looks(record: TrainingRun) -> list[Panel]:
    """Return how sinks and the stream changed, each line a step."""
    if not record.looks:
        return []
    shown = (
        record.looks
        if len(record.looks) <= LINES
        else [record.looks[0], record.looks[len(record.looks) // 2], record.looks[-1]]
    )
    layers = [float(layer) for layer in range(record.model.layers)]
    sinks = [Line(f"step {look.step}", layers, look.first_token_share) for look in shown]
    norms = [Line(f"step {look.step}", layers, look.stream_norm) for look in shown]
    return [
        Panel("first_token_share", "Attention to the first token", "Share of all attention.", "layer", "share", sinks),
        Panel("stream_norm", "Residual stream", "Mean norm over tokens.", "layer", "norm", norms, log_y=True),
    ]


def _domains(record: TrainingRun) -> Table:
    head = ["domain", "share", "tokens", "documents", "passes", "validation tokens", "validation loss"]
    rows = [
        [
            domain.name,
            f"{domain.share:.1%}",
            f"{domain.tokens:,}",
            f"{domain.documents:,}",
            f"{domain.passes:.2f}",
            f"{domain.validation_tokens:,}",
            f"{record.validation[-1].losses[domain.name]:.4f}",
        ]
        for domain in record.domains
    ]
    return "Text", head, rows


def _facts(record: TrainingRun) -> Table:
    model, machine = record.model, record.environment.machine
    rows = [
        ["class", model.class_],
        ["layers", str(model.layers)],
        ["parameters", f"{model.parameters:,}"],
        ["FLOPs a token", f"{model.flops_per_token:.3g}"],
        ["FLOPs a second", f"{_flops(record):.3g}, a large product of matrices {record.matrix_flops:.3g}"],
        ["memory at its peak", "—" if record.peak_bytes is None else f"{record.peak_bytes / 1e6:,.0f} MB"],
        [f"KV bytes stored a token ({model.dtype})", f"{model.kv_bytes_per_token:,.0f}"],
        ["KV bytes read for each token of the cache", f"{model.kv_read_bytes_per_token:,.0f}"],
        ["device", machine.gpu or f"{machine.processor}, {machine.threads} threads"],
    ]
    return "Model", ["what", "value"], rows
