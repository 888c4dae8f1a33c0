"""Time that is left: calm, and right as soon as it can be."""

import io
import sys

import pytest

from crosslayer.output import progress
from crosslayer.output.progress import Progress, Remaining


def remaining(steps, total=None):
    """Return what is said to be left after each of these steps, in seconds."""
    clock, left, found = 0.0, Remaining(), []
    for number, seconds in enumerate(steps, 1):
        clock += seconds
        found.append(left.after(number, total or len(steps), clock))
    return found


def test_the_first_step_says_nothing_of_the_others():
    assert remaining([30, 1, 1, 1, 1, 1]) == [None, 4, 3, 2, 1, 0]


def jump(left, steps):
    """Return by how much, at most, what is said to be left departs from what was said before, less the time since."""
    pairs = zip(left[1:-1], left[2:], steps[2:], strict=True)  # steps from the third on
    return max(abs(after - (before - seconds)) for before, after, seconds in pairs)


def test_uneven_steps_do_not_make_it_jump():
    steps = [30, *[1, 1, 40, 2, 1, 1, 35, 8, 2, 50] * 3]  # the checks of a verification, say
    plain = [sum(steps[:done]) / done * (len(steps) - done) for done in range(1, len(steps) + 1)]
    calm = remaining(steps)
    assert jump(calm, steps) < 0.6 * jump(plain, steps)
    truth = [sum(steps[done:]) for done in range(1, len(steps) + 1)]
    assert all(abs(calm[done] - truth[done]) < 0.35 * sum(steps) for done in range(8, len(steps)))


def test_steps_may_begin_late_and_be_counted_in_leaps():
    left = Remaining()
    assert left.after(27, 31, 5.0) is None and left.after(28, 31, 7.0) == 6 and left.after(30, 31, 11.0) == 2


@pytest.fixture
def clock(monkeypatch):
    """A clock that is set by hand."""
    now = [0.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: now[0])
    return now


def test_lines_are_few_and_the_last_says_how_long_it_took(clock, capsys):
    with Progress("working", 4) as bar:
        for done in range(1, 5):
            clock[0] += 4
            bar.step(done, 4)
        bar.step(4, 4)
    assert capsys.readouterr().err.splitlines() == [
        "working: 0 of 4",
        "working: 2 of 4, about 8 s left",
        "working: 4 of 4, 16 s",
    ]


def test_a_terminal_gets_a_bar_with_the_same_words(clock, monkeypatch):
    terminal = io.StringIO()
    monkeypatch.setattr(terminal, "isatty", lambda: True)
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setenv("TERM", "xterm")
    with Progress("working", 4) as bar:
        for done in range(1, 4):
            clock[0] += 4
            bar.step(done, 4)
    assert "3/4" in terminal.getvalue() and "about 4 s left" in terminal.getvalue()


def test_work_whose_length_is_not_known_is_counted(clock, capsys):
    with Progress("reading") as bar:
        for done in range(1, 4):
            clock[0] += 4
            bar.step(1000 * done, 0)
    assert capsys.readouterr().err.splitlines() == ["reading", "reading: 2,000 so far"]
