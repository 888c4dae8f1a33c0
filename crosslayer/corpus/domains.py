"""Text of several kinds: the embedded domains, what models are judged on and fitted to, and windows from all of them.

A domain is text of a single kind, by name: how a model does on text that it was fitted to says little about other text.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from crosslayer.corpus.documents import TextSource, embedded_documents, load_documents
from crosslayer.corpus.files import PLAIN, file_kind, local_files
from crosslayer.corpus.windows import Windows, check_text, split

EMBEDDED = {  # domain → archive and files in it; sources and licenses: data/SOURCES.md
    "books": ("default_corpus", ("moby_dick", "pride_and_prejudice", "sense_and_sensibility")),
    "science": ("default_corpus", ("newton_opticks",)),
    "speeches": ("default_corpus", ("sotu_sample",)),
    "web": ("modern_corpus", ("web",)),
    "docs": ("modern_corpus", ("docs",)),
    "code": ("modern_corpus", ("code",)),
}
# domains to which a retrofit is fitted by default; the others only judge it, as text that it was not fitted to
FITTED = ("books", "web", "docs")
# kinds of text that prompts have: a codec is fitted to them too, and nothing is judged on them
FIT_ONLY = {name: ("mixed_corpus", (name,)) for name in ("python", "formulas", "reasoning", "dialogue")}
Documents = Tensor | TextSource | Iterable[str]
DomainTexts = Documents | Sequence[TextSource] | Mapping[str, Documents] | None


def embedded_domains(names: Iterable[str] = tuple(EMBEDDED)) -> dict[str, Iterable[str]]:
    """Return the documents of the embedded corpus by domain; those of `FIT_ONLY` only if they are named."""
    places = {**EMBEDDED, **FIT_ONLY}
    return {name: embedded_documents(*places[name]) for name in names}


def check_table_options(sources: Sequence[TextSource]) -> None:
    """Refuse a configuration, split or column of a source that has none."""
    for source in sources:
        files = local_files(source.name)
        is_dataset = source.name is not None and not files
        has_column = is_dataset or any(file_kind(path) not in PLAIN for path in files)
        for option, is_used in (("config", is_dataset), ("split", is_dataset), ("column", has_column)):
            value, default = vars(source)[option], vars(TextSource())[option]
            if not is_used and value != default:
                what = "tables" if option == "column" else "Hub datasets"
                wrong = f"{option}={value} applies only to {what}; leave it out"
                raise ValueError(f"`text` {source.describe()}: {wrong}")


def shared_out(count: int, domains: Sequence[str]) -> dict[str, int]:
    """Return equal numbers of windows for each domain, `count` in all; the first take what is left over."""
    return {name: (count + len(domains) - 1 - index) // len(domains) for index, name in enumerate(domains)}


def split_domains(
    domains: Mapping[str, Tensor | Iterable[str]],
    tokenizer: PreTrainedTokenizerBase | None,
    *,
    parts: Mapping[str, Mapping[str, int]],
    length: int = 512,
    seed: int = 0,
    bos: str = "auto",
) -> dict[str, Windows]:
    """Cut each domain into disjoint parts, such as {"evaluation": {"web": 16, "code": 16}, "calibration": {"web": 64}}.

    Of a domain of token ids (N, T) each row is a window; all others are documents, which need the tokenizer.

    Raises:
        ValueError: a domain has too little text; the message names it.
    """
    windows_of: dict[str, list[tuple[str, Windows]]] = {part: [] for part in parts}
    for name, documents in domains.items():
        wanted = {part: counts[name] for part, counts in parts.items() if counts.get(name)}
        if not wanted:
            continue
        try:
            if isinstance(documents, Tensor):
                cut = _split_ids(documents, wanted)
            elif tokenizer is None:
                raise ValueError("texts need tokenizer=…; without one, pass token ids (N, T)")
            else:
                cut = split(documents, tokenizer, parts=wanted, length=length, seed=seed, bos=bos)
        except ValueError as error:
            raise ValueError(f"{name}: {error}" if len(domains) > 1 else str(error)) from None
        for part, windows in cut.items():
            windows_of[part].append((name, windows))
    return {part: joined(pairs) for part, pairs in windows_of.items() if pairs}


def window_ranges(parts: Mapping[str, Windows]) -> dict[str, dict[str, tuple[int, int]]]:
    """Return where `split_domains` took each part from: first window and count, in each domain's list of windows."""
    taken: Counter[str] = Counter()
    ranges = {}
    for part, windows in parts.items():
        counts = Counter(windows.domains)
        ranges[part] = {name: (taken[name], count) for name, count in counts.items()}
        taken += counts
    return ranges


