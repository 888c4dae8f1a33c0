"""What models lose on text that they were not trained on, window by window; files keep it for a run that goes on.

Windows are those of a retrofit's receipt, cut the same way: of the embedded domains, at the same places for the same
options. Of a domain that is trained on, they come from what is held out of it.
"""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import psutil
import torch
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from crosslayer.conversion.losses import Losses, logits_of, losses
from crosslayer.corpus.domains import embedded_domains, shared_out, split_domains
from crosslayer.corpus.windows import Windows
from crosslayer.models.load import load_model
from crosslayer.output.progress import Meter
from crosslayer.recovery.recipe import HealRecipe, embedded_source
from crosslayer.recovery.stages import write_whole

SHARE = 2  # of the free memory, models that are measured together take at most a half


class Measured(BaseModel):
    """What a file of losses holds, a number for each window; `schema_` is written as "schema"."""

    model_config = ConfigDict(extra="forbid", strict=True, populate_by_name=True, allow_inf_nan=False)
    schema_: Literal["crosslayer/recovery-losses/1"] = Field(default="crosslayer/recovery-losses/1", alias="schema")
    windows: str
    before: list[float]
    after: list[float]
    kl: list[float]


@dataclass(frozen=True)
class Judge:
    """The original and the windows on which models are compared with it."""

    original: PreTrainedModel
    windows: Windows
    meter: Meter

    def measure(self, models: Mapping[Path, Path]) -> dict[Path, Losses]:
        """Return the losses of saved models, by the file that keeps them; the original runs once for many of them.

        Args:
            models: the folder of each model, by that file.

        """
        measured = {path: self._read(path) for path in models}
        missing = [path for path, read in measured.items() if read is None]
        for paths in _batches(missing, models):
            runs = {}
            for path in paths:
                model, _ = load_model(str(models[path]), dtype=self.original.dtype, device=self.original.device)
                runs[str(path)] = logits_of(model)
            names = f"measuring {len(paths)} model{'s' if len(paths) > 1 else ''}"
            with self.meter(names, len(self.windows)) as bar:
                for name, result in losses(logits_of(self.original), runs, self.windows, bar.step).items():
                    self._write(Path(name), result)
                    measured[Path(name)] = result
        return {path: result for path, result in measured.items() if result is not None}

    def _read(self, path: Path) -> Losses | None:
        """Return what a file holds, None where there is none of these windows."""
        if not path.is_file():
            return None
        try:
            kept = Measured.model_validate_json(path.read_bytes())
        except ValidationError:
            return None
        if kept.windows != fingerprint(self.windows):
            return None
        before, after, kl = (np.array(values) for values in (kept.before, kept.after, kept.kl))
        if not len(before) == len(after) == len(kl) == len(self.windows):
            return None
        return Losses(before, after, kl, self.windows.documents, self.windows.domains)

    def _write(self, path: Path, measured: Losses) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        lists: dict[str, Any] = {name: vars(measured)[name].tolist() for name in ("before", "after", "kl")}
        write_whole(path, Measured(windows=fingerprint(self.windows), **lists).model_dump_json(by_alias=True))


def judging_windows(recipe: HealRecipe, tokenizer: PreTrainedTokenizerBase) -> Windows:
    """Cut the windows to measure on.

    Raises:
        ValueError: a domain has too little text; the message names it.

    """
    domains: dict[str, Any] = embedded_domains(recipe.eval.domains)
    for part in recipe.data.domains:
        if embedded_source(part) and part.name in domains:
            domains[part.name] = list(part.domain().held_out())
    counts = shared_out(recipe.eval.windows, list(domains))
    try:
        cut = split_domains(
            domains, tokenizer, parts={"evaluation": counts}, length=recipe.eval.length, seed=recipe.seed
        )
    except ValueError as error:
        raise ValueError(f"eval.length is {recipe.eval.length}: {error}") from None
    return cut["evaluation"]


def fingerprint(windows: Windows) -> str:
    """Return a SHA-256 of the windows' tokens."""
    return hashlib.sha256(windows.ids.numpy().tobytes()).hexdigest()


def _batches(paths: Sequence[Path], models: Mapping[Path, Path]) -> list[list[Path]]:
    """Return files in groups whose models fit into half of the free memory together."""
    free = psutil.virtual_memory().available
    if torch.cuda.is_available():
        free = torch.cuda.mem_get_info()[0]
    batches: list[list[Path]] = []
    left = 0
    for path in paths:
        size = sum(file.stat().st_size for file in models[path].glob("*.safetensors"))
        if not batches or size > left:
            batches.append([])
            left = free // SHARE
        batches[-1].append(path)
        left -= size
    return batches
