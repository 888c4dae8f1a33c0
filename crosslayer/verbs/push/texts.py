"""The files that `push` generates: the card with the repository's name, evaluation results, and a matching manifest.

All other files are uploaded unchanged.
"""

import hashlib
from pathlib import Path

import yaml
from huggingface_hub import EvalResultEntry, eval_result_entries_to_yaml

from crosslayer.output.card import FOLDER
from crosslayer.output.manifest import NAME, check_files, manifest_text, read_manifest
from crosslayer.output.result import load_as
from crosslayer.verbs.retrofit.card import model_card
from crosslayer.verbs.retrofit.result import RetrofitReport
from crosslayer.verbs.serve.engine import TOKENIZERS

CARD = "README.md"
RESULTS = ".eval_results/crosslayer.yaml"


def own_texts(folder: Path, repo: str) -> dict[str, str]:
    """Return the generated files by name, the manifest last.

    The card is generated from the report, or, without a report, the folder's card with the repository's name filled in;
    a card that was edited after the folder was written is uploaded unchanged.
    """
    if not folder.is_dir() or not (folder / NAME).is_file():
        raise ValueError(f"push needs a model folder written by crosslayer, and {folder.name!r} has no {NAME}")
    changes = [change for change in check_files(folder) if not change.startswith(f"{CARD} is ")]
    if changes:
        more = f", and {len(changes) - 1} more" if len(changes) > 1 else ""
        raise ValueError(f"{folder.name!r} was changed since crosslayer wrote it: {changes[0]}{more}")
    manifest = read_manifest(folder)
    try:
        report = load_as((RetrofitReport,), folder)
    except ValueError:  # not the folder of a retrofit
        report = None
    texts = {CARD: _card(folder, repo, report, manifest.files.get(CARD))}
    entries = [] if report is None else eval_entries(report)
    if entries:
        texts[RESULTS] = yaml.safe_dump(eval_result_entries_to_yaml(entries), sort_keys=False)
    digests = {name: hashlib.sha256(text.encode()).hexdigest() for name, text in texts.items()}
    texts[NAME] = manifest_text(manifest.model_copy(update={"files": {**manifest.files, **digests}}))
    return texts


def eval_entries(record: RetrofitReport) -> list[EvalResultEntry]:
    """Return an evaluation result for each domain that is a dataset of the hub; other texts have no name there."""
    entries = []
    for domain in record.damage.domains:
        names = domain.name.split("/")  # OWNER, NAME, often a configuration, and the split
        if len(names) not in (3, 4):
            continue
        note = f"perplexity of {domain.kl.n} windows of {record.settings.length} tokens"
        before = f"{domain.perplexity_before:.4f} before the retrofit"
        entries.append(
            EvalResultEntry(
                dataset_id="/".join(names[:2]),
                task_id=names[2] if len(names) == 4 else "default",
                value=round(domain.perplexity_after, 4),
                notes=f"{note} of the split {names[-1]}; {before}",
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
    return text.replace(FOLDER, repo)
