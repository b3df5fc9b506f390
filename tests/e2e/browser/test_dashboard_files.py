"""The dashboard in a real browser with nothing behind it: only its files are served, and no service answers."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest
from playwright.sync_api import Browser, Page, expect

from api import console as dashboard
from labeler.accounting.gaussian import epsilon_of_delta
from tests.e2e.browser.conftest import in_both_widths_and_schemes, opening

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
    while len(visit.failed_loads) <= before:
        visit.page.wait_for_timeout(50)
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


@in_both_widths_and_schemes(320, quick=2)
def test_every_text_has_contrast_and_nothing_is_wider_than_the_window(
    open_page: OpenPage, url: str, scheme: str, width: int
) -> None:
    visit = open_page(url, width=width, scheme=scheme)
    expect(visit.page.locator("#banner")).to_be_visible()
    assert visit.naming_problems() == []
    assert visit.axe_problems() == []
    assert visit.overflow_px() <= 0
    visit.page.evaluate("document.querySelector('h1').style.color = getComputedStyle(document.body).backgroundColor")
    assert "Sign in to see" in " ".join(visit.axe_problems())


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


@pytest.fixture(scope="module")
def modules(chromium: Browser, url: str) -> Iterator[Page]:
    """One page for all who only call what its modules export: each of its own costs half a second of a core."""
    with opening(chromium) as open_one:
        yield open_one(url).page


def test_epsilons_drawn_agree_with_the_accountant(modules: Page) -> None:
    for delta in (1e-3, 1e-5, 1e-9):
        for nano in (1, 10**4, 10**6, 10**8, 10**9, 3 * 10**10, 10**12):
            expected = epsilon_of_delta(delta, (nano / 1e9) ** 0.5)
            drawn = modules.evaluate(f"import('/dashboard/epsilon.js').then((m) => m.epsilonOf({nano}, {delta}))")
            assert drawn == pytest.approx(expected, rel=1e-6, abs=1e-9), (delta, nano)


def test_words_of_strangers_stay_words(modules: Page) -> None:
    html = modules.evaluate(
        "import('/dashboard/dom.js').then((m) => m.el('p', {title: '\"><b>'}, '<img src=x onerror=alert(1)>'))"
        ".then((node) => node.outerHTML)"
    )
    assert "<img" not in html
    refused = (
        "import('/dashboard/dom.js').then((m) => m.el('p', {style: 'color:red'})).then(() => '', (e) => e.message)"
    )
    assert "not set from data" in modules.evaluate(refused)


def test_events_are_split_whatever_ends_their_lines(modules: Page) -> None:
    parse = "([text]) => import('/dashboard/api.js').then((m) => m.parseEvent(text))"
    assert modules.evaluate(parse, ['id: 3\r\nevent: job\r\ndata: {"job_id": "a"}']) == {"job_id": "a"}
    assert modules.evaluate(parse, ['data:{"a":\ndata: 1}']) == {"a": 1}
    assert modules.evaluate(parse, [": ping"]) is None
    assert modules.evaluate(parse, ["data: half a {"]) is None


def called(page: Page, module: str, name: str, *arguments: Any) -> Any:
    """What a function of the page's own modules says."""
    call = "([module, name, values]) => import(`/dashboard/${module}`).then((m) => m[name](...values))"
    return page.evaluate(call, [module, name, list(arguments)])


def test_epsilons_keep_three_digits_and_no_bound_is_never_a_number(modules: Page) -> None:
    for value, words in {0: "0", 0.5: "0.500", 0.81249: "0.812", 12: "12.0", 0.00001234: "1.23e-5"}.items():
        assert called(modules, "words.js", "epsilon", value) == words
    assert called(modules, "words.js", "epsilon", None) == "no bound"
    assert called(modules, "words.js", "worth", None) == "no bound"
    node = modules.evaluate("import('/dashboard/words.js').then((m) => m.worthNode(null).outerHTML)")
    assert "no-bound" in node
    assert "<svg" in node


def test_every_moment_is_told_in_utc_wherever_the_reader_is(modules: Page) -> None:
    assert modules.evaluate("Intl.DateTimeFormat().resolvedOptions().timeZone") == "Europe/Berlin"
    told = modules.evaluate("import('/dashboard/words.js').then((m) => m.time('2027-03-01T23:30:00Z').textContent)")
    assert told == "1 Mar 2027, 23:30 UTC"


