"""A server that is told to end ends, whatever it waits for; with stand-ins for it."""

import os
import signal
import subprocess
import sys
import textwrap
import time

import psutil
import pytest

from crosslayer.verbs.serve import bounded

STUBBORN = """
    import signal, subprocess, sys, time
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    print(child.pid, flush=True)
    time.sleep(600)
"""
ORDERLY = """
    import signal, sys, time
    signal.signal(signal.SIGINT, lambda *_: sys.exit(7))
    print(0, flush=True)
    time.sleep(600)
"""


def hears_ctrl_c():
    """A shell starts what runs in its background with SIGINT ignored, and processes inherit that."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def started(program, seconds):
    words = [sys.executable, bounded.__file__, str(seconds), "-c", textwrap.dedent(program)]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    process = subprocess.Popen(words, text=True, preexec_fn=hears_ctrl_c, **pipes)
    return process, int(process.stdout.readline())


@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 137), (signal.SIGTERM, 137)])
def test_a_server_that_does_not_end_is_killed_with_its_processes(number, status):
    process, child = started(STUBBORN, 0.5)
    process.send_signal(number)
    _, err = process.communicate(timeout=30)
    assert process.returncode == status and "was killed" in err
    assert not psutil.pid_exists(child) or psutil.Process(child).status() == psutil.STATUS_ZOMBIE


def test_a_second_signal_does_not_wait():
    process, _ = started(STUBBORN, 600)
    process.send_signal(signal.SIGINT)
    time.sleep(0.3)
    process.send_signal(signal.SIGINT)
    assert "was killed" in process.communicate(timeout=30)[1]


def test_a_server_that_ends_keeps_its_exit_status():
    process, _ = started(ORDERLY, 600)
    process.send_signal(signal.SIGINT)
    assert process.communicate(timeout=30)[1] == "" and process.returncode == 7


def test_a_server_and_its_processes_get_one_signal_each(tmp_path):
    """A terminal's Ctrl-C reaches a whole group of processes, and vLLM drops its requests at the second."""
    server = f"""
        import os, signal, time
        os.fork()
        def hear(*_):
            with open({str(tmp_path / "heard")!r}, "a") as file:
                file.write(f"{{os.getpid()}} ")
        signal.signal(signal.SIGINT, hear)
        print(0, flush=True)
        for _ in range(20):
            time.sleep(0.05)
    """
    words = [sys.executable, bounded.__file__, "600", "-c", textwrap.dedent(server)]
    process = subprocess.Popen(words, stdout=subprocess.PIPE, start_new_session=True, preexec_fn=hears_ctrl_c)
    for _ in range(2):
        process.stdout.readline()
    os.killpg(process.pid, signal.SIGINT)
    process.communicate(timeout=30)
    heard = (tmp_path / "heard").read_text().split()
    assert len(heard) == len(set(heard)) == 2
