"""Build the documentation site: `python website/build.py OUT`.

Its pages are those of docs/, some that stand elsewhere in the repository, and the API out of docstrings. Formulas
become MathML, which browsers draw without a script. A link or an anchor that leads nowhere ends the build, as does
anything that a page would fetch from another host.
"""

import html
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from links import faults

ROOT = Path(__file__).resolve().parent.parent
# on the site next to the pages of docs/
ELSEWHERE = ("CHANGELOG.md", "CONTRIBUTING.md", "crosslayer/data/SOURCES.md")
LINK = re.compile(r"(?<=\]\()[^)#:]+(?=[)#])")
FORMULA = re.compile(r'<div class="formula">(.*?)</div>|<span class="arithmatex">\\\((.*?)\\\)</span>', re.S)


def main(out: Path) -> list[str]:
    """Build the site in a folder, which is replaced; return what is wrong with it."""
    with tempfile.TemporaryDirectory() as name:
        work = Path(name)
        lay_out(work)
        command = [sys.executable, "-m", "zensical", "build", "--strict"]
        environment = {**os.environ, "NO_COLOR": "1"}
        done = subprocess.run(command, cwd=work, env=environment, capture_output=True, text=True)
        if done.returncode:
            return [done.stdout + done.stderr]
        shutil.rmtree(out, ignore_errors=True)
        shutil.copytree(work / "site", out)
    for page in out.rglob("*.html"):
        page.write_text(FORMULA.sub(mathml, page.read_text(encoding="utf-8")), encoding="utf-8")
    return faults(out)


def lay_out(work: Path) -> None:
    """Put the pages and the configuration where Zensical takes them."""
    source = ROOT / "docs"
    places = {path: path.relative_to(source) for path in source.rglob("*") if path.is_file()}
    places |= {ROOT / path: Path(path).name for path in ELSEWHERE}
    for path, place in places.items():
        target = work / "docs" / place
        target.parent.mkdir(parents=True, exist_ok=True)
        if path.suffix == ".md":
            text = LINK.sub(lambda link, at=path: moved(link[0], at, places), path.read_text(encoding="utf-8"))
            target.write_text(text, encoding="utf-8")
        else:
            shutil.copyfile(path, target)
    shutil.copyfile(ROOT / "website" / "site.css", work / "docs" / "site.css")
    for page, names in api().items():
        (work / "docs" / "api").mkdir(exist_ok=True)
        (work / "docs" / "api" / f"{page}.md").write_text(names, encoding="utf-8")
    config = (ROOT / "website" / "zensical.toml").read_text(encoding="utf-8")
    (work / "zensical.toml").write_text(config.replace("PACKAGE", ROOT.as_posix()), encoding="utf-8")


def moved(link: str, page: Path, places: dict) -> str:
    """Return a relative link of a page as it must be on the site."""
    target = (page.parent / link).resolve()
    return os.path.relpath(places[target], Path(places[page]).parent) if target in places else link


def api() -> dict[str, str]:
    """Return the pages of the API: every public name, whose docstring mkdocstrings puts there."""
    stub = (ROOT / "crosslayer" / "__init__.pyi").read_text(encoding="utf-8")
    public = re.findall(r"(?m)^from \S+ import (\w+) as", stub)
    pages = {"calls": "# Calls\n\nEvery verb, and what goes with it, as `crosslayer.NAME`.\n"}
    pages["types"] = "# Types\n\nResults, and what calls take, as `crosslayer.NAME`.\n"
    for name in sorted(public):
        pages["types" if name[0].isupper() else "calls"] += f"\n::: crosslayer.{name}\n"
    return pages


def mathml(formula: re.Match) -> str:
    """Return a formula, in LaTeX as it stands on a page, in MathML."""
    from latex2mathml.converter import convert  # here: all else is plain Python, and tests read it without

    if formula[1] is None:
        return convert(html.unescape(formula[2]), display="inline")
    return f'<div class="formula">{convert(html.unescape(formula[1]).strip(), display="block")}</div>'


if __name__ == "__main__":
    wrong = main(Path(sys.argv[1]))
    print(*wrong, sep="\n", file=sys.stderr)
    sys.exit(bool(wrong))
