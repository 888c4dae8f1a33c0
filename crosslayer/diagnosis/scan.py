"""Diagnose a model: every measure of every layer, a forward pass for each sequence, intervals over sequences.

Flows: tokens → measures of a sequence (`diagnosis/sequence.py`) → mean and interval → verdict → result.
"""

import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from crosslayer.corpus.windows import Text, open_text, read_windows, text_name
from crosslayer.diagnosis.record import CrossLayer, DepthWeights, Measures, ModelFacts, Settings
from crosslayer.diagnosis.result import Diagnosis
from crosslayer.diagnosis.sequence import SequenceMeasures, measure_sequence
from crosslayer.diagnosis.tokens import position_table, top_tokens
from crosslayer.diagnosis.verdict import verdict
from crosslayer.diagnosis.words import words
from crosslayer.environment import environment
from crosslayer.models.load import ready_model
from crosslayer.output.progress import Meter, Silent
from crosslayer.output.record import Environment, Measure
from crosslayer.output.summary import by_position, measure
from crosslayer.probe.intercept import attention_layers, evaluating
from crosslayer.probe.shapes import LayerShape
from crosslayer.probe.tokens import check_ids, check_length


@torch.no_grad()
def diagnose(
    model: PreTrainedModel | str | Path,
    text: Text = None,
    tokenizer: PreTrainedTokenizerBase | None = None,
    *,
    sequences: int = 8,
    length: int = 512,
    seed: int = 0,
    bos: str = "auto",
    cross_layer: bool = False,
    dtype: str | torch.dtype | None = None,
    device: str | torch.device | None = None,
    settings: Mapping[str, Any] | None = None,
    progress: Meter = Silent,
) -> Diagnosis:
    """Measure sinks, value drains, peaks, concentration and redundancy of every layer; the model is left unchanged.

    Args:
        model: a causal or bidirectional Hugging Face model whose attention goes through the attention interface, or
            a name: of the hub, of a folder, or smollm2 or minilm.
        text: token ids (B, T) with T ≥ 2 and no padding, a `TextSource`, texts, or None for the embedded corpus.
        tokenizer: needed for texts on a model that is loaded already, and to show tokens as text.
        sequences: how many sequences are cut from the text; `length` tokens each, in an order drawn with `seed`, their
            first token as `bos` says. Token ids are taken as they are.
        length: tokens of a sequence.
        seed: of the order in which pieces of text are taken.
        bos: the first token: "auto" (as the tokenizer has it), "yes" or "no".
        cross_layer: also compare the value residual with true cross-layer attention (Fig. 4 of arXiv 2410.17897), at
            the cost of about six more attention calls a layer.
        dtype: of a model that is named; default float32 on a CPU, the checkpoint's own elsewhere.
        device: of a model that is named; default the first GPU if there is any, else the CPU.
        settings: what the record should say of the run otherwise than what is known here, such as the `command`.
        progress: shows what is being done.

    Raises:
        ValueError: the model or the text cannot be read, the model cannot be probed, or the sequences are longer than
            its positions.

    """
    origin = text_name(text)
    text = open_text(text, sequences=sequences, length=length, seed=seed, meter=progress)
    loaded, tokenizer, name, _ = ready_model(model, tokenizer, dtype=dtype, device=device, meter=progress)
    if not isinstance(text, Tensor):
        check_length(loaded, length)
    windows = read_windows(text, tokenizer, sequences=sequences, length=length, seed=seed, bos=bos, meter=progress)
    check_model(loaded, windows.ids)
    cut = not isinstance(text, Tensor)
    known = {
        "model": name,
        "text": origin,
        "documents": list(windows.documents),
        "sequences": len(windows.ids),
        "length": windows.ids.shape[1],
        "seed": seed if cut else None,
        "bos": bos if cut else None,
        "cross_layer": cross_layer,
    }
    about = Settings(**{**known, **(settings or {})})
    started = time.perf_counter()
    measured = _measure(loaded, windows.ids, cross_layer, progress)
    return _diagnosis(loaded, tokenizer, windows.ids, measured, about, started)


def check_model(model: PreTrainedModel, ids: Tensor) -> None:
    """Refuse, by a ValueError, ids that do not fit the model, and adapters that hide tokens from the layers."""
    check_ids(model, ids)
    if getattr(getattr(model, "active_peft_config", None), "is_prompt_learning", False):
        raise ValueError("prompt-learning adapters add tokens outside the layers; diagnose the base model instead")


def _measure(model: PreTrainedModel, ids: Tensor, cross_layer: bool, progress: Meter) -> list[SequenceMeasures]:
    measured = []
    with evaluating(model), progress("diagnosing", len(ids)) as meter:
        for sequence in ids:
            measured.append(measure_sequence(model, sequence, cross_layer))
            meter.step(len(measured), len(ids))
    return measured


def _diagnosis(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase | None,
    ids: Tensor,
    measured: Sequence[SequenceMeasures],
    settings: Settings,
    started: float,
) -> Diagnosis:
    """Put the measures of all sequences, and what they say, into the result."""
    shapes = measured[0].shapes
    shares = np.stack([sequence.shares for sequence in measured])  # (N, L, T)
    measures = Measures(**_averages([sequence.measures for sequence in measured]))
    cosines = _averages([sequence.cross_layer for sequence in measured])
    decisions = verdict(measures, shapes, settings.length)
    return Diagnosis(
        model=_facts(model, shapes),
        settings=settings,
        measures=measures,
        cross_layer=CrossLayer(**cosines) if cosines else None,
        depth_weights=_depth_weights(measured),
        importance_by_position=by_position(shares),
        top_tokens=top_tokens(shares, ids.cpu().numpy(), tokenizer),
        position_table=position_table(model),
        verdict=decisions,
        words=words(decisions),
        seconds=time.perf_counter() - started,
        environment=Environment.model_validate(environment()),
    )


def _depth_weights(measured: Sequence[SequenceMeasures]) -> DepthWeights | None:
    readers = measured[0].depth.readers
    tables = np.stack([sequence.depth.table() for sequence in measured])
    return DepthWeights(readers=readers, weights=measure(tables)) if readers else None


def _averages(by_sequence: Sequence[dict[str, np.ndarray]]) -> dict[str, Measure]:
    """Return mean and interval of each measure over the sequences."""
    names = by_sequence[0].keys()
    return {name: measure(np.stack([measures[name] for measures in by_sequence])) for name in names}


def _facts(model: PreTrainedModel, shapes: Sequence[LayerShape | None]) -> ModelFacts:
    config = model.config.get_text_config()
    first = next(shape for shape in shapes if shape is not None)
    return ModelFacts(
        class_=type(model).__name__,
        type=model.config.model_type,
        layers=len(shapes),
        attention_layers=len(attention_layers(model.config)),
        hidden_size=config.hidden_size,
        heads=first.heads,
        kv_heads=first.kv_heads,
        parameters=sum(parameter.numel() for parameter in model.parameters()),
        dtype=str(model.dtype).removeprefix("torch."),
        attention=config._attn_implementation,
        masks=[None if shape is None else shape.mask for shape in shapes],
    )
