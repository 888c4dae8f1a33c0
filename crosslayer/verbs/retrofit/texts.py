"""Which text a retrofit reads: by domain, for fitting and for judging, and no token for two purposes."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor
from transformers import PreTrainedTokenizerBase

from crosslayer.corpus.documents import TextSource, load_documents
from crosslayer.corpus.domains import FITTED, embedded_domains, shared_out, split_domains
from crosslayer.corpus.windows import Windows, check_text
from crosslayer.verbs.retrofit.damage import FEWEST
from crosslayer.verbs.retrofit.request import Request

CHOICE_WINDOWS, SEARCH_WINDOWS, CURVE_WINDOWS = 4, 2, 24
Documents = Tensor | TextSource | Iterable[str]
DomainTexts = Documents | Sequence[TextSource] | Mapping[str, Documents] | None


@dataclass(frozen=True)
class Texts:
    """Text by domain, and which domains are fitted to, and which judge the result.

    A domain that does both is cut into windows that each serve a single purpose.
    """

    # documents of each domain by name, or its token ids (N, T), a window each
    domains: Mapping[str, Tensor | Iterable[str]]
    fitted: tuple[str, ...]  # domains to which W_c and the choice of layers are fitted
    judging: tuple[str, ...]  # domains on which the damage is measured
    named: bool = False  # whether the fitted domains were asked for, and not taken by default

    @classmethod
    def load(cls, judging: DomainTexts = None, fitted: DomainTexts = None, seed: int = 0) -> "Texts":
        """Read the text to judge on and the text to fit to.

        Token ids, a source or documents (a string is a document) are a domain; several sources are a domain each, by
        their short names; a mapping names its domains. Without text to judge on, all embedded domains judge. Without
        text to fit to, the domains that judge are fitted; without either, three of the embedded domains.
        """
        judges, fits = _by_name(judging, "text"), _by_name(fitted, "calibration text")
        for name in judges.keys() & fits.keys():
            one, other = judges[name], fits[name]
            are_sources = isinstance(one, TextSource) and isinstance(other, TextSource)
            if one is not other and not (are_sources and one == other):
                raise ValueError(f"two texts are called {name!r}; a domain goes by its name, so rename either")
        domains: dict[str, Tensor | Iterable[str]] = {}
        for name, text in {**judges, **fits}.items():
            documents = load_documents(text, seed) if isinstance(text, TextSource) else text
            domains[name] = [documents] if isinstance(documents, str) else documents
        if judges:
            return cls(domains, tuple(fits or judges), tuple(judges), bool(fits))
        embedded = embedded_domains()
        doubled = sorted(embedded.keys() & domains.keys())
        if doubled:
            raise ValueError(f"{doubled[0]!r} is the name of an embedded domain; give `text` too, or rename it")
        return cls({**domains, **embedded}, tuple(fits or FITTED), tuple(embedded), bool(fits))

    def parts(self, request: Request) -> dict[str, dict[str, int]]:
        """Return the windows that are needed, by purpose and domain."""
        options, least = request.options, FEWEST * len(self.judging)
        if options.windows < least:
            each = f" for each of the {len(self.judging)} domains" if len(self.judging) > 1 else ""
            raise ValueError(f"`windows` {options.windows} is too few for an interval{each}; use at least {least}")
        for name, domain in self.domains.items():
            if isinstance(domain, Tensor) and (domain.dim() != 2 or domain.shape[1] != options.length):
                raise ValueError(
                    f"{name}: token ids are {tuple(domain.shape)}, and length is {options.length}; give ids (N, T) and "
                    "length=T"
                )
        counts = {"evaluation": shared_out(options.windows, self.judging)}
        if request.fits or request.many_tokens:
            counts["calibration"] = shared_out(options.calibration, self.fitted)
        if options.layers == "auto" and not request.many_tokens:
            counts["choice"] = shared_out(CHOICE_WINDOWS, self.fitted)
        if request.searches:
            counts["search"] = shared_out(max(SEARCH_WINDOWS, len(self.fitted)), self.fitted)
            counts["trade-off"] = shared_out(CURVE_WINDOWS, self.judging)
        if self.named and not counts.keys() - {"evaluation"}:
            raise ValueError(
                "`calibration_text` does nothing here, as neither W_c nor a choice of layers is fitted; leave it out"
            )
        return counts

    def windows(self, tokenizer: PreTrainedTokenizerBase | None, request: Request) -> dict[str, Windows]:
        """Cut the windows of every purpose."""
        options = request.options
        cut = {"length": options.length, "seed": options.seed, "bos": options.bos}
        return split_domains(self.domains, tokenizer, parts=self.parts(request), **cut)


def _by_name(text: DomainTexts, name: str) -> dict[str, Documents]:
    """Return domains by name, not read yet; `name` is that of text which has none."""
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
                f"{name} holds a {type(source).__name__}; give sources alone, texts alone, or each by the name of its "
                "domain: {'web': …, 'code': …}"
            )
        if by_name.setdefault(source.describe(), source) != source:
            raise ValueError(
                f"two texts are called {source.describe()!r}; a domain goes by its file's name, so rename "
                "either, or name it (NAME=FILE)"
            )
    return by_name
