"""Progress of a long computation, for people: a bar on a terminal, plain lines elsewhere; always on stderr."""

import sys
import time

QUIET = 5  # seconds between two lines


def say(text: str) -> None:
    """Print one line on stderr."""
    print(text, file=sys.stderr, flush=True)


class Progress:
    """Progress on stderr: a bar with the time that is left on a terminal, plain lines otherwise."""

    def __init__(self, what: str, total: int):
        self.what, self.total, self.started, self.bar = what, total, time.monotonic(), None
        self.said = self.started

    def __enter__(self) -> "Progress":
        if sys.stderr.isatty():
            from rich.console import Console
            from rich.progress import Progress as Bar

            self.bar = Bar(console=Console(stderr=True))
            self.bar.start()
            self.task = self.bar.add_task(self.what, total=self.total)
        return self

    def __exit__(self, *_) -> None:
        if self.bar is not None:
            self.bar.stop()

    def step(self, done: int, total: int) -> None:
        """Show how much is done."""
        if self.bar is not None:
            self.bar.update(self.task, completed=done, total=total)
            return
        now = time.monotonic()
        if done == 0:
            say(f"{self.what}: 0 of {total}")
            return
        if done < total and now - self.said < QUIET:
            return
        self.said = now
        left = (time.monotonic() - self.started) / done * (total - done)
        say(f"{self.what}: {done} of {total}, about {left:.0f} s left")
