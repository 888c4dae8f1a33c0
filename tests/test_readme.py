"""What README.md says of methods is true, and the smallest method of the pages works."""

import importlib
import re
from pathlib import Path

from crosslayer.core.method import Method
from crosslayer.core.methods import merge_plans, method_class, method_names
from crosslayer.testing import CHECKS, config_of
from crosslayer.verbs.serve.caches import not_servable

ROOT = Path(__file__).parent.parent
BLOCK = re.compile(r"```python\n(.*?)```", re.DOTALL)


def test_the_smallest_method_passes_the_contract(tmp_path, monkeypatch):
    method, *_ = BLOCK.findall((ROOT / "docs" / "methods" / "your_own.md").read_text())
    (tmp_path / "one_cache.py").write_text(method)
    monkeypatch.syspath_prepend(tmp_path)
    config = config_of(importlib.import_module("one_cache").OneCache())
    assert config.plan.cached_fraction() == 0.5  # layers 0, 1 and 2 of 6
    for check in CHECKS[:3]:
        check(config)


def test_the_table_of_the_readme_has_every_method_and_its_cache():
    rows = re.findall(
        r"^\| (`\w+`(?:, `\w+`)*) \|[^|]*\| (\d+)% \| (yes|no) \|", (ROOT / "README.md").read_text(), re.M
    )
    cells = {name: (int(share), yes == "yes") for names, share, yes in rows for name in re.findall(r"\w+", names)}
    assert sorted(cells) == method_names(), "README.md's table must have a row for each method"
    for name, (share, pretrained) in cells.items():
        method = method_class(name)
        assert round(100 * merge_plans([method.example(32)], 32).cached_fraction()) == share, name
        assert pretrained == (method.from_groups.__func__ is not Method.from_groups.__func__), name


def test_the_readme_names_the_methods_that_vllm_does_not_serve():
    served_but = re.search(r"vLLM serves\s.*?all methods but\s(.*?)\. ", (ROOT / "README.md").read_text(), re.S)
    methods = {name: method_class(name).example(6) for name in method_names()}
    refused = [name for name, method in methods.items() if not_servable(config_of(method, num_hidden_layers=6))]
    assert served_but is not None and sorted(re.findall(r"`(\w+)`", served_but[1])) == sorted(refused)
