"""The dashboard in a real browser with nothing behind it: only its files are served, and no service answers."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest
from playwright.sync_api import expect

from api import dashboard
from labeler.accounting.gaussian import epsilon_of_delta

OpenPage = Callable[..., Any]


class Files(SimpleHTTPRequestHandler):
    """Answers /dashboard and its files with the headers the service sends; everything else is not there."""

    def translate_path(self, path: str) -> str:
        name = path.partition("?")[0].removeprefix("/dashboard").strip("/") or "index.html"
        return super().translate_path(f"/{name}" if path.startswith("/dashboard") else "/nothing-here")

    def end_headers(self) -> None:
        for name, value in dashboard.HEADERS.items():
            self.send_header(name, value)
        super().end_headers()

    def log_message(self, format: str, *args: Any) -> None:
        """Quiet."""


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with ThreadingHTTPServer(("127.0.0.1", 0), partial(Files, directory=str(dashboard.STATIC))) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}/dashboard"
        server.shutdown()
        thread.join()


def test_without_a_service_it_says_so_and_tries_again_without_a_script_error(open_page: OpenPage, url: str) -> None:
    visit = open_page(url)
    expect(visit.page.locator("#banner")).to_contain_text("cannot be reached")
    expect(visit.page.get_by_role("heading", level=1)).to_have_text("Sign in to see the privacy budget")
    expect(visit.page.get_by_label("Access token")).to_be_visible()
    before = len(visit.failed_loads)
    visit.page.get_by_role("button", name="Try now").click()
    visit.page.wait_for_timeout(200)
    assert len(visit.failed_loads) > before
    assert visit.script_errors == []
    assert all("/readyz" in line for line in visit.failed_loads)


def test_a_token_in_the_address_leaves_it_at_once_and_stays_in_the_tab(open_page: OpenPage, url: str) -> None:
    visit = open_page(f"{url}#token=lab_example")
    expect(visit.page.get_by_role("button", name="Sign out")).to_be_visible()
    assert visit.page.url == url
    assert "lab_example" not in visit.page.content()
    assert visit.page.evaluate("sessionStorage.getItem('labeler.token')") == "lab_example"
    assert visit.page.evaluate("JSON.stringify(localStorage) + document.cookie") == "{}"
    visit.page.get_by_role("button", name="Sign out").click()
    expect(visit.page.get_by_label("Access token")).to_be_visible()
    expect(visit.page.locator("#sign-in-error")).to_contain_text("You signed out")
    assert visit.page.evaluate("sessionStorage.length") == 0
    assert visit.script_errors == []


def test_a_token_is_pasted_with_the_keyboard_alone(open_page: OpenPage, url: str) -> None:
    page = open_page(url).page
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.className") == "skip"
    page.get_by_label("Access token").focus()
    page.keyboard.type("two words")
    page.keyboard.press("Enter")
    expect(page.locator("#sign-in-error")).to_contain_text("without spaces")
    page.get_by_label("Access token").focus()
    page.keyboard.type("lab_typed")
    page.keyboard.press("Enter")
    expect(page.get_by_role("button", name="Sign out")).to_be_visible()


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [320, 1280])
def test_every_text_has_contrast_and_nothing_is_wider_than_the_window(
    open_page: OpenPage, url: str, scheme: str, width: int
) -> None:
    visit = open_page(url, width=width, scheme=scheme)
    expect(visit.page.locator("#banner")).to_be_visible()
    assert visit.contrast_problems() == []
    assert visit.naming_problems() == []
    assert visit.overflow_px() <= 0


def test_the_theme_switch_overrides_the_system_and_is_remembered(open_page: OpenPage, url: str) -> None:
    page = open_page(url, scheme="light").page
    ground = "getComputedStyle(document.body).backgroundColor"
    light = page.evaluate(ground)
    page.get_by_role("radio", name="Auto").focus()
    page.keyboard.press("ArrowRight")
    page.keyboard.press("ArrowRight")
    dark = page.evaluate(ground)
    assert dark != light
    page.reload()
    assert page.evaluate(ground) == dark
    expect(page.get_by_role("radio", name="Dark")).to_be_checked()


def test_epsilons_drawn_agree_with_the_accountant(open_page: OpenPage, url: str) -> None:
    page = open_page(url).page
    for delta in (1e-3, 1e-5, 1e-9):
        for nano in (1, 10**4, 10**6, 10**8, 10**9, 3 * 10**10, 10**12):
            expected = epsilon_of_delta(delta, (nano / 1e9) ** 0.5)
            drawn = page.evaluate(f"import('/dashboard/epsilon.js').then((m) => m.epsilonOf({nano}, {delta}))")
            assert drawn == pytest.approx(expected, rel=1e-6, abs=1e-9), (delta, nano)


def test_words_of_strangers_stay_words(open_page: OpenPage, url: str) -> None:
    page = open_page(url).page
    html = page.evaluate(
        "import('/dashboard/dom.js').then((m) => m.el('p', {title: '\"><b>'}, '<img src=x onerror=alert(1)>'))"
        ".then((node) => node.outerHTML)"
    )
    assert "<img" not in html
    refused = (
        "import('/dashboard/dom.js').then((m) => m.el('p', {style: 'color:red'})).then(() => '', (e) => e.message)"
    )
    assert "not set from data" in page.evaluate(refused)


def test_events_are_split_whatever_ends_their_lines(open_page: OpenPage, url: str) -> None:
    page = open_page(url).page
    parse = "([text]) => import('/dashboard/api.js').then((m) => m.parseEvent(text))"
    assert page.evaluate(parse, ['id: 3\r\nevent: job\r\ndata: {"job_id": "a"}']) == {"job_id": "a"}
    assert page.evaluate(parse, ['data:{"a":\ndata: 1}']) == {"a": 1}
    assert page.evaluate(parse, [": ping"]) is None
    assert page.evaluate(parse, ["data: half a {"]) is None


def test_numbers_never_round_to_all_or_nothing(open_page: OpenPage, url: str) -> None:
    page = open_page(url).page
    say = "([name, value]) => import('/dashboard/words.js').then((m) => m[name](value))"
    epsilons = {0: "0", 0.5: "0.500", 0.81249: "0.812", 12: "12.0", 0.00001234: "1.23e-5"}
    for value, words in epsilons.items():
        assert page.evaluate(say, ["epsilon", value]) == words
    assert page.evaluate(say, ["epsilon", None]) == "without bound"
    for fraction, words in {0: "0 %", 0.002: "under 1 %", 0.5: "50 %", 0.999: "over 99 %", 1: "100 %"}.items():
        assert page.evaluate(say, ["percent", fraction]) == words
