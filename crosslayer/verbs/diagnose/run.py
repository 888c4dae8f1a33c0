"""Diagnose a model: every measure of every layer, a forward pass for each sequence, intervals over sequences.

Flows: tokens → measures of a sequence (`diagnosis/sequence.py`) → mean and interval → verdict → result.
"""

import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from crosslayer.corpus.windows import Text, open_text, read_windows, text_name
from crosslayer.models.load import ready_model
from crosslayer.output.progress import Meter, Silent
from crosslayer.output.record import Measure
from crosslayer.output.summary import by_position, measure
from crosslayer.probe.intercept import attention_layers, evaluating
from crosslayer.probe.tokens import check_ids, check_length
from crosslayer.verbs.diagnose.record import ByStream, CrossLayer, DepthWeights, Measures, ModelFacts, Settings
from crosslayer.verbs.diagnose.result import Diagnosis
from crosslayer.verbs.diagnose.sequence import SequenceMeasures, measure_sequence
from crosslayer.verbs.diagnose.tokens import position_table, top_tokens
from crosslayer.verbs.diagnose.verdict import verdict
from crosslayer.verbs.diagnose.words import notes, words


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
    progress: Meter = Silent,
) -> Diagnosis:
    """Measure sinks, value drains, peaks, concentration and redundancy of every layer of a pretrained model.

    Args:
        model: hub name, local folder, or smollm2 or minilm (embedded). In Python also a loaded model.
        text: .txt, .md, .jsonl or .parquet (or a folder of such), or a datasets name; default the embedded corpus. In
            Python also token ids (B, T), T ≥ 2, without padding, a `TextSource` or texts.
        tokenizer: in Python, of a loaded model; also shows token ids as text.
        sequences: sequences to measure; intervals need two.
        length: tokens of a sequence.
        seed: seed of the order in which pieces of text are taken.
        bos: first token: auto (as the tokenizer has it), yes or no.
        cross_layer: also compare the value residual with two-layer attention (Fig. 4 of arXiv 2410.17897), at the cost
            of about six more attention calls a layer.
        dtype: float32, bfloat16, …; default float32 on a CPU. In Python for models that are named.
        device: cpu, cuda, …; default the GPU, or the CPU where there is none. In Python for models that are named.
        progress: in Python, shows what is being done.

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
    settings = Settings(
        model=name,
        text=origin,
        documents=list(windows.documents),
        sequences=len(windows.ids),
        length=windows.ids.shape[1],
        seed=seed if cut else None,
        bos=bos if cut else None,
        cross_layer=cross_layer,
    )
    started = time.perf_counter()
    measured = _measure(loaded, windows.ids, cross_layer, progress)
    return _diagnosis(loaded, tokenizer, windows.ids, measured, settings, started)


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
    single = _averages([sequence.by_stream for sequence in measured])
    decisions = verdict(measures, shapes, settings.length)
    facts = _facts(model, measured[0])
    return Diagnosis(
        model=facts,
        settings=settings,
        measures=measures,
        by_stream=ByStream(**single) if single else None,
        cross_layer=CrossLayer(**cosines) if cosines else None,
        depth_weights=_depth_weights(measured),
        importance_by_position=by_position(shares),
        top_tokens=top_tokens(shares, ids.cpu().numpy(), tokenizer),
        position_table=position_table(model),
        verdict=decisions,
        words=[*notes(facts), *words(decisions)],
        seconds=time.perf_counter() - started,
    )


def _depth_weights(measured: Sequence[SequenceMeasures]) -> DepthWeights | None:
    readers = measured[0].depth.readers
    tables = np.stack([sequence.depth.table() for sequence in measured])
    return DepthWeights(readers=readers, weights=measure(tables)) if readers else None


def _averages(by_sequence: Sequence[dict[str, np.ndarray]]) -> dict[str, Measure]:
    names = by_sequence[0].keys()
    return {name: measure(np.stack([measures[name] for measures in by_sequence])) for name in names}


def _facts(model: PreTrainedModel, measured: SequenceMeasures) -> ModelFacts:
    config, shapes = model.config.get_text_config(), measured.shapes
    single = measured.by_stream.get("stream_norm")
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
        streams=1 if single is None else single.shape[1],
        over_depth=measured.over_depth,
    )
