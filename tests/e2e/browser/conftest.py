"""A real Chromium for tests of the dashboard: what it shows, what its scripts complain about, what can be read."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import pytest
from axe_playwright_python.base import AXE_SCRIPT
from playwright.sync_api import Browser, ConsoleMessage, Page, expect, sync_playwright

PROBES = Path(__file__).parent
PATIENCE_MS = 240_000
"""How long a page may take to show what a test expects: on shared cores the browser's own 5 s are sometimes too few."""

VIOLATIONS = """async () => (await axe.run({
    resultTypes: ["violations"], rules: {"color-contrast": {enabled: false}},
  })).violations.flatMap((one) => one.nodes.map((node) => `${one.id}: ${node.target} ${node.html.slice(0, 200)}`))"""
"""All rules but that of contrast, which `contrast.js` holds of every text: axe's takes nine tenths of its time, seconds
of a core for a page of a thousand texts."""


def in_both_widths_and_schemes(narrow: int = 390, *, quick: int = 1) -> pytest.MarkDecorator:
    """As narrow as a phone and as wide as a screen, light and dark: the first `quick` for every run of the tests."""
    all_four = ((narrow, "light"), (1400, "dark"), (narrow, "dark"), (1400, "light"))
    others = [pytest.param(width, scheme, marks=pytest.mark.long) for width, scheme in all_four[quick:]]
    return pytest.mark.parametrize(("width", "scheme"), [*all_four[:quick], *others])


NAMES = ("chromium", "chromium-browser", "google-chrome")
ARGUMENTS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--no-first-run",
]


@dataclass
class Visit:
    """One open page and everything it complained about.

    Attributes:
        page: playwright's page.
        script_errors: errors and warnings that came from scripts, styles or the content security policy.
        failed_loads: requests that got no answer or a refusal. The browser writes a line about each to the console,
            which no page can prevent; a test says which of them it expects.
    """

    page: Page
    script_errors: list[str] = field(default_factory=list)
    failed_loads: list[str] = field(default_factory=list)

    def heard(self, message: ConsoleMessage) -> None:
        if message.type not in ("error", "warning"):
            return
        if message.text.startswith("Failed to load resource"):
            self.failed_loads.append(f"{message.location.get('url', '')}: {message.text}")
        else:
            self.script_errors.append(message.text)

    def contrast_problems(self) -> list[str]:
        """Texts below WCAG AA as they are painted now."""
        found: list[str] = self.page.evaluate((PROBES / "contrast.js").read_text())
        return found

    def naming_problems(self) -> list[str]:
        """Controls, pictures and tables a screen reader could not name."""
        found: list[str] = self.page.evaluate((PROBES / "naming.js").read_text())
        return found

    def axe_problems(self) -> list[str]:
        """Everything that axe-core objects to in the page as it is now: its rule, and where; texts without contrast."""
        if not self.page.evaluate("'axe' in window"):  # its 600 kB take half a second of a core to read
            self.page.evaluate(AXE_SCRIPT)
        found: list[str] = self.page.evaluate(VIOLATIONS)
        return found + self.contrast_problems()

    def overflow_px(self) -> int:
        """By how much the page is wider than its window."""
        wider: int = self.page.evaluate("document.documentElement.scrollWidth - window.innerWidth")
        return wider

    def keep(self, folder: Path, name: str) -> Path:
        """A picture of the whole page, for people to look at."""
        path = folder / f"{name}.png"
        self.page.screenshot(path=path, full_page=True)
        return path


OpenPage = Callable[..., Visit]


@pytest.fixture
def screenshots(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where pictures are kept: LABELER_SCREENSHOTS, or the test's own folder."""
    path = Path(os.environ.get("LABELER_SCREENSHOTS") or tmp_path_factory.mktemp("screenshots"))
    path.mkdir(parents=True, exist_ok=True)
    return path


@pytest.fixture(scope="module")
def chromium() -> Iterator[Browser]:
    """A running browser, or a reason why there is none.

    Until it ends, playwright keeps an event loop running in this thread, in which no other test can start its own.
    """
    path = next((found for name in NAMES if (found := shutil.which(name))), None)
    if path is None:
        pytest.skip(f"no browser: none of {', '.join(NAMES)} is on PATH")
    expect.set_options(timeout=PATIENCE_MS)
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=ARGUMENTS, timeout=PATIENCE_MS)
        yield browser
        browser.close()


@pytest.fixture
def open_page(chromium: Browser) -> Iterator[OpenPage]:
    """`open_page(url, width=..., scheme=...)` opens a fresh profile on it; all are closed at the end."""
    with opening(chromium) as open_one:
        yield open_one


@contextmanager
def opening(chromium: Browser) -> Iterator[OpenPage]:
    """See `open_page`."""
    contexts = []

    def open_one(
        url: str, *, width: int = 1280, height: int = 900, scheme: Literal["light", "dark"] = "light"
    ) -> Visit:
        context = chromium.new_context(
            viewport={"width": width, "height": height},
            color_scheme=scheme,
            reduced_motion="reduce",
            locale="en-GB",
            timezone_id="Europe/Berlin",
        )
        context.set_default_timeout(PATIENCE_MS)
        contexts.append(context)
        visit = Visit(context.new_page())
        visit.page.on("console", visit.heard)
        visit.page.on("pageerror", lambda error: visit.script_errors.append(str(error)))
        visit.page.goto(url)
        return visit

    yield open_one
    for context in contexts:
        context.close()
