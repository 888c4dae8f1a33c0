"""Every figure of a page saved from its buttons: as SVG, PNG or PDF, and its data as CSV."""

import base64
import contextlib
import csv
import re
from dataclasses import replace
from xml.etree import ElementTree

import pytest
from selenium.common.exceptions import TimeoutException
from selenium.webdriver.support.ui import WebDriverWait

from crosslayer.output.page import Page
from crosslayer.output.panel import Dots, Heat, Line, Panel, Wires
from crosslayer.output.record import PositionBins
from crosslayer.verbs.diagnose.curves import position_panel
from tests.helpers.browser import complaints, opened, resize

LINES = [
    Line('first, "quoted"', [0, 1, 2], [0.25, None, 4.0], [0.125, None, 3.0], [0.5, None, 5.0]),
    Line("second", [0, 1], [1.0, 2.0]),
]
LINE_PANEL = Panel("two_lines", "Two lines", "", "layer", "share", LINES)
BINS = PositionBins(edges=[0, 1, 3], length=5, mean=[[10.0, 100.0, 1000.0]])
PANELS = [
    LINE_PANEL,
    replace(LINE_PANEL, key="one_line", x_title="", lines=LINES[1:]),
    Panel(
        "heat", "Heat", "", "column", "layer", heat=Heat([0, 1], [0, 1], [[0.5, None], [1.0, 2.0]], "cosine", (0, 2))
    ),
    replace(position_panel("bins", "Bins", "", BINS, 1.0, "norm", (0, 3)), x_title="position", wide=False),
    Panel(
        "dots", "Dots", "", "loss", "", dots=Dots(["a", "b"], [1.0, 2.0], [0.5, None], [1.5, None], [[0.5, 1.5], []])
    ),
    Panel("wires", "Wires", "", "bytes", "layer", wires=Wires([2.0, 0.0, 1.0], ["full"] * 3, [[], [0], []])),
]
ROWS = {
    "two_lines": [
        ["line", "layer", "share", "low", "high"],
        ["first, \"quoted\"", "0", "0.25", "0.125", "0.5"],
        ["first, \"quoted\"", "1", "", "", ""],
        ["first, \"quoted\"", "2", "4", "3", "5"],
        ["second", "0", "1", "", ""],
        ["second", "1", "2", "", ""],
    ],
    "one_line": [["line", "x", "share", "low", "high"], ["second", "0", "1", "", ""], ["second", "1", "2", "", ""]],
    "heat": [["layer", "column", "cosine"], ["0", "0", "0.5"], ["0", "1", ""], ["1", "0", "1"], ["1", "1", "2"]],
    "bins": [["layer", "position", "norm"], ["0", "0", "1"], ["0", "1-2", "2"], ["0", "3-4", "3"]],
    "dots": [["name", "loss", "low", "high", "values"], ["a", "1", "0.5", "1.5", "0.5 1.5"], ["b", "2", "", "", ""]],
    "wires": [["layer", "kind", "bytes", "reads"], ["0", "full", "2", ""], ["1", "", "0", "0"], ["2", "full", "1", ""]],
}  # fmt: skip


@pytest.fixture(scope="module")
def saved(browser, tmp_path_factory):
    """Save every figure by its buttons; return the folder of downloads."""
    folder, downloads = tmp_path_factory.mktemp("page"), tmp_path_factory.mktemp("downloads")
    page = folder / "report.html"
    page.write_text(Page("A page", "", [], ["A sentence."], PANELS, [], []).html())
    resize(browser, 1280)
    opened(browser, page)
    browser.execute_cdp_cmd("Browser.setDownloadBehavior", {"behavior": "allow", "downloadPath": str(downloads)})
    for panel in PANELS:
        for kind in ("SVG", "PNG", "CSV"):
            path = downloads / f"{panel.key}.{kind.lower()}"
            for _ in range(3):  # a click is lost while a figure on the way moves the page
                press(browser, panel.key, kind)
                with contextlib.suppress(TimeoutException):
                    WebDriverWait(browser, 20).until(lambda _, path=path: path.is_file())
                    break
            assert path.is_file()
    assert not complaints(browser)
    return downloads


def press(browser, key, kind):
    button = browser.find_element("xpath", f"//div[@id='figure-{key}']/..//div[@class='save']/button[text()='{kind}']")
    browser.execute_script("arguments[0].scrollIntoView({block: 'center'})", button)
    button.click()  # as a user: a page may not download several files by itself


def test_the_data_of_a_figure(saved):
    for key, rows in ROWS.items():
        with (saved / f"{key}.csv").open(encoding="utf-8", newline="") as file:
            assert list(csv.reader(file)) == rows, key


def test_a_saved_figure_has_its_title_and_legend(saved):
    for panel in PANELS:
        texts = [
            text.text for text in ElementTree.parse(saved / f"{panel.key}.svg").iter() if text.tag.endswith("}text")
        ]
        assert panel.title in texts, panel.key
        assert (saved / f"{panel.key}.png").read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
        if panel.key == "two_lines":
            assert {line.name for line in LINES} <= {*texts}
        if panel.heat is not None:
            assert panel.heat.label in texts


def test_a_pdf_is_one_figure_on_a_page_of_its_size(browser, saved):
    browser.execute_script("window.print = () => { window.printed = document.title; }")  # the dialog would wait
    for panel in PANELS:
        press(browser, panel.key, "PDF")
        WebDriverWait(browser, 20).until(lambda b, key=panel.key: b.execute_script("return window.printed") == key)
        browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"media": "print"})
        shown = "return [...document.body.children].filter((one) => one.offsetHeight).map((one) => one.id)"
        assert browser.execute_script(shown) == ["sheet"]
        browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"media": ""})
        printed = browser.execute_cdp_cmd("Page.printToPDF", {"preferCSSPageSize": True, "printBackground": True})
        pdf = base64.b64decode(printed["data"])
        assert len(re.findall(rb"/Type\s*/Page\b", pdf)) == 1, panel.key
        box = re.search(rb"/MediaBox\s*\[0 0 ([\d.]+) ([\d.]+)\]", pdf)
        root = ElementTree.parse(saved / f"{panel.key}.svg").getroot()
        pixels = [float(root.attrib[side]) for side in ("width", "height")]
        assert [float(end) / 0.75 for end in box.groups()] == pytest.approx(pixels, abs=3.0), panel.key
        left = "return [document.title, document.getElementById('sheet')]"
        assert browser.execute_script(left) == ["A page", None]
