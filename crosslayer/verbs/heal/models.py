"""The folder of a healed model, as a retrofit's is: weights, tokenizer, card and manifest.

The receipt travels along as `retrofit.json`: it says what the wiring is and what it cost before any training. The
healed model's own figures are in the record of the recovery.
"""

from pathlib import Path

from crosslayer.environment import quiet_transformers
from crosslayer.models.load import load_model
from crosslayer.output.folder import whole_folder
from crosslayer.output.manifest import write_manifest
from crosslayer.output.record import dumps
from crosslayer.verbs.heal.retrofits import Retrofit
from crosslayer.verbs.retrofit.card import model_card

RECEIPT = "retrofit.json"
UNTRAINED = "> `crosslayer heal` trained nothing in this model: it is the retrofit that is described below.\n\n"
HEALED = (
    "> This model was trained after the retrofit that is described below, by `crosslayer heal`. The figures below are "
    "of the retrofit before that; the record of the recovery has those of this model.\n\n"
)


def save_healed(source: Path, retrofit: Retrofit, target: Path, trained: bool) -> None:
    """Write the folder of a healed model, whole or not at all.

    Args:
        source: where its weights and its tokenizer are.
        retrofit: that it was.
        target: the folder.
        trained: whether any stage trained it.

    """
    model, tokenizer = load_model(str(source), device="cpu")
    with whole_folder(target) as partial:
        with quiet_transformers():
            model.save_pretrained(partial)
            tokenizer.save_pretrained(partial)
        (partial / RECEIPT).write_text(dumps(retrofit.receipt.record()), encoding="utf-8")
        header, _, body = model_card(retrofit.receipt).partition("\n\n")
        note = HEALED if trained else UNTRAINED
        (partial / "README.md").write_text(f"{header}\n\n{note}{body}", encoding="utf-8")
        write_manifest(partial, model)
