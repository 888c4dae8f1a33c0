"""Compares two fits of the codec on the same windows, at equal bytes.

    python benchmarks/codecs.py smollm2 --ways codec@12.5,codec@6.25 --fit-text books --fit-text web --fit-text docs
        --zone 0.1 --out OLD …
    python benchmarks/codecs.py smollm2 --ways codec@12.5,codec@6.25 --out NEW …
    python benchmarks/codec_fits.py OLD NEW [NEW …]

Prints the ratio of NEW's KL to OLD's, the geometric mean over windows, with a bootstrap over documents. OLD's log KL is
interpolated over log bytes, window by window, so that both have the same bytes.
"""

import argparse
import json
from pathlib import Path

from codec_rivals.paired import picked, ratio_of

SAME = ("model", "windows", "prompt", "continued", "seed", "bos", "text")


def main() -> None:
    """Print a line for each fit and budget: over all windows, then domain by domain."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("old", type=Path)
    parser.add_argument("new", type=Path, nargs="+")
    given = parser.parse_args()
    old = json.loads(given.old.read_text())
    for file in given.new:
        new = json.loads(file.read_text())
        for name in SAME:
            if old["settings"][name] != new["settings"][name]:
                raise SystemExit(f"{file.name} must have the {name} of {given.old.name}")
        print(f"\n{new['settings']['model']}: {file.stem} ÷ {given.old.stem}")
        for row in (row for row in new["rows"] if row["way"] == "codec"):
            cells = []
            for domain in ("all", *dict.fromkeys(new["domains"])):
                windows = [at for at, name in enumerate(new["domains"]) if domain in ("all", name)]
                rows = [picked(other, windows) for other in old["rows"] if other["way"] == "codec"]
                found = ratio_of(picked(row, windows), rows, [new["documents"][at] for at in windows])
                assert found is not None
                value, *ends = (f"{number:.3f}" for number in found["ratio"])
                better = f", better on {found['better_on']} of {found['of']}" if domain == "all" else ""
                cells.append(f"{domain} {value} ({'-'.join(ends)}){better}" if ends else f"{domain} {value}")
            print(f"{100 * row['share']:.2f}%: " + "; ".join(cells))


if __name__ == "__main__":
    main()
