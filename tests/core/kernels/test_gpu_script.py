"""The script of all measurements on a GPU, on a CPU with tiny shapes."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[3] / "benchmarks" / "gpu" / "run.sh"
PARTS = {
    "uniattn", "two_phase", "depth_attention", "training", "diagnosis", "serving", "stored_prompts", "resformer",
    "equation7", "attnres", "depth",
}  # fmt: skip


@pytest.mark.slow
def test_the_dry_run_writes_every_part_within_five_minutes(tmp_path):
    (tmp_path / "vl_convert.py").write_text("raise ImportError('nothing may be drawn')\n")
    paths = os.pathsep.join(filter(None, (str(tmp_path), os.environ.get("PYTHONPATH"))))
    environment = os.environ | {"PYTHON": sys.executable, "PYTHONPATH": paths}
    started = time.monotonic()
    done = subprocess.run(
        ["bash", str(SCRIPT), str(tmp_path / "out"), "--dry-run"], env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout
    assert time.monotonic() - started < 300
    records = {file.stem: json.loads(file.read_text()) for file in (tmp_path / "out").iterdir()}
    assert records.keys() == PARTS
    assert all(record["rows"] for record in records.values())
    assert all("error" not in row for row in records["training"]["rows"].values())
    assert done.stdout.count("\n## ") == len(PARTS)
