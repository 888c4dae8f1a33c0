"""Folders appear whole, one process at a time writes them, and what a killed one leaves is mended by the next."""

import os
import re
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch
from safetensors import SafetensorError
from safetensors.torch import save_file

from crosslayer.environment import environment
from crosslayer.output.folder import check_target, exclusive, locked_folder, release_targets, whole_folder
from crosslayer.verbs.verify.result import Verification
from tests.cli.test_cli import run

PROGRAM = """
import os, signal, sys, time
from pathlib import Path
sys.argv[0] = "crosslayer"  # as a command starts: without torch
from crosslayer import _start
from crosslayer.output import folder
out = Path(sys.argv[1])
"""


def child(code, *words):
    """Start a program that knows `folder` and `out`, its first word."""
    program = PROGRAM + textwrap.dedent(code)
    return subprocess.Popen(
        [sys.executable, "-c", program, *map(str, words)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def finish(process):
    out, err = process.communicate(timeout=60)
    return process.returncode, out, err


def write(out, text, force=False):
    with whole_folder(out, force) as partial:
        (partial / "record.json").write_text(f'{{"schema": "crosslayer/test/1", "text": "{text}"}}')


def read(out):
    return re.search('"text": "(.*)"', (out / "record.json").read_text())[1]


@pytest.fixture
def out(tmp_path):
    """A folder of ours with the text "old"."""
    write(tmp_path / "out", "old")
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    return tmp_path / "out"


def modes(folder):
    return {path.stat().st_mode & 0o777 for path in folder.rglob("*") if path.is_file()}


def test_every_file_gets_the_mode_that_the_umask_gives(tmp_path):
    """Also weights: safetensors writes 0600, which a server of another user cannot read."""
    for umask, mode in ((0o022, 0o644), (0o027, 0o640), (0o002, 0o664)):
        before = os.umask(umask)
        try:
            with whole_folder(tmp_path / "out", force=True) as partial:
                (partial / "figures").mkdir()
                save_file({"a": torch.zeros(2)}, partial / "figures" / "weights.svg")  # a name that a result has
                (partial / "record.json").write_text('{"schema": "crosslayer/test/1"}')
        finally:
            os.umask(before)
        assert modes(tmp_path / "out") == {mode}


KILLED_AT = {  # name of the call that dies: which one of them, before or after it
    "before it is put aside": ("rename", 1, "before"),
    "once it is put aside": ("rename", 1, "after"),
    "once the new one stands": ("rename", 2, "after"),
    "while it is written": ("mkdir", 1, "after"),
    "before the lock goes": ("unlink", 1, "before"),
}


@pytest.mark.parametrize("moment", KILLED_AT)
def test_whenever_it_is_killed_the_folder_is_old_or_new(out, moment):
    name, count, side = KILLED_AT[moment]
    process = child(
        """
        name, number, side = sys.argv[2], int(sys.argv[3]), sys.argv[4]
        original, calls = getattr(Path, name), iter(range(9))

        def deadly(self, *words, **more):
            if name == "mkdir" and not self.name.startswith("."):
                return original(self, *words, **more)
            last = next(calls) + 1 == number
            if last and side == "before":
                os.kill(os.getpid(), signal.SIGKILL)
            original(self, *words, **more)
            if last:
                os.kill(os.getpid(), signal.SIGKILL)

        setattr(Path, name, deadly)
        with folder.whole_folder(out, force=True) as partial:
            (partial / "record.json").write_text('{"schema": "crosslayer/test/1", "text": "new"}')
        """,
        out, name, count, side,
    )  # fmt: skip
    assert finish(process)[0] == -signal.SIGKILL and len(list(out.parent.iterdir())) > 1
    with exclusive(out):
        pass
    assert [path.name for path in out.parent.iterdir()] == ["out"]
    assert read(out) == ("new" if moment in ("once the new one stands", "before the lock goes") else "old")
    write(out, "next", force=True)
    assert read(out) == "next" and [path.name for path in out.parent.iterdir()] == ["out"]


def test_a_failing_second_rename_gives_the_old_folder_back(monkeypatch, out):
    original = Path.rename

    def rename(self, other):
        if self.name.endswith("-partial"):
            raise OSError("out of luck")
        return original(self, other)

    monkeypatch.setattr(Path, "rename", rename)
    with pytest.raises(OSError, match="out of luck"):
        write(out, "new", force=True)
    assert read(out) == "old" and [path.name for path in out.parent.iterdir()] == ["out"]


@pytest.mark.parametrize(
    "error",
    [
        OSError(28, "No space left on device"),
        SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)"),
        Exception("No space left on device (os error 28)"),  # of tokenizers
        RuntimeError("[enforce fail at inline_container.cc:672] . unexpected pos 64 vs 0"),  # of torch
    ],
    ids=lambda error: type(error).__name__,
)
@pytest.mark.parametrize("writer", [whole_folder, locked_folder])
def test_a_full_disk_is_named_whoever_finds_it(tmp_path, writer, error):
    said = "the disk may be full" if "inline" in str(error) else "No space left on device"
    with pytest.raises(OSError, match=said) as raised, writer(tmp_path / "results"):
        raise error
    assert raised.value.errno == 28 and raised.value.filename == str(tmp_path / "results")
    assert not list(tmp_path.iterdir())
    with pytest.raises(KeyError), writer(tmp_path / "results"):
        raise KeyError("other errors stay as they are")
    with pytest.raises(RuntimeError, match="PytorchStreamReader"), writer(tmp_path / "results"):
        raise RuntimeError("[enforce fail at inline_container.cc:159] PytorchStreamReader failed reading zip archive")
    with pytest.raises(RuntimeError, match="the checkpoint"), writer(tmp_path / "results"):
        raise RuntimeError("the checkpoint of step 3: No space left on device") from error  # has a sentence already


def test_a_full_shared_memory_is_not_the_folders_disk(tmp_path):
    """Processes that read data hand tensors over in /dev/shm."""
    error = RuntimeError("unable to write to file </torch_812_95_0>: No space left on device (28)")
    with pytest.raises(OSError, match="space left") as raised, whole_folder(tmp_path / "results"):
        raise error
    assert raised.value.filename == "/dev/shm"


def test_two_processes_do_not_write_one_folder(out):
    holder = child(
        """
        folder.check_target(out, force=True)
        print("holding", flush=True)
        time.sleep(60)
        """,
        out,
    )
    assert holder.stdout.readline() == "holding\n"
    try:
        for call in (lambda: check_target(out, True), lambda: write(out, "mine", force=True)):
            with pytest.raises(ValueError, match=rf"'out' is being written .* process \(process {holder.pid}\)"):
                call()
        assert read(out) == "old"
    finally:
        holder.kill()
        finish(holder)
    write(out, "mine", force=True)  # the lock of the dead is none
    assert read(out) == "mine" and [path.name for path in out.parent.iterdir()] == ["out"]


def test_what_is_kept_for_a_run_is_free_after_it(tmp_path):
    check_target(tmp_path / "deep" / "out", False)
    check_target(tmp_path / "deep" / "out", False)
    write(tmp_path / "deep" / "out", "new")
    assert len(list((tmp_path / "deep").iterdir())) == 2
    release_targets()
    assert [path.name for path in (tmp_path / "deep").iterdir()] == ["out"]
    check_target(tmp_path / "other" / "out", False)
    release_targets()
    assert [path.name for path in tmp_path.iterdir()] == ["deep"]  # folders made for a lock go with it


@pytest.mark.parametrize("fails", [False, True])
def test_every_verb_lets_go(monkeypatch, tmp_path, fails):
    def verified(*_, **__):
        assert len(list(tmp_path.iterdir())) == 1  # the lock
        if fails:
            raise ValueError("no")
        return Verification(model="smollm2", checks=(), seconds=0.0, environment=environment())

    monkeypatch.setattr("crosslayer.verbs.verify.run.verify", verified)
    assert run(monkeypatch, "verify", "smollm2", "--out", tmp_path / "out") == (2 if fails else 0)
    assert [path.name for path in tmp_path.iterdir()] == ([] if fails else ["out"])


def test_two_threads_do_not_write_one_folder(tmp_path):
    with whole_folder(tmp_path / "out"), pytest.raises(ValueError, match="being written"):
        write(tmp_path / "out", "mine")


def test_sigterm_cleans_up(tmp_path):
    process = child(
        """
        _start.interrupts.at_once = False  # as once a verb is loaded
        with folder.whole_folder(out) as partial:
            print("writing", flush=True)
            time.sleep(60)
        """,
        tmp_path / "deep" / "out",
    )
    assert process.stdout.readline() == "writing\n"
    process.terminate()
    assert finish(process) == (143, "", "") and not list(tmp_path.iterdir())


def test_a_file_system_without_locks_will_do(monkeypatch, tmp_path):
    import errno
    import fcntl

    def none(*_):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", none)
    write(tmp_path / "out", "new")
    assert read(tmp_path / "out") == "new"


def test_who_waits_for_the_lock_comes_next(tmp_path):
    processes = [
        child(
            """
            with folder.exclusive(out, wait=True):
                if not out.exists():
                    with folder.staged_folder(out) as partial:
                        time.sleep(0.3)
                        print("filled")
            """,
            tmp_path / "out",
        )
        for _ in range(3)
    ]
    assert sorted(finish(process) for process in processes) == [(0, "", ""), (0, "", ""), (0, "filled\n", "")]
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_the_root_is_no_folder_of_a_result():
    for call in (lambda: check_target(Path("/"), True), lambda: locked_folder(Path("/")).__enter__()):
        with pytest.raises(ValueError, match="output folder"):
            call()


def test_what_cannot_be_a_folder_is_one_line(tmp_path):
    (tmp_path / "file").write_text("x")
    (tmp_path / "thesis").mkdir()
    (tmp_path / "thesis" / "thesis.tex").write_text("years of work")
    names = {
        "file": "is a file",
        "file/out": "cannot be written",
        "thesis": "has files not written by crosslayer",
        "x" * 300: "cannot be written",
        os.fsdecode(b"caf\xe9"): r"must be valid UTF-8, got 'caf\\udce9'",
    }
    for name, message in names.items():
        with pytest.raises(ValueError, match=re.escape(message).replace(r"\\\\", r"\\")) as error:
            check_target(tmp_path / name, True)
        str(error.value).encode()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "thesis"]


@pytest.mark.skipif(not Path("/proc/self").exists(), reason="needs a folder in which nobody can make files")
@pytest.mark.parametrize("out", ["/proc/out", "/proc/none/out"])
def test_a_folder_that_cannot_be_made_is_not_said_to_be_in_use(out):
    with pytest.raises(ValueError, match="written: "), locked_folder(Path(out)):
        pass
