"""The dashboard of a running federation, as a requester and a privacy officer walk through it in a real browser.

A little over 400 lines: one federation, started once, and everything that people do on its pages.
"""

from __future__ import annotations

import json
import os
import re
import signal
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Locator, Page, expect
from safetensors import safe_open

from api.access import ACCESS
from api.client import Client
from api.coordinator.results import SIDE
from api.schema import JobView, Selection, TaskRequest
from labeler.errors import LabelerError
from tests.e2e.browser.conftest import in_both_widths_and_schemes
from tests.e2e.service.conftest import Service, running
from tests.forked_command import run_forked

OpenPage = Callable[..., Any]
pytestmark = pytest.mark.slow
RESERVED = re.compile(r"reserved (?!0\.0)[0-9.]+ % \+")


@pytest.fixture(scope="module")
def federation(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    with running(tmp_path_factory.mktemp("dashboard") / "home") as service:
        yield service


@pytest.fixture(scope="module")
def client(federation: Service) -> Iterator[Client]:
    with federation.client() as client:
        yield client


def new_task(client: Client, name: str, *, epsilon: float) -> str:
    request = TaskRequest(name=name, method="knn", k=1, epsilon=epsilon, max_queries=200)
    return client.create_task(request).task_id


def submit(client: Client, federation: Service, name: str, *, epsilon: float, count: int = 20) -> JobView:
    return client.submit(
        new_task(client, name, epsilon=epsilon),
        images=federation.examples / "digits.zip",
        selection=Selection(strategy="random", count=count),
        name=name,
    )


def goto(page: Page, view: str) -> None:
    page.get_by_role("navigation", name="Views").get_by_role("link", name=view, exact=True).click()


def row(page: Page, name: str) -> Locator:
    return page.locator("#jobs-list tbody tr", has_text=name)


def open_job(page: Page, name: str) -> Locator:
    goto(page, "Jobs")
    row(page, name).get_by_role("link", name=name).click()
    expect(page.get_by_role("heading", name=name, level=2)).to_be_visible()
    return page.locator("#job-page")


def unexpected(visit: Any) -> list[str]:
    """Loads that failed, but for labels that were asked for while they were being made: the page asks again."""
    return [line for line in visit.failed_loads if not ("/labels?" in line and "503" in line)]


def percent(text: str) -> float:
    found = re.search(r"([0-9.]+) %", text)
    assert found, text
    return float(found.group(1))


def photos(federation: Service, folder: Path, count: int) -> list[Path]:
    """Some of the example images as files, some of them with names that must stay names."""
    odd = {0: "Grünes Bild 春.png", 1: "<img src=x onerror=alert(1)>.png", 2: 'a "quoted" 100 %22.png'}
    with zipfile.ZipFile(federation.examples / "digits.zip") as archive:
        names = [name for name in archive.namelist() if name.endswith(".png")][:count]
        for place, name in enumerate(names):
            (folder / odd.get(place, Path(name).name)).write_bytes(archive.read(name))
    return sorted(folder.iterdir())


def test_the_rest_interface_is_shown_without_another_host_and_its_script_reaches_no_token(
    open_page: OpenPage, federation: Service
) -> None:
    visit = open_page(federation.url)
    asked: list[str] = []
    visit.page.on("request", lambda request: asked.append(request.url))
    visit.page.goto(f"{federation.url}/api")
    expect(visit.page.locator(".opblock")).to_have_count(len(ACCESS))
    assert (visit.script_errors, visit.failed_loads) == ([], [])
    visit.page.locator("[id$=-label_images] .opblock-summary-control").click()
    expect(visit.page.locator(".opblock-body")).to_contain_text("For a token of role requester or admin.")
    expect(visit.page.get_by_role("button", name="Try it out")).to_have_count(0)
    stored = visit.page.evaluate("() => { try { return sessionStorage.length } catch (error) { return error.name } }")
    assert stored == "SecurityError"
    assert not any(url.endswith("/openapi.json") for url in asked)
    status = "async () => { try { return (await fetch('/v1/status')).status } catch (error) { return error.name } }"
    assert visit.page.evaluate(status) == "TypeError"
    assert all(url.startswith((federation.url, "data:")) for url in asked)


def test_a_requester_makes_a_task_sees_the_price_submits_images_and_looks_at_their_labels(
    open_page: OpenPage, federation: Service, client: Client, screenshots: Path, tmp_path: Path
) -> None:
    made = client.create_token("a curious lab", "requester")
    visit = open_page(f"{federation.url}/")
    page = visit.page
    expect(page).to_have_url(f"{federation.url}/dashboard")
    page.get_by_label("Access token").fill(str(made.token))
    page.keyboard.press("Enter")
    goto(page, "New job")
    page.get_by_text("Make a new task").click()
    before = client.budget().head_seq

    # The price follows what is typed; what is wrong is told where it stands, and nothing typed is lost.
    page.get_by_label("Name", exact=True).fill("Ziffern <b>für</b> alle")
    page.get_by_label("Questions, at most").fill("40")
    page.get_by_text("Classes, method, what is opened").click()
    page.get_by_label("How agents answer").select_option("knn")
    page.get_by_label("Epsilon of all its questions").fill("0.8")
    expect(page.locator("#task-price")).to_contain_text("epsilon 0.800")
    page.get_by_label("Votes of an agent").fill("9999999")
    page.get_by_role("button", name="Make the task").click()
    error = page.locator("#task-k-error")
    expect(error).to_be_visible()
    assert page.get_by_label("Votes of an agent").get_attribute("aria-describedby") == "task-k-error"
    expect(page.get_by_label("Name", exact=True)).to_have_value("Ziffern <b>für</b> alle")
    assert visit.axe_problems() == []
    page.get_by_label("Votes of an agent").fill("5")
    page.get_by_role("button", name="Make the task").click()
    expect(page.locator("#job-task option:checked")).to_contain_text("Ziffern <b>für</b> alle")
    expect(error).to_have_count(0)
    assert client.budget().head_seq == before

    page.get_by_label("Ask about").select_option("all")
    expect(page.locator("#job-price")).to_contain_text("Choose images")
    page.get_by_role("button", name="Submit the job").click()
    expect(page.locator("#job-files-error")).to_be_visible()
    files = photos(federation, tmp_path, 30)
    page.get_by_label("Images, a zip of them").set_input_files(files)
    expect(page.locator(".field-error")).to_have_count(0)
    page.get_by_label("Name of the job").fill("Bilder <i>eins</i>")
    price = page.locator("#job-price")
    expect(price).to_contain_text("30 questions")
    expect(price).to_contain_text("of the federation's budget")
    expect(price).to_contain_text("of the images labeled right")
    expect(price).to_have_attribute("aria-busy", "false")
    assert client.budget().head_seq == before
    visit.keep(screenshots, "new-job")
    page.get_by_role("button", name="Submit the job").click()

    # Straight to the job, to its labels with their images when it is done.
    expect(page.get_by_role("heading", name="Bilder <i>eins</i>", level=2)).to_be_visible()
    expect(page.locator("#job-state")).to_contain_text("completed")
    tiles = page.locator("#gallery-list li")
    expect(tiles).to_have_count(24)
    page.get_by_role("button", name="Show 6 more").click()
    expect(tiles).to_have_count(30)
    expect(page.locator("#gallery-list img")).to_have_count(30)
    widths = "[...document.querySelectorAll('#gallery-list img')].map((one) => one.naturalWidth)"
    while SIDE not in page.evaluate(widths):
        page.wait_for_timeout(50)
    assert set(page.evaluate(widths)) <= {0, SIDE}  # those further down are not painted yet
    shown = page.locator("#gallery-list .source").all_inner_texts()
    assert sorted(shown) == sorted(path.name for path in files)
    chosen = page.locator("#gallery-class option").nth(1)
    name, number = re.fullmatch(r"(.+) \((\d+)\)", str(chosen.text_content())).groups()  # type: ignore[union-attr]
    page.get_by_label("Class", exact=True).select_option(name)
    expect(tiles).to_have_count(int(number))
    assert {one.strip() for one in page.locator("#gallery-list strong").all_inner_texts()} == {name}
    page.get_by_label("Class", exact=True).select_option("")
    assert visit.axe_problems() == []
    visit.keep(screenshots, "gallery")
    (job,) = (one for one in client.jobs() if one.name == "Bilder <i>eins</i>")
    with page.expect_download() as download:
        page.get_by_role("button", name="JSON lines").click()
    ours = client.labels(job.job_id, screenshots / "labels.jsonl", format="jsonl")
    assert download.value.path().read_bytes() == ours.read_bytes()
    with page.expect_download() as student:
        page.get_by_role("button", name="Student, to label others").click()
    with safe_open(student.value.path(), framework="numpy") as file:
        assert "privacy" in str(file.metadata())
    assert page.get_by_role("link", name="Tokens").count() == 0
    assert visit.script_errors == []
    assert [line for line in unexpected(visit) if "422" not in line] == []


LOSE_ONE_ANSWER = """() => {
  const listen = XMLHttpRequest.prototype.addEventListener;
  let lost = false;
  XMLHttpRequest.prototype.addEventListener = function (kind, listener) {
    listen.call(this, kind, kind !== "load" ? listener : (event) => {
      if (lost) return listener(event);
      lost = true;
      return this.dispatchEvent(new ProgressEvent("error"));
    });
  };
}"""
"""The service took the request, and the connection broke before its answer came."""


@pytest.mark.long
def test_a_submission_whose_answer_was_lost_is_sent_again_and_is_one_job(
    open_page: OpenPage, federation: Service, client: Client, tmp_path: Path
) -> None:
    task = new_task(client, "sent twice", epsilon=0.3)
    visit = open_page(f"{federation.url}/dashboard#token={federation.token}")
    page = visit.page
    goto(page, "New job")
    page.get_by_label("Task", exact=True).select_option(task)
    page.get_by_label("Images, a zip of them").set_input_files(photos(federation, tmp_path, 5))
    page.get_by_label("Ask about").select_option("all")
    page.get_by_label("Name of the job").fill("asked once")

    page.evaluate(LOSE_ONE_ANSWER)
    page.get_by_role("button", name="Submit the job").click()
    expect(page.locator("#job-error")).to_contain_text("nothing is charged twice")
    expect(page.get_by_label("Name of the job")).to_have_value("asked once")
    # What it changed reaches the page before somebody presses again; the submission stays the same one.
    expect(page.locator("#job-task-words")).to_contain_text("195 questions left")
    page.get_by_role("button", name="Submit the job").click()
    expect(page.get_by_role("heading", name="asked once", level=2)).to_be_visible()
    assert len([one for one in client.jobs() if one.name == "asked once"]) == 1


def test_the_officer_finds_why_a_job_stopped_and_what_to_do_and_stops_a_token(
    open_page: OpenPage,
    federation: Service,
    client: Client,
    screenshots: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    client.wait(submit(client, federation, "asked before", epsilon=0.3, count=5).job_id)  # something is spent
    policy = next(federation.home.rglob("agent-1/policy.toml"))
    before = policy.read_text()
    policy.write_text(re.sub(r"(?m)^methods = .*$", 'methods = ["ensemble"]', before))
    try:
        job = client.wait(submit(client, federation, "not with agent-1", epsilon=0.4, count=200).job_id)
    finally:
        policy.write_text(before)
    assert job.state in ("refused", "failed")
    with pytest.raises(LabelerError, match="left"):
        submit(client, federation, "far too dear", epsilon=60.0, count=200)
    visit = open_page(federation.dashboard)
    page = visit.page

    dear = page.locator(".alert", has_text="“far too dear” was refused")
    expect(dear).to_contain_text("What to do: Ask fewer questions")
    visit.keep(screenshots, "overview-alerts")
    dear.get_by_role("link", name="Open the job").click()
    reason = page.get_by_role("region", name="Why")
    expect(page.locator("#headline")).to_contain_text(" % of the budget is spent")
    spent = percent(page.locator("#headline").inner_text().rpartition("; ")[2])
    expect(reason).to_contain_text(f"and {round(100 - spent, 1)} % is left")
    assert percent(reason.locator(".reason").inner_text()) > 100
    reason.get_by_text("In nano-units").click()
    for words in ("Federation", "one image", "Asked", "epsilon 60.0", "Limit"):
        expect(reason).to_contain_text(words)

    expect(page.locator("#job-stage")).to_contain_text("0 of 200 questions answered; nothing was charged.")
    page.keyboard.press("Escape")
    expect(page.get_by_role("heading", name="Jobs", level=2)).to_be_visible()
    expect(row(page, "far too dear")).to_contain_text("nothing charged")
    goto(page, "Overview")
    assert page.evaluate(
        "[...document.querySelectorAll('.meter .reserved, .meter .asked')].every((one) => !one.offsetWidth)"
    )
    alert = page.locator(".alert", has_text="“not with agent-1”").first
    expect(alert).to_contain_text("What to do:")
    alert.get_by_role("link", name="Open the job").click()
    answered = page.locator("#job-rounds")
    expect(answered).to_contain_text("agent-1")
    expect(answered.locator("td[data-label=State]")).to_have_text(re.compile("never asked|given up"))
    page.get_by_text("Price, times, ledger").click()
    expect(page.locator("#job-facts")).to_contain_text(job.ledger, ignore_case=True)
    monkeypatch.setenv("LABELER_TOKEN", federation.token)
    _, shown = run_forked("status", job.job_id, "--url", federation.url)
    assert job.refusals
    assert all(" ".join(shown.split()).count(one.reason) == 1 for one in job.refusals)
    assert job.ledger in shown

    goto(page, "Tokens")
    page.get_by_label("For whom").fill("a contractor")
    page.get_by_label("Role").select_option("viewer")
    page.get_by_role("button", name="Make a token").click()
    secret = page.locator("#token-secret")
    expect(secret).to_have_text(re.compile("^lab_"))
    with Client(federation.url, secret.inner_text()) as contractor:
        assert contractor.whoami().name == "a contractor"
        page.get_by_role("button", name="Done: hide it").click()
        assert "lab_" not in page.content()
        page.get_by_role("button", name="Revoke a contractor").click()
        assert visit.axe_problems() == []
        page.keyboard.press("Escape")
        assert contractor.whoami().revoked_at is None
        page.get_by_role("button", name="Revoke a contractor").click()
        page.get_by_role("button", name="Yes, revoke it").click()
        expect(page.locator("#token-error")).to_contain_text("a contractor was revoked")
        with pytest.raises(LabelerError, match="revoked"):
            contractor.whoami()
    expect(page.locator("#tokens-list tbody tr", has_text="a contractor")).to_contain_text("UTC")
    visit.keep(screenshots, "tokens")
    assert visit.script_errors == []
    assert unexpected(visit) == []


@pytest.mark.long
def test_the_officer_prints_signed_evidence_of_a_task_and_of_a_period(
    open_page: OpenPage, federation: Service, client: Client, tmp_path: Path
) -> None:
    job = client.wait(submit(client, federation, "to be proved", epsilon=0.2).job_id)
    made = client.create_token("data protection", "viewer")
    visit = open_page(f"{federation.url}/dashboard#token={made.token}")
    page = visit.page
    page.evaluate("(id) => { location.hash = `#jobs/${id}`; }", job.job_id)
    with page.expect_download() as download:
        page.get_by_role("button", name="Evidence, signed file").click()
    signed = tmp_path / "evidence.json"
    download.value.save_as(signed)
    (task,) = json.loads(signed.read_text())["evidence"]["facts"]["tasks"]
    assert job.task_id in json.dumps(task)
    code, said = run_forked("evidence", "verify", signed)
    assert code == 0, said
    expect(page.locator("#job-message")).to_contain_text("labeler evidence verify")

    goto(page, "Ledger")
    page.get_by_text("Evidence of a period, signed").click()
    page.get_by_label("From (UTC)").fill("2020-01-01")
    page.get_by_label("To the end of (UTC)").fill("2100-01-01")
    assert visit.axe_problems() == []
    with page.expect_download() as printed:
        page.get_by_role("button", name="Evidence, page to print").last.click()
    text = printed.value.path().read_text()
    assert job.task_id[:12] in text
    assert "<script" not in text
    assert visit.script_errors == []
    assert unexpected(visit) == []


def test_a_job_is_seen_from_queued_to_completed_and_the_budget_after_it(
    open_page: OpenPage, federation: Service, client: Client, screenshots: Path
) -> None:
    visit = open_page(federation.dashboard)
    page = visit.page
    expect(page.get_by_text("first administrator (admin)")).to_be_visible()
    before = client.budget()
    goto(page, "Sites")
    expect(page.locator("#parties-list")).to_contain_text("3 of 3 agents")
    # An agent that stands still holds the job open long enough for people to look at it.
    agent = federation.pid("agent-2")
    os.kill(agent, signal.SIGSTOP)
    try:
        job = submit(client, federation, "watched live", epsilon=0.5, count=200)
        goto(page, "Jobs")
        # It has not said yet whether it will, so nobody is asked and nothing is charged for good.
        expect(row(page, "watched live")).to_contain_text("to say whether they will: agent-2")
        shown = open_job(page, "watched live")
        awaited = shown.locator("td[data-label=Awaited]").first
        expect(awaited).to_contain_text("agent-2")
        page.get_by_text("Price, times, ledger").click()
        expect(shown).to_contain_text(f"Reserved {client.job(job.job_id).ledger.removeprefix('reserved ')}")
        shown.get_by_role("button", name="Cancel this job").click()
        expect(shown).to_contain_text("stays charged")
        assert visit.axe_problems() == []
        page.keyboard.press("Escape")
        expect(shown.get_by_role("button", name="Cancel this job")).to_be_focused()
        goto(page, "Ledger")
        expect(page.locator("#ledger-jobs tr", has_text="watched live")).to_contain_text("reserved")
        goto(page, "Overview")
        expect(page.locator("#budget-federation .meter").first).to_have_attribute("aria-label", RESERVED)
    finally:
        os.kill(agent, signal.SIGCONT)
    expect(page.locator("#announcer")).to_have_text("watched live: completed")
    shown = open_job(page, "watched live")
    expect(shown).to_contain_text("200 of 200 questions answered")
    expect(awaited).to_have_text("nobody")
    after = client.budget()
    assert after.head_seq > before.head_seq
    told = client.job(job.job_id)
    expect(shown.locator("#job-facts")).to_contain_text(told.ledger, ignore_case=True)
    expect(shown.locator("#job-facts")).to_contain_text(told.price.holds_against)
    expect(shown.locator("#job-queries tbody tr").first).to_contain_text("each")
    expect(shown.locator("#job-queries")).to_contain_text("Every question of a round costs the same")
    expect(shown.locator("#job-queries .plot canvas")).to_be_visible()
    goto(page, "Overview")
    page.get_by_text("Budget by query").click()
    expect(page.locator("#budget-queries tbody tr").first).to_contain_text("watched live")
    expect(page.locator("#budget-queries .plot canvas")).to_be_visible()
    persons = {one.account: one for one in client.budget().persons}
    person = page.locator("#budget-agents tr", has_text="agent-1").locator("td[data-label='One patient']")
    assert persons["agent:agent-1"].person_epsilon is None, "its task limits no person's images"
    expect(person).to_contain_text("no bound")
    expect(person).to_contain_text(persons["agent:agent-1"].reason, ignore_case=True)
    page.get_by_text("Epsilon over time").click()
    expect(page.locator("#charts .plot canvas").first).to_be_visible()
    visit.keep(screenshots, "overview-light")
    assert visit.script_errors == []
    assert unexpected(visit) == []


@pytest.mark.long
def test_an_evaluation_shows_each_number_with_two_intervals_and_gives_the_measured_model(
    open_page: OpenPage, federation: Service, client: Client, screenshots: Path
) -> None:
    labeled = submit(client, federation, "to be evaluated", epsilon=1.0, count=40)
    assert client.wait(labeled.job_id).state == "completed"
    asked = client.evaluate(labeled.job_id, epsilon=1.0, name="how good is it")
    assert client.wait(asked.job_id).state == "completed"
    visit = open_page(federation.dashboard)
    job = open_job(visit.page, f"evaluation of {labeled.job_id}")
    found = client.evaluation(asked.job_id)
    table = job.get_by_role("table", name="What the evaluation found")
    first = table.get_by_role("row").nth(1)
    expect(first).to_contain_text(f"{100 * found['accuracy']['value']:.1f} %")
    low, high = found["accuracy"]["sampling"]
    expect(first).to_contain_text(f"{100 * low:.1f} % to {100 * high:.1f} %")
    expect(job.locator("#job-evaluation")).to_contain_text("the sites' own")
    expect(job.locator("#job-gallery")).to_be_hidden()
    with visit.page.expect_download() as download:
        job.get_by_role("button", name="The model, stating what was right").click()
    with safe_open(str(download.value.path()), framework="numpy") as file:
        assert "measured" in json.loads(file.metadata()["labeler"])
    with visit.page.expect_download() as download:
        job.get_by_role("button", name="Evaluation", exact=True).click()
    assert json.loads(download.value.path().read_text())["accuracy"] == found["accuracy"]
    visit.page.screenshot(path=screenshots / "evaluation.png", full_page=True)
    assert visit.axe_problems() == []
    assert visit.overflow_px() <= 0
    assert visit.script_errors == []


@pytest.mark.long
def test_the_ledger_by_job_adds_up_to_the_budget_and_nano_units_and_hashes_are_one_click_away(
    open_page: OpenPage, federation: Service, client: Client, screenshots: Path
) -> None:
    for number in range(2):
        client.wait(submit(client, federation, f"adds up {number}", epsilon=0.6, count=100).job_id)
    visit = open_page(federation.dashboard)
    page = visit.page
    legend = page.locator("#budget-federation .legend").first
    expect(legend).to_contain_text("= 100 % of the budget")
    parts = [percent(part) for part in legend.locator("li").all_inner_texts()[:3]]
    assert sum(parts) == pytest.approx(100, abs=1e-9)
    goto(page, "Ledger")
    rows = page.locator("#ledger-jobs > div > table > tbody > tr")
    expect(rows.filter(has_text="adds up 1")).to_contain_text("charged for good")
    shares = [percent(one) for one in page.locator("#ledger-jobs td[data-label='One image']").all_inner_texts()]
    assert sum(shares[:-1]) == pytest.approx(shares[-1], abs=1e-6)
    assert shares[-1] == pytest.approx(parts[0] + parts[1], abs=0.11)
    plot = page.locator("#ledger-plots figure:not([hidden])").first
    expect(plot.locator("canvas")).to_be_visible()
    expect(plot.locator(".readout")).to_contain_text("spent or reserved after adds up 1")
    assert percent(plot.locator(".readout").inner_text()) == pytest.approx(shares[-1], abs=0.11)
    mine = rows.filter(has_text="adds up 1")
    expect(mine).to_contain_text("task adds up 1")
    expect(mine).to_contain_text("100 questions: ")
    mine.get_by_text("Entries, nano-units and hashes").click()
    expect(mine.locator(".hash").first).to_have_text(re.compile("^[0-9a-f]{64}$"))
    (job,) = (one for one in client.jobs() if one.name == "adds up 1")
    entries = list(client.ledger(search=job.job_id))
    assert mine.locator(".hash").all_inner_texts() == [one.hash for one in entries]
    assert visit.axe_problems() == []
    page.get_by_text("Every entry, with nano-units and hashes").click()
    expect(page.locator("#ledger-list tbody tr").first).to_contain_text(job.job_id)
    visit.keep(screenshots, "ledger")
    assert visit.script_errors == []
    assert unexpected(visit) == []


@pytest.mark.long
def test_what_an_ended_job_leaves_is_deleted_after_asking_twice_and_its_charge_stays(
    open_page: OpenPage, federation: Service, client: Client, screenshots: Path
) -> None:
    job = client.wait(submit(client, federation, "to be forgotten", epsilon=0.2).job_id)
    assert job.state == "completed"
    visit = open_page(federation.dashboard)
    page = visit.page
    shown = open_job(page, "to be forgotten")
    assert shown.get_by_role("button", name="Cancel this job").count() == 0
    shown.get_by_role("button", name="Delete its data").click()
    expect(shown).to_contain_text("deleted for good")
    assert visit.axe_problems() == []
    shown.get_by_role("button", name="Keep it").click()
    expect(shown.get_by_role("button", name="JSON lines")).to_be_visible()
    assert client.job(job.job_id).forgotten_at is None
    expect(page.locator("#gallery-list img").first).to_be_attached()
    shown.get_by_role("button", name="Delete its data").click()
    shown.get_by_role("button", name="Yes, delete it").click()
    expect(shown).to_contain_text("What this job sent and got was deleted")
    for gone in ("JSON lines", "Delete its data", "Yes, delete it"):
        expect(shown.get_by_role("button", name=gone)).to_have_count(0)
    expect(page.locator("#job-gallery")).to_be_hidden()
    expect(page.locator("#gallery-list li")).to_have_count(0)
    with pytest.raises(LabelerError, match="were deleted on"):
        client.labels(job.job_id, screenshots / "gone.jsonl", format="jsonl")
    assert visit.script_errors == []


VIEWS = ("Overview", "Jobs", "New job", "Sites", "Ledger", "Tokens")
CUT = """() => [...document.querySelectorAll("main *, nav *")].filter((one) => one.checkVisibility() &&
    !one.closest(".visually-hidden, select, .source, svg, caption, thead, .plot, .meter") &&
    one.getBoundingClientRect().right > innerWidth + 0.5).map((one) => one.outerHTML.slice(0, 120))"""


@in_both_widths_and_schemes()
def test_every_view_reads_in_both_themes_and_widths_nothing_is_cut_and_axe_finds_nothing(
    open_page: OpenPage, federation: Service, client: Client, screenshots: Path, width: int, scheme: str
) -> None:
    job = next((one for one in client.jobs() if one.name == "without bound"), None)
    if job is None:
        # A task without max_agent_records has no finite price for a whole agent; accounts without a limit take it.
        endless = TaskRequest(name="votes", method="reverse-knn", k=1, epsilon=0.3, delta=1e-5, max_queries=200)
        task = client.create_task(endless).task_id
        sent = client.submit(task, images=federation.examples / "digits.zip", name="without bound")
        job = client.wait(sent.job_id)
    assert job.state == "completed"
    assert job.price.agent_epsilon is None
    visit = open_page(federation.dashboard, width=width, scheme=scheme)
    page = visit.page
    for view in (*VIEWS, "a job"):
        if view == "a job":
            page.evaluate("(id) => { location.hash = `#jobs/${id}`; }", job.job_id)
            expect(page.locator("#gallery-list li").first).to_be_visible()
            page.get_by_text("Price, times, ledger").click()
        else:
            goto(page, view)
        if view == "Overview":
            expect(page.locator("#budget-agents")).to_contain_text("agent-3")
            expect(page.locator(".account.open .figure")).to_have_text("No limit")
            assert page.locator(".alert", has_text="No bound").count() == 0, "no limit was chosen by the operator"
        if view == "Jobs":
            expect(row(page, "without bound")).to_be_visible()
        if view == "Ledger":
            dear = page.locator("#ledger-jobs tr", has_text="without bound")
            expect(dear.locator(".no-bound")).to_be_visible()
        if view == "New job":
            page.locator("#new-task > summary").click()
            page.locator("#task-form details > summary").first.click()
            expect(page.locator("#task-price")).to_have_attribute("aria-busy", "false")
            expect(page.locator("#task-price .verdict")).to_be_visible()
        visit.keep(screenshots, f"{view.replace(' ', '-')}-{width}-{scheme}")
        assert visit.axe_problems() == [], view
        assert visit.naming_problems() == [], view
        assert visit.overflow_px() <= 0, view
        assert page.evaluate(CUT) == [], view
        if width == 390 and view in ("Overview", "Jobs", "Sites", "Ledger"):
            assert page.evaluate("document.documentElement.scrollHeight") < 4_500, view
    assert visit.script_errors == []


def test_with_the_keyboard_alone_every_control_is_reached_and_seen_and_none_holds_it(
    open_page: OpenPage, federation: Service
) -> None:
    page = open_page(federation.dashboard).page
    expect(page.locator("#budget-agents")).to_contain_text("agent-3")
    page.locator("#nav a", has_text="New job").focus()
    page.keyboard.press("Enter")
    expect(page.get_by_role("heading", name="New job")).to_be_focused()
    page.locator("#new-task > summary").focus()
    page.keyboard.press("Enter")
    # A price that comes later would take the place of what has the focus.
    expect(page.locator("#task-price .verdict")).to_be_visible()
    expect(page.locator("#new [aria-busy=true]")).to_have_count(0)
    wanted = set(
        page.evaluate(
            "[...document.querySelectorAll('#new :is(input, select, textarea, button, summary)')]"
            ".filter((one) => one.checkVisibility() && !one.disabled).map((one) => one.id || one.textContent)"
        )
    )
    seen: set[str] = set()
    page.get_by_role("heading", name="New job").focus()
    for _ in range(60):
        page.keyboard.press("Tab")
        name, outline = page.evaluate(
            "[document.activeElement.id || document.activeElement.textContent,"
            " getComputedStyle(document.activeElement).outlineStyle]"
        )
        seen.add(name)
        if page.evaluate("document.activeElement === document.body"):
            break
        assert outline != "none", name
    assert wanted <= seen, wanted - seen
    assert page.evaluate("document.activeElement === document.body || document.activeElement.id === 'skip'")


@pytest.mark.long
def test_a_viewer_sees_budgets_and_is_offered_nothing_to_stop_or_to_download(
    open_page: OpenPage, federation: Service, client: Client
) -> None:
    task = new_task(client, "a task's name is for all to read", epsilon=0.2)
    asked = Selection(strategy="random", count=20)
    images = federation.examples / "digits.zip"
    client.wait(client.submit(task, images=images, selection=asked, name="whose name is hidden").job_id)
    made = client.create_token("privacy office", "viewer")
    visit = open_page(f"{federation.url}/dashboard")
    page = visit.page
    page.get_by_label("Access token").fill(str(made.token))
    page.keyboard.press("Enter")
    expect(page.get_by_text("privacy office (viewer)")).to_be_visible()
    expect(page.locator("#budget-agents")).to_contain_text("agent-3")
    assert page.get_by_role("link", name="Tokens").count() == 0
    goto(page, "New job")
    expect(page.get_by_role("button", name="Submit the job")).to_be_disabled()
    expect(page.locator("#job-price")).to_contain_text("epsilon")
    assert page.get_by_text("Make a new task").is_hidden()
    goto(page, "Jobs")
    page.locator("#jobs-list tbody tr", has_text="completed").first.get_by_role("link").click()
    page.get_by_text("Price, times, ledger").click()
    expect(page.locator("#job-facts")).to_contain_text("Price, one image")
    assert "whose name is hidden" not in page.content()
    for offer in ("Cancel this job", "Delete its data", "JSON lines"):
        assert page.locator("#job-page").get_by_role("button", name=offer).count() == 0
    expect(page.locator("#job-gallery")).to_be_hidden()
    assert visit.script_errors == []
    assert unexpected(visit) == []
    client.revoke_token(made.token_id)
    expect(page.locator("#sign-in-error")).to_contain_text("not known here, or was revoked")
