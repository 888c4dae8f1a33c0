"""A reader that goes away, as in `crosslayer … | head -1`, is no error: the work is done, and the end is quiet."""

import os
import subprocess
import sys

import pytest
from rich.table import Table

from crosslayer.cli.options import print_table
from crosslayer.output.progress import print_to

PROGRAM = [sys.executable, "-c", "import sys; sys.argv[0] = 'crosslayer'; from crosslayer.cli import main; main()"]


@pytest.fixture
def unread():
    """A pipe that nobody reads."""
    reader, writer = os.pipe()
    os.close(reader)
    yield writer
    os.close(writer)


@pytest.mark.parametrize("words", [["methods"], ["methods", "--help"], ["--help"], ["--version"]], ids=str)
def test_an_unread_result_ends_quietly(unread, words):
    ran = subprocess.run([*PROGRAM, *words], stdout=unread, stderr=subprocess.PIPE, text=True)
    expected = "importing torch and transformers\n" if words == ["methods"] else ""
    assert (ran.returncode, ran.stderr) == (0, expected)


def test_unread_messages_change_nothing(unread):
    ran = subprocess.run([*PROGRAM, "methods"], stdout=subprocess.PIPE, stderr=unread, text=True)
    assert ran.returncode == 0 and ran.stdout.endswith("}\n")
    assert subprocess.run([*PROGRAM, "no-such-verb"], stderr=unread).returncode == 2


def test_the_work_goes_on_when_nobody_reads(unread):
    with os.fdopen(os.dup(unread), "w") as stream:
        for _ in range(3):
            print_to(stream, "a line")
        assert os.path.samestat(os.fstat(stream.fileno()), os.stat(os.devnull))


def test_a_table_is_printed_whole(capsys):
    table = Table("a", "b")
    table.add_row("[1]", "ü")
    print_table(table, width=40)
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 5 and "[1]" in lines[3] and "ü" in lines[3]
