"""Where a model comes from, as the card of what is made of it says: its name on the hub, its license, its languages."""

from pathlib import Path

from huggingface_hub import hf_hub_download
from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError
from transformers import PreTrainedModel

from crosslayer.hub import hub_source, is_hub_name
from crosslayer.models.embedded import EMBEDDED, embedded_name
from crosslayer.output.card import split_card

CARD = "README.md"
COPIED = ("license", "license_name", "license_link", "language")


def origin(model: PreTrainedModel | str | Path) -> dict[str, str | list[str]]:
    """Return base_model, license and language of a model's card as far as they are known."""
    name = str((model.name_or_path or "") if isinstance(model, PreTrainedModel) else model)
    folder = Path(name).expanduser()
    embedded = name if name in EMBEDDED else embedded_name(folder)
    if embedded is not None:
        entry = EMBEDDED[embedded]
        language = {} if entry.language is None else {"language": entry.language}
        return {"base_model": entry.hub, "license": entry.license, **language}
    if folder.is_dir():
        return _stated(folder / CARD)
    if "/" not in name or not is_hub_name(name):  # the class of a model that was built here
        return {}
    try:  # the card lies in the cache, or is fetched where the hub answers
        card = Path(hf_hub_download(name, CARD, local_files_only=hub_source(name) != name))
    except (ValueError, OSError, HfHubHTTPError, LocalEntryNotFoundError):
        return {"base_model": name}
    return {**_stated(card), "base_model": name}


def _stated(path: Path) -> dict[str, str | list[str]]:
    """Return what a card states; of its base only where it is ours, as others mean what they were made of."""
    if not path.is_file():
        return {}
    facts, _ = split_card(path.read_text(encoding="utf-8-sig", errors="replace"))
    tags = facts.get("tags")
    ours = isinstance(tags, list) and "crosslayer" in tags
    return {name: facts[name] for name in (*COPIED, *(["base_model"] if ours else [])) if _is_words(facts.get(name))}


def _is_words(value: object) -> bool:
    words = value if isinstance(value, list) else [value]
    return bool(words) and all(isinstance(word, str) and word for word in words)
