"""Runs lm-eval quietly: loads its tasks by name, calls its evaluator, and turns its errors into one line."""

import contextlib
import difflib
import importlib.metadata
import io
import json
import logging
import random
import warnings
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import Any
from unittest.mock import patch

import jinja2
import numpy as np
import torch

from crosslayer.extras import check_extra
from crosslayer.hub import reading_dataset
from crosslayer.output.progress import progress

LOCAL = "_local"  # ending of the names of tasks that read local files
LM_EVAL_SEED = 1234  # lm-eval's default for numpy, torch and few-shot examples; our seed is added to it
SHOWN = 160  # characters of a library's error that are shown
# What lm-eval and templates of tasks raise for a task that is wrong. Others (out of memory, an interrupt) are not its
# refusals, and pass.
REFUSALS = (
    ArithmeticError,
    AssertionError,
    AttributeError,
    LookupError,
    StopIteration,
    SyntaxError,
    TypeError,
    jinja2.TemplateError,
)
# In the message or the class of an error that datasets and the hub raise without a network.
OFFLINE = ("OfflineModeIsEnabled", "Couldn't reach", "offline", "ConnectionError", "Max retries", "LocalEntryNotFound")
# the tasks over which a paper reports a mean; each is a list of names, the last of which is lm-eval's own task
GROUPS: dict[str, list[list[str]]] = {
    name: group["tasks"]
    for name, group in json.loads(Path(__file__).with_name("groups.json").read_text(encoding="utf-8")).items()
}


def check_installed() -> str:
    """Return lm-eval's version."""
    check_extra("eval", "evaluate", "lm_eval", "accelerate", "datasets")
    return importlib.metadata.version("lm_eval")


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Run lm-eval without its log, progress bars and prints; restores the state of all random generators."""
    from lm_eval import evaluator
    from tqdm.std import tqdm

    start, logs = tqdm.__init__, logging.root.manager.disable
    python, numpy = random.getstate(), np.random.get_state()
    devices = [*range(torch.cuda.device_count())]

    # lm-eval does not hand `disable_tqdm` on to all of its bars.
    def hide(bar: tqdm, *args: Any, **options: Any) -> None:
        start(bar, *args, **options | {"disable": True})

    logging.disable()
    try:
        with (
            patch.object(tqdm, "__init__", hide),
            # Outside a repository, git prints an error past Python's stderr.
            patch.object(evaluator, "get_git_commit_hash", return_value=None),
            torch.random.fork_rng(devices),
            warnings.catch_warnings(),
            contextlib.redirect_stdout(io.StringIO()),
        ):
            # lm-eval forks processes for its bootstrap; Python 3.12 warns of that when torch has threads
            warnings.filterwarnings("ignore", message=".*use of fork\\(\\)", category=DeprecationWarning)
            yield
    finally:
        logging.disable(logs)
        random.setstate(python)
        np.random.set_state(numpy)


def select(names: Sequence[str], local: Collection[str] = ()) -> tuple[list[str], dict[str, tuple[str, ...]]]:
    """Return the tasks that names stand for, without duplicates, and the tasks of each named group in `GROUPS`.

    A group uses the local version of a task if it is in `local`, the tasks of the user's folder.
    """
    groups = {}
    for name in names:
        if name in GROUPS:
            chosen = []
            for options in GROUPS[name]:
                chosen.append(next((option + LOCAL for option in options if option + LOCAL in local), options[-1]))
            groups[name] = tuple(chosen)
    tasks = [task for name in names for task in groups.get(name, (name,))]
    return list(dict.fromkeys(tasks)), groups


class Tasks:
    """Tasks of lm-eval and of a user's folder, by name.

    Attributes:
        allow_code: whether code of the user's folder, and code that a model writes, may run.
        groups: tasks of each named group in `GROUPS`.
        loaded: tasks and groups of lm-eval, with their data.
    """

    def __init__(self, names: Sequence[str], include_path: Path | None, allow_code: bool = False):
        """Find tasks and read their data."""
        from lm_eval.tasks import TaskManager

        self.allow_code = allow_code
        local = set[str]()
        if include_path is not None:
            if not include_path.is_dir():
                raise ValueError(f"`include_path` must be a folder with YAML files of tasks, got {str(include_path)!r}")
            # Before anything in the folder is read. To guess whether it runs code would take lm-eval's own rules, and
            # one that is missed would run a stranger's code.
            if not allow_code:
                raise ValueError(
                    f"`include_path` {include_path.name!r} needs `allow_code`, since task files run Python code "
                    "(functions, classes, metrics and templates); read them first"
                )
            self.manager = TaskManager(include_path=str(include_path), include_defaults=False)
            local = set(self.manager.all_tasks)
            if not local:
                raise ValueError(f"{include_path.name!r} has no lm-eval tasks (valid YAML files with task: NAME)")
        tasks, self.groups = select(names, local)
        # Reading lm-eval's own thousands of tasks takes seconds, so it is done only if one of them is named.
        if not local >= set(tasks):
            self.manager = TaskManager(include_path=None if include_path is None else str(include_path))
        for name in tasks:
            if name not in self.manager.all_tasks:
                known = sorted({*self.manager.all_tasks, *local, *GROUPS})
                near = difflib.get_close_matches(name, known, n=3, cutoff=0.6)
                advice = f"did you mean {', '.join(near)}?" if near else f"groups are {', '.join(GROUPS)}"
                raise ValueError(f"task {name!r} is not known; {advice}")
        self.loaded = [task for name in tasks for task in self._load(name)]

    def _load(self, name: str) -> list[Any]:
        """Return a task, or a group that contains its tasks."""
        import datasets

        load = datasets.load_dataset
        formats = Path(datasets.__file__).parent / "packaged_modules"  # json, csv …

        # Without a network, datasets itself tries for some 25 seconds.
        def load_dataset(path: str, *rest: Any, **options: Any) -> Any:
            """Check that the hub answers before a dataset is loaded from it."""
            local = (formats / path).is_dir() or Path(path).exists()
            with contextlib.nullcontext() if local else reading_dataset(path):
                return load(path, *rest, **options)

        try:
            with patch.object(datasets, "load_dataset", load_dataset):
                content = self.manager.load([name])
        except Exception as error:
            raise ValueError(f"task {name!r} cannot be loaded: {_reason(error)}") from error
        # A group already holds the groups and tasks in it, which would be scored twice.
        inner = {child for children in content.get("group_map", {}).values() for child in children}
        groups = [group for label, group in content.get("groups", {}).items() if label not in inner]
        return groups or list(content["tasks"].values())


def task_names(tasks: str | Sequence[str]) -> tuple[str, ...]:
    """Return names that are listed, or separated by commas, or both."""
    texts = [tasks] if isinstance(tasks, str) else tasks
    return tuple(name.strip() for text in texts for name in text.split(","))


def read_tasks(names: Sequence[str], include_path: Path | None = None, allow_code: bool = False) -> Tasks:
    """Return tasks of lm-eval and of a user's folder by name, with their data."""
    check_installed()
    with quiet(), progress("reading tasks", 0):
        return Tasks(names, include_path, allow_code)


