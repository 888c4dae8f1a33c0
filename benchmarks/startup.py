"""How long the command line and the import take to answer, beside Python itself and a plain transformers import.

    python benchmarks/startup.py [--repeats 7] [--json FILE]

Each side is a process of its own; the sides run in turns. CPU seconds (user + system) of the process, medians with
minimum and maximum; the files are warm, since the first round is not counted.
"""

import argparse
import json
import platform
import resource
import statistics
import subprocess
import sys
import tempfile
from datetime import date
from importlib.metadata import version
from pathlib import Path

COMMAND = ["-c", "import sys; sys.argv[0] = 'crosslayer'; from crosslayer.cli import main; main()"]
CONFIG = {"model_type": "gemma3_text", "num_hidden_layers": 26, "sliding_window_pattern": 6, "dtype": "bfloat16"}
FOLDER = Path(tempfile.mkdtemp())
(FOLDER / "config.json").write_text(json.dumps(CONFIG))
SIDES = {
    "python": ["-c", "pass"],
    "crosslayer --version": [*COMMAND, "--version"],
    "crosslayer --help": [*COMMAND, "--help"],
    "crosslayer retrofit --help": [*COMMAND, "retrofit", "--help"],
    "crosslayer methods": [*COMMAND, "methods"],
    "crosslayer plan FOLDER": [*COMMAND, "plan", str(FOLDER)],
    "crosslayer plan smollm2 (GGUF)": [*COMMAND, "plan", "smollm2"],
    "import torch": ["-c", "import torch"],
    "from transformers import LlamaForCausalLM": ["-c", "from transformers import LlamaForCausalLM"],
    "import crosslayer": ["-c", "import crosslayer"],
}


def cpu_seconds(words: list[str]) -> float:
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run([sys.executable, *words], check=True, stdout=subprocess.DEVNULL)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--json", type=Path, default=Path(__file__).parent / "results" / "startup.json")
    options = parser.parse_args()
    times: dict[str, list[float]] = {name: [] for name in SIDES}
    for repeat in range(options.repeats + 1):
        for name, words in SIDES.items():
            seconds = cpu_seconds(words)
            if repeat:
                times[name].append(seconds)
    plain = statistics.median(times["from transformers import LlamaForCausalLM"])
    rows = {}
    for name, values in times.items():
        middle = statistics.median(values)
        rows[name] = {"median": middle, "min": min(values), "max": max(values), "ratio_to_transformers": middle / plain}
        print(f"{name:45} {middle:6.2f} s ({min(values):.2f}-{max(values):.2f})  {middle / plain:5.2f} x")
    record = {
        "date": date.today().isoformat(),
        "versions": {name: version(name) for name in ("torch", "transformers", "typer")},
        "python": platform.python_version(),
        "repeats": options.repeats,
        "cpu_seconds": rows,
    }
    options.json.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
