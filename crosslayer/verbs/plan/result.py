"""What `crosslayer.plan` returns, its record and its page: who reads whom, bytes by layer, bytes by length."""

from pathlib import Path
from typing import Any, Literal

from pydantic import Field

from crosslayer.core.plan import CACHED
from crosslayer.output.formatting import Table, readable_bytes
from crosslayer.output.page import Page
from crosslayer.output.panel import QUIET, Line, Panel, Wires
from crosslayer.output.record import Frozen
from crosslayer.output.result import Result
from crosslayer.wiring.result import COLUMNS, SHARE, ModelPlan, PlannedLength, methods_table

# Tokens of the curve. Its lengths double, so they are evenly spaced on a logarithmic axis.
SHORTEST, LONGEST = 256, 131_072
MIB = 2**20
FULL = "the 16-bit cache"


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

    def sentences(self) -> list[str]:
        """Return the findings."""
        return list(self.findings)

    def layout(self) -> Page:
        """Return the page."""
        settings = self.settings
        last = max(self.sizes, key=lambda size: size.length)
        sequences = "one sequence" if settings.batch == 1 else f"{settings.batch} sequences"
        stored, share, read = last.cells()

        readers, layers = sum(bool(layer.sources) for layer in self.layers), len(self.layers)
        sharing = f"{readers} of {layers} read another layer's (arrows)" if readers else "none reads another's"
        title = "Layers: what each stores, and whose states it reads"
        sentence = f"What each layer stores at {max(settings.length):,} tokens; {sharing}."
        wires = Wires(
            widths=[layer.stored_bytes / MIB for layer in self.layers],
            kinds=[layer.mask for layer in self.layers],
            sources=[layer.sources for layer in self.layers],
        )

        methods = []
        for method in self.methods:
            largest = max(method.sizes, key=lambda size: size.length, default=None)
            methods.append((method.method, largest, method.pretrained))
        return Page(
            title=f"KV cache of {self.model}",
            subtitle=f"{self.type} · {len(self.layers)} layers · as {settings.engine} allocates it, from the config",
            cards=[
                ("KV cache", stored, f"at {last.length:,} tokens, {sequences}, {settings.kv_dtype}"),
                (SHARE, share, f"all layers, all tokens, in 16 bits: {readable_bytes(last.full_bytes)}"),
                ("read per decoding step", read, "a layer that reads another's states counts too"),
            ],
            panels=[Panel("layers", title, sentence, "MiB", "layer", wires=wires), self._curve()],
            tables=[methods_table(last.length, methods)] if methods else [],
        )

    def tables(self) -> list[Table]:
        """Return the sizes by length."""
        return [("By length", ["tokens", *COLUMNS], [[f"{size.length:,}", *size.cells()] for size in self.sizes])]

    def _curve(self) -> Panel:
        """Return the figure of bytes over length; models of equal size share a line."""
        x = [size.length for size in self.curve]
        curves = [("this model", self.curve), *((f"with {method.method}", method.curve) for method in self.methods)]
        named: dict[tuple[int, ...], list[str]] = {}  # sizes → names; methods that save alike would hide one another
        for name, sizes in curves:
            named.setdefault(tuple(size.stored_bytes for size in sizes), []).append(name)
        named.setdefault(tuple(size.full_bytes for size in self.curve), []).append(FULL)
        lines = []
        for sizes, names in named.items():
            is_full = names == [FULL]
            if any(sizes):
                y = [size / MIB for size in sizes]
                lines.append(Line(", ".join(names), x, y, color=QUIET if is_full else None, dashed=is_full))
        sentence = f"What {self.settings.engine} allocates, and the 16-bit cache of all layers and tokens."
        ticks = {float(length): f"{length // 1024}k" if length >= 1024 else str(length) for length in x}
        title = "Bytes over length"
        return Panel("lengths", title, sentence, "tokens", "MiB", lines, log_x=True, log_y=True, x_ticks=ticks)


class Plan(ModelPlan):
    """The wiring of a model and the bytes of its cache, which can be saved as a page."""

    def report(self) -> PlanReport:
        """Return the plan as a record."""
        lengths = [SHORTEST]
        while lengths[-1] < max(LONGEST, self.length):
            lengths.append(2 * lengths[-1])

        shown, held = self.shown, self.shown.layer_bytes
        layers = []
        for layer in range(len(self.layers)):
            sources = {source for state in CACHED for source in shown.plan.reads(state, layer)} - {layer}
            layers.append(
                PlannedLayer(
                    mask=shown.layers[layer].mask,
                    stored_bytes=held[layer],
                    attends=shown.plan.attends(layer),
                    sources=tuple(sorted(sources)),
                )
            )
        methods = []
        for method, plan, pretrained in self.shared:
            sizes = () if plan is None else tuple(map(plan.sizes_at, self.lengths))
            curve = () if plan is None else tuple(map(plan.sizes_at, lengths))
            methods.append(PlannedMethod(method=method, pretrained=pretrained, sizes=sizes, curve=curve))
        settings = {name: getattr(self, name) for name in ("batch", "dtype", "kv_dtype", "engine")}
        return PlanReport(
            settings=PlanSettings(length=self.lengths, **settings),
            model=self.model,
            type=self.type,
            residual=self.residual,
            figures=self.headline(),
            findings=tuple(self.findings()),
            layers=tuple(layers),
            curve=tuple(map(self.sizes_at, lengths)),
            sizes=tuple(map(self.sizes_at, self.lengths)),
            methods=tuple(methods),
        )

    def save(self, folder: str | Path, force: bool = False) -> Path:
        """Write record.json, report.html and figures into a folder; return the page's path.

        Raises:
            ValueError: the folder exists and `force` is not set, or it cannot be written.
        """
        return self.report().save(folder, force)

    def next_command(self, model: str | None = None, out: str | None = None) -> str | None:
        """Return the command that the page shows, too."""
        return self.report().next_command(model, out)
