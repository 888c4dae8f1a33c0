"""The Hugging Face hub: a short question says whether it answers, before a library tries for half a minute."""

import contextlib
import functools
import threading
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from huggingface_hub import HfApi, constants, get_hf_file_metadata, hf_hub_url, is_offline_mode
from huggingface_hub.errors import EntryNotFoundError, GatedRepoError, HFValidationError, RepositoryNotFoundError
from huggingface_hub.file_download import repo_folder_name
from huggingface_hub.utils import validate_repo_id

from crosslayer.corpus.files import say_skipped

PATIENCE = 4.0  # seconds to wait for the hub
SHUFFLED = 1000  # rows of the buffer from which a stream is drawn
ANSWERS = (EntryNotFoundError, GatedRepoError, RepositoryNotFoundError)  # of a hub that can be reached


def is_hub_name(name: str) -> bool:
    """Return whether a name has the form of a hub's: a repository, or owner/repository."""
    try:
        validate_repo_id(name)
    except HFValidationError:
        return False
    return True


def ask_hub(name: str, file: str, seconds: float, kind: str = "model") -> Exception | None:
    """Return what went wrong when the hub was asked for a file of a repository, whose kind is "model" or "dataset".

    The answer is waited for so many seconds: looking up the hub's address can hang.
    """
    url = hf_hub_url(name, file, repo_type=kind)
    answer = _within(seconds, lambda: get_hf_file_metadata(url, timeout=seconds))
    return answer if isinstance(answer, Exception) else None


def _within(seconds: float, ask: Callable[[], Any]) -> Any:
    """Return what a question is answered with, or what went wrong, after so many seconds at the latest."""
    answers: list[Any] = []

    def run() -> None:
        try:
            answers.append(ask())
        except Exception as error:
            answers.append(error)

    asking = threading.Thread(target=run, daemon=True)
    asking.start()
    asking.join(seconds)
    return answers[0] if answers else TimeoutError(f"no answer in {seconds:.0f} s")


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
    answer = ask_hub(name, "README.md", PATIENCE, "dataset")
    before = constants.HF_HUB_OFFLINE
    constants.HF_HUB_OFFLINE = answer is not None and not isinstance(answer, ANSWERS)
    try:
        yield
    finally:
        constants.HF_HUB_OFFLINE = before


def stream_dataset(name: str, config: str | None, split: str, column: str, seed: int) -> Iterator[str]:
    """Open a dataset at once, so that an unreadable name is said before a model is loaded; stream its texts.

    Rows whose `column` has no text are skipped, and their number is said; `seed` decides the order of rows.
    """
    try:
        import datasets
    except ImportError as error:
        raise ValueError(
            f"{name!r} is no local file, and a datasets name needs: pip install 'crosslayer[train]'"
        ) from error
    with _readable(name), reading_dataset(name):
        rows = datasets.load_dataset(name, config, split=split, streaming=True)
        return _texts(name, rows.shuffle(seed=seed, buffer_size=SHUFFLED), column)


def _texts(name: str, rows: Iterable[dict[str, Any]], column: str) -> Iterator[str]:
    skipped = 0
    with _readable(name):
        for row in rows:
            if column not in row:
                raise KeyError(f"column {column!r} is not there; it has {', '.join(row)}")
            if isinstance(row[column], str):
                yield row[column]
            else:
                skipped += 1
    say_skipped(name, skipped)


@contextlib.contextmanager
def _readable(name: str) -> Iterator[None]:
    try:
        yield
    except Exception as error:  # datasets raises many kinds; all mean that this source cannot be read
        reason = " ".join(str(error).split())[:200]
        raise ValueError(
            f"{name!r} is no local file, and as a dataset it cannot be read ({reason or type(error).__name__})"
        ) from error
