"""The results of a benchmark, in transformers or in vLLM, and their pages: ratios and times by configuration."""

from typing import Annotated, Literal

from pydantic import Field, PositiveInt

from crosslayer.cache.eviction import Evict
from crosslayer.cache.running import CacheOptions
from crosslayer.judge.clock import TIMES
from crosslayer.judge.page import (
    by_verdict,
    cards,
    change_panels,
    failures,
    grid,
    listing,
    models_table,
    quantity_name,
    span,
)
from crosslayer.judge.report import Report
from crosslayer.output.formatting import UNKNOWN, Table, listed, percent, plural, readable_bytes
from crosslayer.output.page import Page
from crosslayer.output.record import SEVERAL, Options, Seed
from crosslayer.stats.times import FEWEST, coverage
from crosslayer.wiring.kv_bits import KvBitsText

# The spread of equal runs above which the machine was busy: their ratios need more pairs.
NOISY = 0.2
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
        settings = self.settings
        last = self.rows[-1].scope
        shown = {name: rows for name in ("bytes", *TIMES) if (rows := self.rows_of(name))}
        # Of a single configuration one figure has all quantities; of several, each quantity has its own.
        interval = f"{covered(settings.repeats)} of the median ratio"
        if all(len(rows) == 1 for rows in shown.values()):
            panels = change_panels([row for rows in shown.values() for row in rows], interval=interval)
        else:
            panels = [panel for name, rows in shown.items() for panel in change_panels(rows, f"{name}_", interval)]
        return Page(
            title=self.title("Benchmark"),
            subtitle=(
                f"random tokens, {settings.new_tokens} decoded after each prompt · {settings.repeats} pairs of "
                f"alternating runs · {self.models[-1].place}, "
                f"{plural(self.environment.machine.threads, 'thread')} · {' and '.join(settings.attention)} attention"
            ),
            cards=cards(row for row in self.rows if row.quantity in ("bytes", *TIMES) and row.scope == last),
            panels=panels,
            tables=[
                listing("All measurements", self.rows, {"stored": "bytes\nas stored"}, "configuration"),
                models_table(self),
            ],
        )

    def sentences(self) -> list[str]:
        """Return what was measured over all configurations; gains and losses are worded alike."""
        settings = self.settings
        pairs = settings.repeats
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
        spread = float(worst.details["spread"])
        if spread > NOISY:
            where = f"{TIMES[worst.quantity]} at {worst.scope} has quartiles {percent(spread)} apart"
            lines.append(f"Equal runs vary: {where}, so the machine was probably busy.")
        lines += failures(self) + CacheOptions(settings.evict, settings.kv_bits).sentences()
        return lines + [f"Skipped: {reason}." for reason in self.skipped]

    def tables(self) -> list[Table]:
        """Return the short table: a row for each configuration, with ratios and both medians."""
        cells = []
        for row in self.rows:
            if row.quantity in ("bytes", *TIMES, "peak memory"):
                # in lines, since the cells are narrow
                head = quantity_name(row).replace(", ", ",\n")
                head += "\n(of the 16-bit cache)" if row.quantity == "bytes" else ""
                verdict = f"\n{row.verdict}" if row.unit == "s" else ""
                cell = f"{row.change_text()}{verdict}\n{row.text(row.value)} / {row.text(row.original)}"
                # a peak need not be known
                cells.append((row.scope, head, UNKNOWN if row.value is None else cell))
        title = f"Candidate ÷ baseline ({covered(self.settings.repeats)}); below it candidate / baseline"
        return [grid(title, "configuration", cells)]


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
        settings = self.settings
        # Throughput is the inverse of the times, which the table has too.
        rows = [row for row in self.rows if row.unit != "s"]
        return Page(
            title=f"{self.title('Benchmark')} in vLLM",
            subtitle=(
                f"{self.engine} · {readable_bytes(settings.kv_bytes)} of KV cache each · random tokens, "
                f"{settings.new_tokens} decoded after each prompt · {settings.repeats} pairs of alternating runs"
            ),
            cards=cards(rows[:5]),
        )

    def tables(self) -> list[Table]:
        """Return the table: a row for each quantity and configuration."""
        return [listing(f"Candidate and baseline ({covered(self.settings.repeats)})", self.rows, of="configuration")]

    def sentences(self) -> list[str]:
        """Return what was measured."""
        written = by_verdict([row for row in self.rows if row.unit != "s"])
        for model in self.models:
            if "not_saved" in model.details:
                written.append(f"{model.name}: {model.details['not_saved']}")
        if self.settings.repeats < FEWEST:
            written.append(f"{self.settings.repeats} pairs of runs are {TOO_FEW}.")
        needed = (max(self.settings.contexts) + self.settings.new_tokens) * max(self.settings.requests)
        full = [model.name for model in self.models if int(model.details["kv_tokens"]) < needed]
        if full:
            written.append(f"The KV cache of {listed(full)} is too small for all requests at once, so some wait.")
        return written
