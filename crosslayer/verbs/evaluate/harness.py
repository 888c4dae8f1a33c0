"""lm-eval, quiet: its tasks by name, its evaluator, and its errors in one line."""

import contextlib
import difflib
import functools
import importlib.metadata
import importlib.util
import io
import logging
import os
import random
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import yaml

from crosslayer.corpus.hub import reading_dataset
from crosslayer.environment import quiet_transformers
from crosslayer.verbs.evaluate.groups import GROUPS, Selection, select

SCRIPT = "python -m crosslayer.verbs.evaluate.local_tasks"
LM_EVAL_SEED = 1234  # lm-eval's own of numpy, torch and few-shot examples; ours counts on from it
SENTENCE = 160  # characters of a library's error that are shown
REFUSALS = (AssertionError, AttributeError, LookupError, StopIteration, SyntaxError, TypeError)  # of a task, by lm-eval
AWAY = ("OfflineModeIsEnabled", "Couldn't reach", "offline", "ConnectionError", "Max retries", "LocalEntryNotFound")


def check_installed() -> str:
    """Return lm-eval's version.

    Raises:
        ValueError: it is not installed, or lacks what it needs for Hugging Face models.

    """
    missing = [name for name in ("lm_eval", "accelerate", "datasets") if importlib.util.find_spec(name) is None]
    if missing:
        raise ValueError(f"eval needs {', '.join(missing)}, not installed: pip install 'crosslayer[eval]'")
    return importlib.metadata.version("lm_eval")


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Silence lm-eval inside the block: log, bars, prints, import warnings; random numbers stay as they were."""
    import datasets
    from lm_eval import evaluator
    from tqdm.std import tqdm

    commit = evaluator.get_git_commit_hash
    python, numpy, devices = random.getstate(), np.random.get_state(), [*range(torch.cuda.device_count())]
    logs = [logging.getLogger(name) for name in ("lm_eval", "datasets")]
    levels, bars, start = [log.level for log in logs], datasets.are_progress_bars_disabled(), tqdm.__init__
    for log in logs:
        log.setLevel(logging.CRITICAL)
    datasets.disable_progress_bars()
    evaluator.get_git_commit_hash = functools.partial(_unheard, commit)
    tqdm.__init__ = functools.partialmethod(start, disable=True)  # type: ignore[assignment, method-assign]
    try:
        with (
            quiet_transformers(),
            torch.random.fork_rng(devices),
            warnings.catch_warnings(),
            contextlib.redirect_stdout(io.StringIO()),
        ):
            # lm-eval draws its bootstrap in processes that it forks, of which Python 3.12 warns beside torch's threads
            warnings.filterwarnings("ignore", message=".*use of fork\\(\\)", category=DeprecationWarning)
            yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)
        evaluator.get_git_commit_hash = commit
        tqdm.__init__ = start  # type: ignore[method-assign]
        if not bars:
            datasets.enable_progress_bars()
        for log, level in zip(logs, levels, strict=True):
            log.setLevel(level)


def _unheard(ask: Callable[[], str | None]) -> str | None:
    """Ask git for the commit of the working directory; where there is none, git itself would complain on stderr."""
    sys.stderr.flush()
    stderr, nowhere = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 2)
    try:
        return ask()
    finally:
        os.dup2(stderr, 2)
        os.close(stderr)
        os.close(nowhere)


class Tasks:
    """Tasks of lm-eval, and of a folder of one's own, by name."""

    def __init__(self, names: Sequence[str], include_path: Path | None, allow_code: bool = False):
        """Find tasks, without their data.

        Raises:
            ValueError: a name is unknown, or the folder is none, holds no tasks, or tasks that run code.

        """
        from lm_eval.tasks import TaskManager

        own: set[str] = set()
        if include_path is not None:
            _check_folder(include_path, allow_code)
            self.manager = TaskManager(include_path=str(include_path), include_defaults=False)
            own = set(self.manager.all_tasks)
            if not own:
                raise ValueError(f"{include_path.name!r} holds no tasks of lm-eval: YAML files with task: NAME")
        self.selection: Selection = select(names, own)
        if not own >= set(self.selection.tasks):  # to read lm-eval's own thousands takes seconds
            self.manager = TaskManager(include_path=None if include_path is None else str(include_path))
        _check_names(self.selection.tasks, self.manager.all_tasks, own)

    def load(self) -> list[Any]:
        """Return the tasks and groups with their data.

        Raises:
            ValueError: data cannot be had, or a task is wrong.

        """
        loaded = []
        for name in self.selection.tasks:
            try:
                with _asking_first():
                    found = self.manager.load([name])
            except Exception as error:
                raise ValueError(f"task {name!r} cannot be loaded: {_reason(error)}") from error
            groups, tasks = found.get("groups", {}), found["tasks"]
            inside = {child for children in found.get("group_map", {}).values() for child in children}
            loaded += [group for label, group in groups.items() if label not in inside]
            loaded += [task for label, task in tasks.items() if not groups]
        return loaded


@contextlib.contextmanager
def _asking_first() -> Iterator[None]:
    """Have tasks ask whether the hub answers before they load a data set of it inside the block."""
    import datasets

    load, formats = datasets.load_dataset, Path(datasets.__file__).parent / "packaged_modules"  # json, say

    def load_dataset(path: str, *rest: Any, **options: Any) -> Any:
        here = (formats / path).is_dir() or Path(path).exists()
        with contextlib.nullcontext() if here else reading_dataset(path):
            return load(path, *rest, **options)

    datasets.load_dataset = load_dataset
    try:
        yield
    finally:
        datasets.load_dataset = load


