"""The retrofits to heal: their folders, reports and original, and the folders of the healed models.

A healed model's folder is like a retrofit's: weights, tokenizer, card and manifest. It holds the retrofit's report as
`retrofit.json`, with the damage before training. The healed model's own figures are in the record of the recovery.
"""

import hashlib
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor
from transformers import PreTrainedModel

from crosslayer.environment import quiet_transformers
from crosslayer.models.load import load_config, load_model, public_name
from crosslayer.output.folder import whole_folder
from crosslayer.output.manifest import write_manifest
from crosslayer.output.record import dumps
from crosslayer.output.result import load_as
from crosslayer.verbs.retrofit.result import RetrofitReport

EMBEDDING = "embed_tokens.weight"
RESERVED_NAMES = ("original", "figures")  # in the folder of a recovery
REPORT, CARD = "retrofit.json", "README.md"
UNTRAINED = "> `crosslayer heal` did not train this model: it is the retrofit described below.\n\n"
HEALED = (
    "> `crosslayer heal` trained this model after the retrofit described below. The figures below are from before that "
    "training; the record of the recovery has those of this model.\n\n"
)


@dataclass(frozen=True)
class Retrofit:
    """A folder that `crosslayer retrofit` wrote."""

    folder: Path
    report: RetrofitReport

    @property
    def name(self) -> str:
        """Its name in the result: its folder's name."""
        return self.folder.name

    def digest(self) -> str:
        """Return a SHA-256 of its report and its embedding, to identify both the retrofit and its original."""
        # The embedding is the original's, so another original of the same shape has another digest.
        digest = hashlib.sha256(dumps(self.report.record()).encode())
        digest.update(self.embedding().contiguous().view(torch.uint8).numpy().data)
        return digest.hexdigest()

    def embedding(self) -> Tensor:
        """Return its embedding (V, C), which is the original's."""
        for path in sorted(self.folder.glob("*.safetensors")):
            with safe_open(path, "pt") as file:
                for name in file.keys():  # noqa: SIM118  safetensors has no iterator
                    if name.endswith(EMBEDDING):
                        return file.get_tensor(name)
        raise ValueError(
            f"{self.name!r} has no {EMBEDDING} in safetensors files; give the folder of a complete retrofit"
        )


def open_retrofits(folders: Sequence[str | Path], original: str | None = None) -> tuple[list[Retrofit], str]:
    """Return retrofits with their reports, and the name of their original, by default the one in the reports."""
    if not folders:
        raise ValueError("no retrofit to heal; give at least one folder that `crosslayer retrofit` wrote")
    retrofits: list[Retrofit] = []
    for path in folders:
        folder = Path(path).expanduser().resolve()
        if not folder.is_dir():
            raise ValueError(
                f"retrofit {folder.name!r} is not a folder; give a folder that `crosslayer retrofit` wrote"
            )
        try:
            retrofit = Retrofit(folder, load_as([RetrofitReport], folder))
        except ValueError as error:
            raise ValueError(f"{folder.name!r} is not a retrofit with its report: {error}") from None
        # Its folder in the result has this name.
        if retrofit.name in (*RESERVED_NAMES, *(earlier.name for earlier in retrofits)):
            raise ValueError(f"the name {retrofit.name!r} is used twice in the result; rename that folder")
        retrofits.append(retrofit)

    first, *others = retrofits
    name = first.report.architecture.name
    for other in others:
        if other.report.architecture.name != name:
            raise ValueError(
                f"retrofits must have the same original, got {name!r} for {first.name!r} and "
                f"{other.report.architecture.name!r} for {other.name!r}; heal them separately"
            )
    try:
        config = load_config(original or name)
    except ValueError as error:
        if original is not None:
            raise
        raise ValueError(f"the report's original cannot be opened, give it with `original`: {error}") from None
    # By the configs, before the original is loaded; `check_original` compares weights.
    name, sizes = original or name, config.to_dict()
    for retrofit in retrofits:
        own = load_config(str(retrofit.folder)).to_dict()
        # A retrofit may have fewer layers than its original, whose number its report has.
        own["num_hidden_layers"] = retrofit.report.architecture.layers
        for key in ("vocab_size", "hidden_size", "num_hidden_layers"):
            if own[key] != sizes.get(key):
                comes = f"{retrofit.name!r} comes from a model with {key} {own[key]}"
                raise ValueError(f"{comes}, but {public_name(name)!r} has {sizes.get(key)}")
    return retrofits, name


def check_original(name: str, original: PreTrainedModel, retrofits: Sequence[Retrofit]) -> None:
    """Raise if an original has other weights than the one that the retrofits come from."""
    size = sum(parameter.numel() for parameter in original.parameters())
    weights = original.get_input_embeddings().weight.detach().cpu()  # type: ignore[operator, union-attr]
    for retrofit in retrofits:
        parameters = retrofit.report.architecture.parameters
        if parameters != size:
            raise ValueError(
                f"{retrofit.name!r} comes from a model of {parameters:,} parameters; {name!r} has {size:,}"
            )
        # No retrofit changes the embedding.
        embedding = retrofit.embedding()
        if not torch.equal(embedding, weights.to(embedding.dtype)):
            raise ValueError(
                f"{retrofit.name!r} has a different embedding than {name!r}; it comes from another model of this shape"
            )


def save_healed(source: Path, retrofit: Retrofit, target: Path, trained: bool) -> None:
    """Write the folder of a healed model, all of it or nothing, from a folder with its weights and tokenizer."""
    model, tokenizer = load_model(str(source), device="cpu")
    # The note comes below the card's first block, before figures that are not of this model.
    card = retrofit.folder / CARD
    header, _, body = (card.read_text(encoding="utf-8") if card.is_file() else "").partition("\n\n")
    with whole_folder(target) as partial:
        with quiet_transformers():
            model.save_pretrained(partial)
            tokenizer.save_pretrained(partial)
        shutil.copyfile(retrofit.folder / "record.json", partial / REPORT)
        (partial / CARD).write_text(f"{header}\n\n{HEALED if trained else UNTRAINED}{body}", encoding="utf-8")
        write_manifest(partial, model)
