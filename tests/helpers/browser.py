"""A real browser with the network off."""

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
DRIVER = shutil.which("chromedriver")
FLAGS = """headless no-sandbox disable-gpu disable-dev-shm-usage no-first-run disable-sync disable-background-networking
disable-component-update hide-scrollbars"""


def offline_browser() -> Iterator:
    """Yield a headless Chromium; skip the test where there is none."""
    if not (CHROMIUM and DRIVER):
        pytest.skip("chromium and chromedriver are not installed")
    from selenium import webdriver

    options = webdriver.ChromeOptions()
    options.binary_location = CHROMIUM
    for flag in FLAGS.split():
        options.add_argument(f"--{flag}")
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    driver = webdriver.Chrome(options=options, service=webdriver.ChromeService(DRIVER))
    driver.execute_cdp_cmd("Network.enable", {})
    offline = {"offline": True, "latency": 0, "downloadThroughput": 0, "uploadThroughput": 0}
    driver.execute_cdp_cmd("Network.emulateNetworkConditions", offline)
    yield driver
    driver.quit()


def resize(browser, width: int) -> None:
    """Make the window as wide as a laptop's or a phone's."""
    size = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": width < 600}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)


def fits(browser, width: int) -> None:
    """Make the window so wide and wait until the page, its figures drawn anew, needs no sideways scrolling."""
    from selenium.webdriver.support.ui import WebDriverWait

    resize(browser, width)
    needed = "return document.documentElement.scrollWidth"
    message = f"the page scrolls sideways in a window of {width} pixels"
    WebDriverWait(browser, 15).until(lambda browser: browser.execute_script(needed) <= width, message)


def complaints(browser) -> list[str]:
    """Return what the browser has written on its console since it was last asked."""
    return [entry["message"] for entry in browser.get_log("browser") if entry["level"] in ("SEVERE", "WARNING")]


def opened(browser, file: Path) -> None:
    """Open a page and wait until its figures are drawn."""
    browser.get(file.as_uri())
    drawn(browser)


def drawn(browser) -> None:
    """Wait until the figures of the page are drawn."""
    from selenium.webdriver.support.ui import WebDriverWait

    waiting = "return document.querySelectorAll('.figure:not([data-drawn])').length"
    WebDriverWait(browser, 30).until(lambda browser: browser.execute_script(waiting) == 0)
