"""How a command starts and is interrupted: at once, in one line, whatever a library does with the exception."""

import contextlib
import io
import os
import platform
import signal
import subprocess
import sys
import time
from pathlib import Path
from unittest import mock

import pytest

from crosslayer import _start, cli
from crosslayer._start import BARS, INTERRUPT_LINE, Interrupts, hide_bars
from crosslayer.output import progress

ROOT = Path(__file__).parent.parent.parent


class Ended(BaseException):
    """Stands for the end of the process."""


@pytest.fixture
def interrupts(monkeypatch):
    """The command line's signal handlers, with signals that are really sent; everything is restored."""
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    monkeypatch.setattr(_start, "PATIENCE", 0.05)
    monkeypatch.setattr(_start.os, "_exit", mock.Mock(side_effect=Ended))
    watched = Interrupts()
    watched.watch()
    monkeypatch.setattr(cli, "interrupts", watched)
    yield watched
    for number, handler in before.items():
        signal.signal(number, handler)


def heed() -> None:
    """Heed Ctrl-C, also where the tests run in the background of a shell."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def heeding(words) -> subprocess.Popen:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(words, stderr=subprocess.PIPE, text=True, env=environment, preexec_fn=heed)


def press() -> None:
    signal.raise_signal(signal.SIGINT)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_while_nothing_exists_the_process_just_ends(interrupts, number):
    with pytest.raises(Ended):
        signal.raise_signal(number)


def test_later_it_is_an_exception_and_a_press_after_a_while_raises_it_again(interrupts):
    interrupts.at_once = False
    for _ in range(3):  # a library may swallow it
        with pytest.raises(KeyboardInterrupt):
            press()
        press()  # at once: changes nothing
        time.sleep(0.06)


def test_kill_is_an_exception_too(interrupts):
    interrupts.at_once = False
    with pytest.raises(SystemExit) as stop:
        signal.raise_signal(signal.SIGTERM)
    assert stop.value.code == 143


def test_more_presses_do_not_disturb_the_end(interrupts):
    interrupts.at_once = False
    with pytest.raises(KeyboardInterrupt):
        press()
    interrupts.caught()
    time.sleep(0.06)
    press()


def test_an_interrupt_that_a_library_turned_into_another_error_is_one(interrupts, monkeypatch, capsys):
    interrupts.at_once = False

    def turn(**_):
        try:
            press()
        except KeyboardInterrupt:
            raise ImportError("cannot import name 'Tensor'") from None

    monkeypatch.setattr(cli, "app", turn)
    with pytest.raises(SystemExit) as stop:
        cli.main()
    assert stop.value.code == 130 and capsys.readouterr().err == f"{INTERRUPT_LINE}\n"


def test_an_error_long_after_a_swallowed_signal_is_reported(interrupts, monkeypatch, capsys):
    interrupts.at_once = False

    def swallow(**_):
        with contextlib.suppress(SystemExit):
            signal.raise_signal(signal.SIGTERM)
        time.sleep(0.06)
        raise ValueError("the file is empty")

    monkeypatch.setattr(cli, "app", swallow)
    with pytest.raises(SystemExit) as stop:
        cli.main()
    assert stop.value.code == 2 and "is empty" in capsys.readouterr().err


def test_a_process_that_ignores_signals_goes_on_doing_so():
    before = {number: signal.signal(number, signal.SIG_IGN) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        Interrupts().watch()
        assert {signal.getsignal(number) for number in before} == {signal.SIG_IGN}
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def test_an_interrupt_while_libraries_are_imported_is_one_line(tmp_path):
    words = [sys.executable, "-m", "crosslayer", "diagnose", "smollm2", "--out", str(tmp_path / "out")]
    process = heeding(words)
    assert process.stderr is not None
    with process.stderr:
        lines = iter(process.stderr.readline, "importing torch and transformers\n")
        assert all(line.startswith("the results go to ") for line in lines)
        process.send_signal(signal.SIGINT)
        assert process.stderr.read() == f"{INTERRUPT_LINE}\n"
    assert process.wait(timeout=60) == 130 and not list(tmp_path.iterdir())


@pytest.mark.slow
def test_an_interrupt_at_any_moment_is_one_line(tmp_path):
    words = [sys.executable, "-m", "crosslayer", "diagnose", "smollm2", "--sequences", "20"]
    words += ["--out", str(tmp_path / "out")]
    for moment in (0.3, 0.5, 1, 1.5, 2, 3, 4, 5, 6, 7, 8, 10):
        process = heeding(words)
        time.sleep(moment)
        process.send_signal(signal.SIGINT)
        error = process.communicate(timeout=60)[1]
        assert process.returncode == 130 and error.endswith(f"{INTERRUPT_LINE}\n"), (moment, error)
        assert "Traceback" not in error and error.count("interrupted") == 1, (moment, error)
        assert not list(tmp_path.iterdir()), moment


def test_bars_of_other_libraries_are_switched_off_where_stderr_is_no_terminal(monkeypatch):
    terminal = io.StringIO()
    monkeypatch.setattr(terminal, "isatty", lambda: True)
    monkeypatch.setattr(sys, "stderr", terminal)
    for name in BARS:
        monkeypatch.delenv(name, raising=False)
    hide_bars()
    assert not set(BARS) & set(os.environ)
    monkeypatch.setattr(sys, "stderr", io.StringIO())
    monkeypatch.setenv(BARS[0], "0")  # what the user decided stays
    hide_bars()
    assert [os.environ[name] for name in BARS] == ["0", "1", "1"]
    for name in BARS:
        monkeypatch.delenv(name)


def test_no_bar_is_drawn_in_a_log():
    code = (
        "import sys; sys.argv = ['crosslayer']; import crosslayer\n"
        "import datasets, tqdm, tqdm.auto, huggingface_hub.utils as hub\n"
        "datasets.Dataset.from_dict({'x': [1, 2]}).map(lambda row: row, load_from_cache_file=False)\n"
        "for bar in (tqdm.tqdm, tqdm.auto.tqdm, hub.tqdm): list(bar(range(3)))\n"
    )
    environment = {name: value for name, value in os.environ.items() if name not in BARS} | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment)
    assert done.returncode == 0 and done.stderr == ""


BLOCKS = """
import resource, sys
def faults():
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt
if sys.argv[1] == "kept":
    sys.argv = ["crosslayer"]  # the command, which imports no more than it needs
    from crosslayer._start import keep_memory
    keep_memory()
before = faults()
for _ in range(5):
    b"x" * (64 << 20)
print(faults() - before)
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="other C libraries have no such setting")
def test_freed_blocks_are_used_again():
    faults = {}
    for way in ("kept", "mapped"):
        words = [sys.executable, "-c", BLOCKS, way]
        faults[way] = int(subprocess.run(words, capture_output=True, text=True, check=True, cwd=ROOT).stdout)
    assert faults["kept"] < faults["mapped"] / 4


def test_a_signal_that_a_library_swallowed_is_raised_again_at_the_next_step(interrupts, monkeypatch):
    """fit-codec once went on for 157 s."""
    monkeypatch.setattr(progress, "interrupts", interrupts)
    interrupts.at_once = False
    with progress.Progress("work", 5) as bar:
        with contextlib.suppress(KeyboardInterrupt):
            press()
        bar.step(1, 5)  # still within the time that cleaning up may take
        time.sleep(0.06)
        with pytest.raises(KeyboardInterrupt):
            bar.step(2, 5)
    interrupts.caught()
    time.sleep(0.06)
    with progress.Progress("the next command of a process", 5) as bar:
        bar.step(1, 5)