def _split_ids(ids: Tensor, parts: Mapping[str, int]) -> dict[str, Windows]:
    """Deal out the rows of token ids (N, T), each as a document of its own."""
    if sum(parts.values()) > len(ids):
        needs = ", ".join(f"{count} for {name}" for name, count in parts.items())
        raise ValueError(f"there are {len(ids)} windows of token ids; {sum(parts.values())} are needed ({needs})")
    windows = {}
    start = 0
    for name, count in parts.items():
        indices = range(start, start + count)
        windows[name] = Windows(ids[indices.start : indices.stop], tuple(indices))
        start += count
    return windows


def joined(pairs: list[tuple[str, Windows]]) -> Windows:
    """Return the windows of several domains together, by name; their documents are renumbered."""
    # intervals are drawn over documents, and each domain counts its own from 0
    keys = [(name, document) for name, windows in pairs for document in windows.documents]
    numbers = {key: index for index, key in enumerate(dict.fromkeys(keys))}
    ids = torch.cat([windows.ids for _, windows in pairs])
    return Windows(ids, tuple(numbers[key] for key in keys), tuple(name for name, _ in keys))


@dataclass(frozen=True)
class Texts:
    """Text by domain, with the names of the calibration and of the evaluation domains.

    A domain that is used for both is cut into windows, and each has a single purpose.
    """

    # documents of each domain by name, or its token ids (N, T), a window each
    domains: Mapping[str, Tensor | Iterable[str]]
    calibration: tuple[str, ...]  # domains on which W_c is fitted and layers are chosen
    evaluation: tuple[str, ...]  # domains on which the damage is measured
    is_explicit: bool = False  # whether the caller named the calibration domains

    @classmethod
    def load(cls, evaluation: DomainTexts = None, calibration: DomainTexts = None, seed: int = 0) -> Self:
        """Read the evaluation text and the calibration text.

        Token ids, a source or documents (a string is a document) are one domain; several sources are a domain each, by
        their short names; a mapping names its domains. The default evaluation text is all embedded domains. The default
        calibration text is the evaluation text, or three of the embedded domains without either.
        """
        evaluated = _by_name(evaluation, "text")
        calibrated = _by_name(calibration, "calibration text")
        # one name means one text: its windows are cut once, so no window serves for both fitting and evaluation
        for name in evaluated.keys() & calibrated.keys():
            judged, fitted = evaluated[name], calibrated[name]
            are_sources = isinstance(judged, TextSource) and isinstance(fitted, TextSource)
            if judged is not fitted and not (are_sources and judged == fitted):
                raise ValueError(f"two different texts are both named {name!r}; rename one of them")
        domains: dict[str, Tensor | Iterable[str]] = {}
        for name, text in {**evaluated, **calibrated}.items():
            documents = load_documents(text, seed) if isinstance(text, TextSource) else text
            domains[name] = [documents] if isinstance(documents, str) else documents
        if evaluated:
            return cls(domains, tuple(calibrated or evaluated), tuple(evaluated), bool(calibrated))
        embedded = embedded_domains()
        duplicates = sorted(embedded.keys() & domains.keys())
        if duplicates:
            raise ValueError(f"{duplicates[0]!r} is the name of an embedded domain; give `text` too, or rename it")
        return cls({**domains, **embedded}, tuple(calibrated or FITTED), tuple(embedded), bool(calibrated))


def _by_name(text: DomainTexts, name: str) -> dict[str, Documents]:
    """Return domains by name, not read yet; `name` is for text without a name."""
    if text is None:
        return {}
    if isinstance(text, Mapping):
        for domain, documents in text.items():
            if not isinstance(documents, TextSource):
                check_text(documents, str(domain))
        return dict(text)
    if isinstance(text, TextSource):
        return {text.describe(): text}
    if isinstance(text, Tensor | str) or not isinstance(text, Sequence):
        check_text(text, name)
        return {name: text}  # type: ignore[dict-item]
    if all(isinstance(document, str) for document in text):
        return {name: text} if text else {}  # type: ignore[dict-item]
    by_name: dict[str, Documents] = {}
    for source in text:
        if not isinstance(source, TextSource):
            raise ValueError(
                f"{name} must be a list of sources, a list of texts, or a dict by domain {{'web': …, 'code': …}}, got "
                f"a list with a {type(source).__name__}"
            )
        if by_name.setdefault(source.describe(), source) != source:
            raise ValueError(
                f"two texts are both named {source.describe()!r}; rename a file, or name its domain (NAME=FILE)"
            )
    return by_name
