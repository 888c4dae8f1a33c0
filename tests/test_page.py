"""The report in a real browser with the network off."""

import shutil

import pytest

import crosslayer
from crosslayer.report.write import write_diagnosis
from tests.tiny import tiny, tokens

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
DRIVER = shutil.which("chromedriver")


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    record = crosslayer.diagnose(tiny("gpt2", num_hidden_layers=6), tokens(batch=3, length=48)).record()
    return write_diagnosis(record, tmp_path_factory.mktemp("page") / "out")[0]


@pytest.fixture
def browser():
    if not (CHROMIUM and DRIVER):
        pytest.skip("chromium and chromedriver are not installed")
    from selenium import webdriver

    options = webdriver.ChromeOptions()
    options.binary_location = CHROMIUM
    flags = ("headless", "no-sandbox", "disable-gpu", "disable-dev-shm-usage", "no-first-run", "disable-sync",
             "disable-background-networking", "disable-component-update")  # fmt: skip
    for flag in flags:
        options.add_argument(f"--{flag}")
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    driver = webdriver.Chrome(options=options, service=webdriver.ChromeService(DRIVER))
    yield driver
    driver.quit()


@pytest.mark.parametrize("width", [1280, 390])
def test_every_figure_is_drawn_without_network(browser, page, width):
    browser.execute_cdp_cmd("Network.enable", {})
    offline = {"offline": True, "latency": 0, "downloadThroughput": 0, "uploadThroughput": 0}
    browser.execute_cdp_cmd("Network.emulateNetworkConditions", offline)
    size = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": width < 600}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    browser.get(page.as_uri())
    figures = browser.find_elements("css selector", ".figure")
    assert len(figures) == 16  # the position table of GPT-2 included
    for figure in figures:
        drawn = figure.find_elements("css selector", ".main-svg")
        marks = figure.find_elements("css selector", ".scatterlayer .trace path, .heatmaplayer image")
        assert drawn and marks, figure.get_attribute("id")
        assert 0 < figure.size["width"] <= width and figure.size["height"] > 200
    assert browser.execute_script("return document.documentElement.scrollWidth") <= width
    errors = [entry for entry in browser.get_log("browser") if entry["level"] in ("SEVERE", "WARNING")]
    assert not errors
