"""The retrofits that are to recover: their folders, receipts, and the original that they share."""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel

from crosslayer.models.load import load_config, public_name
from crosslayer.output.record import dumps
from crosslayer.output.result import load_as
from crosslayer.verbs.retrofit.result import Receipt

EMBEDDING = "embed_tokens.weight"
TAKEN = ("original", "figures")  # names in the folder of a recovery


@dataclass(frozen=True)
class Retrofit:
    """A folder that `crosslayer retrofit` wrote."""

    folder: Path
    receipt: Receipt

    @property
    def name(self) -> str:
        """How the result calls it: its folder's name."""
        return self.folder.name

    def digest(self) -> str:
        """Return a SHA-256 of its receipt and its embedding, which tells retrofits and originals of a name apart."""
        digest = hashlib.sha256(dumps(self.receipt.record()).encode())
        digest.update(self.embedding().contiguous().view(torch.uint8).numpy().data)
        return digest.hexdigest()

    def embedding(self) -> Tensor:
        """Return its embedding (V, C), which no wiring changes: the original's.

        Raises:
            ValueError: there is none in its files.

        """
        for path in sorted(self.folder.glob("*.safetensors")):
            with safe_open(path, "pt") as file:
                for name in file.keys():  # noqa: SIM118  safetensors hands out no iterator
                    if name.endswith(EMBEDDING):
                        return file.get_tensor(name)
        raise ValueError(f"{self.name!r} has no weights {EMBEDDING} in safetensors; name a folder of a whole retrofit")

    def layers(self, model: PreTrainedModel) -> tuple[int, ...]:
        """Return which layer of the original each layer of its model is."""
        plan, layers = self.receipt.plan, model.config.num_hidden_layers
        if layers == plan.layers:
            return tuple(range(layers))
        kept = [layer for layer in range(plan.layers) if plan.attends(layer) or plan.mlps[layer] is not None]
        assert len(kept) == layers, "the receipt's plan is of another model"
        return tuple(kept)


def open_retrofits(folders: Sequence[str | Path], original: str | None = None) -> tuple[list[Retrofit], str]:
    """Read the receipts of some retrofits, and return these with the name of their original.

    Args:
        folders: as `crosslayer retrofit` wrote them.
        original: the model that they come from, where its name in the receipt cannot be opened.

    Raises:
        ValueError: a folder has no receipt, two have the same name, they come from different originals, or the original
            has another vocabulary or number of layers, or cannot be opened.

    """
    if not folders:
        raise ValueError("there is no retrofit to heal; name at least one folder of `crosslayer retrofit`")
    retrofits = [_open(Path(folder).expanduser().resolve()) for folder in folders]
    for place, retrofit in enumerate(retrofits):
        if retrofit.name in [other.name for other in retrofits[:place]] or retrofit.name in TAKEN:
            raise ValueError(f"the name {retrofit.name!r} is taken in the result; rename that folder")
    first = retrofits[0]
    for retrofit in retrofits[1:]:
        names = [entry.receipt.architecture.name for entry in (first, retrofit)]
        if names[0] != names[1]:
            raise ValueError(
                f"{first.name!r} comes from {names[0]!r} and {retrofit.name!r} from {names[1]!r}; heal them one by one"
            )
    name = original or first.receipt.architecture.name
    try:
        config = load_config(name)
    except ValueError as error:
        if original is not None:
            raise
        raise ValueError(f"the receipt's original cannot be opened, name it with `original`: {error}") from None
    _check_original(public_name(name), config, retrofits)
    return retrofits, name


def check_original(called: str, original: PreTrainedModel, retrofits: Sequence[Retrofit]) -> None:
    """Refuse an original that has other weights than that from which the retrofits come.

    Raises:
        ValueError: its parameters are more or fewer, or its embedding is another.

    """
    size = sum(parameter.numel() for parameter in original.parameters())
    weights = original.get_input_embeddings().weight.detach().cpu()  # type: ignore[operator, union-attr]
    for retrofit in retrofits:
        before, own = retrofit.receipt.architecture.parameters_before, retrofit.embedding()
        if before != size:
            raise ValueError(
                f"{retrofit.name!r} comes from {before:,} parameters, and {called!r} has {size:,}: another model"
            )
        if not torch.equal(own, weights.to(own.dtype)):
            raise ValueError(
                f"{retrofit.name!r} has another embedding than {called!r}: it comes from another model of that shape"
            )


def _open(folder: Path) -> Retrofit:
    if not folder.is_dir():
        raise ValueError(f"retrofit {folder.name!r} is no folder; name a folder that `crosslayer retrofit` wrote")
    try:
        return Retrofit(folder, load_as([Receipt], folder))
    except ValueError as error:
        raise ValueError(f"{folder.name!r} is no retrofit with its receipt: {error}") from None


def _check_original(called: str, original: PreTrainedConfig, retrofits: Sequence[Retrofit]) -> None:
    """Refuse an original that the retrofits cannot come from, by configs alone."""
    for retrofit in retrofits:
        config = load_config(str(retrofit.folder))
        pairs = {key: (config.to_dict()[key], original.to_dict().get(key)) for key in ("vocab_size", "hidden_size")}
        pairs["num_hidden_layers"] = retrofit.receipt.architecture.layers, original.num_hidden_layers
        for key, (own, other) in pairs.items():
            if own != other:
                raise ValueError(f"{retrofit.name!r} comes from {key} {own}, and {called!r} has {other}: another model")
