"""Text by domain: what models are judged on, and what they are fitted to."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Self

from torch import Tensor

from crosslayer.corpus.documents import TextSource, load_documents
from crosslayer.corpus.domains import FITTED, embedded_domains
from crosslayer.corpus.windows import check_text

Documents = Tensor | TextSource | Iterable[str]
DomainTexts = Documents | Sequence[TextSource] | Mapping[str, Documents] | None


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
        evaluated, calibrated = _by_name(evaluation, "text"), _by_name(calibration, "calibration text")
        for name in evaluated.keys() & calibrated.keys():
            one, other = evaluated[name], calibrated[name]
            are_sources = isinstance(one, TextSource) and isinstance(other, TextSource)
            if one is not other and not (are_sources and one == other):
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
