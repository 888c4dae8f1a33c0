"""Which text a retrofit reads: by domain, for fitting and for judging, and no token for two purposes."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from transformers import PreTrainedTokenizerBase

from crosslayer.conversion.damage import FEWEST
from crosslayer.conversion.request import Request
from crosslayer.corpus.documents import TextSource
from crosslayer.corpus.domains import FITTED, embedded_domains, load_domains, shared_out, split_domains
from crosslayer.corpus.windows import Windows

CHOICE_WINDOWS, SEARCH_WINDOWS, CURVE_WINDOWS = 4, 2, 36


@dataclass(frozen=True)
class Texts:
    """Documents by domain, and which domains W_c and the choice of layers are fitted to, and which judge the result.

    A domain that is fitted and judges is cut into windows that serve one purpose each. `named`: those that are fitted
    were asked for, and not taken by default.
    """

    documents: Mapping[str, Iterable[str]]
    fitted: tuple[str, ...]
    judging: tuple[str, ...]
    named: bool = False

    @classmethod
    def load(cls, judging: Sequence[TextSource] = (), fitted: Sequence[TextSource] = (), seed: int = 0) -> "Texts":
        """Read the sources; without any to judge on, all embedded domains judge.

        Without sources to fit to, those that judge are fitted; without either, three of the embedded domains.

        Raises:
            ValueError: a source cannot be read, or two have the same name.

        """
        named = list(dict.fromkeys([*judging, *fitted]))
        documents = load_domains(named, seed)
        names = dict(zip(named, documents, strict=True))
        judges = [names[source] for source in dict.fromkeys(judging)]
        fits = [names[source] for source in dict.fromkeys(fitted)]
        if not judges:
            embedded = embedded_domains()
            doubled = sorted(set(embedded) & set(documents))
            if doubled:
                raise ValueError(f"{doubled[0]!r} is the name of an embedded domain; give --text too, or rename it")
            documents, judges = {**documents, **embedded}, list(embedded)
            fits = fits or list(FITTED)
        return cls(documents, tuple(fits or judges), tuple(judges), bool(fitted))

    def read(self, request: Request) -> tuple[str, ...]:
        """Return the domains to which W_c or the choice of layers is fitted; none where nothing is."""
        return self.fitted if set(self.parts(request)) & {"calibration", "choice", "search"} else ()

    def seen(self, request: Request) -> frozenset[str]:
        """Return the domains to which anything is fitted, among those that judge."""
        return frozenset(self.read(request)) & frozenset(self.judging)

    def parts(self, request: Request) -> dict[str, dict[str, int]]:
        """Return the windows that are needed, by purpose and domain.

        Raises:
            ValueError: there are too few windows for an interval in each domain, or nothing is fitted to text that was
                given for that.

        """
        if request.windows < FEWEST * len(self.judging):
            each = f" for each of the {len(self.judging)} domains" if len(self.judging) > 1 else ""
            raise ValueError(
                f"--windows {request.windows} is too few for an interval{each}; use at least "
                f"{FEWEST * len(self.judging)}"
            )
        counts = {"evaluation": shared_out(request.windows, self.judging)}
        if request.fits:
            counts["calibration"] = shared_out(request.calibration, self.fitted)
        if request.layers == "auto":
            counts["choice"] = shared_out(CHOICE_WINDOWS, self.fitted)
        if request.method is None:
            counts["search"] = shared_out(max(SEARCH_WINDOWS, len(self.fitted)), self.fitted)
            counts["trade-off"] = shared_out(CURVE_WINDOWS, self.judging)
        if self.named and not counts.keys() - {"evaluation"}:
            raise ValueError(
                "--calibration-text does nothing here, as neither W_c nor a choice of layers is fitted; leave it out"
            )
        return counts

    def windows(self, tokenizer: PreTrainedTokenizerBase, request: Request) -> dict[str, Windows]:
        """Cut the windows of every purpose.

        Raises:
            ValueError: a domain has too little text; the message names it.

        """
        return split_domains(
            self.documents,
            tokenizer,
            parts=self.parts(request),
            length=request.length,
            seed=request.seed,
            bos=request.bos,
        )
