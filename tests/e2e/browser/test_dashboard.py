"""The dashboard of a running federation: a job as it happens, a refusal with its reason, the budget after both."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Page, expect

from api.client import Client
from api.schema import JobView, Selection, TaskRequest
from labeler.errors import LabelerError

OpenPage = Callable[..., Any]
pytestmark = pytest.mark.slow
SLOW_MS = 30_000
RESERVED = re.compile("reserved for jobs that run now")


@dataclass(frozen=True)
class Federation:
    """A running `labeler up`: where it answers, its first token, example images, and its folder."""

    url: str
    token: str
    examples: Path

    home: Path

    def pid(self, role: str) -> int:
        """Process id of a part that runs now."""
        return int(json.loads((self.home / "processes.json").read_text())[role])

    @property
    def dashboard(self) -> str:
        return f"{self.url}/dashboard#token={self.token}"


@pytest.fixture(scope="module")
def federation(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Federation]:
    folder = tmp_path_factory.mktemp("dashboard")
    command = [sys.executable, "-m", "workers.cli", "up", "--home", str(folder / "home"), "--json"]
    with (folder / "log").open("w") as log:
        process = subprocess.Popen(
            [*command, "--agents", "3", "--port", "0"],
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
            env=os.environ | {"OMP_NUM_THREADS": "1"},
        )
    assert process.stdout is not None
    try:
        line = process.stdout.readline()
        assert line, (folder / "log").read_text()
        told = json.loads(line)
        yield Federation(told["url"], told["token"], Path(told["examples"]), folder / "home")
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(timeout=30)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        process.stdout.close()


@pytest.fixture(scope="module")
def client(federation: Federation) -> Iterator[Client]:
    with Client(federation.url, federation.token) as client:
        yield client


def new_task(client: Client, name: str, *, epsilon: float) -> str:
    request = TaskRequest(name=name, k=1, epsilon=epsilon, delta=1e-5, max_queries=200)
    return client.create_task(request).task_id


def submit(client: Client, federation: Federation, name: str, *, epsilon: float, count: int = 20) -> JobView:
    return client.submit(
        new_task(client, name, epsilon=epsilon),
        images=federation.examples / "digits.zip",
        selection=Selection(strategy="random", count=count),
        name=name,
    )


@pytest.fixture
def screenshots(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where pictures are kept: LABELER_SCREENSHOTS, or the test's own folder."""
    folder = os.environ.get("LABELER_SCREENSHOTS")
    path = Path(folder) if folder else tmp_path_factory.mktemp("screenshots")
    path.mkdir(parents=True, exist_ok=True)
    return path


def row(page: Page, name: str) -> Any:
    return page.locator("#jobs-list tbody tr", has_text=name)


def test_a_job_is_seen_from_queued_to_completed_and_the_budget_after_it(
    open_page: OpenPage, federation: Federation, client: Client, screenshots: Path
) -> None:
    visit = open_page(federation.dashboard)
    page = visit.page
    expect(page.get_by_text("first administrator (admin)")).to_be_visible(timeout=SLOW_MS)
    expect(page.locator("#readiness")).to_contain_text("Ready")
    expect(page.locator("#parties-list")).to_contain_text("3 of 3 agents", timeout=SLOW_MS)
    before = client.budget()

    # An agent that stands still holds the job open long enough for people to look at it.
    agent = federation.pid("agent-2")
    os.kill(agent, signal.SIGSTOP)
    try:
        job = submit(client, federation, "watched live", epsilon=0.5, count=200)
        # It has not said yet whether it will, so nobody is asked and nothing is charged for good.
        expect(row(page, "watched live")).to_contain_text("to say whether they will: agent-2", timeout=SLOW_MS)
        row(page, "watched live").get_by_role("button", name="Details").click()
        dialog = page.get_by_role("dialog")
        awaited = dialog.locator("td[data-label=Awaited]").first
        expect(awaited).to_contain_text("agent-2", timeout=SLOW_MS)
        expect(dialog).to_contain_text(f"Reserved {client.job(job.job_id).ledger.removeprefix('reserved ')}")
        expect(page.locator("#budget-federation .meter").first).to_have_attribute("aria-label", RESERVED)
        page.screenshot(path=screenshots / "dashboard-job.png")
        assert visit.contrast_problems() == []
        assert visit.naming_problems() == []
    finally:
        os.kill(agent, signal.SIGCONT)
    expect(dialog).to_contain_text("completed", timeout=SLOW_MS)
    expect(awaited).to_have_text("nobody")
    page.keyboard.press("Escape")
    expect(page.locator("#announcer")).to_have_text("watched live: completed")
    expect(row(page, "watched live")).to_contain_text("200 of 200 questions")

    after = client.budget()
    assert after.head_seq > before.head_seq
    expect(page.locator("#headline")).to_contain_text("epsilon 0.500", timeout=SLOW_MS)
    expect(page.locator("#ledger-list tbody tr").first).to_contain_text(job.job_id)
    expect(page.locator("#charts .plot canvas").first).to_be_visible()

    row(page, "watched live").get_by_role("button", name="Details").click()
    told = client.job(job.job_id)
    expect(dialog).to_contain_text(told.ledger, ignore_case=True)
    expect(dialog).to_contain_text(told.price.holds_against)
    with page.expect_download() as download:
        dialog.get_by_role("button", name="JSONL").click()
    ours = client.labels(job.job_id, screenshots / "labels.jsonl", format="jsonl")
    assert download.value.path().read_bytes() == ours.read_bytes()
    page.keyboard.press("Escape")
    visit.keep(screenshots, "dashboard-light")
    assert visit.script_errors == []
    assert visit.failed_loads == []


