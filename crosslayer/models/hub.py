"""Models of the Hugging Face hub: a short question says whether a model is there, before anything is loaded."""

from pathlib import Path

from huggingface_hub import is_offline_mode, try_to_load_from_cache
from huggingface_hub.errors import EntryNotFoundError, GatedRepoError, RepositoryNotFoundError

from crosslayer.corpus import hub

BRIEFLY = 1.0  # seconds to wait for the hub where the model is in the cache already


def hub_source(name: str) -> str:
    """Return from where transformers loads a hub's model: its name, or its folder in the cache if the hub is away.

    Without this question it tries some ten times, for up to a minute, to reach a hub that cannot be reached; and even
    with `local_files_only` it asks for an adapter, where peft is installed.
    """
    cached = try_to_load_from_cache(name, "config.json")
    cached = cached if isinstance(cached, str) else None
    if is_offline_mode():
        answer: Exception | None = OSError("HF_HUB_OFFLINE is set")
    else:
        answer = hub.ask_hub(name, "config.json", BRIEFLY if cached else hub.PATIENCE)
    if answer is None:
        return name
    if isinstance(answer, GatedRepoError):
        raise ValueError(f"model {name!r} is gated: accept its terms on the Hugging Face hub, then `hf auth login`")
    if isinstance(answer, RepositoryNotFoundError):
        raise ValueError(f"there is no folder {name!r}, and the Hugging Face hub has no such model, or a private one")
    if isinstance(answer, EntryNotFoundError):
        raise ValueError(f"{name!r} on the Hugging Face hub has no config.json; it is no model of transformers")
    if cached is not None:
        return str(Path(cached).parent)
    reason = (" ".join(str(answer).split()) or type(answer).__name__)[:100]
    raise ValueError(f"there is no folder {name!r}, and the Hugging Face hub cannot be reached ({reason})")
