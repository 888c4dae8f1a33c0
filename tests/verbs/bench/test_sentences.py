"""What a bench says: briefly, and losses as plainly as gains."""

import copy
import itertools

import pytest

from crosslayer.cli.command import print_table
from crosslayer.judge.clock import TIMES
from crosslayer.testing.tiny import build, config_of
from crosslayer.verbs.bench.result import Benchmark
from tests.helpers.benches import UNIATTN, short


@pytest.fixture(scope="module")
def six():
    """Six configurations with known times, of five pairs."""
    record = short(build(config_of(UNIATTN)), build(config_of([])), 12, new_tokens=3, repeats=3).record()
    rows = []
    for context, batch in itertools.product((512, 2048, 8192), (1, 4)):
        for row in copy.deepcopy(record["rows"]):
            row["scope"] = f"context {context}, batch {batch}, sdpa"
            if row["quantity"] in TIMES:
                times = {"value": 1.25, "low": 1.2, "high": 1.3}
                if row["quantity"] == "tpot_static":
                    times = {"value": 0.9 + batch / 100, "low": 0.8, "high": 1.1}
                row["change"] |= times | {"n": 5}
                row["details"]["spread"] = 0.1
            rows.append(row)
    times = [row for row in rows if row["quantity"] == "ttft"]
    times[0]["change"] |= {"value": 0.5, "low": 0.4, "high": 0.6}
    times[1]["details"]["spread"] = 0.7
    settings = {**record["settings"], "repeats": 5}
    return Benchmark.from_record({**record, "rows": rows, "settings": settings})


def test_losses_are_said_as_plainly_as_gains_and_briefly(six):
    written = six.sentences()
    first, dynamic, static = written[1:4]
    faster, slower = first.split("Slower at ")
    assert "context 512, batch 1" in faster
    assert slower.count("1.250x (1.200-1.300)") == 5 and "context 8192, batch 4" in slower
    assert dynamic.startswith("Time per token, dynamic cache. Slower") and dynamic.count("1.250x") == 6
    assert "difference seen" in static and "0.910x" in static and "0.940x" in static
    (noise,) = [sentence for sentence in written if "70%" in sentence]
    assert "context 512, batch 4" in noise and len(written) <= 8
    calm = six.record()
    calm["rows"] = [row | {"details": row["details"] | {"spread": 0.2}} for row in calm["rows"]]
    assert len(Benchmark.from_record(calm).sentences()) == len(written) - 1
    panels = six.layout().panels  # of bytes and of three times
    assert [len(set(panel.dots.names)) for panel in panels] == [6] * 4


@pytest.mark.parametrize("pairs", [1, 2, 4])
def test_too_few_pairs_have_one_name_everywhere(six, pairs):
    """The interval is named in sentences, the table and the page, and only if there is one."""
    rows = six.record()["rows"]
    for row in rows:
        if row["quantity"] in TIMES:
            row["change"] |= {"low": None, "high": None, "n": pairs}
    settings = {**six.record()["settings"], "repeats": pairs}
    few = Benchmark.from_record({**six.record(), "rows": rows, "settings": settings})
    (title, head, cells), *_ = few.tables()
    text = " ".join([title, *few.sentences(), *head, *(cell for row in cells for cell in row), str(few.layout().cards)])
    assert "faster" not in text and "slower" not in text and "few pairs" in text
    assert "% interval" not in text and "no interval" in text


def test_the_printed_table_has_a_row_a_setting_and_cuts_nothing(six, capsys):
    print_table(*six.tables()[0])
    lines = capsys.readouterr().out.splitlines()
    starts = [line.split()[:4] for line in lines if "83.3%" in line]
    assert starts == [["context", f"{c},", "batch", f"{b},"] for c in (512, 2048, 8192) for b in (1, 4)]
