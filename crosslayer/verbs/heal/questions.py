"""What a judge asks of a model before training and after each stage; files keep the answers for a resumed run.

The evaluation windows are those of the retrofits' reports, without any that a retrofit was fitted or searched on. A
retrofit cuts each domain into a list of windows that depends on length, seed and `bos` only; its record has the use of
each. The same list is cut again here, and windows are taken from its start, except those that any of the retrofits was
calibrated on. For a training domain, windows come from its held-out pieces, which may hold calibration text.

Shapes: N windows, T tokens of a window.
"""

import hashlib
import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from pydantic import Field, ValidationError
from torch import Tensor
from torch.nn import functional
from torch.utils.data import Subset
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from crosslayer.corpus.domains import EMBEDDED, embedded_domains, joined, shared_out
from crosslayer.corpus.windows import Windows, split
from crosslayer.judge.candidate import Candidate
from crosslayer.judge.damage import MIN_WINDOWS, OF_TARGETS, OF_TOKENS, Losses
from crosslayer.judge.hidden import Sample
from crosslayer.judge.judge import Judge
from crosslayer.judge.retrieval import askable_samples
from crosslayer.output.folder import write_whole
from crosslayer.output.record import Frozen
from crosslayer.training.recipe import Recipe
from crosslayer.training.rows import IGNORED
from crosslayer.verbs.heal.retrofits import Retrofit

JUDGED = ("evaluation", "trade-off")  # purposes that do not change a retrofit


class Answers(Frozen):
    """The measurements of a model: those of its N windows, of held-out rows by domain, and of hidden numbers."""

    text: str
    means: dict[str, tuple[float, ...]] = Field(description="(N,) of all that is measured at a token, by name")
    documents: tuple[int, ...]
    domains: tuple[str, ...]
    held_out: dict[str, float]
    found: tuple[bool, ...] = Field(description="whether it finds each hidden number; empty if not asked")

    @cached_property
    def losses(self) -> Losses:
        """The losses on the windows, against the original's."""
        means = {name: np.array(values) for name, values in self.means.items()}
        return Losses(means, self.documents, self.domains)


@dataclass(frozen=True)
class Questions:
    """The original, and the text on which models are compared with it."""

    original: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    windows: Windows
    held_out: Mapping[str, Subset[dict[str, Tensor]]]  # held-out rows of the training text, by domain
    needles: bool  # whether hidden numbers are asked for

    def ask(self, candidate: Candidate, file: Path) -> Answers:
        """Return the answers of a candidate, from the file if it has them for this text."""
        # An answer takes minutes, and stays valid as long as the text and the measured quantities do.
        if file.is_file():
            try:
                stored = Answers.model_validate_json(file.read_bytes())
                if stored.text == self.text and stored.means.keys() == {*OF_TARGETS, *OF_TOKENS}:
                    return stored
            # Written by another version: measured again.
            except ValidationError:
                pass
        # A judge for each model, which is freed with it.
        judge = Judge(self.original, self.windows, self.tokenizer, catches=False)
        losses = judge.kl([candidate])[candidate.name]
        answers = Answers(
            text=self.text,
            means={name: tuple(values.tolist()) for name, values in losses.means.items()},
            documents=losses.documents,
            domains=losses.domains,
            held_out=judge.asked(
                candidate, lambda model, _: {name: mean_loss(model, rows) for name, rows in self.held_out.items()}
            ),
            found=tuple(judge.found(candidate, self.samples) or ()) if self.samples else (),
        )
        file.parent.mkdir(parents=True, exist_ok=True)
        write_whole(file, answers.model_dump_json())
        return answers

    @cached_property
    def samples(self) -> list[Sample]:
        """Texts with hidden numbers, if they are asked for and the model can be asked."""
        return askable_samples(self.original, self.tokenizer) if self.needles else []

    @cached_property
    def text(self) -> str:
        """A SHA-256 of all text that models are measured on."""
        # Labels too: the same tokens are another question where other ones count.
        digest = hashlib.sha256(self.windows.ids.numpy().tobytes())
        digest.update(b"needles" if self.needles else b"")
        for name, rows in self.held_out.items():
            digest.update(name.encode())
            for row in rows:
                digest.update(row["input_ids"].numpy().tobytes() + row["labels"].numpy().tobytes())
        return digest.hexdigest()


