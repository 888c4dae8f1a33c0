"""The losses of models on evaluation text, window by window; files keep them for a resumed run."""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import psutil
import torch
from pydantic import Field, ValidationError
from torch import Tensor
from torch.nn import functional
from torch.utils.data import Subset
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from crosslayer.corpus.windows import Windows
from crosslayer.judge.losses import Losses, logits_of, losses
from crosslayer.judge.retrieval import Retrieval, measure_retrieval
from crosslayer.models.load import load_model
from crosslayer.output.folder import write_whole
from crosslayer.output.record import Frozen
from crosslayer.training.mixture import IGNORED

MEMORY_SHARE = 2  # models that are measured together use at most half of the free memory


class Measured(Frozen):
    """The contents of a file of losses, one number per window; `schema_` is written as "schema"."""

    schema_: Literal["crosslayer/heal-losses/2"] = Field(default="crosslayer/heal-losses/2", alias="schema")
    text: str
    before: list[float]
    after: list[float]
    kl: list[float]
    held_out: dict[str, float]
    needles: tuple[Retrieval, ...]


class Measurement(NamedTuple):
    """The measurements of a model."""

    losses: Losses  # on the windows, against the original's
    held_out: dict[str, float]  # loss on held-out rows of the training text, by domain
    needles: tuple[Retrieval, ...]  # which numbers hidden in long texts it retrieves; empty if not measured


@dataclass(frozen=True)
class Evaluator:
    """The original, and the text on which models are compared with it."""

    original: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase | None  # to test retrieval of hidden numbers; None: it is not tested
    windows: Windows
    held_out: Mapping[str, Subset[dict[str, Tensor]]]  # held-out rows of the training text, by domain

    def measure(self, models: Mapping[Path, Path]) -> dict[Path, Measurement]:
        """Measure models, given as {file for the losses: model folder}; the original runs once for several models."""
        measured = {path: kept for path in models if (kept := self._read(path)) is not None}
        for paths in _batches([path for path in models if path not in measured], models):
            own = {"dtype": self.original.dtype, "device": self.original.device}
            loaded = {path: load_model(str(models[path]), **own)[0] for path in paths}
            runs = {str(path): logits_of(model) for path, model in loaded.items()}
            doing = f"measuring {', '.join(map(_label, paths))}"
            results = losses(logits_of(self.original), runs, self.windows, doing)
            for path, model in loaded.items():
                measured[path] = self._measured(path, model, results[str(path)])
        return measured

    def measure_original(self, path: Path, other: Losses) -> Measurement:
        """Return the measurements of the original, whose losses on the windows were computed with another model's."""
        own = Losses(other.before, other.before, np.zeros(len(other.kl)), other.documents, other.domains)
        return self._read(path) or self._measured(path, self.original, own)

    def _measured(self, path: Path, model: PreTrainedModel, losses: Losses) -> Measurement:
        held_out = {name: _mean_loss(model, rows) for name, rows in self.held_out.items()}
        needles = measure_retrieval(model, self.tokenizer)
        path.parent.mkdir(parents=True, exist_ok=True)
        lists: dict[str, Any] = {name: vars(losses)[name].tolist() for name in ("before", "after", "kl")}
        content = Measured(text=self.text, held_out=held_out, needles=needles, **lists)
        write_whole(path, content.model_dump_json(by_alias=True))
        return Measurement(losses, held_out, needles)

    @cached_property
    def text(self) -> str:
        """A SHA-256 of all text that models are measured on."""
        digest = hashlib.sha256(self.windows.ids.numpy().tobytes())
        digest.update(b"needles" if self.tokenizer is not None else b"")
        for name, rows in self.held_out.items():
            digest.update(name.encode())
            for row in rows:
                digest.update(row["input_ids"].numpy().tobytes() + row["labels"].numpy().tobytes())
        return digest.hexdigest()

    def _read(self, path: Path) -> Measurement | None:
        """Return the contents of a file, None if there is no valid file for this text."""
        if not path.is_file():
            return None
        try:
            kept = Measured.model_validate_json(path.read_bytes())
        except ValidationError:
            return None
        before, after, kl = (np.array(values) for values in (kept.before, kept.after, kept.kl))
        if kept.text != self.text or not len(before) == len(after) == len(kl) == len(self.windows):
            return None
        losses = Losses(before, after, kl, self.windows.documents, self.windows.domains)
        return Measurement(losses, kept.held_out, kept.needles)


@torch.no_grad()
def _mean_loss(model: PreTrainedModel, rows: Subset[dict[str, Tensor]]) -> float:
    total, count = 0.0, 0
    for row in rows:
        inputs = {name: row[name][None].to(model.device) for name in ("input_ids", "position_ids")}
        logits = model(**inputs, use_cache=False).logits[0, :-1].float()  # (T − 1, V)
        targets = row["labels"][1:].to(model.device)
        total += functional.cross_entropy(logits, targets, reduction="sum").item()
        count += int((targets != IGNORED).sum())
    return total / count


def _label(path: Path) -> str:
    """Return a model's label for progress, from its file of losses: NAME/before, NAME/stage-1, original."""
    parts = (*path.parts[-3:-1], path.stem) if path.parent.name.startswith("stage-") else path.parts[-2:]
    return "/".join(parts).removesuffix(".json").removesuffix("/losses")


def _batches(paths: Sequence[Path], models: Mapping[Path, Path]) -> list[list[Path]]:
    """Return files in batches whose models fit into half of the free memory together."""
    free = psutil.virtual_memory().available
    if torch.cuda.is_available():
        free = torch.cuda.mem_get_info()[0]
    batches: list[list[Path]] = []
    left = 0
    for path in paths:
        size = sum(file.stat().st_size for file in models[path].glob("*.safetensors"))
        if not batches or size > left:
            batches.append([])
            left = free // MEMORY_SHARE
        batches[-1].append(path)
        left -= size
    return batches
