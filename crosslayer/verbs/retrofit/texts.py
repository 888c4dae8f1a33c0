"""The text of a retrofit by domain: calibration text and evaluation text, with no token used for both."""

from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedTokenizerBase

from crosslayer.core.decoder.weights import to_config
from crosslayer.corpus.domains import shared_out, split_domains
from crosslayer.corpus.windows import Windows
from crosslayer.judge.damage import MIN_WINDOWS
from crosslayer.judge.texts import Texts
from crosslayer.verbs.retrofit.calibrate import input_width
from crosslayer.verbs.retrofit.moments import TOKENS_PER_INPUT, least_sequences
from crosslayer.verbs.retrofit.request import QUICK_SETS, Request, RetrofitOptions

QUICK_LENGTH = 128  # tokens of a window
CHOICE_WINDOWS, SEARCH_WINDOWS, CURVE_WINDOWS = 4, 2, 16


class RetrofitTexts(Texts):
    """Text by domain, and how many windows of it a retrofit needs for each purpose."""

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
