"""A reader that goes away, as in `crosslayer … | head -1`, is no error: the work is done, and the end is quiet."""

import os
import subprocess
import sys

import pytest

from crosslayer.cli.command import print_table
from crosslayer.output.page import Mark
from crosslayer.output.progress import print_to

PROGRAM = [sys.executable, "-c", "import sys; sys.argv[0] = 'crosslayer'; from crosslayer.cli import main; main()"]


@pytest.fixture
def unread():
    """A pipe that nobody reads."""
    reader, writer = os.pipe()
    os.close(reader)
    yield writer
    os.close(writer)


@pytest.mark.parametrize("words", [["info"], ["methods", "--help"], ["--help"], ["--version"]], ids=str)
def test_an_unread_result_ends_quietly(unread, words):
    ran = subprocess.run([*PROGRAM, *words], stdout=unread, stderr=subprocess.PIPE, text=True)
    expected = "importing torch and transformers\n" if words == ["info"] else ""
    assert (ran.returncode, ran.stderr) == (0, expected)


@pytest.mark.slow  # a process of its own
def test_unread_messages_change_nothing(unread):
    ran = subprocess.run([*PROGRAM, "info"], stdout=subprocess.PIPE, stderr=unread, text=True)
    assert ran.returncode == 0 and ran.stdout.endswith("}\n")
    assert subprocess.run([*PROGRAM, "no-such-verb"], stderr=unread).returncode == 2


NUMBERS = {"stdin": 0, "stdout": 1, "stderr": 2}


def closing(names, *words):
    """Run the command line without some of its streams, as `2>&-` does."""

    def close():
        for name in names:
            os.close(NUMBERS[name])

    streams = {name: subprocess.PIPE for name in ("stdout", "stderr") if name not in names}
    return subprocess.run([*PROGRAM, *words], preexec_fn=close, text=True, **streams)


ALL = ["stdin", "stdout", "stderr"]


@pytest.mark.parametrize(
    "names",
    [pytest.param(names, marks=pytest.mark.slow) for names in (ALL, *([name] for name in ALL[1:]))],
    ids=" and ".join,
)
def test_a_stream_that_is_closed_changes_nothing_else(names):
    ran = closing(names, "info")
    assert ran.returncode == 0 and (ran.stdout is None or ran.stdout.endswith("}\n"))
    for words in (["--version"], ["--help"], ["methods", "--help"]):
        assert closing(names, *words).returncode == 0


@pytest.mark.slow
@pytest.mark.parametrize("names", [ALL, *([name] for name in ALL[1:])], ids=" and ".join)
def test_an_error_without_its_streams_writes_nothing(names, tmp_path):
    config = tmp_path / "config.json"
    config.write_text("{}")
    ran = closing(names, "plan", str(config), "--out", str(tmp_path / "out"))
    assert ran.returncode == 2 and (ran.stderr is None or "crosslayer: error: " in ran.stderr)
    assert config.read_text() == "{}" and [path.name for path in tmp_path.iterdir()] == ["config.json"]


def test_a_result_that_cannot_be_written_is_a_line():
    with open("/dev/full", "w") as full:
        ran = subprocess.run([*PROGRAM, "--version"], stdout=full, stderr=subprocess.PIPE, text=True)
    assert ran.returncode == 2 and ran.stderr.endswith("error: stdout cannot be written: No space left on device\n")
    assert ran.stderr.count("error") == 1


def test_the_work_goes_on_when_nobody_reads_or_nothing_can_be_written(unread):
    with os.fdopen(os.dup(unread), "w") as closed, open("/dev/full", "w") as full:
        for stream in (closed, full):
            for _ in range(3):
                print_to(stream, "a line")
            assert os.path.samestat(os.fstat(stream.fileno()), os.stat(os.devnull))


def test_a_table_is_printed_whole(capsys):
    print_table("title", ["a", "b"], [["[1]", Mark("ü", "pass")], [["x", "y"], ""]])
    lines = capsys.readouterr().out.splitlines()
    assert (
        lines[0] == "title"
        and "[1]" in lines[4]
        and "ü" in lines[4]
        and [line.strip() for line in lines[5:7]] == ["x", "y"]
    )
