"""The section on cache sizes of docs/evidence/README.md and its JSON say what the plan says today."""

import json
import sys
from pathlib import Path

import pytest
import transformers

from crosslayer.core.transformers_versions import CACHE

BENCHMARKS = Path(__file__).parent.parent / "benchmarks"
pytestmark = pytest.mark.skipif(CACHE != "cache", reason="default configs are those of the newest supported version")


@pytest.fixture
def cache_sizes(monkeypatch):
    monkeypatch.syspath_prepend(BENCHMARKS)
    import cache_sizes

    yield cache_sizes
    del sys.modules["cache_sizes"]


def test_the_table_of_shipped_models_is_what_plan_says(cache_sizes):
    rows = [cache_sizes.row_of(model_type, name) for model_type, name in cache_sizes.SHIPPED.items()]
    record = json.loads((cache_sizes.RESULTS / "cache_sizes.json").read_text())
    assert record["models"] == json.loads(json.dumps(rows))
    (written,) = cache_sizes.SECTION.findall(cache_sizes.PAGE.read_text())
    measured, today = f"transformers {record['transformers']}.", f"transformers {transformers.__version__}."
    assert written.replace(measured, today) == cache_sizes.section(rows, cache_sizes.refusals())


def test_refusals_of_the_table_are_those_that_are_tested(cache_sizes):
    from tests.wiring.test_every_decoder import REFUSED

    listed = {model_type for types in cache_sizes.refusals().values() for model_type in types}
    assert listed <= set(REFUSED)
