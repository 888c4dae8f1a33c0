"""The retrofits that are to recover: their folders, reports, the original that they share, and what becomes of them.

The folder of a healed model is as a retrofit's is: weights, tokenizer, card and manifest. The report travels along as
`retrofit.json`: it says what the wiring is and what it cost before any training. The healed model's own figures are in
the record of the recovery.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel

from crosslayer.environment import quiet_transformers
from crosslayer.models.load import load_config, load_model, public_name
from crosslayer.output.folder import whole_folder
from crosslayer.output.manifest import write_manifest
from crosslayer.output.record import dumps
from crosslayer.output.result import load_as
from crosslayer.verbs.retrofit.card import model_card
from crosslayer.verbs.retrofit.result import RetrofitReport

EMBEDDING = "embed_tokens.weight"
RESERVED_NAMES = ("original", "figures")  # names in the folder of a recovery
REPORT = "retrofit.json"
UNTRAINED = "> `crosslayer heal` trained nothing in this model: it is the retrofit that is described below.\n\n"
HEALED = (
    "> This model was trained after the retrofit that is described below, by `crosslayer heal`. The figures below are "
    "of the retrofit before that; the record of the recovery has those of this model.\n\n"
)


@dataclass(frozen=True)
class Retrofit:
    """A folder that `crosslayer retrofit` wrote."""

    folder: Path
    report: RetrofitReport

    @property
    def name(self) -> str:
        """How the result calls it: its folder's name."""
        return self.folder.name

    def digest(self) -> str:
        """Return a SHA-256 of its report and its embedding, which tells retrofits and originals of a name apart."""
        digest = hashlib.sha256(dumps(self.report.record()).encode())
        digest.update(self.embedding().contiguous().view(torch.uint8).numpy().data)
        return digest.hexdigest()

    def embedding(self) -> Tensor:
        """Return its embedding (V, C), which no wiring changes: the original's."""
        for path in sorted(self.folder.glob("*.safetensors")):
            with safe_open(path, "pt") as file:
                for name in file.keys():  # noqa: SIM118  safetensors hands out no iterator
                    if name.endswith(EMBEDDING):
                        return file.get_tensor(name)
        raise ValueError(f"{self.name!r} has no weights {EMBEDDING} in safetensors; name a folder of a whole retrofit")

    def layers(self, model: PreTrainedModel) -> tuple[int, ...]:
        """Return which layer of the original each layer of its model is."""
        plan, layers = self.report.plan, model.config.num_hidden_layers
        if layers == plan.layers:
            return tuple(range(layers))
        kept = [layer for layer in range(plan.layers) if plan.attends(layer) or plan.mlps[layer] is not None]
        assert len(kept) == layers, "the report's plan is of another model"
        return tuple(kept)


def open_retrofits(folders: Sequence[str | Path], original: str | None = None) -> tuple[list[Retrofit], str]:
    """Read the reports of some retrofits, and return these with the name of their original, by default as they say."""
    if not folders:
        raise ValueError("there is no retrofit to heal; name at least one folder of `crosslayer retrofit`")
    retrofits: list[Retrofit] = []
    for path in folders:
        retrofit = _open(Path(path).expanduser().resolve())
        if retrofit.name in (*RESERVED_NAMES, *(other.name for other in retrofits)):
            raise ValueError(f"the name {retrofit.name!r} is taken in the result; rename that folder")
        retrofits.append(retrofit)
    first, *others = retrofits
    name = first.report.architecture.name
    for other in others:
        if other.report.architecture.name != name:
            raise ValueError(
                f"{first.name!r} comes from {name!r} and {other.name!r} from {other.report.architecture.name!r}; heal "
                "them one by one"
            )
    try:
        config = load_config(original or name)
    except ValueError as error:
        if original is not None:
            raise
        raise ValueError(f"the report's original cannot be opened, name it with `original`: {error}") from None
    for retrofit in retrofits:
        _check_config(public_name(original or name), config, retrofit)
    return retrofits, original or name


def check_original(called: str, original: PreTrainedModel, retrofits: Sequence[Retrofit]) -> None:
    """Refuse an original that has other weights than that from which the retrofits come."""
    size = sum(parameter.numel() for parameter in original.parameters())
    weights = original.get_input_embeddings().weight.detach().cpu()  # type: ignore[operator, union-attr]
    for retrofit in retrofits:
        before, own = retrofit.report.architecture.parameters, retrofit.embedding()
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
        return Retrofit(folder, load_as([RetrofitReport], folder))
    except ValueError as error:
        raise ValueError(f"{folder.name!r} is no retrofit with its report: {error}") from None


def _check_config(called: str, original: PreTrainedConfig, retrofit: Retrofit) -> None:
    """Refuse an original that a retrofit cannot come from, by configs alone."""
    config = load_config(str(retrofit.folder)).to_dict()
    config["num_hidden_layers"] = retrofit.report.architecture.layers
    for key in ("vocab_size", "hidden_size", "num_hidden_layers"):
        other = original.to_dict().get(key)
        if config[key] != other:
            raise ValueError(
                f"{retrofit.name!r} comes from {key} {config[key]}, and {called!r} has {other}: another model"
            )


def save_healed(source: Path, retrofit: Retrofit, target: Path, trained: bool) -> None:
    """Write the folder of a healed model, whole or not at all, from a folder with its weights and its tokenizer."""
    model, tokenizer = load_model(str(source), device="cpu")
    with whole_folder(target) as partial:
        with quiet_transformers():
            model.save_pretrained(partial)
            tokenizer.save_pretrained(partial)
        (partial / REPORT).write_text(dumps(retrofit.report.record()), encoding="utf-8")
        header, _, body = model_card(retrofit.report).partition("\n\n")
        note = HEALED if trained else UNTRAINED
        (partial / "README.md").write_text(f"{header}\n\n{note}{body}", encoding="utf-8")
        write_manifest(partial, model)
