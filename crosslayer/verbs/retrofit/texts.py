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
# Few, as each of up to `PASSES` configurations runs over all windows for the search. The trade-off is then measured on
# more, which the search did not use: its own KL is 0.8 of that on unseen text (SmolLM2 at 85% of the cache).
CHOICE_WINDOWS, SEARCH_WINDOWS, CURVE_WINDOWS = 4, 2, 16


class RetrofitTexts(Texts):
    """Text by domain, and how many windows of it a retrofit needs for each purpose."""

    def window_counts(self, *strategies: Strategy) -> dict[str, dict[str, int]]:
        """Return how many windows are needed, by purpose and domain; the variants of a sweep have the same ones."""
        # with `quick` each variant asks for as few calibration windows as its own fit needs
        options = max((strategy.options for strategy in strategies), key=lambda variant: variant.calibration)
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
        return {purpose: shared_out(*wanted[purpose]) for purpose in wanted if purpose in needed}

    def checked_options(self, strategy: Strategy, defaults: Mapping[str, Any]) -> RetrofitOptions:
        """Return the options, with `quick` the least; raise for all options together that are below it."""
        options = strategy.options
        length = options.length
        if options.quick:
            for name in QUICK_SETS:
                if vars(options)[name] != defaults[name]:
                    raise ValueError(f"`{name}` has no effect with `quick`, which sets it; remove one of them")
            # rows of token ids are windows already, of whatever length they have
            lengths = [text.shape[-1] for text in self.domains.values() if isinstance(text, Tensor)]
            length = max(lengths, default=length if strategy.needs_long_text else QUICK_LENGTH)

        # the fewest windows with which a model is fitted and judged, by option, and why
        least = {"windows": (MIN_WINDOWS * len(self.evaluation), f"{MIN_WINDOWS} of each domain")}
        if strategy.fits:
            assert strategy.config is not None
            width = input_width(strategy.config, strategy.fit)
            count = least_sequences(width, len(self.calibration), length, strategy.fit)
            why = f"{strategy.fit} fits {width} inputs, {TOKENS_PER_INPUT} tokens each plus those held out"
            least["calibration"] = count, why
        if options.quick:
            fewest = {option: count for option, (count, _) in least.items()}
            return options.model_copy(update={"length": length, **fewest})
        wrong = [
            f"`{option}` must be at least {count} ({why}), got {vars(options)[option]}"
            for option, (count, why) in least.items()
            if vars(options)[option] < count
        ]
        if wrong:
            raise ValueError(f"{'; '.join(wrong)}; for a first estimate give `quick` instead")
        return options

    def windows(self, tokenizer: PreTrainedTokenizerBase | None, *strategies: Strategy) -> dict[str, Windows]:
        """Cut the windows for every purpose."""
        options = strategies[0].options
        cut = {"length": options.length, "seed": options.seed, "bos": options.bos}
        return split_domains(self.domains, tokenizer, parts=self.window_counts(*strategies), **cut)