def test_a_refusal_is_shown_with_account_level_asked_and_left(
    open_page: OpenPage, federation: Federation, client: Client
) -> None:
    visit = open_page(federation.dashboard)
    with pytest.raises(LabelerError, match="left"):
        submit(client, federation, "far too dear", epsilon=60.0, count=200)
    card = visit.page.locator("#refusals-list article", has_text="far too dear")
    expect(card).to_be_visible(timeout=SLOW_MS)
    for words in ("Account", "Federation", "one image", "Asked", "epsilon 60.0", "Left"):
        expect(card).to_contain_text(words)
    assert visit.script_errors == []
    assert visit.failed_loads == []


def test_a_job_that_agents_refuse_is_told_alike_by_the_page_and_the_command(
    open_page: OpenPage, federation: Federation, client: Client, screenshots: Path
) -> None:
    policy = next(federation.home.rglob("agent-1/policy.toml"))
    before = policy.read_text()
    policy.write_text(re.sub(r"(?m)^methods = .*$", 'methods = ["ensemble"]', before))
    try:
        job = client.wait(submit(client, federation, "not with agent-1", epsilon=0.4, count=200).job_id)
    finally:
        policy.write_text(before)
    assert job.state in ("refused", "failed")
    assert [one.party_id for one in job.refusals] == ["agent-1"]
    visit = open_page(federation.dashboard)
    card = visit.page.locator("#refusals-list article", has_text="not with agent-1")
    expect(card).to_contain_text(job.ledger, timeout=SLOW_MS)
    said = visit.page.locator("#refusals-list tbody tr", has_text="not with agent-1")
    expect(said).to_have_count(len(job.refusals))
    card.get_by_role("button", name="Details").click()
    dialog = visit.page.get_by_role("dialog")
    expect(dialog).to_contain_text(job.ledger, ignore_case=True)
    expect(dialog.locator("td[data-label=State]")).to_have_text(re.compile("never asked|given up"))
    expect(dialog).not_to_contain_text("none yet")
    assert ("charge stands" in dialog.inner_text()) is False
    visit.page.screenshot(path=screenshots / "dashboard-refused.png")
    command = [sys.executable, "-m", "workers.cli", "status", job.job_id, "--url", federation.url]
    shown = subprocess.run(
        command, env=os.environ | {"LABELER_TOKEN": federation.token}, capture_output=True, text=True, check=False
    ).stdout
    assert shown.count("Refused ") == len(job.refusals)
    assert f"Ledger     {job.ledger}" in shown
    assert visit.script_errors == []


