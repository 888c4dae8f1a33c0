"""What `crosslayer.plan` returns, and its record."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

from pydantic import Field

from crosslayer.output.record import Frozen
from crosslayer.output.result import Result
from crosslayer.wiring.result import ModelPlan

SHORTEST, LONGEST = 256, 131_072  # tokens of the curve, whose lengths double


class PlanSettings(Frozen):
    """What was asked."""

    length: tuple[int, ...]
    batch: int = Field(ge=1)
    dtype: str
    kv_dtype: str
    engine: str


class PlannedLayer(Frozen):
    """A layer: its mask, the bytes of its states, and the other layers whose keys and values it reads."""

    mask: str
    stored_bytes: int = Field(ge=0)
    attends: bool
    sources: tuple[int, ...]


class PlannedLength(Frozen):
    """Bytes at a length: stored, read for the last token, and of the 16-bit cache."""

    length: int = Field(ge=1)
    stored_bytes: int = Field(ge=0)
    read_bytes: int = Field(ge=0)
    full_bytes: int = Field(ge=0)


class PlannedMethod(Frozen):
    """The model with a method at the same lengths, none if it is not possible, and what a pretrained model needs."""

    method: str
    pretrained: str
    sizes: tuple[PlannedLength, ...]
    curve: tuple[PlannedLength, ...]


class PlanReport(Result):
    """What a plan saves; `layers` and `methods` at the longest length asked, `curve` over many."""

    schema_: Literal["crosslayer/plan/2"] = Field(default="crosslayer/plan/2", alias="schema")
    settings: PlanSettings
    model: str
    type: str
    residual: str
    figures: dict[str, Any] = Field(description="the numbers of the last line of the command")
    findings: tuple[str, ...]
    layers: tuple[PlannedLayer, ...]
    curve: tuple[PlannedLength, ...]
    sizes: tuple[PlannedLength, ...]
    methods: tuple[PlannedMethod, ...]

    def headline(self) -> dict[str, Any]:
        """Return the numbers of the JSON line that the command prints last."""
        return self.figures


class Plan(ModelPlan):
    """The wiring of a model and the bytes of its cache, which can be saved as a page."""

    def save(self, folder: str | Path, force: bool = False) -> Path:
        """Write record.json, report.html and figures into a folder; return the page's path.

        Raises:
            ValueError: the folder exists and `force` is not set, or it cannot be written.
        """
        return report_of(self).save(folder, force)

    def next_command(self, model: str | None = None, out: str | None = None) -> str | None:
        """Return the command that the page shows, too."""
        return report_of(self).next_command(model, out)


def report_of(plan: ModelPlan) -> PlanReport:
    """Return a plan as a record."""
    longest = max(LONGEST, plan.length)
    lengths = [SHORTEST]
    while lengths[-1] < longest:
        lengths.append(2 * lengths[-1])
    return PlanReport(
        settings=PlanSettings(
            length=plan.lengths, batch=plan.batch, dtype=plan.dtype, kv_dtype=plan.kv_dtype, engine=plan.engine
        ),
        model=plan.model,
        type=plan.type,
        residual=plan.residual,
        figures=plan.headline(),
        findings=tuple(plan.findings()),
        layers=tuple(_layer(plan.shown, layer) for layer in range(len(plan.layers))),
        curve=_at(plan, lengths),
        sizes=_at(plan, plan.lengths),
        methods=tuple(
            PlannedMethod(
                method=sharing.method,
                pretrained=sharing.pretrained,
                sizes=_at(sharing.plan, plan.lengths),
                curve=_at(sharing.plan, lengths),
            )
            for sharing in plan.shared
        ),
    )


def _at(plan: ModelPlan | None, lengths: Sequence[int]) -> tuple[PlannedLength, ...]:
    if plan is None:
        return ()
    sizes = []
    for length in lengths:
        stored, read, full = plan.stored_at(length), plan.read_at(length), plan.full_at(length)
        sizes.append(PlannedLength(length=length, stored_bytes=stored, read_bytes=read, full_bytes=full))
    return tuple(sizes)


def _layer(shown: ModelPlan, layer: int) -> PlannedLayer:
    sources = {source for state in ("keys", "values") for source in shown.plan.reads(state, layer)}
    return PlannedLayer(
        mask=shown.layers[layer].mask,
        stored_bytes=shown.layer_bytes[layer],
        attends=shown.plan.attends(layer),
        sources=tuple(sorted(sources - {layer})),
    )
