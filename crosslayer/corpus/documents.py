"""Documents of a source: a file, a dataset, or the corpus that lies in the package."""

import tarfile
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from crosslayer.corpus.files import READERS, read_file, separated
from crosslayer.corpus.streamed import stream_dataset

DATA = Path(__file__).parent.parent / "data"


@dataclass(frozen=True)
class TextSource:
    """Where text comes from.

    Args:
        name: a .txt, .jsonl or .parquet file, or the name of a dataset; None is the embedded corpus.
        config: configuration of a dataset.
        split: split of a dataset.
        column: text column of a table or dataset.

    """

    name: str | None = None
    config: str | None = None
    split: str = "train"
    column: str = "text"

    def describe(self) -> str:
        """Return a short name for reports, without any folder."""
        if self.name is None:
            return "embedded corpus (Moby Dick, Opticks, two Austen novels, State of the Union)"
        path = Path(self.name).expanduser()
        return path.name if path.exists() else "/".join(filter(None, (self.name, self.config, self.split)))


def load_documents(source: TextSource, seed: int = 0) -> Iterable[str]:
    """Return the documents of a source: a list, or a stream of a dataset in an order shuffled by `seed`.

    Raises:
        ValueError: the file is missing, empty or binary, the column is unknown, or the dataset cannot be reached.

    """
    if source.name is None:
        return embedded_documents("default_corpus")
    path = Path(source.name).expanduser()
    if path.exists():
        return read_file(path, source.column)
    if path.suffix in READERS:
        raise ValueError(f"text file {source.name!r} does not exist")
    return stream_dataset(source.name, source.config, source.split, source.column, seed)


def embedded_documents(archive: str, files: Sequence[str] = ()) -> list[str]:
    """Return the documents of the named files (without suffix) of an embedded archive; without names, whole files."""
    documents = []
    with tarfile.open(DATA / f"{archive}.tar.xz", "r:xz") as opened:
        members = [member for member in opened.getmembers() if member.isfile()]
        for member in sorted(members, key=lambda member: member.name):
            if files and Path(member.name).stem not in files:
                continue
            content = opened.extractfile(member)
            assert content is not None
            text = content.read().decode("utf-8")
            documents += separated(text) if files else [text]
    return documents