@torch.no_grad()
def mean_loss(model: PreTrainedModel, rows: Subset[dict[str, Tensor]]) -> float:
    """Return the mean loss over the labels of rows, in nats per token."""
    total, count = 0.0, 0
    # Row by row, since rows of instructions count different numbers of tokens: their mean is over labels, not rows.
    for row in rows:
        inputs = {name: row[name][None].to(model.device) for name in ("input_ids", "position_ids")}
        logits = model(**inputs, use_cache=False).logits[0, :-1].float()  # (T − 1, V)
        targets = row["labels"][1:].to(model.device)
        total += functional.cross_entropy(logits, targets, reduction="sum").item()
        count += int((targets != IGNORED).sum())
    return total / count


def evaluation_windows(recipe: Recipe, retrofits: Sequence[Retrofit], tokenizer: PreTrainedTokenizerBase) -> Windows:
    """Cut the windows as in the reports, which must agree, unless the recipe's `judge` differs."""
    judge = recipe.judge
    trained = {part.name: part for part in recipe.data.domains if part.source is None}
    cut, seed, bos = (_shared(retrofits, name) for name in ("length", "seed", "bos"))
    length = judge.length or cut
    windows = judge.windows or _shared(retrofits, "windows", "judge.windows")
    domains = judge.domains or _shared(retrofits, "domains", "judge.domains")
    for name in domains:
        if name not in EMBEDDED:
            raise ValueError(
                f"{retrofits[0].name!r} was evaluated on {name!r}, which is not an embedded domain; set judge.domains "
                f"to some of {', '.join(EMBEDDED)}"
            )
    least = MIN_WINDOWS * len(domains)
    if windows < least:
        raise ValueError(
            f"judge.windows must be at least {least} for {len(domains)} domains, got {windows}; raise it, or use fewer "
            "judge.domains"
        )
    pairs = []
    for name, count in shared_out(windows, domains).items():
        # Held-out pieces of a training domain are cut into another list, whose numbers mean other windows.
        fitted = set() if name in trained else _fitted(retrofits, name)
        try:
            # Windows of another length begin elsewhere: once, up to two thirds of those that judged had been fitted to.
            # Shorter ones are the beginnings of the report's own.
            if fitted and length > cut:
                raise ValueError(
                    f"judge.length must be at most {cut}, the length of the calibration windows, got {length}; or "
                    f"remove {name} from judge.domains"
                )
            text: Iterable[str] = embedded_domains([name])[name]
            if name in trained:
                text = list(trained[name].text(held_out_often=True).held_out())
            windows_left = (index for index in itertools.count() if index not in fitted)
            indices = list(itertools.islice(windows_left, count))
            options = {"length": cut if fitted else length, "seed": seed, "bos": bos}
            (every,) = split(text, tokenizer, parts={"evaluation": indices[-1] + 1}, **options).values()
        except ValueError as error:
            raise ValueError(f"judge: {name}: {error}") from None
        documents = tuple(every.documents[index] for index in indices)
        pairs.append((name, Windows(every.ids[indices, :length], documents)))
    return joined(pairs)


def _fitted(retrofits: Sequence[Retrofit], name: str) -> set[int]:
    """Return the windows of a domain that any of the retrofits was fitted or searched on."""
    fitted: set[int] = set()
    for retrofit in retrofits:
        for purpose, ranges in retrofit.report.windows.items():
            if name in ranges and purpose not in JUDGED:
                first, count = ranges[name]
                fitted.update(range(first, first + count))
    return fitted


def _shared(retrofits: Sequence[Retrofit], option: str, key: str | None = None) -> Any:
    """Return an option of the reports, which must be equal in all; `key` of the recipe can replace it."""
    settings = [{**vars(each.report.settings), "domains": tuple(each.report.judged)} for each in retrofits]
    values = [", ".join(each[option]) if option == "domains" else str(each[option]) for each in settings]
    for retrofit, value in zip(retrofits, values, strict=True):
        if value != values[0]:
            remedy = "heal them separately" if key is None else f"set {key}, or heal them separately"
            raise ValueError(
                f"retrofits must have been evaluated with the same {option}, got {values[0]} for {retrofits[0].name!r} "
                f"and {value} for {retrofit.name!r}; {remedy}"
            )
    return settings[0][option]
