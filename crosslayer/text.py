"""Text from a file, a dataset or the embedded corpus, packed into token sequences without padding."""

import itertools
import json
import random
import tarfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

DATA = Path(__file__).parent / "data"
EMBEDDED = {  # domain → archive and files in it; sources and licences: data/SOURCES.md
    "books": ("default_corpus", ("moby_dick", "pride_and_prejudice", "sense_and_sensibility")),
    "science": ("default_corpus", ("newton_opticks",)),
    "speeches": ("default_corpus", ("sotu_sample",)),
    "web": ("modern_corpus", ("web",)),
    "docs": ("modern_corpus", ("docs",)),
    "code": ("modern_corpus", ("code",)),
}
FITTED = ("books", "web", "docs")  # domains to which a retrofit is fitted by default; the others only judge it
DOCUMENT_LINE = "<|doc|>"  # a line that separates documents in a .txt file
STREAMED = 4096  # documents of a stream that `split` takes
WORD = 1000  # characters, within which a text that has spaces shows one
CHARACTERS_PER_TOKEN = 6  # an upper estimate for text, so that one piece fills one sequence


@dataclass(frozen=True)
class TextSource:
    """Where text comes from: `name` None is the embedded corpus; the rest is for tables and `datasets`."""

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
    """Return the documents of a source; a `datasets` name is streamed in an order shuffled by `seed`.

    Raises:
        ValueError: the file is missing, empty or binary, the column is unknown, or the dataset cannot be reached.

    """
    if source.name is None:
        return _embedded_documents("default_corpus")
    path = Path(source.name).expanduser()
    if not path.exists():
        if path.suffix in (".txt", ".jsonl", ".parquet"):
            raise ValueError(f"text file {source.name!r} does not exist")
        return _dataset_documents(source, seed)
    if not path.is_file():
        raise ValueError(f"{source.name!r} is a folder; give a .txt, .jsonl or .parquet file, or a datasets name")
    readers = {".txt": _txt_documents, ".jsonl": _jsonl_documents, ".parquet": _parquet_documents}
    if path.suffix not in readers:
        raise ValueError(f"{path.name!r} has the suffix {path.suffix!r}; text files end in .txt, .jsonl or .parquet")
    documents = [d for d in readers[path.suffix](path, source.column) if d.strip()]
    if not documents:
        raise ValueError(f"{path.name!r} holds no text")
    return documents


def embedded_domains(names: Iterable[str] = tuple(EMBEDDED)) -> dict[str, Iterable[str]]:
    """Return the documents of the embedded corpus by domain."""
    return {name: _embedded_documents(*EMBEDDED[name]) for name in names}


def load_domains(sources: Sequence[TextSource], seed: int = 0) -> dict[str, Iterable[str]]:
    """Return the documents of several sources, each a domain by its short name.

    Raises:
        ValueError: a source cannot be read, or two have the same name.

    """
    found: dict[str, Iterable[str]] = {}
    for source in sources:
        name = source.describe()
        if name in found:
            raise ValueError(f"two texts are called {name!r}; a domain goes by its file's name, so rename one")
        found[name] = load_documents(source, seed)
    return found


def pack(
    documents: Iterable[str],
    tokenizer: PreTrainedTokenizerBase,
    *,
    sequences: int = 8,
    length: int = 512,
    seed: int = 0,
    bos: str = "auto",
) -> Tensor:
    """Cut documents into token sequences, (sequences, length) int64, without padding.

    A sequence is contiguous text as far as its document reaches; pieces are taken in an order drawn with `seed`. `bos`:
    "auto" keeps what the tokenizer puts first and last ([CLS] and [SEP], say), "yes" forces the beginning token, "no"
    gives plain text.

    Raises:
        ValueError: there is too little text; the message says how many tokens there are.

    """
    first, last = special_tokens(tokenizer, bos)
    body = length - len(first) - len(last)
    if sequences < 1 or body < 1:
        raise ValueError(f"sequences = {sequences} and length = {length} leave no room for text; both must be larger")
    windows: list[list[int]] = []
    rest: list[int] = []
    for piece in _pieces(documents, CHARACTERS_PER_TOKEN * body, seed):
        tokens = tokenizer(piece, add_special_tokens=False, verbose=False)["input_ids"]
        if len(tokens) >= body:
            windows.append(tokens[:body])
            tokens = tokens[body:]
        rest += tokens
        if len(windows) == sequences:
            break
    while len(windows) < sequences and len(rest) >= body:
        windows.append(rest[:body])
        rest = rest[body:]
    if len(windows) < sequences:
        count = len(windows) * body + len(rest)
        raise ValueError(
            f"the text has {count} tokens; {sequences} sequences of {length} need {sequences * body}: "
            "use fewer or shorter sequences, or more text"
        )
    return torch.tensor([[*first, *window, *last] for window in windows])


