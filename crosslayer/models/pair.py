"""A model and, where one is wanted, another that it is compared with: each a name, or loaded already."""

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import torch
from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

from crosslayer.models.embedded import described
from crosslayer.models.load import (
    is_causal,
    load_config,
    load_model,
    load_tokenizer,
    model_source,
    public_name,
    resolve_device,
)
from crosslayer.output.progress import progress
from crosslayer.probe.model import config_positions, unwrapped

Named = PreTrainedModel | str | Path


@dataclass(frozen=True)
class Loadable:
    """A causal language model that is looked at by its config and its tokenizer, and loaded when it is to run."""

    source: Named
    name: str
    config: PreTrainedConfig
    words: PreTrainedTokenizerBase | Named  # the tokenizer, or the model that has it
    dtype: str | torch.dtype | None
    device: str | torch.device | None

    @cached_property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        """The tokenizer, loaded without the model."""
        return self.words if isinstance(self.words, PreTrainedTokenizerBase) else load_tokenizer(str(self.words))

    @property
    def positions(self) -> int:
        """How many positions it has; far more than enough where its config names no limit."""
        return config_positions(self.config) or 2**31

    def load(self) -> PreTrainedModel:
        """Return the model; one that is named is loaded at every call, and its memory is free once nobody holds it."""
        if isinstance(self.source, PreTrainedModel):
            return self.source
        with progress(f"loading {described(str(self.source))}", 0):
            return load_model(str(self.source), dtype=self.dtype, device=self.device)[0]


def pair(
    verb: str,
    model: Named,
    baseline: Named | None = None,
    tokenizer: PreTrainedTokenizerBase | None = None,
    *,
    dtype: str | torch.dtype | None = None,
    device: str | torch.device | None = None,
    needs_tokenizer: bool = True,
) -> list[Loadable]:
    """Return a causal language model and its baseline, where there is one, checked and not yet loaded.

    One that is named gets the dtype and the device of the other, unless others are asked for. One that is loaded has
    `tokenizer`, or that of the other.
    """
    sources = [unwrapped(side) for side in (model, baseline) if side is not None]
    configs = [causal_config(verb, source) for source in sources]
    loaded = [source for source in sources if isinstance(source, PreTrainedModel)]
    named = [source for source in sources if not isinstance(source, PreTrainedModel)]
    if not named and (dtype is not None or device is not None):
        raise ValueError("dtype and device apply only to models given by name")
    if not loaded and tokenizer is not None:
        raise ValueError("a model given by name has its own tokenizer; leave tokenizer=… out")
    if not named and tokenizer is None and needs_tokenizer:
        raise ValueError("a loaded model needs its tokenizer; pass tokenizer=…")
    # both run in one dtype, or the comparison would also be one of dtypes
    if loaded:
        dtype = dtype or loaded[0].dtype
        device = device or loaded[0].device
    elif dtype is None and len(named) > 1 and resolve_device(device).type != "cpu":
        dtype = configs[0].dtype
    sides = []
    for source, config in zip(sources, configs, strict=True):
        words = (tokenizer or [*named, source][0]) if isinstance(source, PreTrainedModel) else source
        sides.append(Loadable(source, public_name(source), config, words, dtype, device))
    return sides


def causal_config(verb: str, source: Named) -> PreTrainedConfig:
    """Return the config of a model for a verb; one that is not there, or no causal language model, is refused."""
    if isinstance(source, PreTrainedModel):
        config = source.config
        fits = source.can_generate()
        name = type(source).__name__
    else:
        # a model without weights is refused here, not after minutes of work on the other one
        model_source(str(source))
        config = load_config(str(source))
        fits = is_causal(config)
        name = public_name(source)
    if not fits or config.is_encoder_decoder:
        raise ValueError(f"{verb} needs a causal LM, got {name}")
    return config
