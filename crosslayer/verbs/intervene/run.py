"""What interventions do: the same sequences before and under them, measured at the positions that they are about.

Beside the change itself stand the first token, tokens left alone, controls (the same change elsewhere, or with random
content) and a scan: the change in a range of layers only.

Shapes: N sequences, T tokens, L layers, P watched positions.
"""

import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from crosslayer.corpus.windows import Text
from crosslayer.output.progress import Meter, Silent
from crosslayer.output.summary import by_position
from crosslayer.probe.intercept import evaluating
from crosslayer.verbs.diagnose.inputs import Inputs, read_inputs
from crosslayer.verbs.intervene.kinds import Kind, acting_layers, intervening, positions_of
from crosslayer.verbs.intervene.readings import Passes, change_at
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
    dtype: str | torch.dtype | None = None,
    device: str | torch.device | None = None,
    progress: Meter = Silent,
) -> Effect:
    """Move, make or remove an attention sink, and show what follows, layer by layer.

    The model is left unchanged.

    Args:
        model: hub name, local folder, or smollm2 or minilm (embedded). In Python also a loaded model.
        text: .txt, .md, .jsonl or .parquet (or a folder of such), or a datasets name; default the embedded corpus. In
            Python also token ids (B, T), T ≥ 2, without padding, a `TextSource` or texts.
        tokenizer: in Python, of a loaded model.
        interventions: in Python, entered together, as objects or as the plain data that a record holds; the result is
            about the first position of the first.
        scan: ranges of layers in each of which the interventions are tried alone, as 0-2,3-29; auto (below a tenth, a
            quarter and half of the depth, above a tenth and a quarter) or none. In Python also groups of layers.
        controls: how often the same is tried elsewhere, all positions shifted alike (a swap: random row or token).
        probes: sequences of scan and controls; default 2.
        sequences: sequences to measure; intervals need two.
        length: tokens of a sequence.
        seed: seed of the order in which pieces of text are taken, and of random positions and contents.
        bos: first token: auto (as the tokenizer has it), yes or no.
        dtype: float32, bfloat16, …; default float32 on a CPU. In Python for models that are named.
        device: cpu, cuda, …; default the GPU, or the CPU where there is none. In Python for models that are named.
        progress: in Python, shows what is being done.

    Raises:
        ValueError: an option, a position or a layer does not fit (a causal model needs two tokens behind a position),
            the text cannot be read, the model cannot be loaded or probed, or `intervene` refuses.

    """
    if isinstance(text, Tensor) and text.dim() == 2:
        sequences, length = text.shape
    cut: dict[str, Any] = {"sequences": sequences, "length": length, "seed": seed}
    asked: dict[str, Any] = {"interventions": interventions, "scan": scan, "controls": controls, "probes": probes}
    request = Request(**asked, **cut)
    inputs = read_inputs(model, text, tokenizer, bos=bos, dtype=dtype, device=device, meter=progress, **cut)
    return _measure(inputs, request, progress)


def _measure(inputs: Inputs, request: Request, progress: Meter) -> Effect:
    """Run all sequences, (N, T), before and under the interventions, and the probes, the first of them, in trials."""
    started, interventions, probes = time.perf_counter(), request.interventions, request.probe_count
    model, ids, probed = inputs.model, inputs.ids, inputs.ids[:probes]
    last = max(request.positions)
    if model.can_generate() and last > request.length - 3:
        raise ValueError(f"position {last} needs two tokens behind it; sequences have {request.length} tokens")
    with intervening(model, *interventions):  # refuses what the model cannot do before anything is measured
        pass
    controls, groups = shifted(model, request), scanned(model, request)
    roles: dict[int, Role] = dict.fromkeys(request.positions, "intervened")
    roles.setdefault(0, "first token")
    for alone, _ in controls:
        roles.setdefault(alone, "left alone")
    watched, first = [*roles], min(request.positions)  # the main position comes first
    total = 2 * len(ids) + probes * (len(groups) + len(controls))
    with progress("running", total) as steps, evaluating(model):
        passes = Passes(model, total, steps)
        after = passes.sample(ids, watched, interventions, first)  # before all else: it may refuse
        before = passes.sample(ids, watched, (), first)
        scan = []
        for layers, within in groups.items():
            scan.append(Trial(layers=list(layers), **dict(passes.sample(probed, watched[:1], within).reading(0))))
        tried = []
        for _, moved in controls:
            position = positions_of(moved[0])[0]  # swaps stay where they are
            start, end = before.reading(watched.index(position), probes), passes.sample(probed, [position], moved)
            tried.append(Control(interventions=list(moved), position=position, before=start, after=end.reading(0)))
    if scan:  # between no layers, and all layers in which the interventions act
        everywhere = sorted({layer for intervention in interventions for layer in acting_layers(model, intervention)})
        nowhere = Trial(layers=[], **dict(before.reading(0, probes)))
        scan = [nowhere, *scan, Trial(layers=everywhere, **dict(after.reading(0, probes)))]
    return Effect(
        model=IntervenedModel(**dict(inputs.facts), causal=before.causal),
        settings=Settings(**{**dict(inputs.settings), "seed": request.seed}, probes=probes),
        interventions=list(interventions),
        positions=[change_at(position, role, i, before, after) for i, (position, role) in enumerate(roles.items())],
        attention_by_position=AttentionByPosition(
            before=by_position(before.received, roles), after=by_position(after.received, roles)
        ),
        scan=scan,
        controls=tried,
        seconds=time.perf_counter() - started,
    )
