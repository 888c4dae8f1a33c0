"""What a push writes itself: the card under the repository's name, evaluation results, and a manifest that fits both.

All else goes up as it lies in the folder.
"""

import hashlib
from pathlib import Path

import yaml
from huggingface_hub import EvalResultEntry, eval_result_entries_to_yaml

from crosslayer.output.card import PLACE
from crosslayer.output.manifest import NAME, check_files, manifest_text, read_manifest
from crosslayer.output.result import load_as
from crosslayer.verbs.retrofit.card import model_card
from crosslayer.verbs.retrofit.result import RetrofitReport
from crosslayer.verbs.serve.engine import TOKENIZERS

CARD = "README.md"
RESULTS = ".eval_results/crosslayer.yaml"


def own_texts(folder: Path, repo: str) -> dict[str, str]:
    """Return the files that a push writes, by name; the manifest is the last.

    The card is written anew from the report, or, where there is none, the folder's with the repository's name put in;
    a card that was edited since the folder was written goes up as it is.
    """
    if not folder.is_dir() or not (folder / NAME).is_file():
        raise ValueError(f"{folder.name!r} is no model's folder of crosslayer: it has no {NAME}, as a retrofit has")
    wrong = [fault for fault in check_files(folder) if not fault.startswith(f"{CARD} is ")]
    if wrong:
        more = f", and {len(wrong) - 1} more" if len(wrong) > 1 else ""
        raise ValueError(f"{folder.name!r} is not as it was written: {wrong[0]}{more}; push a whole folder")
    manifest = read_manifest(folder)
    try:
        report = load_as((RetrofitReport,), folder)
    except ValueError:  # the folder of no retrofit
        report = None
    texts = {CARD: _card(folder, repo, report, manifest.files.get(CARD))}
    entries = [] if report is None else eval_entries(report)
    if entries:
        texts[RESULTS] = yaml.safe_dump(eval_result_entries_to_yaml(entries), sort_keys=False)
    digests = {name: hashlib.sha256(text.encode()).hexdigest() for name, text in texts.items()}
    texts[NAME] = manifest_text(manifest.model_copy(update={"files": {**manifest.files, **digests}}))
    return texts


def eval_entries(record: RetrofitReport) -> list[EvalResultEntry]:
    """Return an evaluation result for each domain that is a dataset of the hub; no other text has a name there."""
    entries = []
    for domain in record.damage.domains:
        named = domain.name.split("/")  # OWNER, NAME, often a configuration, and the split
        if len(named) not in (3, 4):
            continue
        note = f"perplexity of {domain.windows} windows of {record.settings.length} tokens"
        before = f"{domain.perplexity_before:.4f} before the retrofit"
        entries.append(
            EvalResultEntry(
                dataset_id="/".join(named[:2]),
                task_id=named[2] if len(named) == 4 else "default",
                value=round(domain.perplexity_after, 4),
                notes=f"{note} of the split {named[-1]}; {before}",
            )
        )
    return entries


def _card(folder: Path, repo: str, report: RetrofitReport | None, digest: str | None) -> str:
    path = folder / CARD
    content = path.read_bytes() if path.is_file() else None
    if content is not None and hashlib.sha256(content).hexdigest() != digest:
        return content.decode("utf-8")
    if report is not None:
        text = model_card(report, any((folder / name).is_file() for name in TOKENIZERS))
    else:
        text = f"# {repo}\n" if content is None else content.decode("utf-8")
    return text.replace(PLACE, repo)
