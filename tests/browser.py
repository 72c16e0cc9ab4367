"""A real browser for tests of pages: headless Chromium, driven by Selenium.

Import the fixture in the `conftest.py` of the folder: `from browser import browser  # noqa: F401`.
Tests that use it are marked `slow`.
"""

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import pytest

Value = TypeVar("Value")

# Resolves to this machine, like the name of a page that attacks by DNS rebinding.
FOREIGN_NAME = "rebound.test"

_FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--disable-dev-shm-usage",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--no-first-run",
    "--no-proxy-server",
    # Other names do not resolve, so that a page that needs the network fails.
    f"--host-resolver-rules=MAP {FOREIGN_NAME} 127.0.0.1, MAP * ~NOTFOUND, EXCLUDE 127.0.0.1",
)


class Browser:
    """One browser window, with the errors and requests of the page that it shows.

    `driver` is Selenium's, for actions without a method here.
    """

    def __init__(self, driver: Any) -> None:
        self.driver = driver
        self._errors: list[str] = []
        self._requests: list[str] = []

    def open(
        self, page: str | Path, *, width: int = 1280, height: int = 900, dark: bool = False
    ) -> None:
        """Show a file or an address in a window of the given size in pixels and colour scheme."""
        self._command(
            "Emulation.setDeviceMetricsOverride",
            {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 600},
        )
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self._command("Emulation.setEmulatedMedia", {"features": [scheme]})
        self.driver.get("about:blank")
        self._read_logs()
        self._errors, self._requests = [], []
        self.driver.get(page.resolve().as_uri() if isinstance(page, Path) else page)

    def run(self, script: str, *args: Any) -> Any:
        """Run a script, the body of a function with `arguments`, and return its value."""
        return self.driver.execute_script(script, *args)

    def wait(self, done: Callable[[], Value], *, timeout_s: float = 30.0) -> Value:
        """Call a function until it returns a true value, and return the value.

        Raises:
            TimeoutException: no value was true in time.
        """
        from selenium.webdriver.support.ui import WebDriverWait

        return WebDriverWait(self.driver, timeout_s, poll_frequency=0.05).until(lambda _: done())

    def move_to(self, x: float, y: float) -> None:
        """Move the mouse to a point of the window, in pixels from its top left corner."""
        self._command("Input.dispatchMouseEvent", {"type": "mouseMoved", "x": x, "y": y})

    def errors(self) -> list[str]:
        """Return the errors in the console since the page was opened."""
        self._read_logs()
        return list(self._errors)

    def requests(self) -> list[str]:
        """Return the requested addresses since the page was opened, without data URLs."""
        self._read_logs()
        return list(self._requests)

    def screenshot(self, path: Path) -> None:
        """Write a picture of the visible part of the page."""
        self.driver.save_screenshot(str(path))

    def _command(self, name: str, settings: dict[str, Any]) -> None:
        self.driver.execute_cdp_cmd(name, settings)

    def _read_logs(self) -> None:
        # Chromium's driver returns each entry only once.
        for entry in self.driver.get_log("browser"):
            if entry["level"] == "SEVERE":
                self._errors.append(entry["message"])
        for entry in self.driver.get_log("performance"):
            message = json.loads(entry["message"])["message"]
            if message["method"] == "Network.requestWillBeSent":
                address = message["params"]["request"]["url"]
                if not address.startswith(("data:", "blob:", "about:", "chrome:")):
                    self._requests.append(address)


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    """Start a browser with an empty profile; skip the tests if none is installed."""
    webdriver = pytest.importorskip("selenium.webdriver")
    names = ("chromium", "chromium-browser", "google-chrome")
    program = next(filter(None, map(shutil.which, names)), None)
    control = shutil.which("chromedriver")
    if program is None or control is None:
        pytest.skip("no browser: install chromium and chromium-driver (Debian's packages)")
    options = webdriver.ChromeOptions()
    options.binary_location = program
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    for flag in (*_FLAGS, f"--user-data-dir={tmp_path_factory.mktemp('profile')}"):
        options.add_argument(flag)
    # Given the path of a driver, Selenium does not look for one on the network.
    service = webdriver.ChromeService(executable_path=control)
    driver = webdriver.Chrome(options=options, service=service)
    try:
        yield Browser(driver)
    finally:
        driver.quit()
