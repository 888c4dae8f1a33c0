"""What interventions do: the same sequences before and under them, measured at the positions that they are about.

Beside the change itself stand the first token, tokens left alone, controls (the same change elsewhere, or with random
content) and a scan: the change in a range of layers only.

Shapes: N sequences, T tokens, L layers, P watched positions.
"""

import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from crosslayer.corpus.windows import Text, open_text, read_windows, text_name
from crosslayer.models.load import ready_model
from crosslayer.output.progress import Meter, Silent
from crosslayer.output.summary import by_position
from crosslayer.probe.intercept import evaluating
from crosslayer.probe.tokens import check_ids, check_length
from crosslayer.verbs.intervene.apply import intervening
from crosslayer.verbs.intervene.kinds import Kind, layers_of
from crosslayer.verbs.intervene.parts import facts, place, reading, trial
from crosslayer.verbs.intervene.readings import Passes, Sample
from crosslayer.verbs.intervene.record import AttentionByPosition, Control, Role, Settings, Trial
from crosslayer.verbs.intervene.request import Request
from crosslayer.verbs.intervene.result import Effect
from crosslayer.verbs.intervene.trials import Scanned, Shifted, scanned, shifted


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
    windowing: dict[str, Any] = {"sequences": sequences, "length": length, "seed": seed, "bos": bos}
    asked: dict[str, Any] = {"interventions": interventions, "scan": scan, "controls": controls, "probes": probes}
    request = Request(**asked, **windowing)
    opened = open_text(text, sequences=sequences, length=length, seed=seed, meter=progress)
    loaded, tokenizer, name, _ = ready_model(model, tokenizer, dtype=dtype, device=device, meter=progress)
    if not isinstance(opened, Tensor):
        check_length(loaded, length)
    windows = read_windows(opened, tokenizer, **windowing, meter=progress)
    settings = Settings(
        model=name,
        text=text_name(text),
        documents=list(windows.documents),
        bos=None if isinstance(text, Tensor) else bos,
        sequences=request.sequences,
        length=request.length,
        probes=request.probe_count,
        seed=request.seed,
    )
    return _measured(loaded, windows.ids, request, settings, progress)


class _Experiment(NamedTuple):
    """What is run, and where it is looked at."""

    interventions: tuple[Kind, ...]
    roles: dict[int, Role]  # of the watched positions, the main position first
    groups: list[Scanned]
    controls: list[Shifted]


class _Samples(NamedTuple):
    """What was read: at all watched positions over all sequences, and of the probes at the position of each trial."""

    before: Sample
    after: Sample
    groups: list[Sample]
    controls: list[Sample]


def _measured(model: PreTrainedModel, ids: Tensor, request: Request, settings: Settings, meter: Meter) -> Effect:
    started = time.perf_counter()
    check_ids(model, ids)
    experiment = _planned(model, request)
    samples = _run(model, ids, settings.probes, experiment, meter)
    before, after, roles = samples.before, samples.after, experiment.roles
    return Effect(
        model=facts(model, before.causal),
        settings=settings,
        interventions=list(experiment.interventions),
        places=[place(position, role, i, before, after) for i, (position, role) in enumerate(roles.items())],
        attention_by_position=AttentionByPosition(
            before=by_position(before.received, roles), after=by_position(after.received, roles)
        ),
        scan=_trials(model, experiment, samples, settings.probes),
        controls=_controls(experiment, samples, settings.probes),
        seconds=time.perf_counter() - started,
    )


def _planned(model: PreTrainedModel, request: Request) -> _Experiment:
    """Return what to run; what the model cannot do is refused here, before anything is measured."""
    last = max(request.positions)
    if model.can_generate() and last > request.length - 3:
        raise ValueError(f"position {last} needs two tokens behind it; sequences have {request.length} tokens")
    interventions = request.interventions
    controls = shifted(model, interventions, request.length, request.controls, request.seed)
    roles: dict[int, Role] = dict.fromkeys(request.positions, "intervened")
    roles.setdefault(0, "first token")
    for control in controls:
        roles.setdefault(control.alone, "left alone")
    groups = scanned(model, interventions, request.scan)
    with intervening(model, *interventions):
        pass
    return _Experiment(interventions, roles, groups, controls)


def _run(model: PreTrainedModel, ids: Tensor, probes: int, experiment: _Experiment, meter: Meter) -> _Samples:
    """Run all sequences, (N, T), before and under the interventions, and the probes, the first of them, in trials."""
    watched = [*experiment.roles]
    intervened_on = [position for position, role in experiment.roles.items() if role == "intervened"]
    first, main = min(intervened_on), watched[0]
    total = 2 * len(ids) + probes * (len(experiment.groups) + len(experiment.controls))
    with meter("running", total) as steps, evaluating(model):
        passes = Passes(model, total, steps)
        after = passes.sample(ids, watched, experiment.interventions, first)  # before all else: it may refuse
        before = passes.sample(ids, watched, (), first)
        groups = [passes.sample(ids[:probes], [main], group.interventions) for group in experiment.groups]
        controls = []
        for control in experiment.controls:
            controls.append(passes.sample(ids[:probes], [control.position], control.interventions))
    return _Samples(before, after, groups, controls)


def _trials(model: PreTrainedModel, experiment: _Experiment, samples: _Samples, probes: int) -> list[Trial]:
    """Return the scan: no layers, each group, and all layers in which the interventions act; empty without groups."""
    if not experiment.groups:
        return []
    trials = [trial((), reading(samples.before, 0, probes))]
    for group, sample in zip(experiment.groups, samples.groups, strict=True):
        trials.append(trial(group.layers, reading(sample, 0)))
    everywhere = {layer for intervention in experiment.interventions for layer in layers_of(model, intervention)}
    return [*trials, trial(sorted(everywhere), reading(samples.after, 0, probes))]


def _controls(experiment: _Experiment, samples: _Samples, probes: int) -> list[Control]:
    watched = [*experiment.roles]
    controls = []
    for control, sample in zip(experiment.controls, samples.controls, strict=True):
        controls.append(
            Control(
                interventions=list(control.interventions),
                position=control.position,
                before=reading(samples.before, watched.index(control.position), probes),
                after=reading(sample, 0),
            )
        )
    return controls