@dataclass(frozen=True)
class Windows:
    """Token sequences (N, T), the document that each is cut from (-1: joined from short ones), and its domain."""

    ids: Tensor
    documents: tuple[int, ...]
    domains: tuple[str, ...] = ()  # empty: all of one

    def __len__(self) -> int:
        return len(self.ids)

    def by_domain(self) -> dict[str, Tensor]:
        """Return the sequences of each domain."""
        names = dict.fromkeys(self.domains)
        return {name: self.ids[[domain == name for domain in self.domains]] for name in names}


def split(
    documents: Iterable[str],
    tokenizer: PreTrainedTokenizerBase,
    *,
    parts: dict[str, int],
    length: int = 512,
    seed: int = 0,
    bos: str = "auto",
) -> dict[str, Windows]:
    """Cut documents into disjoint parts of so many windows each, such as {"evaluation": 64, "calibration": 128}.

    Windows are drawn with `seed` from everywhere in the documents (at most 4,096 of a stream); no token is used twice.

    Raises:
        ValueError: there is too little text; the message says how many tokens there are.

    """
    first, last = special_tokens(tokenizer, bos)
    body, wanted = length - len(first) - len(last), sum(parts.values())
    if min(parts.values()) < 1 or body < 1:
        raise ValueError(f"windows {parts} of {length} tokens leave no room for text; both must be larger")
    held = list(itertools.islice(documents, None if isinstance(documents, list) else STREAMED))
    found: list[tuple[list[int], int]] = []
    rest: list[int] = []
    for number, piece in _numbered_pieces(held, CHARACTERS_PER_TOKEN * body, seed):
        if len(found) == wanted:
            break
        tokens = tokenizer(piece, add_special_tokens=False, verbose=False)["input_ids"]
        while len(tokens) >= body and len(found) < wanted:
            found.append((tokens[:body], number))
            tokens = tokens[body:]
        if len(held[number]) >= CHARACTERS_PER_TOKEN * body:
            continue
        rest += tokens  # a short document: joined with others
        if len(rest) >= body:
            found.append((rest[:body], -1))
            rest = rest[body:]
    if len(found) < wanted:
        needs = ", ".join(f"{count} for {name}" for name, count in parts.items())
        raise ValueError(
            f"the text gives {len(found)} windows of {length} tokens ({len(found) * length} tokens); {wanted} are "
            f"needed ({needs}): use fewer or shorter windows, or more text"
        )
    result, start = {}, 0
    for name, count in parts.items():
        chosen = found[start : start + count]
        ids = torch.tensor([[*first, *tokens, *last] for tokens, _ in chosen])
        result[name], start = Windows(ids, tuple(number for _, number in chosen)), start + count
    return result