def score(
    lm: Any,
    loaded: Sequence[Any],
    manager: Any,
    *,
    limit: int | None,
    num_fewshot: int | None,
    seed: int,
    allow_code: bool = False,
) -> dict[str, Any]:
    """Return what lm-eval's simple_evaluate returns; run inside of `quiet`, since it sets all seeds.

    Raises:
        ValueError: lm-eval refuses a task, or the model.

    """
    from lm_eval.evaluator import simple_evaluate

    try:
        results = simple_evaluate(
            model=lm,
            tasks=list(loaded),
            task_manager=manager,
            num_fewshot=num_fewshot,
            batch_size=lm.batch_size,
            device=str(lm.device),
            limit=limit,
            log_samples=True,
            random_seed=seed,
            numpy_random_seed=(seed + LM_EVAL_SEED) % 2**32,
            torch_random_seed=seed + LM_EVAL_SEED,
            fewshot_random_seed=seed + LM_EVAL_SEED,
            confirm_run_unsafe_code=allow_code,
        )
    except ValueError as error:  # with a sentence of its own
        raise ValueError(f"lm-eval stopped: {error}") from error
    except REFUSALS as error:
        raise ValueError(f"lm-eval stopped: {_reason(error)}") from error
    assert results is not None  # only the other processes of several get none
    return dict(results)


def _check_names(names: Sequence[str], known: Sequence[str], own: set[str]) -> None:
    """Refuse unknown names, the nearest beside them."""
    for name in names:
        if name in known:
            continue
        near = difflib.get_close_matches(name, sorted({*known, *own, *GROUPS}), n=3, cutoff=0.6)
        advice = f"the nearest are {', '.join(near)}" if near else f"groups are {', '.join(GROUPS)}"
        raise ValueError(f"there is no task {name!r}; {advice}")


def _check_folder(folder: Path, allow_code: bool) -> None:
    """Refuse what is no folder, and task files in it that name Python code of their own, unless that is allowed."""
    if not folder.is_dir():
        raise ValueError(f"`include_path` {str(folder)!r} is no folder; it holds YAML files of tasks")
    for path in sorted(folder.rglob("*.yaml")):
        if not allow_code and _names_code(path):
            raise ValueError(
                f"{path.name!r} in {folder.name!r} names Python code (!function, class: or a metric that is none of "
                "lm-eval's), which runs when the task does; read it, and set `allow_code` if it may"
            )


def _names_code(path: Path, seen: frozenset[Path] = frozenset()) -> bool:
    """Return whether a task file, or one that it includes, names code that is not lm-eval's own."""
    path = path.resolve()
    if path.is_relative_to(stock_folder()):
        return False
    try:
        node = yaml.compose(path.read_bytes(), Loader=yaml.SafeLoader)  # bytes in any encoding, as lm-eval reads it
    except OSError:
        return False  # lm-eval cannot open it, either
    except (RecursionError, ValueError, yaml.YAMLError) as error:
        deep = isinstance(error, RecursionError)
        reason = "it is nested too deeply" if deep else str(error).splitlines()[0]
        raise ValueError(f"{path.name!r} in {path.parent.name!r} is no YAML file: {reason}") from error
    included: list[str] = []
    if any(_walk(node, included)):
        return True
    files = [path.parent / name for name in included]
    return any(_names_code(file, seen | {path}) for file in files if file.resolve() not in seen | {path})


def _walk(root: yaml.Node | None, included: list[str]) -> Iterator[bool]:
    """Yield for each part of a task file whether it names code; collect what is included.

    Each part is looked at once, however often others refer to it.
    """
    waiting, seen = [root], set()
    while waiting:
        node = waiting.pop()
        if node is None or id(node) in seen:
            continue
        seen.add(id(node))
        yield not node.tag.startswith("tag:yaml.org,2002:") or node.tag.startswith("tag:yaml.org,2002:python")
        if isinstance(node, yaml.SequenceNode):
            waiting += node.value
        elif isinstance(node, yaml.MappingNode):
            for key, value in node.value:
                waiting += [key, value]
                yield _is_code(key.value, value, included)


def _is_code(name: Any, value: yaml.Node, included: list[str]) -> bool:
    """Return whether an entry of a task file names code; collect what it includes."""
    if name == "include":
        parts = value.value if isinstance(value, yaml.SequenceNode) else [value]
        included += [str(part.value) for part in parts]
    if name == "metric":  # lm-eval hands a name that it does not know to `evaluate`, which runs a script
        return isinstance(value, yaml.ScalarNode) and value.value not in _metrics()
    if name in ("hf_evaluate", "unsafe_code"):
        return isinstance(value, yaml.ScalarNode) and value.value.lower() in ("true", "yes", "on")
    return name == "class"


@functools.cache
def _metrics() -> frozenset[str]:
    """Return the names of lm-eval's own metrics."""
    from lm_eval.api import metrics, registry

    assert metrics is not None  # which registers them
    return frozenset(registry.METRIC_REGISTRY)


@functools.cache
def stock_folder() -> Path:
    """Return the folder of lm-eval's own tasks."""
    spec = importlib.util.find_spec("lm_eval")
    assert spec is not None and spec.origin is not None
    return Path(spec.origin).resolve().parent / "tasks"


def _reason(error: Exception) -> str:
    """Return why a task cannot be loaded; without the network, what helps."""
    text = " ".join(str(error).split())
    if any(word in text or word in type(error).__name__ for word in AWAY):
        return (
            f"its data is on the Hugging Face hub, which cannot be reached; `{SCRIPT} DATA OUT` writes tasks that read "
            "local files, for --include-path OUT"
        )
    return f"{type(error).__name__}: {text[:SENTENCE]}"
