"""Documents of a dataset of the Hugging Face hub, streamed."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from crosslayer.corpus.files import say_skipped
from crosslayer.corpus.hub import reading_dataset

SHUFFLED = 1000  # rows of the buffer from which a stream is drawn


def stream_dataset(name: str, config: str | None, split: str, column: str, seed: int) -> Iterator[str]:
    """Open a dataset at once, so that an unreadable name is said before a model is loaded; stream its texts.

    Args:
        name: of the dataset.
        config: its configuration.
        split: its split.
        column: where its text is; rows without are skipped, and their number is said.
        seed: of the order of rows.

    Raises:
        ValueError: the dataset, or in the course of reading a row of it, cannot be read.

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


@contextmanager
def _readable(name: str) -> Iterator[None]:
    try:
        yield
    except Exception as error:  # datasets raises many kinds; all mean that this source cannot be read
        reason = " ".join(str(error).split())[:200]
        raise ValueError(
            f"{name!r} is no local file, and as a dataset it cannot be read ({reason or type(error).__name__})"
        ) from error
