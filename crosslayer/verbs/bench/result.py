"""The results of a benchmark, in transformers or in vLLM, and their pages: ratios and times by configuration."""

from typing import Annotated, Any, Literal

from pydantic import Field, PositiveInt

from crosslayer.cache.eviction import Evict
from crosslayer.cache.running import CacheOptions
from crosslayer.judge.clock import TIMES
from crosslayer.judge.page import by_verdict, failures, listing, models_table, span
from crosslayer.judge.report import Report, Row
from crosslayer.output.chart import same_scale
from crosslayer.output.formatting import UNKNOWN, Table, listed, percent, plural, readable_bytes
from crosslayer.output.page import Cell, Page
from crosslayer.output.panel import COLORS, QUIET, Line, Panel
from crosslayer.output.record import SEVERAL, Options, Seed
from crosslayer.stats.estimate import band
from crosslayer.stats.times import FEWEST, coverage
from crosslayer.wiring.kv_bits import KvBitsText

NOISY = 0.2  # the spread of equal runs above which the machine was busy
TOO_FEW = f"too few pairs for an interval: it needs {FEWEST} (--repeats {FEWEST})"


def covered(pairs: int) -> str:
    """Name the interval that this number of pairs gives: 93.8% interval, or no interval."""
    return f"{percent(coverage(pairs), 1)} interval" if pairs >= FEWEST else "no interval"


class BenchSettings(Options):
    """The options of a benchmark: every context (tokens of the prompt) with every batch size and attention."""

    contexts: Annotated[tuple[PositiveInt, ...], SEVERAL]
    batches: Annotated[tuple[PositiveInt, ...], SEVERAL] = (1,)
    new_tokens: PositiveInt
    repeats: PositiveInt
    attention: Annotated[tuple[Literal["sdpa", "eager"], ...], SEVERAL] = ("sdpa",)
    seed: Seed = 0
    evict: Evict | None = Field(default=None, description="eviction policy of the candidate's cache")
    kv_bits: KvBitsText | None = Field(default=None, description="bits of the candidate's cache")


class Benchmark(Report):
    """What `crosslayer.bench` returns: bytes, times and peak memory at each configuration, and a page.

    The scope of a row is its configuration: context 512, batch 1, sdpa.
    """

    schema_: Literal["crosslayer/bench/9"] = Field(default="crosslayer/bench/9", alias="schema")
    settings: BenchSettings
    skipped: tuple[str, ...] = Field(description="why configurations were left out")

    def layout(self) -> Page:
        """Return the page; its cards have the size of the cache, and times, of the last configuration."""
        settings, threads = self.settings, self.environment.machine.threads
        last, titles, cards = self.rows[-1].scope, {"bytes": "KV cache", **TIMES}, []
        for row in self.rows:
            if row.scope == last and row.quantity in titles and row.change is not None:
                figure, _, interval = row.change_text().partition(" ")
                cards.append((titles[row.quantity], figure, f"{interval} {row.verdict}; {last}".strip()))
        return Page(
            title=self.title("Benchmark"),
            subtitle=(
                f"random tokens, {settings.new_tokens} decoded after each prompt · {settings.repeats} pairs of "
                f"alternating runs · {self.models[-1].place}, {plural(threads, 'thread')} · "
                f"{' and '.join(settings.attention)} attention"
            ),
            cards=cards,
            panels=self._panels(),
            tables=[
                listing("All measurements", self.rows, {"stored": "bytes\nas stored"}, "configuration"),
                models_table(self),
            ],
        )

    def sentences(self) -> list[str]:
        """Return what was measured over all configurations; gains and losses are worded alike."""
        settings, pairs = self.settings, self.settings.repeats
        times = [row for row in self.rows if row.quantity in TIMES]
        spans = [f"{title} {span(self.rows_of(name))}" for name, title in TIMES.items() if self.rows_of(name)]
        spans[0] = spans[0][0].upper() + spans[0][1:]
        lines = [
            f"KV cache: {span(self.rows_of('bytes'))} of the baseline's 16-bit cache. {'; '.join(spans)}.",
            *by_verdict(times),
        ]
        if softmax := self.rows_of("softmax share"):
            ends = []
            for shares in ([row.value or 0.0 for row in softmax], [row.original or 0.0 for row in softmax]):
                ends.append(" to ".join(dict.fromkeys(percent(end) for end in (min(shares), max(shares)))))
            lines.append(
                f"With eager attention, softmax takes {ends[0]} of the time to first token, in the baseline {ends[1]}."
            )
        rule = "a candidate counts as faster or slower only if the interval excludes 1"
        lines.append(
            f"Each ratio is the median of {plural(pairs, 'pair')} of runs ({covered(pairs)}); "
            f"{TOO_FEW if pairs < FEWEST else rule}."
        )
        worst = max(times, key=lambda row: row.details["spread"])
        apart = float(worst.details["spread"])
        if apart > NOISY:
            where = f"{TIMES[worst.quantity]} at {worst.scope} has quartiles {percent(apart)} apart"
            lines.append(f"Equal runs vary: {where}, so the machine was probably busy.")
        lines += failures(self) + CacheOptions(settings.evict, settings.kv_bits).sentences()
        return lines + [f"Skipped: {reason}." for reason in self.skipped]

    def tables(self) -> list[Table]:
        """Return the short table: a row for each configuration, with ratios and both medians."""
        quantities = {"bytes": "KV cache\n(of the 16-bit cache)", **TIMES, "peak memory": "peak memory"}
        shown = {name: title for name, title in quantities.items() if self.rows_of(name)}
        cells: list[list[Cell]] = []
        for scope in dict.fromkeys(row.scope for row in self.rows):
            rows = [self.row(self.candidates[0].name, name, scope) for name in shown]
            cells.append([scope, *(_cell(row) for row in rows)])
        title = f"Candidate ÷ baseline ({covered(self.settings.repeats)}); below it candidate / baseline"
        return [(title, ["configuration", *(title.replace(", ", ",\n") for title in shown.values())], cells)]

    def _panels(self) -> list[Panel]:
        """Return the figures of each batch size and attention: ratios, and time per token."""
        groups: dict[str, dict[float, str]] = {}  # by batch and attention: scope of each context
        for scope in dict.fromkeys(row.scope for row in self.rows):
            context, rest = scope.removeprefix("context ").split(", ", 1)
            groups.setdefault(rest, {})[float(context)] = scope
        ratios, times = [], []
        for group, scopes in groups.items():
            scopes = dict(sorted(scopes.items()))
            ratios.append(self._ratios(group, scopes))
            times.append(self._times(group, scopes))
        return [panel for pair in zip(same_scale(ratios), same_scale(times), strict=True) for panel in pair]

    def _ratios(self, group: str, scopes: dict[float, str]) -> Panel:
        """Return the figure of ratios by context; those of bytes have no interval."""
        lines, pairs = [], self.settings.repeats
        for name, title in (*TIMES.items(), ("bytes", "KV cache, in 16 bits")):
            rows = {row.scope: row for row in self.rows_of(name)}
            changes = [rows[scope].change for scope in scopes.values()]
            values, low, high = band([change for change in changes if change is not None])
            has_ends = name in TIMES and pairs >= FEWEST
            lines.append(Line(title, [*scopes], values, low if has_ends else None, high if has_ends else None))
        caption = "Below 1 the candidate needs less time or memory. Bars, side by side: "
        caption += f"{covered(pairs)} of the median ratio."
        return _panel("ratios", "Ratios by context", caption, "candidate ÷ baseline", group, lines, log_y=True)

    def _times(self, group: str, scopes: dict[float, str]) -> Panel:
        """Return the figure of times per token by context."""
        rows = {row.scope: row for row in self.rows_of("tpot_dynamic")}
        own = [1e3 * (rows[scope].value or 0.0) for scope in scopes.values()]
        original = [1e3 * (rows[scope].original or 0.0) for scope in scopes.values()]
        lines = [Line("candidate", [*scopes], own, color=COLORS[0]), Line("baseline", [*scopes], original, color=QUIET)]
        caption = "Dynamic cache; medians over runs."
        return _panel("times", "Time per token", caption, "milliseconds per token", group, lines)


