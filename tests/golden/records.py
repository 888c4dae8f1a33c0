"""One record of each comparison on tiny models, and its numbers by path.

`python -m tests.golden.records` writes them to numbers.json; `test_golden.py` compares what is computed now with them.
"""

import json
import os
import re
import tempfile
from pathlib import Path

import torch

import crosslayer
from tests.helpers import evaluations, recovery, runs
from tests.helpers.saved import ours
from tests.helpers.tiny import VOCABULARY, tiny
from tests.verbs.needles.oracle import TOKENIZER, oracle, random_model

NUMBERS = Path(__file__).parent / "numbers.json"
LENGTH = 16
# facts of the machine, of the moment and of versions, and what is a time
VOLATILE = (
    r"seconds?|environment|machine|flops|time|tokens_per|rate|memory|peak|allocated|threads|created|version|sha|digest"
    r"|schema|ttft|tpot|predicted|operators"
)


def ids(count, seed, length=LENGTH):
    """Return windows of random ids, (count, length)."""
    return torch.randint(3, VOCABULARY, (count, length), generator=torch.Generator().manual_seed(seed))


def retrofitted(folder, **options):
    """Retrofit a random Llama of 8 layers in float64 on two random texts."""
    text = {"web": ids(64, 0, 24), "code": ids(64, 1, 24)}
    model = tiny("llama", num_hidden_layers=8)
    return crosslayer.retrofit(model, text, windows=32, length=24, **options).record()


def healed(folder):
    """Distill one retrofit and its original in two stages."""
    original = recovery.original_in(folder)
    recovery.retrofit_in(folder, original, "fitted")
    return recovery.healed(folder, "fitted", folder).record()


def evaluated(folder):
    """Answer three tasks with two models."""
    candidate, baseline = (evaluations.saved(folder / name, seed) for name, seed in (("candidate", 1), ("baseline", 2)))
    tasks = evaluations.local_tasks(folder)
    names = ["arc_easy_local", "piqa_local", "wikitext2_local"]
    return crosslayer.evaluate(
        candidate, tasks=names, baseline=baseline, include_path=tasks, batch=4, allow_code=True
    ).record()


def retrieved(folder):
    """Ask random weights and an oracle for hidden numbers."""
    found = crosslayer.needles(
        random_model(torch.float32), TOKENIZER, baseline=oracle(), lengths=[512], depths=[0, 50], keys=2, samples=3
    )
    cells = found.settings.cells  # of the one length, by depth
    shares = [[[found.score(model, *cell) for cell in cells]] for model in (0, 1)]
    return found.record() | {
        "scores": [[[share.value for share in depths] for depths in model] for model in shares],
        "intervals": [[[share.interval for share in depths] for depths in model] for model in shares],
    }


def compared(folder):
    """Compare planted runs of three variants over four seeds."""
    planted = []
    for variant, loss in (("vanilla", 3.0), ("resformer", 2.9), ("cla", 3.05)):
        for seed in range(4):
            planted.append(runs.run(variant, seed, loss=loss + 0.01 * seed + 0.003 * (seed % 2), gap=loss - 3.0))
    paths = []
    for number, run in enumerate(planted):
        run.save(folder / f"run{number}")
        paths.append(folder / f"run{number}")
    return crosslayer.compare(paths).record()


RECORDS = {
    "retrofit": lambda folder: retrofitted(folder, method="cla", layers="2-3,5-7", calibration=32, full=True),
    "retrofit-search": lambda folder: retrofitted(folder, kv_budget=0.8, calibration=32),
    "retrofit-choice": lambda folder: retrofitted(
        folder, method={"name": "shared_choice", "sinks": 1, "window": 2, "least": 0}, kl_budget=0.05
    ),
    "heal": healed,
    "bench": lambda folder: crosslayer.bench(
        ours("cla"), tiny("llama", dtype=torch.float32), contexts=(32,), new_tokens=4, repeats=3
    ).record(),
    "needles": retrieved,
    "evaluate": evaluated,
    "verify": lambda folder: crosslayer.verify(ours("cla"), dtypes=("float32",), compile_backend="aot_eager").record(),
    "compare": compared,
}


def numbers(record, path=""):
    """Return the numbers of a record by their path, without times and what else no two runs share."""
    found = {}
    entries = record.items() if isinstance(record, dict) else enumerate(record)
    for key, entry in entries:
        inner = f"{path}.{key}" if path else str(key)
        if re.search(VOLATILE, str(key)):
            continue
        if isinstance(entry, dict | list | tuple):
            found |= numbers(entry, inner)
        elif isinstance(entry, int | float) and not isinstance(entry, bool):
            found[inner] = entry
    return found


def measure(name):
    """Return the numbers of a record, computed now."""
    with tempfile.TemporaryDirectory() as folder:
        return numbers(json.loads(json.dumps(RECORDS[name](Path(folder)))))


if __name__ == "__main__":
    os.environ["CROSSLAYER_CACHE"] = tempfile.mkdtemp()
    found = {name: measure(name) for name in RECORDS}
    NUMBERS.write_text(json.dumps(found, indent=0) + "\n")
    print({name: len(each) for name, each in found.items()})
