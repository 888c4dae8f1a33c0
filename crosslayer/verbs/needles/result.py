"""The result of a needle test and its page: a map of scores by length and depth for each model, tables, answers."""

from typing import Annotated, Literal, Self

from pydantic import Field, PositiveInt, model_validator

from crosslayer.cache.eviction import Evict
from crosslayer.cache.running import CacheOptions
from crosslayer.judge.hidden import KEYS, SOURCE, Question, is_retrieved
from crosslayer.judge.page import by_verdict, listing
from crosslayer.judge.report import ALL, Report
from crosslayer.output.formatting import Table, listed, percent
from crosslayer.output.page import Cell, Mark, Page
from crosslayer.output.panel import Heat, Panel
from crosslayer.output.record import SEVERAL, Options, Seed
from crosslayer.stats.differences import share
from crosslayer.stats.estimate import Estimate
from crosslayer.wiring.kv_bits import KvBitsText

SHORTEST = 256  # tokens; below, template and needles leave no space for a haystack
SHOWN = 12  # answers on the page; the record has all
# A baseline's score below which a candidate has nothing to lose: that no loss is seen would then say nothing.
LOW = 0.05


class NeedlesSettings(Options):
    """The options of a needle test: every length is combined with every depth, `samples` times."""

    lengths: Annotated[tuple[int, ...], SEVERAL]
    depths: Annotated[tuple[int, ...], SEVERAL]
    keys: int
    samples: PositiveInt
    new_tokens: PositiveInt
    batch: PositiveInt
    evict: Evict | None = None
    kv_bits: KvBitsText | None = None
    seed: Seed

    @property
    def cells(self) -> list[tuple[int, int]]:
        """All combinations of a length and a depth."""
        return [(length, depth) for length in self.lengths for depth in self.depths]

    @property
    def hidden(self) -> str:
        """What is asked for in a text."""
        return "the hidden number" if self.keys == 1 else f"one of {self.keys} hidden numbers"

    @model_validator(mode="after")
    def _check(self) -> Self:
        wrong = []
        if min(self.lengths) < SHORTEST:
            wrong.append(f"`lengths` must be at least {SHORTEST} tokens, got {min(self.lengths)}")
        outside = [depth for depth in self.depths if not 0 <= depth <= 100]
        if outside:
            wrong.append(f"`depths` must be 0-100, got {outside[0]}")
        if not 1 <= self.keys <= len(KEYS):
            wrong.append(f"`keys` must be 1-{len(KEYS)}, got {self.keys}")
        if wrong:
            raise ValueError("; ".join(wrong))
        return self