def _cell(row: Row | None) -> str:
    if row is None or row.value is None:
        return UNKNOWN
    verdict = f"\n{row.verdict}" if row.unit == "s" else ""
    return f"{row.change_text()}{verdict}\n{row.text(row.value)} / {row.text(row.original)}"


def _panel(key: str, title: str, caption: str, axis: str, group: str, lines: list[Line], **look: Any) -> Panel:
    ticks = {context: f"{context:.0f}" for context in lines[0].x}
    name = f"{key}_{group.replace(', ', '_').replace(' ', '_')}"
    look |= {"log_x": len(ticks) > 1, "bars": True}
    return Panel(name, f"{title}, {group}", caption, "context (tokens)", axis, lines, x_ticks=ticks, **look)


class ServingSettings(Options):
    """The options of a benchmark in vLLM: every context is measured with every number of concurrent requests."""

    contexts: Annotated[tuple[PositiveInt, ...], SEVERAL]
    requests: Annotated[tuple[PositiveInt, ...], SEVERAL]
    new_tokens: PositiveInt
    repeats: PositiveInt
    kv_bytes: PositiveInt = Field(description="memory for the KV cache of each model")
    dtype: str | None = Field(description="None: vLLM's default")
    seed: Seed


class ServingBenchmark(Report):
    """What `crosslayer.bench` returns for engine vllm: how many tokens the caches hold, and throughput.

    The scope of a row of throughput is its configuration: context 512, 4 requests.
    """

    schema_: Literal["crosslayer/bench-serving/6"] = Field(default="crosslayer/bench-serving/6", alias="schema")
    settings: ServingSettings
    engine: str = Field(description="vLLM and its version")

    def layout(self) -> Page:
        """Return the page."""
        settings, rows = self.settings, [row for row in self.rows if row.unit != "s"]
        return Page(
            title=f"{self.title('Benchmark')} in vLLM",
            subtitle=(
                f"{self.engine} · {readable_bytes(settings.kv_bytes)} of KV cache each · random tokens, "
                f"{settings.new_tokens} decoded after each prompt · {settings.repeats} pairs of alternating runs"
            ),
            cards=[(row.quantity, row.change_text(), f"{row.scope}: {row.verdict}") for row in rows[:5]],
        )

    def tables(self) -> list[Table]:
        """Return the table: a row for each quantity and configuration."""
        return [listing(f"Candidate and baseline ({covered(self.settings.repeats)})", self.rows, of="configuration")]

    def sentences(self) -> list[str]:
        """Return what was measured."""
        written = by_verdict([row for row in self.rows if row.unit != "s"])
        written += [f"{one.name}: {one.details['not_saved']}" for one in self.models if "not_saved" in one.details]
        if self.settings.repeats < FEWEST:
            written.append(f"{self.settings.repeats} pairs of runs are {TOO_FEW}.")
        needed = (max(self.settings.contexts) + self.settings.new_tokens) * max(self.settings.requests)
        full = [one.name for one in self.models if int(one.details["kv_tokens"]) < needed]
        if full:
            written.append(f"The KV cache of {listed(full)} is too small for all requests at once, so some wait.")
        return written
