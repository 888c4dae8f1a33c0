"""What a model is looked into with: the model itself, token ids out of a text, and what a record says of both."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from crosslayer.corpus.windows import Text, open_text, read_windows, text_name
from crosslayer.models.load import model_facts, ready_model
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
    loaded, tokenizer, name, _ = ready_model(model, tokenizer, dtype=dtype, device=device, meter=meter)
    config = loaded.config
    known: dict[str, Any] = model_facts(loaded, name) | {"layers": len(layer_stack(loaded))}
    facts = ProbedModel(**known, type=config.model_type, hidden_size=config.get_text_config().hidden_size)
    cut = not isinstance(opened, Tensor)
    if cut:
        check_length(loaded, length)
    windows = read_windows(opened, tokenizer, sequences=sequences, length=length, seed=seed, bos=bos, meter=meter)
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
