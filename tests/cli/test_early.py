"""What is refused before torch is imported, and what `plan` does not import."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from crosslayer.cli import similar
from crosslayer.models.embedded import EMBEDDED, check_known

ROOT = Path(__file__).parent.parent.parent
RUN = """
import runpy, sys
sys.argv = ["crosslayer", *sys.argv[1:]]
try:
    runpy.run_module("crosslayer", run_name="__main__")
except SystemExit as stop:
    print("status", stop.code)
print("loaded", *(name for name in {names} if name in sys.modules))
"""


def ran(words: str, *names: str) -> list[str]:
    """Run a command line in a process of its own; its last line says which of some modules it loaded."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", RUN.replace("{names}", repr(names)), *words.split()]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=120)
    return [*done.stderr.splitlines(), *done.stdout.splitlines()]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("plan smolm2", "did you mean smollm2?"),
        ("plan qwen-0.5b", "did you mean qwen?"),
        ("bench smollm2 --baseline gemma", "did you mean gemma3?"),
        ("plan smollm2 --memory 8GBs", "--memory"),
        ("store prompts --limit 1,5GiB", "--limit"),
        ("serve smollm2 --prompt-limit 10%", "--prompt-limit"),
        ("needles smollm2 --depths 0,110", "--depths must be 0-100, got 110"),
    ],
)
def test_wrong_values_are_refused_before_torch_is_imported(words, said):
    lines = ran(words, "torch", "transformers")
    assert any(said in line for line in lines) and lines[-2:] == ["status 2", "loaded"], lines


def test_plan_imports_no_modeling_code():
    """Importing it takes as long as importing torch: `plan` took 5.5 s of processor time."""
    names = ("transformers.modeling_utils", "crosslayer.core.decoder.modeling", "crosslayer.models.load")
    others = [f"crosslayer.verbs.{path.parent.name}.run" for path in (ROOT / "crosslayer").glob("verbs/*/run.py")]
    lines = ran("plan smollm2 --length 512", *names, *others, "transformers.models.llama.tokenization_llama")
    assert '"stored_bytes": 11796480' in "".join(lines)
    assert lines[-1] == "loaded crosslayer.verbs.plan.run"


@pytest.mark.parametrize("name", ["org/smolm2", "gpt2", "distilgpt2", "bert-base-uncased", "t5-small", *EMBEDDED])
def test_other_names_are_left_to_the_hub(name):
    check_known(name)


def test_a_terminal_without_arrows_shows_what_it_has():
    error = UnicodeEncodeError("cp1252", "a ← 3 → ‖ λ", 2, 3, "no such character")
    assert similar(error) == ("<", 3)
    assert similar(UnicodeEncodeError("cp1252", "λ", 0, 1, ""))[0] == "\\u03bb"