def test_what_an_ended_job_leaves_is_deleted_after_asking_twice_and_its_charge_stays(
    open_page: OpenPage, federation: Federation, client: Client, screenshots: Path
) -> None:
    job = client.wait(submit(client, federation, "to be forgotten", epsilon=0.2).job_id)
    assert job.state == "completed"
    visit = open_page(federation.dashboard)
    page = visit.page
    row(page, "to be forgotten").get_by_role("button", name="Details").click()
    dialog = page.get_by_role("dialog")
    assert dialog.get_by_role("button", name="Cancel this job").count() == 0
    dialog.get_by_role("button", name="Delete its data").click()
    expect(dialog).to_contain_text("deleted for good")
    assert visit.naming_problems() == []
    assert visit.contrast_problems() == []
    dialog.get_by_role("button", name="Keep it").click()
    expect(dialog.get_by_role("button", name="JSONL")).to_be_visible()
    assert client.job(job.job_id).forgotten_at is None
    dialog.get_by_role("button", name="Delete its data").click()
    dialog.get_by_role("button", name="Yes, delete it").click()
    expect(dialog).to_contain_text("What this job sent and got was deleted", timeout=SLOW_MS)
    for gone in ("JSONL", "Delete its data", "Yes, delete it"):
        assert dialog.get_by_role("button", name=gone).count() == 0
    expect(dialog).to_contain_text(client.job(job.job_id).ledger, ignore_case=True)
    with pytest.raises(LabelerError, match="was deleted on"):
        client.labels(job.job_id, screenshots / "gone.jsonl", format="jsonl")
    assert visit.script_errors == []
    assert visit.failed_loads == []


def test_the_price_slider_names_price_accounts_and_how_many_such_jobs_are_left(
    open_page: OpenPage, federation: Federation, client: Client
) -> None:
    task = new_task(client, "priced by hand", epsilon=2.0)
    before = client.budget().head_seq
    visit = open_page(federation.dashboard)
    page = visit.page
    page.get_by_label("Task").select_option(task, timeout=SLOW_MS)
    page.get_by_role("slider", name="Questions").focus()
    page.keyboard.press("End")
    result = page.locator("#estimate-result")
    expect(result).to_contain_text("epsilon 2.00 for one image", timeout=SLOW_MS)
    expect(result).to_contain_text("The budgets cover it")
    expect(result).to_contain_text("Federation")
    page.keyboard.press("Home")
    expect(result).to_contain_text("for 1 question", timeout=SLOW_MS)
    assert client.budget().head_seq == before
    assert visit.script_errors == []
    assert visit.failed_loads == []


@pytest.mark.parametrize(
    ("width", "scheme", "name"), [(1280, "dark", "dashboard-dark"), (320, "light", "dashboard-phone")]
)
def test_it_reads_in_the_dark_and_on_a_phone(
    open_page: OpenPage, federation: Federation, screenshots: Path, width: int, scheme: str, name: str
) -> None:
    visit = open_page(federation.dashboard, width=width, scheme=scheme)
    expect(visit.page.locator("#parties-list")).to_contain_text("agent-1", timeout=SLOW_MS)
    expect(visit.page.locator("#ledger-list tbody tr").first).to_be_visible(timeout=SLOW_MS)
    expect(visit.page.locator("#charts figure").first).to_be_visible()
    expect(visit.page.locator("#estimate-result")).to_have_attribute("aria-busy", "false", timeout=SLOW_MS)
    visit.keep(screenshots, name)
    assert visit.contrast_problems() == []
    assert visit.naming_problems() == []
    assert visit.overflow_px() <= 0
    assert visit.script_errors == []


def test_a_viewer_sees_budgets_and_is_offered_nothing_to_stop_or_to_download(
    open_page: OpenPage, federation: Federation, client: Client
) -> None:
    made = client.create_token("privacy office", "viewer")
    visit = open_page(f"{federation.url}/dashboard")
    page = visit.page
    page.get_by_label("Access token").fill(str(made.token))
    page.keyboard.press("Enter")
    expect(page.get_by_text("privacy office (viewer)")).to_be_visible(timeout=SLOW_MS)
    expect(page.locator("#budget-agents")).to_contain_text("agent-3", timeout=SLOW_MS)
    page.locator("#jobs-list tbody tr").first.get_by_role("button", name="Details").click()
    expect(page.get_by_role("dialog")).to_contain_text("Price, one image", timeout=SLOW_MS)
    for offer in ("Cancel this job", "Delete its data", "JSONL"):
        assert page.get_by_role("dialog").get_by_role("button", name=offer).count() == 0
    assert visit.script_errors == []
    assert visit.failed_loads == []
    client.revoke_token(made.token_id)
    expect(page.locator("#sign-in-error")).to_contain_text("not known here, or was revoked", timeout=SLOW_MS)
