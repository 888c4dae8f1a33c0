"""docs/results/findings.md says what the committed results say."""

import sys
from pathlib import Path

BENCHMARKS = Path(__file__).parent.parent / "benchmarks"


def test_every_number_of_the_findings_comes_from_committed_results(monkeypatch, tmp_path):
    monkeypatch.syspath_prepend(BENCHMARKS)
    import findings
    import four_models
    import front_page

    monkeypatch.setattr(findings, "FIGURES", tmp_path)
    monkeypatch.setattr(four_models, "FIGURES", tmp_path)
    monkeypatch.setattr(findings, "draw_front_page", front_page.measured)
    written = [finding() for finding in findings.FINDINGS]
    last = four_models.on_four_models(findings.results("models")["models"])
    assert findings.page(written, last) == findings.PAGE.read_text()
    figures = BENCHMARKS.parent / "docs" / "figures"
    shown = [finding.figure for finding in written] + [path.stem for path in tmp_path.glob("*.svg")]
    assert all((figures / f"{name}.svg").is_file() for name in shown)
    del sys.modules["findings"], sys.modules["four_models"], sys.modules["front_page"]
