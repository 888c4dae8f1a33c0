"""Diagnose a model: measure every layer in one forward pass per sequence, with intervals over sequences.

Flows: tokens → measures of a sequence (`sequence.py`) → mean and interval → verdict → result.
"""

import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from crosslayer.corpus.windows import Text, Windows, open_text, packed, special_tokens, text_name
from crosslayer.models.load import load_config, model_facts, public_name, ready_model
from crosslayer.output.progress import progress
from crosslayer.output.record import Measure
from crosslayer.probe.depth import DepthMixing, log_slope, output_norms
from crosslayer.probe.measures import working
from crosslayer.probe.model import (
    check_ids,
    check_length,
    config_positions,
    evaluating,
    layer_stack,
    position_embedding,
    unwrapped,
)
from crosslayer.stats.bootstrap import Ends, by_position, measure, over_documents
from crosslayer.verbs.diagnose.result import (
    ByStream,
    CrossLayer,
    DepthWeights,
    DiagnosedModel,
    Diagnosis,
    Measures,
    OutputGates,
    Outputs,
    PositionTable,
    ProbedModel,
    Settings,
    TextSettings,
    TopToken,
)
from crosslayer.verbs.diagnose.sequence import SequenceMeasures, measure_sequence
from crosslayer.verbs.diagnose.verdict import verdict

LENGTH = 512  # tokens of a sequence, if models have as many positions
# Of each sequence the ten largest shares are added up, as many as `top_importance` has; five sums are shown.
PER_SEQUENCE, SHOWN = 10, 5
# Times the median norm: above this a row of a position table is an outlier. In MiniLM these are rows 0, 511 and 510.
STANDS_OUT = 1.5
FIRST = -1  # stands for the token at the first position, whatever it is


@torch.no_grad()
def diagnose(
    model: PreTrainedModel | str | Path,
    text: Text = None,
    tokenizer: PreTrainedTokenizerBase | None = None,
    *,
    baseline: PreTrainedModel | str | Path | None = None,
    sequences: int = 8,
    length: int | None = None,
    seed: int = 0,
    bos: str = "auto",
    prefix: str | Sequence[int] | None = None,
    cross_layer: bool = False,
    outputs: bool = False,
    dtype: str | torch.dtype | None = None,
    device: str | torch.device | None = None,
) -> Diagnosis:
    """Find attention sinks, value drains, massive activations and redundant layers in a pretrained model.

    Args:
        model: hub name, local folder, smollm2, qwen, gemma3 or minilm. In Python also a loaded model.
        text: a .txt, .md, .jsonl or .parquet file, a folder of them, or a Hugging Face dataset:
            NAME,config=…,split=…,column=…; default: the embedded corpus. In Python also token ids (B, T), T ≥ 2,
            without padding, a `TextSource` or texts.
        tokenizer: in Python, the tokenizer of a loaded model; token ids are then shown as text.
        baseline: another model to compare with, such as the original of a retrofit.
        sequences: sequences to measure; confidence intervals need at least two.
        length: tokens per sequence; default: 512, or as many as the models have positions.
        seed: random seed for the order of the text.
        bos: whether sequences start with the BOS token: auto (as the tokenizer does), yes or no.
        prefix: text that every sequence begins with; chat: the chat template's. In Python also token ids.
        cross_layer: also measure how well a value residual approximates attention over two layers (arXiv 2410.17897,
            Fig. 4); costs about six more attention calls per layer.
        outputs: also measure the norms of each layer's attention and MLP outputs, and of the gradients of the loss with
            respect to them; takes about three times as long and needs memory for a backward pass.
        dtype: float32, bfloat16, …; default: float32 on a CPU. In Python only if `model` is a name or path.
        device: cpu, cuda, …; default: the GPU if there is one. In Python only if `model` is a name or path.

    Raises:
        ValueError: the model or the text cannot be read, the model's attention cannot be measured, or the sequences
            are longer than the model allows.
    """
    model, baseline = unwrapped(model), unwrapped(baseline)
    # an error in its name shows before the first model is measured
    if isinstance(baseline, str | Path):
        load_config(str(baseline))
    if length is None:
        length = default_length(text, *([model] if baseline is None else [model, baseline]))
    cut = {"sequences": sequences, "length": length, "seed": seed, "bos": bos, "prefix": prefix}
    options = {**cut, "dtype": dtype, "device": device}
    diagnoses = []
    for source in [model] if baseline is None else [baseline, model]:
        inputs = read_inputs(source, text, tokenizer, **options)
        if outputs and not inputs.model.can_generate():
            raise ValueError(f"`outputs` needs a causal language model with a loss, but {inputs.facts.name} has none")
        started, measured, norms = time.perf_counter(), [], []
        with evaluating(inputs.model), progress(f"diagnosing {inputs.facts.name}", len(inputs.ids)) as meter:
            for sequence in inputs.ids:
                measured.append(measure_sequence(inputs.model, sequence, cross_layer))
                norms += [output_norms(inputs.model, sequence)] if outputs else []
                meter.step(len(measured), len(inputs.ids))
        diagnoses.append(_diagnosis(inputs, measured, norms, cross_layer, started))
    *others, diagnosis = diagnoses
    return diagnosis.model_copy(update={"baseline": others[0]}) if others else diagnosis


