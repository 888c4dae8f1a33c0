"""The documentation site builds, its links lead somewhere, and every page opens without network at two widths."""

import functools
import http.server
import importlib.util
import os
import sys
import threading
import tomllib
from pathlib import Path

import pytest

from tests.helpers.browser import complaints, resize

ROOT = Path(__file__).parent.parent.parent
WEBSITE = ROOT / "website"
# elements that reach beyond the window and are not within something that scrolls by itself
WIDE = """
const scrolls = e => { for (; e; e = e.parentElement) if (/auto|scroll|hidden/.test(getComputedStyle(e).overflowX)) return true; };
const width = arguments[0];  // innerWidth grows with what overflows
return document.documentElement.scrollWidth <= width ? [] :
  [...document.body.querySelectorAll('*')].filter(e => e.getBoundingClientRect().right > width + 1 && !scrolls(e))
    .map(e => e.outerHTML.slice(0, 120)).slice(0, 3).concat(document.documentElement.scrollWidth);
"""  # noqa: E501
OTHER_HOSTS = """
return performance.getEntriesByType('resource').map(e => e.name).filter(name => !name.startsWith(location.origin))
"""


@pytest.fixture
def website(monkeypatch):
    """The scripts of the site can be imported."""
    monkeypatch.syspath_prepend(WEBSITE)


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """The folder of the site: the one that `make site` has built, or a new one."""
    built = os.environ.get("CROSSLAYER_SITE")
    if built:
        return Path(built).resolve()
    if not all(importlib.util.find_spec(name) for name in ("zensical", "latex2mathml", "mkdocstrings")):
        pytest.skip("what builds the site is not installed: pip install '.[docs]'")
    sys.path.insert(0, str(WEBSITE))
    try:
        import build

        folder = tmp_path_factory.mktemp("site")
        assert build.main(folder) == []
    finally:
        sys.path.remove(str(WEBSITE))
    return folder


@pytest.fixture
def address(site):
    """Where the site is served."""
    handler = functools.partial(Quiet, directory=str(site))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


class Quiet(http.server.SimpleHTTPRequestHandler):
    """Serves without a word."""

    def log_message(self, *words):
        """Say nothing."""


def test_a_link_that_leads_nowhere_is_found(website, tmp_path):
    import links

    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "index.html").write_text('<h1 id="here">x</h1>')
    (tmp_path / "index.html").write_text(
        '<a href="other/#here">1</a><a href="other/#gone">2</a><a href="lost/">3</a><a href="https://example.org">4</a>'
        '<img src="https://example.org/x.png"><img src="x.png"><a href="#gone">5</a>'
    )
    assert links.faults(tmp_path) == [
        "index.html: fetches https://example.org/x.png",
        "index.html: other/#gone has no such anchor",
        "index.html: lost/ does not exist",
        "index.html: #gone has no such anchor",
        "index.html: x.png does not exist",
    ]


def test_every_page_stands_in_the_navigation(website):
    import build

    pages = {path.relative_to(ROOT / "docs").as_posix() for path in (ROOT / "docs").rglob("*.md")}
    pages |= {Path(path).name for path in build.ELSEWHERE} | {f"api/{name}.md" for name in build.api()}
    nav = tomllib.loads((WEBSITE / "zensical.toml").read_text())["project"]["nav"]
    assert sorted(leaves(nav)) == sorted(pages)


def leaves(nav):
    """The pages that a navigation names."""
    for entry in nav:
        for page in entry.values():
            yield from [page] if isinstance(page, str) else leaves(page)


@pytest.mark.slow
@pytest.mark.parametrize("width", [1280, 390])
def test_every_page_opens(browser, site, address, width):
    online = {"offline": False, "latency": 0, "downloadThroughput": -1, "uploadThroughput": -1}
    browser.execute_cdp_cmd("Network.emulateNetworkConditions", online)  # this machine alone: pages name no other host
    resize(browser, width)
    complaints(browser)
    wrong = {}
    for page in sorted(site.rglob("*.html")):
        name = page.relative_to(site).as_posix()
        browser.get(f"{address}/{name}")
        found = complaints(browser) + browser.execute_script(OTHER_HOSTS) + browser.execute_script(WIDE, width)
        if found:
            wrong[name] = found
    assert not wrong
    browser.execute_cdp_cmd("Network.emulateNetworkConditions", {**online, "offline": True})


@pytest.mark.slow
def test_formulas_are_drawn(browser, site, address):
    methods = (site / "methods" / "overview" / "index.html").read_text()
    assert methods.count("<math") > 17 and "\\[" not in methods and "\\(" not in methods
