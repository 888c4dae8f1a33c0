"""A plan as a record."""

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
    """Bytes at a length: stored, read for the last token, and of a full cache."""

    length: int = Field(ge=1)
    stored_bytes: int = Field(ge=0)
    read_bytes: int = Field(ge=0)
    full_bytes: int = Field(ge=0)


class PlannedMethod(Frozen):
    """The model with a method: bytes at each of the lengths, and whether a pretrained model can take it, in words."""

    method: str
    pretrained: str
    stored_bytes: tuple[int, ...]


class PlanReport(Result):
    """What a plan saves; `layers` and `methods` at the longest length asked, `curve` over many."""

    schema_: Literal["crosslayer/plan/1"] = Field(default="crosslayer/plan/1", alias="schema")
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
        findings=tuple(plan.sentences()[1:]),
        layers=tuple(_layer(plan, layer) for layer in range(len(plan.layers))),
        curve=tuple(_at(plan, length) for length in lengths),
        sizes=tuple(_at(plan, length) for length in plan.lengths),
        methods=tuple(
            PlannedMethod(
                method=sharing.method,
                pretrained=sharing.pretrained,
                stored_bytes=tuple(sharing.plan.stored_at(length) for length in lengths),
            )
            for sharing in plan.shared
        ),
    )


def _at(plan: ModelPlan, length: int) -> PlannedLength:
    sizes = {"stored_bytes": plan.stored_at(length), "read_bytes": plan.read_at(length)}
    return PlannedLength(length=length, full_bytes=plan.full_at(length), **sizes)


def _layer(plan: ModelPlan, layer: int) -> PlannedLayer:
    shown = plan.shared[0].plan if len(plan.shared) == 1 else plan  # the one whose diagram is printed
    sources = {source for state in ("keys", "values") for source in shown.plan.reads(state, layer)}
    return PlannedLayer(
        mask=shown.layers[layer].mask,
        stored_bytes=shown.layer_bytes[layer],
        attends=shown.plan.attends(layer),
        sources=tuple(sorted(sources - {layer})),
    )
