"""The Hugging Face hub: a short question says whether it answers, before a library tries for half a minute."""

import contextlib
import functools
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from huggingface_hub import HfApi, constants, get_hf_file_metadata, hf_hub_url, is_offline_mode, try_to_load_from_cache
from huggingface_hub.errors import EntryNotFoundError, GatedRepoError, HFValidationError, RepositoryNotFoundError
from huggingface_hub.file_download import repo_folder_name
from huggingface_hub.utils import validate_repo_id

# seconds to wait for the hub: by its own retries, the client says after 20 to 55 s that a name does not exist
PATIENCE = 4.0
BRIEFLY = 1.0  # where the model is in the cache already
ANSWERS = (EntryNotFoundError, GatedRepoError, RepositoryNotFoundError)  # of a hub that can be reached


def is_hub_name(name: str) -> bool:
    """Return whether a name has the form of a hub's: a repository, or owner/repository."""
    try:
        validate_repo_id(name)
    except HFValidationError:
        return False
    return True


def ask_hub(name: str, file: str, seconds: float, kind: str = "model") -> Exception | None:
    """Return the error from asking the hub for a file of a repository (`kind` is "model" or "dataset"), or None.

    It waits at most `seconds`, since looking up the hub's address can hang.
    """
    url = hf_hub_url(name, file, repo_type=kind)
    answer = _within(seconds, lambda: get_hf_file_metadata(url, timeout=seconds))
    return answer if isinstance(answer, Exception) else None


def _within(seconds: float, ask: Callable[[], Any]) -> Any:
    """Return the answer to a question, or the error, after at most `seconds`."""
    answers: list[Any] = []

    def run() -> None:
        try:
            answers.append(ask())
        except Exception as error:
            answers.append(error)

    # a daemon, so that a look-up that hangs does not keep the process from ending
    asking = threading.Thread(target=run, daemon=True)
    asking.start()
    asking.join(seconds)
    return answers[0] if answers else TimeoutError(f"no answer in {seconds:.0f} s")


def hub_source(name: str) -> str:
    """Return from where transformers loads a hub's model: its name, or its folder in the cache if the hub is away.

    Without this question it tries some ten times, for up to a minute, to reach a hub that cannot be reached; and even
    with `local_files_only` it asks for an adapter, where peft is installed.
    """
    # a file that is known not to exist is an object, not a path
    cached = try_to_load_from_cache(name, "config.json")
    cached = cached if isinstance(cached, str) else None
    if is_offline_mode():
        answer: Exception | None = OSError("HF_HUB_OFFLINE is set")
    else:
        answer = ask_hub(name, "config.json", BRIEFLY if cached else PATIENCE)
    if answer is None:
        return name
    if isinstance(answer, GatedRepoError):
        raise ValueError(f"model {name!r} is gated: accept its terms on the Hugging Face hub, then `hf auth login`")
    if isinstance(answer, RepositoryNotFoundError):
        raise ValueError(f"there is no folder {name!r}, and no public model of this name on the Hugging Face hub")
    if isinstance(answer, EntryNotFoundError):
        raise ValueError(f"{name!r} on the Hugging Face hub has no config.json, so it is not a transformers model")
    if cached is not None:
        return str(Path(cached).parent)
    reason = (" ".join(str(answer).split()) or type(answer).__name__)[:100]
    raise ValueError(f"there is no folder {name!r}, and the Hugging Face hub cannot be reached ({reason})")


@functools.cache
def dataset_revision(name: str) -> str | None:
    """Return the newest commit of a dataset; where the hub does not say, the one that was read last, or None."""
    if not is_hub_name(name):
        return None
    if not is_offline_mode():
        info = _within(PATIENCE, lambda: HfApi().dataset_info(name, timeout=PATIENCE))
        if not isinstance(info, Exception):
            return info.sha
    folder = repo_folder_name(repo_id=name, repo_type="dataset")
    main = Path(constants.HF_HUB_CACHE) / folder / "refs" / "main"
    return main.read_text().strip() if main.is_file() else None


@contextlib.contextmanager
def reading_dataset(name: str) -> Iterator[None]:
    """Let datasets load a set inside the block: from its cache, or not at all, where the hub does not answer."""
    if is_offline_mode() or not is_hub_name(name):
        yield
        return
    # any file will do: that it does not exist is an answer, too
    answer = ask_hub(name, "README.md", PATIENCE, "dataset")
    before = constants.HF_HUB_OFFLINE
    constants.HF_HUB_OFFLINE = answer is not None and not isinstance(answer, ANSWERS)
    try:
        yield
    finally:
        constants.HF_HUB_OFFLINE = before
