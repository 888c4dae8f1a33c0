"""The fewest windows with which a retrofit can be fitted and judged; all options below are named at once."""

import math

from torch import Tensor
from transformers import PreTrainedConfig

from crosslayer.core.decoder.weights import to_config
from crosslayer.verbs.retrofit.calibrate import input_width
from crosslayer.verbs.retrofit.damage import MIN_WINDOWS
from crosslayer.verbs.retrofit.moments import TOKENS_PER_INPUT, least_sequences
from crosslayer.verbs.retrofit.request import QUICK_SETS, Request, RetrofitOptions
from crosslayer.verbs.retrofit.texts import Texts

QUICK_LENGTH = 128  # tokens of a window, unless tokens are chosen or the text is token ids, whose rows are windows


def checked_options(texts: Texts, request: Request, config: PreTrainedConfig) -> RetrofitOptions:
    """Return the options, with `quick` those of a first estimate; `config` is that of the original.

    Raises:
        ValueError: there are too few windows to fit or to judge, or `quick` comes with an option that it decides.

    """
    options = request.options
    if not options.quick:
        least = _least(texts, request, config, options.length)
        wrong = [
            f"`{option}` must be at least {count} ({why}), got {vars(options)[option]}"
            for option, (count, why) in least.items()
            if vars(options)[option] < count
        ]
        if wrong:
            raise ValueError(f"{'; '.join(wrong)}; for a first estimate give `quick` instead")
        return options
    given = [name for name in QUICK_SETS if vars(options)[name] != RetrofitOptions.model_fields[name].default]
    if given:
        raise ValueError(f"`{given[0]}` has no effect with `quick`, which decides it; remove one of them")
    usual = options.length if request.has_choices else QUICK_LENGTH
    length = max((text.shape[-1] for text in texts.domains.values() if isinstance(text, Tensor)), default=usual)
    least = {option: count for option, (count, _) in _least(texts, request, config, length).items()}
    return options.model_copy(update={"length": length, **least})


def _least(texts: Texts, request: Request, config: PreTrainedConfig, length: int) -> dict[str, tuple[int, str]]:
    """Return the least number of windows of `length` tokens by option, and the reason."""
    least = {"windows": (MIN_WINDOWS * len(texts.evaluation), f"{MIN_WINDOWS} of each domain")}
    if request.many_tokens:
        tokens = TOKENS_PER_INPUT * config.get_text_config().hidden_size
        least["calibration"] = math.ceil(tokens / length), f"`select` correlation reads at least {tokens} tokens"
    if request.fits and not request.calibrates:
        width = input_width(to_config(config), request.fit)
        count = least_sequences(width, len(texts.calibration), length, request.fit)
        why = f"{request.fit} fits {width} inputs, with {TOKENS_PER_INPUT} tokens each beside those held out"
        least["calibration"] = max(least.get("calibration", (0, "")), (count, why))
    return least