def default_length(text: Text, *models: PreTrainedModel | str | Path) -> int:
    """Return `LENGTH`, or the fewest positions of the models if these are fewer; token ids have their own length."""
    limits: list[int | None] = []
    for model in () if isinstance(text, Tensor) else models:
        limits.append(config_positions(model.config if isinstance(model, PreTrainedModel) else load_config(str(model))))
    return min([LENGTH, *(limit for limit in limits if limit is not None)])


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
        raise ValueError("`prefix` must be None for token ids; put its ids before them instead")
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


def _depth_weights(mixing: Sequence[DepthMixing], over: Ends | None) -> tuple[DepthWeights | None, str | None]:
    """Return the mean weights over depth of all sequences, or None, and what is not known of them."""
    tables = [table for of_sequence in mixing if (table := of_sequence.table()) is not None]  # (readers, sources) each
    by_stream = [weights for of_sequence in mixing if (weights := of_sequence.by_stream()) is not None]
    # only now: the questions above note what they could not answer
    unknown = next((of_sequence.why for of_sequence in mixing if of_sequence.why is not None), None)
    if len(tables) < len(mixing):
        return None, unknown
    facts: dict[str, Any] = {"readers": mixing[0].readers, "sources": mixing[0].sources}
    if len(by_stream) == len(mixing):
        weights = np.stack([of_sequence.weights for of_sequence in by_stream])  # (N, readers, S)
        pairs = np.stack([of_sequence.pairs for of_sequence in by_stream])  # (N, readers, sources, S)
        facts["streams"] = measure(weights, over)
        facts["pairs"] = measure(pairs.reshape(*pairs.shape[:2], -1), over)
    return DepthWeights(weights=measure(np.stack(tables), over), **facts), unknown


def _output_gates(measured: Sequence[SequenceMeasures], over: Ends | None, prefix: range) -> OutputGates | None:
    """Return the mean output gates, and attention after them; None if no layer has a gate."""
    means = [sequence.gates for sequence in measured if sequence.gates is not None]
    shares = [sequence.gated_shares for sequence in measured if sequence.gated_shares is not None]
    # what looks like a gate in some sequences only is none
    if len(means) < len(measured):
        return None
    first = np.stack([share[:, 0] for share in shares])
    return OutputGates(
        mean=measure(np.stack(means), over),
        first_token_share=measure(first, over),
        importance_by_position=by_position(np.stack(shares), prefix),
    )


def _diagnosis(
    inputs: Inputs,
    measured: Sequence[SequenceMeasures],
    norms: Sequence[dict[str, np.ndarray]],
    cross_layer: bool,
    started: float,
) -> Diagnosis:
    """Average the measures, and the norms of outputs if there are any, over the sequences and build the result."""
    shapes = measured[0].shapes
    over, prefix = over_documents(inputs.settings.documents), range(len(inputs.settings.prefix))
    shares = np.stack([sequence.shares for sequence in measured])  # (N, L, T)
    measures = Measures(**_averages([sequence.measures for sequence in measured], over))
    cosines = _averages([sequence.cross_layer for sequence in measured], over)
    single = _averages([sequence.by_stream for sequence in measured], over)
    gates = _output_gates(measured, over, prefix)
    depth, unknown = _depth_weights([sequence.depth for sequence in measured], over)
    outputs = None
    if norms:
        # the slope of each sequence, so that their mean has an interval
        slopes = {
            name.removesuffix("_norm"): measure(np.array([log_slope(of_sequence[name]) for of_sequence in norms]), over)
            for name in norms[0]
        }
        outputs = Outputs(**_averages(norms, over), slopes=slopes)
    largest = np.stack([sequence.activations for sequence in measured])  # (N, L, 2, 2, C)
    activations, others = top_channels(largest[:, :, 0]), top_channels(largest[:, :, 1])
    known = [shape for shape in shapes if shape is not None]
    facts = DiagnosedModel(
        **dict(inputs.facts),
        attention_layers=len(known),
        heads=known[0].heads,
        kv_heads=known[0].kv_heads,
        attention=inputs.model.config.get_text_config()._attn_implementation,
        masks=[None if shape is None else shape.mask for shape in shapes],
        streams=measured[0].by_stream["stream_norm"].shape[1] if single else 1,
        over_depth=measured[0].over_depth,
    )
    return Diagnosis(
        model=facts,
        settings=Settings(**dict(inputs.settings), cross_layer=cross_layer),
        measures=measures,
        by_stream=ByStream(**single) if single else None,
        cross_layer=CrossLayer(**cosines) if cosines else None,
        outputs=outputs,
        depth_weights=depth,
        depth_unknown=unknown,
        output_gates=gates,
        importance_by_position=by_position(shares, prefix),
        last_row_by_position=by_position(np.stack([sequence.last for sequence in measured]), prefix),
        value_norms_by_position=by_position(np.stack([sequence.value_norms for sequence in measured]), prefix),
        hidden_norms_by_position=by_position(np.stack([sequence.hidden_norms for sequence in measured]), prefix),
        prefix_share=measure(shares[..., : len(prefix)], over) if prefix else None,
        top_tokens=top_tokens(shares, inputs.ids.cpu().numpy(), inputs.tokenizer),
        top_channels=top_channels(np.stack([sequence.channels for sequence in measured])),
        top_activations=activations,
        top_activations_others=others,
        position_table=position_table(inputs.model),
        verdict=verdict(measures, shapes, inputs.settings.length, activations, others),
        seconds=time.perf_counter() - started,
    )


