"""Reads finished training runs, which may be untrusted, and sorts them into configurations and variants.

A configuration is a recipe without name, seed, method and number of key/value heads. Of a run only `record.json` is
read.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from crosslayer.output.record import read_record
from crosslayer.output.result import load_as
from crosslayer.training.record import Snapshot, mean_of_known
from crosslayer.verbs.compare.grid import HEADS, variant_of
from crosslayer.verbs.compare.result import MISSING, ComparedRun, Configuration, SnapshotMeans, Trace, Variant
from crosslayer.verbs.train.result import TrainingRun

RECORD, RUNS = "record.json", "runs"
RATE = "train.learning_rate"
# recipe keys that differ between runs of a configuration
OWN = ("name.", "seed.", "model.method.", f"model.shape.{HEADS}.")


@dataclass(frozen=True)
class NamedRun:
    """A run with its folder and its configuration."""

    run: TrainingRun
    folder: Path
    configuration: Configuration


@dataclass(frozen=True)
class GroupedRuns:
    """Runs with their configurations and variants."""

    configurations: tuple[Configuration, ...]
    variants: tuple[Variant, ...]
    domains: tuple[str, ...]
    runs: tuple[ComparedRun, ...]


def load_run(folder: Path) -> TrainingRun:
    """Read and check the run in a folder."""
    # The record is not trusted: what pages and figures need is checked here.
    try:
        schema = str(read_record(folder).get("schema"))
        if not schema.startswith("crosslayer/train/"):
            raise ValueError(f"record.json must be of a training run, got schema {schema[:60]!r}")
        run = load_as([TrainingRun], folder)
        for name in (run.name, run.model.dtype, *(domain.name for domain in run.domains)):
            if not name.isprintable():
                raise ValueError(f"names must be printable, got {name!r}")
        variant_of_run(run)
        for steps in (
            run.curve.steps,
            [entry.step for entry in run.validation],
            [snapshot.step for snapshot in run.snapshots],
        ):
            if any(later <= step for step, later in pairwise((0, *steps))):
                raise ValueError("its steps must increase, starting at 1 or later")
    except ValueError as error:
        raise ValueError(f"{folder.name}: {error}") from None
    return run


def variant_of_run(run: TrainingRun) -> Variant:
    """Return the variant that a run trained."""
    heads = _flat(run.recipe).get(f"model.shape.{HEADS}")
    if heads is not None and type(heads) is not int:
        raise ValueError(f"model.shape.{HEADS} of its recipe must be a whole number, got {heads!r}")
    return variant_of(run.model.methods, heads)


def read_runs(paths: Sequence[str | Path]) -> list[NamedRun]:
    """Read finished runs, in `paths` and in folders inside them, and sort them into configurations by their recipes."""
    folders: list[Path] = []
    for path in map(Path, paths):
        within = path / RUNS if (path / RUNS).is_dir() else path
        inner = sorted(file.parent for file in within.glob(f"*/{RECORD}")) if within.is_dir() else []
        if within == path and (path / RECORD).is_file():
            inner = [path]
        if not inner:
            raise ValueError(f"{path.name!r} contains no finished run; pass a folder that `crosslayer train` wrote")
        folders += inner

    runs = [load_run(folder) for folder in folders]
    of_a_run = (*OWN, f"{RATE}.") if _own_rates(runs) else OWN
    recipes = []
    for run in runs:
        recipes.append({key: value for key, value in _flat(run.recipe).items() if not f"{key}.".startswith(of_a_run)})
    keys = dict.fromkeys(key for recipe in recipes for key in recipe)
    differing = [key for key in keys if _count(recipes, [key]) > 1]
    # A label names only keys that split configurations further than the keys before them: of several keys that change
    # together, one tells them apart.
    distinguishing: list[str] = []
    for key in differing:
        if _count(recipes, [*distinguishing, key]) > _count(recipes, distinguishing):
            distinguishing.append(key)
    named = []
    for folder, run, recipe in zip(folders, runs, recipes, strict=True):
        values = {key: recipe.get(key, MISSING) for key in differing}
        named.append(NamedRun(run, folder, Configuration.from_values(values, distinguishing)))
    return named


def _own_rates(runs: Sequence[TrainingRun]) -> bool:
    """Return whether the learning rate belongs to the variant: each has a single one, and they differ.

    A rate that suits one method may not suit another, so variants may be tuned one by one and then compared. Where a
    variant has several rates, they are configurations.
    """
    rates: dict[str, set[Any]] = {}  # by variant
    for run in runs:
        rates.setdefault(variant_of_run(run).label, set()).add(_flat(run.recipe).get(RATE))
    return all(len(values) == 1 for values in rates.values()) and len(set.union(*rates.values())) > 1


def _count(recipes: Sequence[Mapping[str, Any]], keys: Sequence[str]) -> int:
    return len({json.dumps([recipe.get(key, MISSING) for key in keys]) for recipe in recipes})


def group_runs(named: Sequence[NamedRun]) -> GroupedRuns:
    """Group runs by configuration and variant, and check that those of a configuration are comparable."""
    variants: dict[str, Variant] = {}
    own_rates = _own_rates([entry.run for entry in named])
    first: dict[str, NamedRun] = {}
    seen: dict[tuple[str, str, int], NamedRun] = {}
    for entry in named:
        variant = variant_of_run(entry.run)
        label = variant.label
        rate = _flat(entry.run.recipe).get(RATE) if own_rates else None
        variants.setdefault(label, variant.model_copy(update={"learning_rate": rate}))
        same = seen.setdefault((entry.configuration.label, label, entry.run.seed), entry)
        if same is not entry:
            names = f"{same.folder.name} and {entry.folder.name}"
            raise ValueError(f"{names} are both {label} with seed {entry.run.seed}; pass only one")

        # Runs of a configuration must be trained and measured on the same text, in steps of the same size.
        reference = first.setdefault(entry.configuration.label, entry)
        both = f"{reference.folder.name} and {entry.folder.name} have the same recipe but"
        texts = []
        for run in (reference.run, entry.run):
            texts.append({domain.name: (domain.fingerprint, domain.validation_tokens) for domain in run.domains})
        for domain in {**texts[0], **texts[1]}:
            if texts[0].get(domain) != texts[1].get(domain):
                what = f"different text in domain {domain!r}"
                raise ValueError(f"{both} {what}; only runs on the same text can be compared")
        # A recipe has the batch of a process and not the number of processes.
        if reference.run.tokens * entry.run.steps != entry.run.tokens * reference.run.steps:
            sizes = [run.tokens / run.steps for run in (reference.run, entry.run)]
            raise ValueError(
                f"{both} {sizes[0]:,.0f} and {sizes[1]:,.0f} tokens per step, probably from another number of "
                "processes; retrain one of them"
            )
    configurations = tuple(entry.configuration for entry in first.values())
    domains = tuple(domain.name for domain in named[0].run.domains)
    return GroupedRuns(configurations, tuple(variants.values()), domains, tuple(map(_compared, named)))


def _compared(entry: NamedRun) -> ComparedRun:
    run = entry.run
    # Domains are weighted by their shares of the mixture, as in training; an unweighted mean is of another text.
    shares = np.array([domain.share for domain in run.domains])  # (D,)
    validation = np.array([[entry.losses[domain.name] for domain in run.domains] for entry in run.validation])  # (M, D)
    speeds = [speed for speed in run.curve.tokens_per_second if speed > 0]
    recipe = _flat(run.recipe)
    return ComparedRun(
        configuration=entry.configuration.label,
        variant=variant_of_run(run).label,
        seed=run.seed,
        name=run.name,
        parameters=run.model.parameters,
        flops_per_token=run.model.flops_per_token,
        steps=run.steps,
        tokens=run.tokens,
        seconds=run.seconds,
        learning_rate=recipe.get(RATE),
        constant_rate=recipe.get("schedule.minimum") == 1,
        step_seconds=run.tokens / run.steps / float(np.median(speeds)) if speeds else None,
        peak_bytes=run.peak_bytes,
        kv_bytes_per_token=run.model.kv_bytes_per_token,
        kv_read_bytes_per_token=run.model.kv_read_bytes_per_token,
        dtype=run.model.dtype,
        machine=run.environment.machine,
        final_loss=run.final_loss,
        losses=run.validation[-1].losses,
        held_out_tokens=sum(domain.validation_tokens for domain in run.domains),
        curve=Trace(steps=tuple(run.curve.steps), losses=tuple(run.curve.losses)),
        validation=Trace(
            steps=tuple(entry.step for entry in run.validation), losses=tuple((validation @ shares).tolist())
        ),
        snapshots=tuple(map(_snapshot_means, run.snapshots)),
        depth_mixing=run.depth_mixing,
    )


def _snapshot_means(snapshot: Snapshot) -> SnapshotMeans:
    norms = [norm for norm in snapshot.stream_norm if norm is not None]
    growth = norms[-1] / norms[0] if norms and norms[0] > 0 else None
    means = ("first_token_share", "sink_rate", "entropy", "token_similarity")
    facts = {name: mean_of_known(getattr(snapshot, name)) for name in means}
    # The first layer writes into the embedding, and alone would decide a spread: in a plain model of 16 layers, 208
    # with it and 9.1 without.
    for what in ("output", "gradient"):
        attention, mlp = getattr(snapshot, f"attention_{what}_norm"), getattr(snapshot, f"mlp_{what}_norm")
        norms = [norm for norm in (*attention[1:], *mlp[1:]) if norm is not None]
        facts[f"{what}_spread"] = max(norms) / min(norms) if norms and min(norms) > 0 else None
    return SnapshotMeans(step=snapshot.step, stream_growth=growth, **facts)


def _flat(values: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return nested mappings as one mapping with dotted keys; lists stay whole, empty mappings vanish."""
    flat: dict[str, Any] = {}
    for key, value in values.items():
        name = f"{prefix}{key}"
        flat |= _flat(value, f"{name}.") if isinstance(value, dict) else {name: value}
    return flat
