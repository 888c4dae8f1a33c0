"""A model and, where one is wanted, another that it is compared with: each a name, or loaded already."""

from collections.abc import Sequence
from pathlib import Path

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from crosslayer.models.load import Ready, is_causal, load_config, model_source, public_name, ready_model
from crosslayer.output.progress import Meter, Silent

Named = PreTrainedModel | str | Path


def check_causal(verb: str, sides: Sequence[Named]) -> None:
    """Refuse models that are not there, or no causal language models, before any is loaded."""
    for side in sides:
        if isinstance(side, PreTrainedModel):
            fits, name = side.can_generate() and not side.config.is_encoder_decoder, type(side).__name__
        else:
            model_source(str(side))
            config, name = load_config(str(side)), public_name(side)
            fits = is_causal(config) and not config.is_encoder_decoder
        if not fits:
            raise ValueError(f"{verb} needs a causal LM; {name} is none")


def pair(
    verb: str,
    model: Named,
    baseline: Named | None = None,
    tokenizer: PreTrainedTokenizerBase | None = None,
    *,
    dtype: str | torch.dtype | None = None,
    device: str | torch.device | None = None,
    needs_tokenizer: bool = True,
    meter: Meter = Silent,
) -> list[Ready]:
    """Return a causal language model and its baseline, where there is one, each loaded once.

    One that is named is loaded in the dtype and on the device of the other, unless others are asked for. One that is
    loaded has `tokenizer`, or that of the other.

    Raises:
        ValueError: a model cannot be loaded or is no causal LM, there is no tokenizer, or an option is of no use.

    """
    sides = [model] if baseline is None else [model, baseline]
    check_causal(verb, sides)
    loaded = [side for side in sides if isinstance(side, PreTrainedModel)]
    named = len(sides) - len(loaded)
    if not named and (dtype is not None or device is not None):
        raise ValueError("dtype and device are for a model that is named; none is")
    if not loaded and tokenizer is not None:
        raise ValueError("a model that is named brings its own tokenizer; leave tokenizer=… out")
    if not named and tokenizer is None and needs_tokenizer:
        raise ValueError("a model that is loaded needs tokenizer=…, its own")
    like, ready = next(iter(loaded), None), []
    for side in sides:
        if isinstance(side, PreTrainedModel):
            ready.append(ready_model(side, tokenizer))
            continue
        wanted = dtype if dtype is not None or like is None else like.dtype
        place = device if device is not None or like is None else like.device
        ready.append(ready_model(side, dtype=wanted, device=place, meter=meter))
        like = like or ready[-1].model
    known = next((side.tokenizer for side in ready if side.tokenizer is not None), None)
    return [side if side.tokenizer is not None else side._replace(tokenizer=known) for side in ready]