def _averages(by_sequence: Sequence[dict[str, np.ndarray]], over: Ends | None) -> dict[str, Measure]:
    names = by_sequence[0].keys()
    return {name: measure(np.stack([measures[name] for measures in by_sequence]), over) for name in names}


def top_tokens(shares: np.ndarray, ids: np.ndarray, tokenizer: PreTrainedTokenizerBase | None) -> list[list[TopToken]]:
    """Return, for each layer, the tokens that receive most attention, counting the ten largest a' of each sequence.

    `shares` is (N, L, T), `ids` (N, T). Occurrences of a token are summed, except that the first position is counted
    separately; shares are means over sequences. A layer without attention has an empty list.
    """
    firsts = set(ids[:, 0].tolist())
    by_layer = []
    for of_layer in shares.swapaxes(0, 1):  # (N, T)
        tops: list[TopToken] = []
        by_layer.append(tops)
        if np.isnan(of_layer).any():
            continue
        total: dict[int, float] = defaultdict(float)
        positions: dict[int, set[int]] = defaultdict(set)
        for sequence, tokens in zip(of_layer, ids, strict=True):
            for position in np.argsort(-sequence)[:PER_SEQUENCE]:
                token = FIRST if position == 0 else int(tokens[position])
                total[token] += float(sequence[position]) / len(ids)
                positions[token].add(int(position))

        for token in sorted(total, key=lambda token: -total[token])[:SHOWN]:
            if token == FIRST and len(firsts) > 1:
                text = "first token"  # whichever it is in each sequence
            else:
                index = int(ids[0, 0]) if token == FIRST else token
                text = str(index) if tokenizer is None else tokenizer.decode([index])
            assert isinstance(text, str)
            occurrences = sorted(positions[token])
            tops.append(TopToken(token=text, first=token == FIRST, share=total[token], positions=occurrences))
    return by_layer


def top_channels(channels: np.ndarray) -> list[list[tuple[int, float, float]]]:
    """Return index, mean value and mean ratio of each layer's largest channels, from values and ratios (N, L, 2, C)."""
    values, ratios = channels[:, :, 0], channels[:, :, 1].mean(axis=0)  # (N, L, C), (L, C)
    # a channel's sign may differ between sequences, in which the token may be another: magnitudes are averaged
    sizes = np.copysign(np.abs(values).mean(axis=0), values.mean(axis=0))  # (L, C)
    tops = []
    for size, ratio in zip(sizes, ratios, strict=True):  # NaN where a layer has no MLP
        order = [] if np.isnan(ratio).any() else np.argsort(-ratio)[:SHOWN].tolist()
        tops.append([(channel, float(size[channel]), float(ratio[channel])) for channel in order])
    return tops


def position_table(model: PreTrainedModel) -> PositionTable | None:
    """Return the row norms of a learned absolute position table; None if the model has no such table."""
    embedding = position_embedding(model)
    if embedding is None:
        return None
    name, table = embedding
    norms = working(table.weight.detach()).norm(dim=-1).double().cpu().numpy()  # (rows,)
    median = float(np.median(norms))
    outliers = [int(row) for row in np.argsort(-norms) if norms[row] > STANDS_OUT * median]  # largest first
    return PositionTable(name=name, norms=norms.tolist(), median=median, outliers=outliers[:10])