class Needles(Report):
    """What `crosslayer.needles` returns: the score of each model by length, every answer, and a page.

    Answers are scored like RULER's `string_match` (arXiv 2404.06654). The scope of a row is a length: 512 tokens.
    """

    schema_: Literal["crosslayer/needles/5"] = Field(default="crosslayer/needles/5", alias="schema")
    settings: NeedlesSettings
    questions: tuple[Question, ...]
    answers: tuple[tuple[str, ...], ...] = Field(description="to each question, of each of `models`")

    @model_validator(mode="after")
    def _check_grid(self) -> Self:
        """Refuse questions and answers that do not match the settings."""
        expected = [(*cell, index) for cell in self.settings.cells for index in range(self.settings.samples)]
        if [(question.length, question.depth, question.index) for question in self.questions] != expected:
            raise ValueError("the questions do not match lengths, depths and samples")
        if len(self.answers) != len(self.models):
            raise ValueError(f"answers of {len(self.answers)} models, of {len(self.models)}")
        for answers in self.answers:
            if len(answers) != len(expected):
                raise ValueError(f"{len(answers)} answers to {len(expected)} questions")
        return self

    def score(self, model: int, length: int, depth: int | None = None) -> Estimate:
        """Return the share of numbers that a model (by index) retrieves at a length, and depth; Wilson's interval."""
        found = [
            is_retrieved(answer, question.value)
            for question, answer in zip(self.questions, self.answers[model], strict=True)
            if question.length == length and depth in (None, question.depth)
        ]
        return share(sum(found), len(found))

    @property
    def strayed(self) -> int:
        """How many of the candidate's answers have the number of another key only."""
        count = 0
        for question, answer in zip(self.questions, self.answers[0], strict=True):
            others = any(is_retrieved(answer, value) for value in question.others)
            count += others and not is_retrieved(answer, question.value)
        return count

    def layout(self) -> Page:
        """Return the page."""
        settings = self.settings
        lengths = [row for row in self.rows if row.scope != ALL]
        cards = []
        for row in lengths:
            note = "" if row.original is None else f"baseline {percent(row.original)}; "
            score = self.score(0, int(row.scope.split()[0]))
            cards.append((row.scope, score.text(0, percent=True), f"{note}95% intervals"))

        # The first answers of each length and depth, of all models side by side.
        examples: list[list[Cell]] = []
        for index, question in enumerate(self.questions):
            if question.index == 0 and len(examples) < SHOWN:
                for model, answers in zip(self.models, self.answers, strict=True):
                    right = Mark(question.value, "pass" if question.value in answers[index] else "fail")
                    cells = [f"{question.length:,}", f"{question.depth}%", model.name, question.key]
                    examples.append([*cells, right, answers[index].strip()])
        head = ["length", "depth", "model", "key", "number", "answer"]
        return Page(
            title=self.title("Needle test"),
            subtitle=(
                f"needle in a haystack (RULER, arXiv 2404.06654): {settings.hidden} in {SOURCE} · seed {settings.seed} "
                f"· {self.candidates[0].place} · {self.seconds:.0f} s"
            ),
            cards=cards,
            panels=[self._map(index) for index in range(len(self.models))],
            tables=[("Answers: the first of each length and depth", head, examples)],
            lead=[listing("By length", lengths, {"samples": "samples"}, "length")],
        )

    def sentences(self) -> list[str]:
        """Return the scores of each model by length, the differences, and how both are measured."""
        settings = self.settings
        written = []
        for index, model in enumerate(self.models):
            role = "baseline" if index else "candidate"
            # A name with a comma (smollm2, 4 bits) would run into the sentence.
            name = f"The {role}, {model.name}," if self.original is not None or ", " in model.name else model.name
            scores = [f"{self.score(index, size).text(0, percent=True)} at {size:,}" for size in settings.lengths]
            written.append(f"{name} retrieves {settings.hidden}: {', '.join(scores)} tokens.")
        if settings.keys > 1:
            strayed = self.strayed / len(self.questions)
            written.append(f"{percent(strayed)} of the candidate's answers give another key's number.")
        paired = ""
        if self.original is not None:
            paired = "; Agresti and Min for paired differences, with McNemar's test"
            lengths = [row for row in self.rows if row.scope != ALL]
            written += by_verdict(lengths)
            low = [row.scope for row in lengths if row.original is not None and row.original < LOW]
            if low:
                written.append(
                    f"At {listed(low)} the baseline itself retrieves fewer than {LOW:.0%}, so the candidate has "
                    "nothing to lose there."
                )
        depths = len(settings.depths)
        return [
            *written,
            *CacheOptions(settings.evict, settings.kv_bits).sentences(),
            f"A score is the share of greedy answers (up to {settings.new_tokens} tokens) that contain the number, "
            f"over {depths * settings.samples} samples per length: {settings.samples} at each of {depths} depths. 95% "
            f"intervals over samples: Wilson for scores{paired}.",
        ]

    def tables(self) -> list[Table]:
        """Return a table of scores for each model: a row for each length, a column for each depth."""
        depths = self.settings.depths
        tables = []
        for index, model in enumerate(self.models):
            rows = []
            for length in self.settings.lengths:
                scores = [self.score(index, length, depth) for depth in (*depths, None)]
                rows.append([f"{length:,}", *(percent(score.value) for score in scores)])
            tables.append((model.name, ["length", *(f"depth {depth}%" for depth in depths), "all"], rows))
        return tables

    def _map(self, model: int) -> Panel:
        """Return the map of a model's scores in percent: a row for each length, a column for each depth."""
        lengths, depths = self.settings.lengths, self.settings.depths
        role = ("candidate", "baseline")[model]
        scores = {cell: self.score(model, *cell) for cell in self.settings.cells}
        best, worst = (end(scores, key=lambda cell: scores[cell].value) for end in (max, min))
        caption = f"{percent(scores[best].value)} at every length and depth."
        if scores[worst].value < scores[best].value:
            ends = [
                f"{scores[length, depth].text(0, percent=True)} at {length:,} tokens, depth {depth}%"
                for length, depth in (best, worst)
            ]
            caption = f"Best: {ends[0]}. Worst: {ends[1]}. In parentheses: 95% intervals."
        heat = Heat(
            # Edges of equal cells: depths need not be evenly spaced.
            [edge - 0.5 for edge in range(len(depths) + 1)],
            [*range(len(lengths))],
            [[100 * scores[length, depth].value for depth in depths] for length in lengths],
            "score, %",
            (0.0, 100.0),
            columns=[f"{depth}%" for depth in depths],
            written=True,
        )
        title, axes = self.models[model].name, ("depth of the needle, %", "length, tokens")
        if self.original is not None:
            title += f", {role}"
        x_ticks = {float(column): str(depth) for column, depth in enumerate(depths)}
        y_ticks = {float(row): f"{length:,}" for row, length in enumerate(lengths)}
        drawn = {"heat": heat, "wide": self.original is None, "x_ticks": x_ticks, "y_ticks": y_ticks}
        return Panel(f"scores_{role}", title, caption, *axes, **drawn)
