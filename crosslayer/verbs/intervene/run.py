"""Measure the effect of interventions: the same sequences before and after, at the positions that they change.

The first token and untouched tokens are measured too, with controls (the same change at other positions, or with
random content) and a scan (the change in some layers only).

Shapes: N sequences, T tokens, L layers, P measured positions.
"""

import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from crosslayer.corpus.windows import Text
from crosslayer.output.progress import progress
from crosslayer.probe.intercept import evaluating
from crosslayer.stats.bootstrap import by_position, over_documents
from crosslayer.verbs.diagnose.inputs import Inputs, read_inputs
from crosslayer.verbs.intervene.kinds import Kind, acting_layers, intervening, positions_of
from crosslayer.verbs.intervene.readings import Passes, changes_at
from crosslayer.verbs.intervene.result import (
    AttentionByPosition,
    Control,
    Effect,
    IntervenedModel,
    Role,
    Settings,
    Trial,
)
from crosslayer.verbs.intervene.trials import Request, scanned, shifted


def intervene(
    model: PreTrainedModel | str | Path,
    text: Text = None,
    tokenizer: PreTrainedTokenizerBase | None = None,
    *,
    interventions: Sequence[Kind | Mapping[str, Any]],
    scan: str | Sequence[Sequence[int]] = "auto",
    controls: int = 2,
    probes: int | None = None,
    sequences: int = 8,
    length: int = 512,
    seed: int = 0,
    bos: str = "auto",
    prefix: str | Sequence[int] | None = None,
    dtype: str | torch.dtype | None = None,
    device: str | torch.device | None = None,
) -> Effect:
    """Move, create or remove an attention sink, and measure the effect layer by layer.

    The model does not change.

    Args:
        model: hub name, local folder, smollm2, qwen, gemma3 or minilm. In Python also a loaded model.
        text: a .txt, .md, .jsonl or .parquet file, a folder of them, or a Hugging Face dataset:
            NAME,config=…,split=…,column=…; default the embedded corpus. In Python also token ids (B, T), T ≥ 2, without
            padding, a `TextSource` or texts.
        tokenizer: in Python, the tokenizer of a loaded model.
        interventions: in Python, what to change, as objects or as plain data from a record, applied together; the
            result describes the first position of the first.
        scan: repeat the interventions in these ranges of layers only, such as 0-2,3-29; none; or auto: the first 10%,
            25% and 50% of layers, and all but the first 10% and 25%. In Python also groups of layers.
        controls: control runs with all positions shifted by a random distance (swaps: with a random row or token).
        probes: number of sequences for scan and controls; default 2.
        sequences: sequences to measure; confidence intervals need at least two.
        length: tokens per sequence.
        seed: random seed for the order of the text and for the controls.
        bos: whether sequences start with the BOS token: auto (as the tokenizer does), yes or no.
        prefix: text that every sequence begins with; chat: the chat template's. In Python also token ids.
        dtype: float32, bfloat16, …; default float32 on a CPU. In Python only if `model` is a name or path.
        device: cpu, cuda, …; default the GPU if there is one. In Python only if `model` is a name or path.

    Raises:
        ValueError: an option, position or layer is invalid (a causal model needs two tokens after every position), the
            text cannot be read, or the model cannot be loaded or does not support the interventions.
    """
    if isinstance(text, Tensor) and text.dim() == 2:
        sequences, length = text.shape
    cut: dict[str, Any] = {"sequences": sequences, "length": length, "seed": seed}
    options: dict[str, Any] = {"interventions": interventions, "scan": scan, "controls": controls, "probes": probes}
    request = Request(**options, **cut)
    cut |= {"bos": bos, "prefix": prefix}
    inputs = read_inputs(model, text, tokenizer, dtype=dtype, device=device, **cut)
    return _measure(inputs, request)


def _measure(inputs: Inputs, request: Request) -> Effect:
    """Run all sequences, (N, T), before and after the interventions, and the first `probes` in scan and controls."""
    started, interventions, probes = time.perf_counter(), request.interventions, request.probe_count
    model, ids, probed = inputs.model, inputs.ids, inputs.ids[:probes]
    last = max(request.positions)
    if model.can_generate() and last > request.length - 3:
        raise ValueError(f"position {last} needs two tokens after it, and sequences have {request.length} tokens")
    with intervening(model, *interventions):  # raises early if the model does not support them
        pass
    controls, groups = shifted(model, request), scanned(model, request)
    roles: dict[int, Role] = dict.fromkeys(request.positions, "intervened")
    roles.setdefault(0, "first token")
    for untouched, _ in controls:
        roles.setdefault(untouched, "left alone")
    measured, first = [*roles], min(request.positions)  # the main position comes first
    total = 2 * len(ids) + probes * (len(groups) + len(controls))
    with progress("running", total) as steps, evaluating(model):
        passes = Passes(model, total, steps)
        after = passes.sample(ids, measured, interventions, first)  # before all else: it may raise
        before = passes.sample(ids, measured, (), first)
        scan = []
        for layers, within in groups.items():
            scan.append(Trial(layers=list(layers), **dict(passes.sample(probed, measured[:1], within).reading(0))))
        control_runs = []
        for _, moved in controls:
            position = positions_of(moved[0])[0]  # swaps keep their position
            start, end = before.reading(measured.index(position), probes), passes.sample(probed, [position], moved)
            control_runs.append(
                Control(interventions=list(moved), position=position, before=start, after=end.reading(0))
            )
    if scan:  # between no layers and all layers in which the interventions act
        everywhere = sorted({layer for intervention in interventions for layer in acting_layers(model, intervention)})
        nowhere = Trial(layers=[], **dict(before.reading(0, probes)))
        scan = [nowhere, *scan, Trial(layers=everywhere, **dict(after.reading(0, probes)))]
    single = {*roles, *range(len(inputs.settings.prefix))}
    received, last_row = (
        AttentionByPosition(before=by_position(start, single), after=by_position(end, single))
        for start, end in ((before.received, after.received), (before.last, after.last))
    )
    return Effect(
        model=IntervenedModel(**dict(inputs.facts), causal=before.causal),
        settings=Settings(**{**dict(inputs.settings), "seed": request.seed}, probes=probes),
        interventions=list(interventions),
        positions=changes_at(roles, before, after, over_documents(inputs.settings.documents)),
        attention_by_position=received,
        last_row_by_position=last_row,
        scan=scan,
        controls=control_runs,
        seconds=time.perf_counter() - started,
    )
