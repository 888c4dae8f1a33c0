"""The results that pages cite can be read by this release."""

from pathlib import Path

import crosslayer

EVIDENCE = Path(__file__).parent.parent / "docs" / "evidence"


def test_all_results_of_the_pages_load():
    folders = [file.parent for file in sorted(EVIDENCE.rglob("record.json"))]
    assert len(folders) >= 100
    wrong = []
    for folder in folders:
        try:
            crosslayer.load_result(folder)
        except ValueError as error:
            wrong.append(f"docs/evidence/{folder.relative_to(EVIDENCE)}: {error}")
    assert not wrong, "\n".join(wrong)
