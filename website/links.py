"""Check the links of a built site: `python website/links.py FOLDER`."""

import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit


class Page(HTMLParser):
    """The anchors of a page, what it links to, and what it fetches by itself."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.anchors: set[str] = set()
        self.links: list[str] = []
        self.fetched: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Note what a tag names, links to and fetches."""
        values = {name: value for name, value in attrs if value is not None}
        self.anchors |= {values[name] for name in ("id", "name") if name in values}
        if "href" in values:
            (self.links if tag == "a" else self.fetched).append(values["href"])
        if "src" in values:
            self.fetched.append(values["src"])


def faults(site: Path) -> list[str]:
    """Return a line for each link that leads nowhere, and for each thing that another host would have to give."""
    pages = {path: Page(path.read_text(encoding="utf-8")) for path in sorted(site.rglob("*.html"))}
    lines = []
    for path, page in pages.items():
        where = path.relative_to(site)
        lines += [f"{where}: fetches {link}" for link in page.fetched if urlsplit(link).netloc]
        for link in page.links + page.fetched:
            parts = urlsplit(link)
            if parts.scheme or parts.netloc:
                continue
            folder = site if parts.path.startswith("/") else path.parent
            target = (folder / unquote(parts.path).lstrip("/")).resolve() if parts.path else path
            target = target / "index.html" if target.is_dir() else target
            if not target.is_file():
                lines.append(f"{where}: {link} does not exist")
            elif parts.fragment and target in pages and unquote(parts.fragment) not in pages[target].anchors:
                lines.append(f"{where}: {link} has no such anchor")
    return lines


if __name__ == "__main__":
    wrong = faults(Path(sys.argv[1]).resolve())
    print(*wrong, sep="\n", file=sys.stderr)
    sys.exit(bool(wrong))
