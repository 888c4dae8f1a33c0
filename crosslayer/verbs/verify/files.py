"""The files of a model's folder: what its manifest says of them, of the plan and of the logits."""

import json
from pathlib import Path

import torch
from transformers import PreTrainedModel

from crosslayer.output import manifest
from crosslayer.verbs.verify.judge import EXACT, WEAK, Measurement, in_brief, judged
from crosslayer.verbs.verify.result import FAIL, NOT_APPLICABLE, PASS, Check

RECORD = "record.json"
SHOWN = 3  # files that are named


def check_files(folder: Path | None) -> Check:
    """Compare the files of a folder with its manifest; nothing is loaded."""
    if folder is None:
        return Check(name="manifest", dtype=None, status=NOT_APPLICABLE, reason="the model is not a local folder")
    if not (folder / manifest.NAME).exists():
        if _is_retrofit(folder):
            reason = f"its {RECORD} says that this is a retrofit, and the {manifest.NAME} of a retrofit is missing"
            return Check(name="manifest: files", dtype=None, status=FAIL, reason=reason)
        return Check(name="manifest", dtype=None, status=NOT_APPLICABLE, reason=f"the folder has no {manifest.NAME}")
    try:
        wrong = manifest.check_files(folder)
    except (ValueError, OSError) as error:
        return Check(name="manifest: files", dtype=None, status=FAIL, reason=in_brief(error))
    more = f", and {len(wrong) - SHOWN} more" if len(wrong) > SHOWN else ""
    reason = "; ".join(wrong[:SHOWN]) + more
    return Check(name="manifest: files", dtype=None, status=FAIL if wrong else PASS, reason=reason)


def check_manifest(model: PreTrainedModel, folder: Path | None) -> list[Check]:
    """Compare files, plan and fingerprint of a loaded model with the manifest of its folder."""
    files = check_files(folder)
    if folder is None or files.status != PASS:
        return [files]
    written = manifest.read_manifest(folder)
    wrong = []
    if manifest.plan_of(model) != written.plan:
        wrong.append("plan")
    if manifest.methods_of(model) != written.methods:
        wrong.append("methods")
    reason = f"{' and '.join(wrong)} in config.json are not the manifest's" if wrong else ""
    plan = Check(name="manifest: plan", dtype=None, status=FAIL if wrong else PASS, reason=reason)

    def compare() -> Measurement:
        now = manifest.fingerprint(model, written.fingerprint.ids)
        pair = torch.tensor([now.logits, written.fingerprint.logits], dtype=torch.float64)  # (2, entries)
        return Measurement((pair[0] - pair[1]).abs().max().item() / written.fingerprint.std)

    # a model that was loaded in a lower precision than it was saved in is that far off
    tolerance = EXACT["float32"] if model.dtype in (torch.float32, torch.float64) else WEAK
    return [files, plan, judged("manifest: fingerprint", "float32", tolerance, compare)]


def _is_retrofit(folder: Path) -> bool:
    """Return whether a folder holds the record of a retrofit, which is never written without a manifest.

    A config cannot say so: `save_pretrained` of a model trained further would repeat it in a folder that has none.
    """
    try:
        record = json.loads((folder / RECORD).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return False
    return isinstance(record, dict) and str(record.get("schema", "")).startswith("crosslayer/retrofit/")
