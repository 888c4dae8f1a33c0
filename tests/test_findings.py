"""docs/results/findings.md says what the committed results say."""

import sys
from pathlib import Path

BENCHMARKS = Path(__file__).parent.parent / "benchmarks"


def test_every_number_of_the_findings_comes_from_committed_results(monkeypatch, tmp_path):
    monkeypatch.syspath_prepend(BENCHMARKS)
    import findings
    import front_page

    monkeypatch.setattr(findings, "FIGURES", tmp_path)
    monkeypatch.setattr(findings, "draw_front_page", front_page.measured)
    written = [finding() for finding in findings.FINDINGS]
    assert findings.page(written) == findings.PAGE.read_text()
    figures = BENCHMARKS.parent / "docs" / "figures"
    assert all((figures / f"{finding.figure}.svg").is_file() for finding in written)
    del sys.modules["findings"], sys.modules["front_page"]
