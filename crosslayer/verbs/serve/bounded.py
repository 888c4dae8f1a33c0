"""Runs a server that ends soon after it is told to: `python bounded.py SECONDS WORD…` runs `python WORD…`.

Ctrl-C, SIGTERM and SIGHUP are passed on to its processes, which are a session of their own. A server that has not ended
SECONDS later, or at a second signal, is killed with its processes: vLLM can wait for ever for the end of a stream that
nothing feeds any more. It is run as a file, so that nothing heavy lies in memory beside the server.
"""

import contextlib
import os
import signal
import subprocess
import sys
import time
from types import FrameType

import psutil

KILLED = "crosslayer: the server did not end by itself and was killed; streams that ran are cut off\n"
GLANCE = 0.2  # seconds between two looks at the clock


def run(seconds: float, words: list[str]) -> int:
    """Run a server until it ends, and return its exit status."""
    server = subprocess.Popen([sys.executable, *words], start_new_session=True)  # else Ctrl-C would reach it twice
    told: list[float] = []  # when the signals came

    def tell(number: int, frame: FrameType | None) -> None:
        if not told and server.returncode is None:
            os.killpg(server.pid, number)  # to all its processes, as a terminal does
        told.append(time.monotonic())

    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is not signal.SIG_IGN:  # as under nohup
            signal.signal(number, tell)
    while True:
        with contextlib.suppress(subprocess.TimeoutExpired):
            status = server.wait(GLANCE)
            return status if status >= 0 else 128 - status
        if len(told) > 1 or told and time.monotonic() - told[0] >= seconds:
            os.write(2, KILLED.encode())
            _kill(server.pid)
            server.wait()


def _kill(server: int) -> None:
    with contextlib.suppress(psutil.NoSuchProcess, ProcessLookupError):  # they may be ending
        for process in psutil.Process(server).children(recursive=True):
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        os.killpg(server, signal.SIGKILL)


if __name__ == "__main__":
    sys.exit(run(float(sys.argv[1]), sys.argv[2:]))
