"""What a judge asks of a model before training and after each stage; files keep the answers for a resumed run."""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
import torch
from pydantic import ValidationError
from torch import Tensor
from torch.nn import functional
from torch.utils.data import Subset
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from crosslayer.corpus.windows import Windows
from crosslayer.judge.candidate import Candidate
from crosslayer.judge.damage import Losses
from crosslayer.judge.judge import Judge
from crosslayer.judge.retrieval import Retrieval, measure_retrieval
from crosslayer.output.folder import write_whole
from crosslayer.output.record import Frozen
from crosslayer.training.rows import IGNORED


class Answers(Frozen):
    """The measurements of a model: those of its N windows, of held-out rows by domain, and of hidden numbers."""

    text: str
    before: tuple[float, ...]
    after: tuple[float, ...]
    kl: tuple[float, ...]
    documents: tuple[int, ...]
    domains: tuple[str, ...]
    held_out: dict[str, float]
    needles: tuple[Retrieval, ...]

    @cached_property
    def losses(self) -> Losses:
        """The losses on the windows, against the original's."""
        before, after, kl = (np.array(each) for each in (self.before, self.after, self.kl))
        return Losses(before, after, kl, self.documents, self.domains)


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
        if file.is_file():
            try:
                kept = Answers.model_validate_json(file.read_bytes())
                if kept.text == self.text:
                    return kept
            except ValidationError:
                pass
        judge = Judge(self.original, self.windows, self.tokenizer, catches=False)
        losses = judge.kl([candidate])[candidate.name]
        answers = Answers(
            text=self.text,
            before=losses.before.tolist(),
            after=losses.after.tolist(),
            kl=losses.kl.tolist(),
            documents=losses.documents,
            domains=losses.domains,
            held_out=judge.asked(
                candidate, lambda model, _: {name: mean_loss(model, rows) for name, rows in self.held_out.items()}
            ),
            needles=judge.asked(
                candidate, lambda model, _: measure_retrieval(model, self.tokenizer if self.needles else None)
            ),
        )
        file.parent.mkdir(parents=True, exist_ok=True)
        write_whole(file, answers.model_dump_json())
        return answers

    @cached_property
    def text(self) -> str:
        """A SHA-256 of all text that models are measured on."""
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
    for row in rows:
        inputs = {name: row[name][None].to(model.device) for name in ("input_ids", "position_ids")}
        logits = model(**inputs, use_cache=False).logits[0, :-1].float()  # (T − 1, V)
        targets = row["labels"][1:].to(model.device)
        total += functional.cross_entropy(logits, targets, reduction="sum").item()
        count += int((targets != IGNORED).sum())
    return total / count
