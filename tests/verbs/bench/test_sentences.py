"""What a bench says: briefly, and losses as plainly as gains."""

import copy
import itertools

import pytest

from crosslayer.cli.printing import print_table
from crosslayer.testing.tiny import build, config_of
from crosslayer.verbs.bench.record import MEASURES
from crosslayer.verbs.bench.result import Benchmark
from crosslayer.verbs.bench.sentences import sentences
from tests.helpers.benches import UNIATTN, short


@pytest.fixture(scope="module")
def six():
    """Six settings with known times, of five pairs."""
    record = short(build(config_of(UNIATTN)), build(config_of([])), 12, new_tokens=3, repeats=3).record()
    rows = []
    for context, batch in itertools.product((512, 2048, 8192), (1, 4)):
        row = copy.deepcopy({**record["rows"][0], "context": context, "batch": batch})
        for measure in MEASURES:
            row[measure]["change"] |= {"value": 1.25, "low": 1.2, "high": 1.3}
        row["tpot_static"]["change"] |= {"value": 0.9 + batch / 100, "low": 0.8, "high": 1.1}
        rows.append(row)
    rows[0]["ttft"]["change"] |= {"value": 0.5, "low": 0.4, "high": 0.6}
    for row, measure in itertools.product(rows, MEASURES):
        row[measure]["baseline"]["quartiles"] = row[measure]["candidate"]["quartiles"] = [1.0, 1.1]
    rows[1]["ttft"]["baseline"]["quartiles"] = [1.0, 1.7]
    settings = {**record["settings"], "repeats": 5}
    return Benchmark.from_record({**record, "rows": rows, "settings": settings})


def test_losses_are_said_as_plainly_as_gains_and_briefly(six):
    written = sentences(six)
    first, dynamic, static = written[1:4]
    faster, slower = first.split("; ")
    assert "faster" in faster and "512 × 1 (0.500x" in faster
    assert "slower" in slower and "512 × 4, 2048 × 1, 2048 × 4, 8192 × 1, 8192 × 4 (1.250x" in slower
    assert dynamic.startswith("Time per token, dynamic cache: slower in every configuration") and "(1.250x" in dynamic
    assert "no difference seen in every configuration" in static and "(0.910x to 0.940x" in static
    (noise,) = [sentence for sentence in written if "70%" in sentence]
    assert "time to first token at 512 × 4" in noise and len(written) <= 8
    calm = six.record()
    calm["rows"][1]["ttft"]["baseline"]["quartiles"] = [1.0, 1.2]
    assert len(sentences(Benchmark.from_record(calm))) == len(written) - 1
    ranges = [panel.y_range for panel in six.layout().panels]
    assert ranges[::2] == [ranges[0]] * 2 and ranges[1::2] == [ranges[1]] * 2


@pytest.mark.parametrize("pairs", [1, 2, 4])
def test_too_few_pairs_have_one_name_everywhere(six, pairs):
    """The interval is named in sentences, the table and the page, and only if there is one."""
    rows = six.record()["rows"]
    for row, measure in itertools.product(rows, MEASURES):
        row[measure]["change"] |= {"low": None, "high": None, "n": pairs}
    settings = {**six.record()["settings"], "repeats": pairs}
    few = Benchmark.from_record({**six.record(), "rows": rows, "settings": settings})
    (_, head, cells), *_ = few.tables()
    text = " ".join([*few.sentences(), *head, *(cell for row in cells for cell in row), str(few.layout().cards)])
    assert "faster" not in text and "slower" not in text and "too few pairs" in text
    assert "% interval" not in text and text.count("no interval") >= 6


def test_the_printed_table_has_a_row_a_setting_and_cuts_nothing(six, capsys):
    print_table(*six.tables()[0])
    lines = capsys.readouterr().out.splitlines()
    assert "median of 5 pairs of runs" in lines[0] and not any("…" in line for line in lines)
    assert sum(line.count("(ratio, 93.8% interval)") for line in lines) == 3
    assert sum("(1.200-1.300)" in line for line in lines) == 6 and len({len(line) for line in lines[1:]}) == 1
    starts = [line.split()[:2] for line in lines if "83.3%" in line]
    assert starts == [[str(c), str(b)] for c in (512, 2048, 8192) for b in (1, 4)]
