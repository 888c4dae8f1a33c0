"""The inputs of a measurement: a model, token ids cut from a text, and the record's facts about both."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from crosslayer.corpus.windows import Text, Windows, open_text, packed, special_tokens, text_name
from crosslayer.models.load import model_facts, public_name, ready_model
from crosslayer.output.progress import progress
from crosslayer.probe.intercept import check_ids, check_length, layer_stack
from crosslayer.verbs.diagnose.result import ProbedModel, TextSettings


@dataclass(frozen=True)
class Inputs:
    """A model, its tokenizer if it has one, token ids (N, T) that fit it, and the record's facts about them."""

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase | None
    ids: Tensor
    facts: ProbedModel
    settings: TextSettings


def read_inputs(
    model: PreTrainedModel | str | Path,
    text: Text,
    tokenizer: PreTrainedTokenizerBase | None,
    *,
    sequences: int,
    length: int,
    seed: int,
    bos: str,
    prefix: str | Sequence[int] | None,
    dtype: str | torch.dtype | None,
    device: str | torch.device | None,
) -> Inputs:
    """Load a model and cut the text into token ids; the text is opened first, so that errors in it come early."""
    if prefix is not None and isinstance(text, Tensor):
        raise ValueError("`prefix` must be None for token ids, got one; put its ids before them")
    opened = open_text(text, sequences=sequences, length=length, seed=seed)
    loaded, tokenizer = ready_model(model, tokenizer, dtype=dtype, device=device)
    facts: dict[str, Any] = dict(model_facts(loaded, public_name(model)))
    facts["layers"] = len(layer_stack(loaded))  # of two stacks, the one that is measured
    config = loaded.config
    probed = ProbedModel(**facts, type=config.model_type, hidden_size=config.get_text_config().hidden_size)
    cut, fixed = not isinstance(opened, Tensor), []
    if isinstance(opened, Tensor):
        windows = Windows(opened, ())
    elif tokenizer is None:
        raise ValueError("texts need a tokenizer; pass tokenizer=…, or token ids (B, T)")
    else:
        check_length(loaded, length)
        with progress("tokenizing the text", 0):
            windows = packed(opened, tokenizer, sequences=sequences, length=length, seed=seed, bos=bos, prefix=prefix)
        fixed = [] if prefix is None else special_tokens(tokenizer, bos, prefix)[0]
    check_ids(loaded, windows.ids)
    if getattr(getattr(loaded, "active_peft_config", None), "is_prompt_learning", False):
        raise ValueError("prompt-learning adapters add tokens outside the layers; use the base model")
    settings = TextSettings(
        text=text_name(text),
        documents=list(windows.documents),
        sequences=windows.ids.shape[0],
        length=windows.ids.shape[1],
        seed=seed if cut else None,
        bos=bos if cut else None,
        prefix=fixed,
    )
    return Inputs(loaded, tokenizer, windows.ids, probed, settings)