def score(
    lm: Any, tasks: Tasks, *, limit: int | None = None, num_fewshot: int | None = None, seed: int = 0
) -> dict[str, Any]:
    """Return what lm-eval's simple_evaluate returns; call inside `quiet`, since it sets all seeds."""
    from lm_eval.evaluator import simple_evaluate

    # With seed 0 the examples are those that lm-eval itself draws.
    harness_seed = seed + LM_EVAL_SEED
    try:
        results = simple_evaluate(
            model=lm,
            tasks=list(tasks.loaded),
            task_manager=tasks.manager,
            num_fewshot=num_fewshot,
            batch_size=lm.batch_size,
            device=str(lm.device),
            limit=limit,
            log_samples=True,
            random_seed=seed,
            numpy_random_seed=harness_seed % 2**32,  # numpy takes 32 bits
            torch_random_seed=harness_seed,
            fewshot_random_seed=harness_seed,
            confirm_run_unsafe_code=tasks.allow_code,
        )
    # Its message can be shown as it is; those of the other kinds mean nothing without the kind.
    except ValueError as error:
        raise ValueError(f"lm-eval stopped: {error}") from error
    except REFUSALS as error:
        raise ValueError(f"lm-eval stopped: {_reason(error)}") from error
    assert results is not None  # it is None only in further processes of a distributed run
    return dict(results)


def _reason(error: Exception) -> str:
    """Return why a task cannot be loaded and, without a network connection, what to do."""
    text = " ".join(str(error).split())
    if any(word in text or word in type(error).__name__ for word in OFFLINE):
        return (
            "its data is on the Hugging Face hub, which cannot be reached; `python benchmarks/local_tasks.py DATA OUT` "
            "in a clone of crosslayer writes tasks that read local files, for --include-path OUT --allow-code"
        )
    return f"{type(error).__name__}: {text[:SHOWN]}"
