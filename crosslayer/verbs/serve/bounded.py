"""Runs a server with a bounded shutdown time: `python bounded.py SECONDS ARGUMENT…` runs `python ARGUMENT…`.

Ctrl-C, SIGTERM and SIGHUP are forwarded to the server's processes, which form a session of their own. A server still
running after SECONDS, or at a second signal, is killed with its processes: vLLM can wait forever for a stream that no
process feeds any more. This file runs as a script and imports little, to use little memory next to the server.
"""

import contextlib
import os
import signal
import subprocess
import sys
import time
from types import FrameType

import psutil

KILLED = "crosslayer: the server did not shut down in time and was killed; running streams are cut off\n"
POLL = 0.2  # seconds between two checks of the clock


def run(seconds: float, arguments: list[str]) -> int:
    """Run a server until it ends, and return its exit status."""
    # Without a session of its own, Ctrl-C would reach the server twice: from the terminal and from here.
    server = subprocess.Popen([sys.executable, *arguments], start_new_session=True)
    signals: list[float] = []  # times of the signals received

    def forward(signum: int, frame: FrameType | None) -> None:
        if not signals and server.returncode is None:
            os.killpg(server.pid, signum)  # to all its processes, as a terminal does
        signals.append(time.monotonic())

    for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(signum) is not signal.SIG_IGN:  # as under nohup
            signal.signal(signum, forward)
    while True:
        with contextlib.suppress(subprocess.TimeoutExpired):
            status = server.wait(POLL)
            return status if status >= 0 else 128 - status  # by a signal, as shells write it
        if len(signals) > 1 or signals and time.monotonic() - signals[0] >= seconds:
            os.write(2, KILLED.encode())
            # Children are killed by their ids, since one with a session of its own is not in the server's group.
            with contextlib.suppress(psutil.NoSuchProcess, ProcessLookupError):  # they may be ending
                for process in psutil.Process(server.pid).children(recursive=True):
                    with contextlib.suppress(psutil.NoSuchProcess):
                        process.kill()
                os.killpg(server.pid, signal.SIGKILL)
            server.wait()


if __name__ == "__main__":
    sys.exit(run(float(sys.argv[1]), sys.argv[2:]))
