"""The script of everything that a GPU should answer, on a CPU: parts by name, which go on where they stopped."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[2] / "benchmarks" / "gpu"


def run(*words):
    environment = {**os.environ, "PYTHON": sys.executable, "OMP_NUM_THREADS": "1"}
    return subprocess.run([str(FOLDER / "run.sh"), *map(str, words)], capture_output=True, text=True, env=environment)


def test_the_list_has_every_part_with_its_seconds():
    lines = run("--list").stdout.splitlines()[1:]
    rows = {line.split()[0]: int(line.split()[1]) for line in lines}
    assert list(rows)[:2] == ["uniattn", "two_phase"] and max(rows.values()) <= 240
    assert sum(int(line.split()[1]) for line in lines if line.split()[2] == "yes") <= 540
    assert run("out", "no_such_part").returncode == 2


@pytest.mark.slow  # a part takes ten seconds
def test_a_part_measures_only_what_is_missing(tmp_path):
    file = tmp_path / "depth_attention.json"
    first = run(tmp_path, "depth_attention", "--dry-run")
    assert first.returncode == 0, first.stdout
    record = json.loads(file.read_text())
    kept = record["rows"].pop("2")
    file.write_text(json.dumps({**record, "rows": {"2": kept}}))
    assert run(tmp_path, "depth_attention", "--dry-run").returncode == 0
    rows = json.loads(file.read_text())["rows"]
    assert list(rows) == ["2", "9"] and rows["2"] == kept and rows["9"] != record["rows"]["9"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["depth_attention.json"]
