"""What `record.json` of a search for needles holds: every sample's figures, every answer, and the scores."""

from pydantic import Field

from crosslayer.output.record import Frozen
from crosslayer.stats.shares import Verdict, mcnemar, verdict_of


class Question(Frozen):
    """A sample without its text, which follows from the settings: its place, its tokens, its key and the values."""

    length: int
    depth: int
    index: int
    tokens: int = Field(description="of the prompt, by the candidate's tokenizer")
    key: str
    value: str
    others: tuple[str, ...] = Field(description="values of the other keys, in the order of the text")


class Score(Frozen):
    """Answers with the value, out of n; `other`: without it, but with the value of another key."""

    length: int
    depth: int | None = Field(description="None over all depths of a length")
    n: int = Field(ge=1)
    found: int = Field(ge=0)
    other: int = Field(ge=0)
    interval: tuple[float, float] = Field(description="Wilson's 95 % interval of the share")

    @property
    def share(self) -> float:
        """The share of answers that hold the value, from 0 to 1."""
        return self.found / self.n


class Side(Frozen):
    """A model and what it said: an answer for each question, and the scores by length and depth, and by length."""

    name: str = Field(description="name without folders above it, or the class")
    dtype: str
    device: str
    parameters: int
    answers: tuple[str, ...]
    cells: tuple[Score, ...]
    by_length: tuple[Score, ...]


class Difference(Frozen):
    """The score of the candidate minus the baseline's, at a length, over n samples that both were asked.

    `gained` were found by the candidate alone, `lost` by the baseline alone.
    """

    length: int
    n: int = Field(ge=1)
    gained: int = Field(ge=0)
    lost: int = Field(ge=0)
    interval: tuple[float, float] = Field(description="95 %, for pairs (Agresti and Min)")

    @property
    def mean(self) -> float:
        """The difference of the shares, from −1 to 1."""
        return (self.gained - self.lost) / self.n

    @property
    def verdict(self) -> Verdict:
        """Whether the candidate finds more or fewer numbers."""
        return verdict_of(self.interval, p=mcnemar(self.gained, self.lost))
