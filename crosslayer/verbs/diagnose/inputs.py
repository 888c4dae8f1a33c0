"""What a model is looked into with: the model itself, token ids out of a text, and what a record says of both."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from crosslayer.corpus.windows import Text, Windows, open_text, packed, text_name
from crosslayer.models.load import model_facts, public_name, ready_model
from crosslayer.output.progress import Meter
from crosslayer.probe.intercept import layer_stack
from crosslayer.probe.tokens import check_ids, check_length
from crosslayer.verbs.diagnose.result import ProbedModel, TextSettings


@dataclass(frozen=True)
class Inputs:
    """A model, its tokenizer where it has any, token ids (N, T) that fit it, and what a record says of both."""

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
    dtype: str | torch.dtype | None,
    device: str | torch.device | None,
    meter: Meter,
) -> Inputs:
    """Return a model with what it is to read: the text is looked at before the model is loaded, and cut after it."""
    opened = open_text(text, sequences=sequences, length=length, seed=seed, meter=meter)
    loaded, tokenizer = ready_model(model, tokenizer, dtype=dtype, device=device, meter=meter)
    known: dict[str, Any] = model_facts(loaded, public_name(model))
    known |= {"layers": len(layer_stack(loaded))}  # of two stacks, the one that is looked at
    config = loaded.config
    facts = ProbedModel(**known, type=config.model_type, hidden_size=config.get_text_config().hidden_size)
    cut = not isinstance(opened, Tensor)
    if isinstance(opened, Tensor):
        windows = Windows(opened, ())
    elif tokenizer is None:
        raise ValueError("texts need tokenizer=…; without it give token ids (B, T)")
    else:
        check_length(loaded, length)
        with meter("cutting the text into tokens", 0):
            windows = packed(opened, tokenizer, sequences=sequences, length=length, seed=seed, bos=bos)
    check_ids(loaded, windows.ids)
    if getattr(getattr(loaded, "active_peft_config", None), "is_prompt_learning", False):
        raise ValueError("prompt-learning adapters add tokens outside the layers; give the base model instead")
    settings = TextSettings(
        text=text_name(text),
        documents=list(windows.documents),
        sequences=windows.ids.shape[0],
        length=windows.ids.shape[1],
        seed=seed if cut else None,
        bos=bos if cut else None,
    )
    return Inputs(loaded, tokenizer, windows.ids, facts, settings)