def test_shares_add_up_and_what_is_there_never_shows_as_nothing(modules: Page) -> None:
    draw = random.Random(8)
    for _ in range(300):
        parts = [draw.choice([0, 1, 10 ** draw.randrange(1, 13)]) * draw.randrange(1, 100) for _ in range(4)]
        shown = called(modules, "shares.js", "percentages", parts)
        if not sum(parts):
            assert shown == [0, 0, 0, 0]
            continue
        assert sum(round(10 * one) for one in shown) == 1000, parts
        for amount, share in zip(parts, shown, strict=True):
            assert (share > 0) == (amount > 0), parts
            assert abs(share - 100 * amount / sum(parts)) <= 0.31, parts
    assert called(modules, "shares.js", "percentages", [1, 0, 10**12]) == [0.1, 0, 99.9]


def balance(**changes: Any) -> dict[str, Any]:
    fields = {"account": "federation", "level": "instance", "cap_nano": 1000, "posted_nano": 250, "reserved_nano": 0}
    fields |= {"left_nano": 750, "left_fraction": 0.75, "delta": 1e-5, "cap_epsilon": 1.0, "spent_epsilon": 0.5}
    fields |= {
        "posted_epsilon": 0.5,
        "left_epsilon": 0.834,
        "words": "at most 0.500 so far; one more job of up to 0.834",
    }
    return fields | changes


def test_an_account_is_told_in_one_measure_that_adds_up_with_the_epsilon_of_the_total_beside_it(
    modules: Page,
) -> None:
    words = called(modules, "meters.js", "inWords", balance())
    assert words.startswith("spent 25.0 % + reserved 0.0 % + left 75.0 % = 100 %")
    assert "Epsilon at most 0.500 so far; one more job of up to 0.834; at most epsilon 1.00 once all" in words
    chosen = balance(spent_epsilon=None, cap_nano=None, left_nano=None, left_fraction=None, cap_epsilon=None)
    assert called(modules, "meters.js", "inWords", chosen).startswith("No limit is set here")
    assert called(modules, "meters.js", "standing", chosen)["kind"] == "open", "what an operator chose is no alarm"
    assert called(modules, "meters.js", "standing", balance(spent_epsilon=None))["kind"] == "unbound"


def test_an_alert_that_is_acknowledged_stays_away_until_it_comes_again(modules: Page) -> None:
    """The page's own class, over a list of jobs as it is filled; nothing readable is kept in the browser."""
    told = modules.evaluate(
        """async ([first, second]) => {
            const { Alerts } = await import("/dashboard/alerts.js");
            document.body.innerHTML = '<div id="alerts-list"></div>';
            let jobs = [first];
            const alerts = () => new Alerts(null, { all: () => jobs });
            const shown = (one) => {
                one.show({ checks: [] }, {}, {});
                return document.querySelectorAll(".alert").length;
            };
            const one = alerts();
            const before = shown(one);
            document.querySelector(".alert button").click();
            const after = shown(one);
            const reloaded = shown(alerts());
            jobs = [second];
            const again = shown(alerts());
            const kept = JSON.stringify(localStorage);
            localStorage.clear();
            return { before, after, reloaded, again, kept };
        }""",
        [
            job(name="secret", state="failed", updated_at=now_text(1)),
            job(name="secret", state="failed", updated_at=now_text(0)),
        ],
    )
    assert [told[name] for name in ("before", "after", "reloaded", "again")] == [1, 0, 0, 1]
    assert "secret" not in told["kept"]


def now_text(hours_ago: int) -> str:
    return (datetime.now(UTC) - timedelta(hours=hours_ago)).strftime("%Y-%m-%dT%H:%MZ")


def job(**changes: Any) -> dict[str, Any]:
    fields: dict[str, Any] = {
        "job_id": "job-1",
        "name": "photos",
        "state": "completed",
        "updated_at": "2027-03-01T00:00Z",
    }
    fields |= {
        "refusals": [],
        "waiting_for": [],
        "problem": None,
        "forgotten_at": None,
        "ledger_seq": None,
        "ledger": "",
    }
    return fields | changes