def shared_out(count: int, domains: Sequence[str]) -> dict[str, int]:
    """Return equal numbers of windows for each domain, `count` in all; the first take what is left over."""
    return {name: (count + len(domains) - 1 - place) // len(domains) for place, name in enumerate(domains)}


def split_domains(
    domains: Mapping[str, Iterable[str]],
    tokenizer: PreTrainedTokenizerBase,
    *,
    parts: Mapping[str, Mapping[str, int]],
    length: int = 512,
    seed: int = 0,
    bos: str = "auto",
) -> dict[str, Windows]:
    """Cut each domain into disjoint parts, such as {"evaluation": {"web": 16, "code": 16}, "calibration": {"web": 64}}.

    Raises:
        ValueError: a domain has too little text; the message names it.

    """
    found: dict[str, list[tuple[str, Windows]]] = {part: [] for part in parts}
    for name, documents in domains.items():
        wanted = {part: counts[name] for part, counts in parts.items() if counts.get(name)}
        if not wanted:
            continue
        try:
            cut = split(documents, tokenizer, parts=wanted, length=length, seed=seed, bos=bos)
        except ValueError as error:
            raise ValueError(f"{name}: {error}" if len(domains) > 1 else str(error)) from None
        for part, windows in cut.items():
            found[part].append((name, windows))
    return {part: _joined(pairs) for part, pairs in found.items() if pairs}


def _joined(pairs: list[tuple[str, Windows]]) -> Windows:
    """Return the windows of several domains as one, with documents numbered anew."""
    keys = [(name, document) for name, windows in pairs for document in windows.documents]
    numbers = {key: number for number, key in enumerate(dict.fromkeys(keys))}
    ids = torch.cat([windows.ids for _, windows in pairs])
    return Windows(ids, tuple(numbers[key] for key in keys), tuple(name for name, _ in keys))


def special_tokens(tokenizer: PreTrainedTokenizerBase, bos: str = "auto") -> tuple[list[Any], list[Any]]:
    """Return the tokens that a sequence begins and ends with."""
    if bos not in ("auto", "yes", "no"):
        raise ValueError(f"bos = {bos!r} is not known; use auto, yes or no")
    if bos == "no":
        return [], []
    if bos == "yes":
        token = tokenizer.bos_token_id if tokenizer.bos_token_id is not None else tokenizer.cls_token_id
        if token is None:
            raise ValueError("bos = 'yes', but this tokenizer has no beginning-of-sequence token; use auto or no")
        return [token], []
    plain = tokenizer.encode("a", add_special_tokens=False)
    full = tokenizer.encode("a")
    assert isinstance(plain, list) and isinstance(full, list)
    for start in range(len(full) - len(plain) + 1):
        if full[start : start + len(plain)] == plain:
            return full[:start], full[start + len(plain) :]
    return [], []


def _numbered_pieces(documents: list[str], characters: int, seed: int) -> Iterator[tuple[int, str]]:
    """Yield contiguous pieces of about `characters`, shuffled, with the number of their document."""
    places = [(d, start) for d, text in enumerate(documents) for start in range(0, len(text), characters)]
    random.Random(seed).shuffle(places)
    for d, start in places:
        yield d, _from_word(documents[d], start, start + characters)


def _pieces(documents: Iterable[str], characters: int, seed: int) -> Iterator[str]:
    """Yield contiguous pieces of about `characters`; shuffled if all documents are at hand, else in their order."""
    if isinstance(documents, list):
        yield from (piece for _, piece in _numbered_pieces(documents, characters, seed))
    else:
        for text in documents:
            for start in range(0, len(text), characters):
                yield _from_word(text, start, start + characters)


def _from_word(text: str, start: int, stop: int) -> str:
    """Return text[start:stop] with both ends moved to the next beginning of a word."""
    return text[_next_word(text, start) : _next_word(text, stop)]


def _next_word(text: str, at: int) -> int:
    if at == 0 or at >= len(text):
        return min(at, len(text))
    space = text.find(" ", at - 1, at + WORD)
    return space if space >= 0 else at


def _embedded_documents(archive: str, files: Sequence[str] = ()) -> list[str]:
    """Return the documents of the named files (without suffix) of an embedded archive; without names, whole files."""
    documents = []
    with tarfile.open(DATA / f"{archive}.tar.xz", "r:xz") as opened:
        for member in sorted((m for m in opened.getmembers() if m.isfile()), key=lambda m: m.name):
            if not files or Path(member.name).stem in files:
                text = opened.extractfile(member).read().decode("utf-8")  # type: ignore[union-attr]
                documents += _separated(text) if files else [text]
    return documents


def _separated(text: str) -> list[str]:
    return text.split(f"\n{DOCUMENT_LINE}\n")


def _decode(path: Path) -> str:
    data = path.read_bytes()
    if not data.strip():
        raise ValueError(f"text file {path.name!r} is empty")
    try:
        if b"\0" in data:
            raise UnicodeError
        return data.decode("utf-8")
    except UnicodeError:
        raise ValueError(f"{path.name!r} is not UTF-8 text (it looks binary)") from None


def _txt_documents(path: Path, column: str) -> list[str]:
    return _separated(_decode(path))


def _jsonl_documents(path: Path, column: str) -> list[str]:
    documents = []
    for number, line in enumerate(_decode(path).splitlines(), 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except json.JSONDecodeError:
            raise ValueError(f"{path.name!r}, line {number}: not JSON; .jsonl holds one object a line") from None
        if not isinstance(row, dict) or not isinstance(row.get(column), str):
            keys = ", ".join(row) if isinstance(row, dict) else type(row).__name__
            raise ValueError(f"{path.name!r}, line {number}: no text in column {column!r}; it has {keys}")
        documents.append(row[column])
    return documents


def _parquet_documents(path: Path, column: str) -> list[str]:
    try:
        import pyarrow.parquet as parquet
    except ImportError as error:
        raise ValueError("reading .parquet needs pyarrow: pip install 'crosslayer[train]'") from error
    try:
        file = parquet.ParquetFile(path)
    except Exception as error:
        raise ValueError(f"{path.name!r} is not a parquet file: {error}") from error
    if column not in file.schema_arrow.names:
        raise ValueError(f"{path.name!r} has no column {column!r}; it has {', '.join(file.schema_arrow.names)}")
    return [str(value) for value in file.read([column])[column].to_pylist() if value is not None]


def _dataset_documents(source: TextSource, seed: int) -> Iterator[str]:
    try:
        import datasets
    except ImportError as error:
        raise ValueError(
            f"{source.name!r} is no local file, and a datasets name needs: pip install 'crosslayer[train]'"
        ) from error
    assert source.name is not None
    try:
        rows = datasets.load_dataset(source.name, source.config, split=source.split, streaming=True)
        rows = rows.shuffle(seed=seed, buffer_size=1000)
        for row in rows:
            if source.column not in row:
                raise KeyError(f"column {source.column!r} is not there; it has {', '.join(row)}")
            if isinstance(row[source.column], str):
                yield row[source.column]
    except Exception as error:  # datasets raises many kinds; all mean that this source cannot be read
        reason = " ".join(str(error).split())[:200]
        raise ValueError(
            f"{source.name!r} is no local file, and as a dataset it cannot be read ({reason or type(error).__name__})"
        ) from error
