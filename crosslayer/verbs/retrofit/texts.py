"""The text of a retrofit by domain: calibration text and evaluation text, with no token used for both."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedTokenizerBase

from crosslayer.core.decoder.weights import to_config
from crosslayer.corpus.documents import TextSource, load_documents
from crosslayer.corpus.domains import FITTED, embedded_domains, shared_out, split_domains
from crosslayer.corpus.windows import Windows, check_text
from crosslayer.verbs.retrofit.calibrate import input_width
from crosslayer.verbs.retrofit.damage import MIN_WINDOWS
from crosslayer.verbs.retrofit.moments import TOKENS_PER_INPUT, least_sequences
from crosslayer.verbs.retrofit.request import QUICK_SETS, Request, RetrofitOptions

QUICK_LENGTH = 128  # tokens of a window
CHOICE_WINDOWS, SEARCH_WINDOWS, CURVE_WINDOWS = 4, 2, 16
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
    def load(cls, evaluation: DomainTexts = None, calibration: DomainTexts = None, seed: int = 0) -> "Texts":
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

    def window_counts(self, *requests: Request) -> dict[str, dict[str, int]]:
        """Return how many windows are needed, by purpose and domain; the variants of a sweep have the same ones."""
        options = max((request.options for request in requests), key=lambda each: each.calibration)
        for name, domain in self.domains.items():
            if isinstance(domain, Tensor) and (domain.dim() != 2 or domain.shape[1] != options.length):
                raise ValueError(
                    f"{name}: token ids must have shape (N, length={options.length}), got {tuple(domain.shape)}"
                )
        counts = {"evaluation": shared_out(options.windows, self.evaluation)}
        if any(request.fits for request in requests):
            counts["calibration"] = shared_out(options.calibration, self.calibration)
        if any(request.options.layers == "auto" for request in requests):
            counts["choice"] = shared_out(CHOICE_WINDOWS, self.calibration)
        if any(request.searches for request in requests):
            counts["search"] = shared_out(max(SEARCH_WINDOWS, len(self.calibration)), self.calibration)
            if not options.quick:
                counts["trade-off"] = shared_out(CURVE_WINDOWS, self.evaluation)
        if self.is_explicit and not counts.keys() - {"evaluation"}:
            raise ValueError("`calibration_text` has no effect: nothing is fitted and no layers are chosen; remove it")
        return counts

    def least(self, request: Request, config: PreTrainedConfig, length: int) -> dict[str, tuple[int, str]]:
        """Return the fewest windows of `length` tokens with which a model is fitted and judged, by option, and why."""
        least = {"windows": (MIN_WINDOWS * len(self.evaluation), f"{MIN_WINDOWS} of each domain")}
        if request.fits and not request.calibrates:
            width = input_width(to_config(config), request.fit)
            count = least_sequences(width, len(self.calibration), length, request.fit)
            why = f"{request.fit} fits {width} inputs, with {TOKENS_PER_INPUT} tokens each beside those held out"
            least["calibration"] = count, why
        return least

    def checked_options(self, request: Request, config: PreTrainedConfig) -> RetrofitOptions:
        """Return the options, with `quick` the least; raise for all options together that are below it."""
        options = request.options
        if not options.quick:
            least = self.least(request, config, options.length)
            wrong = [
                f"`{option}` must be at least {count} ({why}), got {vars(options)[option]}"
                for option, (count, why) in least.items()
                if vars(options)[option] < count
            ]
            if wrong:
                raise ValueError(f"{'; '.join(wrong)}; for a first estimate give `quick` instead")
            return options
        for name in QUICK_SETS:
            if vars(options)[name] != RetrofitOptions.model_fields[name].default:
                raise ValueError(f"`{name}` has no effect with `quick`, which decides it; remove one of them")
        lengths = [text.shape[-1] for text in self.domains.values() if isinstance(text, Tensor)]  # rows are windows
        length = max(lengths, default=options.length if request.has_choices else QUICK_LENGTH)
        least = {option: count for option, (count, _) in self.least(request, config, length).items()}
        return options.model_copy(update={"length": length, **least})

    def windows(self, tokenizer: PreTrainedTokenizerBase | None, *requests: Request) -> dict[str, Windows]:
        """Cut the windows for every purpose."""
        options = requests[0].options
        cut = {"length": options.length, "seed": options.seed, "bos": options.bos}
        return split_domains(self.domains, tokenizer, parts=self.window_counts(*requests), **cut)


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
                f"{name} must be a list of sources, a list of texts, or a dict by domain {{'web': …, 'code': …}}; not "
                f"a list with a {type(source).__name__}"
            )
        if by_name.setdefault(source.describe(), source) != source:
            raise ValueError(
                f"two texts are both named {source.describe()!r}; rename a file, or name its domain (NAME=FILE)"
            )
    return by_name
