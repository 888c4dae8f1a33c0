"""Processor time of `crosslayer plan` against that of importing the one configuration class that it needs.

Both run as processes of their own, in turns; medians, their spread and the ratio are written as JSON.

    python benchmarks/plan.py --repeats 7 --out benchmarks/results/plan.json
"""

import argparse
import json
import resource
import statistics
import subprocess
import sys
from pathlib import Path

PLAN = [sys.executable, "-m", "crosslayer", "plan", "smollm2", "--length", "4096"]
CLASS = [sys.executable, "-c", "from transformers.models.llama.configuration_llama import LlamaConfig"]


def processor_seconds(command: list[str]) -> float:
    """Return the user and system time of a process and its children."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run(command, check=True, capture_output=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime - before.ru_utime + after.ru_stime - before.ru_stime


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    for command in (PLAN, CLASS):  # fills the caches of files and bytecode
        processor_seconds(command)
    pairs = [(processor_seconds(PLAN), processor_seconds(CLASS)) for _ in range(options.repeats)]
    plan, imported = zip(*pairs, strict=True)
    ratios = sorted(own / other for own, other in pairs)
    found = {
        "plan_seconds": statistics.median(plan),
        "import_seconds": statistics.median(imported),
        "ratio": statistics.median(ratios),
        "ratio_range": [ratios[0], ratios[-1]],
        "repeats": options.repeats,
    }
    text = json.dumps(found, indent=1)
    print(text)
    if options.out:
        options.out.write_text(text + "\n")


if __name__ == "__main__":
    main()