def test_alerts_say_what_it_means_and_what_to_do_the_worst_first(modules: Page) -> None:
    now = modules.evaluate("Date.parse('2027-03-02T00:00Z')")
    party = {
        "party_id": "clinic",
        "role": "agent",
        "state": "active",
        "is_live": True,
        "claim": "",
        "last_contact": None,
    }
    silent = {"name": "talliers", "ok": False, "detail": "talliers not heard from for 60 s: counter"}
    unready = {"name": "service", "ok": False, "detail": "no job can be taken now"}
    ready = {
        "ready": False,
        "checks": [{"name": "storage", "ok": False, "detail": "the disk is full"}, silent, unready],
    }
    budget = {
        "accounts": [
            balance(account="agent:short", left_nano=50, left_fraction=0.05, posted_nano=950),
            balance(account="agent:clinic", left_nano=0, left_fraction=0, posted_nano=1000),
            balance(account="agent:other", cap_nano=None, left_fraction=None, spent_epsilon=None),
            balance(spent_epsilon=None),
            balance(account="agent:fine"),
        ]
    }
    used = {"expires_at": "2027-03-05T10:30Z", "used_at": "2027-03-01T10:30Z"}
    parties = {
        "parties": [
            {**party, "is_live": False},
            {**party, "party_id": "counter", "role": "tallier", "is_live": False},
            {**party, "party_id": "doubter", "claim": "it has seen entry 9"},
            {**party, "party_id": "gone", "state": "revoked", "is_live": False},
            {**party, "party_id": "there"},
        ],
        "key_changes": [
            {"party_id": "ward", "is_rotation": True, "expires_at": "2027-03-05T10:30Z", "used_at": None},
            {"party_id": "late", "is_rotation": True, "expires_at": "2027-03-01T10:30Z", "used_at": None},
            *({**used, "party_id": name, "is_rotation": name == "lab"} for name in ("lab", "east", "west")),
        ],
    }
    problem = {"type": "urn:labeler:problem:quorum-not-reached", "title": "Too few agents answered"}
    refusals = [{"party_id": "clinic", "reason": "no", "rounds": [0]}]
    jobs = [
        job(state="failed", problem=problem),
        job(name="old", state="failed", updated_at="2027-02-01T00:00Z"),
        job(name="deleted", state="failed", forgotten_at="2027-03-01T01:00Z"),
        job(name="slow", state="queued", waiting_for=[{"agent_id": "clinic", "reason": "approval"}]),
        job(name="partly", refusals=refusals),
        job(name="well"),
        job(
            name="odd",
            state="failed",
            problem=problem,
            refusals=[{"party_id": "clinic", "reason": "no", "rounds": [0]}],
        ),
    ]
    found = called(modules, "alerts.js", "alertsOf", ready, parties, budget, jobs, now)
    assert [(one["kind"], one["title"]) for one in found] == [
        ("bad", "Not ready: storage"),
        ("bad", "The budget for one image is used up: clinic"),
        ("bad", "No bound for one image: Federation"),
        ("bad", "counter is away"),
        ("bad", "doubter has seen entries that are missing here"),
        ("bad", "“photos” failed: Too few agents answered"),
        ("bad", "“odd” failed: Too few agents answered"),
        ("low", "The budget for one image is nearly spent: short (5.0 % left)"),
        ("low", "clinic is away"),
        ("low", "New keys: lab"),
        ("low", "Joined: east, west"),
        ("low", "The keys of ward are about to change"),
        ("low", "“slow” waits for a person at clinic"),
        ("low", "clinic refused “partly”"),
    ]
    for one in found:
        assert len(one["means"]) > 20, one
        assert len(one["todo"]) > 20, one
    assert found[11]["detail"] == "The invitation may be used until 5 Mar 2027, 10:30 UTC."
    assert "Bring enough agents back" in found[5]["todo"]
    assert "change what they refuse" in found[6]["todo"]
    assert called(modules, "alerts.js", "alertsOf", {"checks": []}, {"parties": []}, {"accounts": []}, [], now) == []
    # Where no enrolled tallier is away, the failed check is all that says so.
    lacking = {"parties": [], "talliers_needed": 3}
    found = called(modules, "alerts.js", "alertsOf", {"checks": [silent]}, lacking, {"accounts": []}, [], now)
    assert [one["title"] for one in found] == ["Not ready: talliers"]


def entry(seq: int, kind: str, reservation: str, amount: int, level: str = "instance") -> dict[str, Any]:
    return {
        "seq": seq,
        "kind": kind,
        "reservation_id": reservation,
        "amount_nano": amount,
        "level": level,
        "at": str(seq),
    }


def test_the_ledger_is_grouped_by_job_once_all_of_a_job_was_read(open_page: OpenPage, url: str) -> None:
    page = open_page(url).page
    entries = [
        entry(12, "reserve", "another requester's job", 5),
        entry(11, "post", "job-c/0", 40),
        entry(10, "post", "job-b/0", 30),
        entry(9, "void", "job-a/1", 20),
        entry(8, "post", "job-a/0", 20),
        entry(7, "reserve", "job-b/0", 30),
        entry(6, "void", "job-a/proposed", 50),
        entry(5, "reserve", "job-a/1", 20),
        entry(4, "reserve", "job-a/0", 20),
        entry(3, "reserve", "job-a/proposed", 50),
        entry(2, "reserve", "job-d/proposed", 9),
        entry(1, "open", "", 1000),
    ]
    found = called(page, "ledger_jobs.js", "groupsOf", entries)
    told = {one["id"]: (one["nano"], one["state"]) for one in found["jobs"]}
    assert told == {
        "job-b": ({"instance": 30}, "posted"),
        "job-a": ({"instance": 20}, "mixed"),
        "job-d": ({"instance": 9}, "reserved"),
    }
    assert [one["seq"] for one in found["settings"]] == [1]
