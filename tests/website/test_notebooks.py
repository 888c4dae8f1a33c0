"""The notebooks run as they stand, and their pages show the code that runs."""

from pathlib import Path

import pytest

NOTEBOOKS = Path(__file__).parent.parent.parent / "docs" / "notebooks"
NAMES = ("see_the_sink", "shrink_the_cache", "write_a_method")


@pytest.fixture
def notebooks(monkeypatch):
    monkeypatch.syspath_prepend(NOTEBOOKS.parent.parent / "website")
    import notebooks

    return notebooks


@pytest.mark.parametrize("name", NAMES)
def test_the_page_is_of_the_script(notebooks, name):
    page = (NOTEBOOKS / f"{name}.md").read_text()
    for text, body in notebooks.cells((NOTEBOOKS / f"{name}.py").read_text()):
        if text:  # the page has its pictures in a folder of its own
            assert all(line in page for line in body.splitlines() if not line.startswith("![")), "run make notebooks"
        else:
            assert f"```python\n{body}\n```" in page, "run make notebooks"


def test_a_cell_prints_what_its_last_line_is(notebooks, tmp_path):
    script = tmp_path / "small.py"
    script.write_text("# %% [markdown]\n# # Title\n\n# %%\nx = 1\nx + 1\n\n# %%\nNone\n")
    printed = notebooks.run(script, tmp_path)
    assert printed == ["2", ""]
    assert (
        notebooks.page(script, printed)
        == "# Title\n\n```python\nx = 1\nx + 1\n```\n\n```text\n2\n```\n\n```python\nNone\n```\n"
    )


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_it_runs(notebooks, name, tmp_path):
    pytest.importorskip("gguf")
    notebooks.run(NOTEBOOKS / f"{name}.py", tmp_path)
