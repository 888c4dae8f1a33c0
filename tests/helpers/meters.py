"""A meter for tests: it keeps what it is told."""

from contextlib import contextmanager


class Recorder:
    """Called like a meter; `works` holds what was done and in how many steps, `steps` every step of all of it."""

    def __init__(self):
        self.works, self.steps = [], []

    @contextmanager
    def __call__(self, what, total):
        self.works.append((what, total))
        yield self

    def step(self, done, total, doing=""):
        self.steps.append((done, total, doing))
