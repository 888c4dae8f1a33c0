"""The text of a retrofit by domain: calibration text and evaluation text, with no token used for both."""

from collections.abc import Mapping
from typing import Any

from torch import Tensor
from transformers import PreTrainedTokenizerBase

from crosslayer.corpus.domains import Texts, shared_out, split_domains
from crosslayer.corpus.windows import Windows
from crosslayer.judge.damage import MIN_WINDOWS
from crosslayer.verbs.retrofit.convert import input_width
from crosslayer.verbs.retrofit.moments import TOKENS_PER_INPUT, least_sequences
from crosslayer.verbs.retrofit.options import QUICK_SETS, RetrofitOptions
from crosslayer.verbs.retrofit.strategy import Strategy

QUICK_LENGTH = 128  # tokens of a window
CHOICE_WINDOWS, SEARCH_WINDOWS, CURVE_WINDOWS = 4, 2, 16


class RetrofitTexts(Texts):
    """Text by domain, and how many windows of it a retrofit needs for each purpose."""

    def window_counts(self, *strategies: Strategy) -> dict[str, dict[str, int]]:
        """Return how many windows are needed, by purpose and domain; the variants of a sweep have the same ones."""
        options = max((strategy.options for strategy in strategies), key=lambda each: each.calibration)
        for name, domain in self.domains.items():
            if isinstance(domain, Tensor) and (domain.dim() != 2 or domain.shape[1] != options.length):
                raise ValueError(
                    f"{name}: token ids must have shape (N, length={options.length}), got {tuple(domain.shape)}"
                )
        wanted = {
            "evaluation": (options.windows, self.evaluation),
            "calibration": (options.calibration, self.calibration),
            "choice": (CHOICE_WINDOWS, self.calibration),
            "search": (max(SEARCH_WINDOWS, len(self.calibration)), self.calibration),
            "trade-off": (CURVE_WINDOWS, self.evaluation),
        }
        needed = {purpose for strategy in strategies for purpose in strategy.purposes}
        if self.is_explicit and needed == {"evaluation"}:
            raise ValueError("`calibration_text` has no effect: nothing is fitted and no layers are chosen; remove it")
        return {purpose: shared_out(*each) for purpose, each in wanted.items() if purpose in needed}

    def least(self, strategy: Strategy, length: int) -> dict[str, tuple[int, str]]:
        """Return the fewest windows of `length` tokens with which a model is fitted and judged, by option, and why."""
        least = {"windows": (MIN_WINDOWS * len(self.evaluation), f"{MIN_WINDOWS} of each domain")}
        if strategy.fits:
            assert strategy.config is not None
            width = input_width(strategy.config, strategy.fit)
            count = least_sequences(width, len(self.calibration), length, strategy.fit)
            why = f"{strategy.fit} fits {width} inputs, {TOKENS_PER_INPUT} tokens each plus those held out"
            least["calibration"] = count, why
        return least

    def checked_options(self, strategy: Strategy, defaults: Mapping[str, Any]) -> RetrofitOptions:
        """Return the options, with `quick` the least; raise for all options together that are below it."""
        options = strategy.options
        if not options.quick:
            least = self.least(strategy, options.length)
            wrong = [
                f"`{option}` must be at least {count} ({why}), got {vars(options)[option]}"
                for option, (count, why) in least.items()
                if vars(options)[option] < count
            ]
            if wrong:
                raise ValueError(f"{'; '.join(wrong)}; for a first estimate give `quick` instead")
            return options
        for name in QUICK_SETS:
            if vars(options)[name] != defaults[name]:
                raise ValueError(f"`{name}` has no effect with `quick`, which sets it; remove one of them")
        lengths = [text.shape[-1] for text in self.domains.values() if isinstance(text, Tensor)]  # rows are windows
        length = max(lengths, default=options.length if strategy.needs_long_text else QUICK_LENGTH)
        least = {option: count for option, (count, _) in self.least(strategy, length).items()}
        return options.model_copy(update={"length": length, **least})

    def windows(self, tokenizer: PreTrainedTokenizerBase | None, *strategies: Strategy) -> dict[str, Windows]:
        """Cut the windows for every purpose."""
        options = strategies[0].options
        cut = {"length": options.length, "seed": options.seed, "bos": options.bos}
        return split_domains(self.domains, tokenizer, parts=self.window_counts(*strategies), **cut)
