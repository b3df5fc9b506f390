"""The walk of two hospitals: they join by invitation, decide on their desks in a browser, and see what was spent."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from playwright.sync_api import expect

from feature_store.backbones import load_backbone
from tests.processes import wait_until
from workers.digits import write_digits, zip_images
from workers.up.redis_server import RedisServer

OpenPage = Callable[..., Any]
SITES = ("hospital-a", "hospital-b")
TALLIERS = ("registry", "university", "auditor")
PAGES = [(1400, "light"), (1400, "dark"), (390, "light"), (390, "dark")]

pytestmark = [pytest.mark.slow, pytest.mark.long]


@dataclass
class Place:
    """A folder in which commands run, and the processes that were started there."""

    folder: Path
    environment: dict[str, str]
    run: Callable[..., Any]
    running: dict[str, subprocess.Popen[str]] = field(default_factory=dict)

    def labeler(self, *arguments: object) -> str:
        """Run a command to its end, in this process; what it printed."""
        done = self.run(*arguments)
        assert done.code == 0, (arguments, done.err)
        return str(done.out)

    def start(self, name: str, *arguments: object, told: bool = False) -> str:
        """Start a command in the background; with `told`, wait for the line that it prints and give it back."""
        with (self.folder / f"{name}.log").open("w") as log:
            process = subprocess.Popen(
                [sys.executable, "-m", "workers.cli", *map(str, arguments)],
                cwd=self.folder,
                env=self.environment,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
            )
        self.running[name] = process
        assert process.stdout is not None
        line = process.stdout.readline() if told else ""
        assert line or not told, (self.folder / f"{name}.log").read_text()
        return line

    def stop_all(self) -> None:
        for process in self.running.values():
            process.send_signal(signal.SIGTERM)
        for process in self.running.values():
            try:
                process.wait(timeout=60)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            if process.stdout is not None:
                process.stdout.close()


@pytest.fixture
def place(tmp_path: Path, labeler: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[Place]:
    monkeypatch.chdir(tmp_path)
    with RedisServer(tmp_path / "redis") as redis, socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
        environment = os.environ | {
            "OMP_NUM_THREADS": "1",
            "LABELER_URL": f"http://127.0.0.1:{port}",
            "COLUMNS": "80",
            "REDIS_OF_THIS_TEST": redis.url,
        }
        found = Place(tmp_path, environment, labeler)
        free.close()
        monkeypatch.setenv("LABELER_URL", environment["LABELER_URL"])
        try:
            yield found
        finally:
            found.stop_all()


def operator(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    """The coordinator, its embedder and a first token; the parts of docs/deploy.md that are not ours to show here."""
    place.labeler("serve", "--home", "coordinator", "--init")
    settings = place.folder / "coordinator" / "coordinator.toml"
    url = place.environment["LABELER_URL"]
    text = settings.read_text()
    fingerprint = load_backbone("pixels:8").fingerprint
    for pattern, line in (
        ("^public_url.*", f'public_url = "{url}"'),
        ("^redis_url.*", f'redis_url = "{place.environment["REDIS_OF_THIS_TEST"]}"'),
        (r"^\[backbones\]", f'[backbones]\n{fingerprint} = "pixels:8"'),
    ):
        text, count = re.subn(pattern, lambda _, line=line: line, text, count=1, flags=re.MULTILINE)
        assert count == 1
    settings.write_text(text)
    made = place.labeler("keys", "token", "--home", "coordinator", "--name", "first", "--role", "admin", "--json")
    monkeypatch.setenv("LABELER_TOKEN", json.loads(made)["token"])
    told = place.start("coordinator", "serve", "--home", "coordinator", "--port", url.rsplit(":", 1)[1], told=True)
    assert json.loads(told) == {"level": "INFO", "url": url}
    place.start("embedder", "embedder", "--home", "coordinator")


def join(place: Place, name: str, role: str, *more: object) -> None:
    made = json.loads(place.labeler("invite", name, "--role", role, "--json"))
    place.labeler(role, "join", made["file"], "--home", name, "--phrase", made["phrase"], *more)
    place.start(name, role, "--home", name)


def submit(place: Place, name: str, *, epsilon: float = 0.5) -> dict[str, Any]:
    (place.folder / "task.toml").write_text(
        f'[task]\nname = "{name}"\nmethod = "reverse-knn"\nk = 1\nepsilon = {epsilon}\ndelta = 1e-5\n'
        '[queries]\nstrategy = "clustered"\ncount = 10\n'
    )
    told: dict[str, Any] = json.loads(
        place.labeler("submit", "scans.zip", "--task", "task.toml", "--name", name, "--json")
    )
    return told


def state_of(place: Place, job: dict[str, Any]) -> dict[str, Any]:
    told: dict[str, Any] = json.loads(place.labeler("status", job["job_id"], "--json"))
    return told


def waits_for(place: Place, job: dict[str, Any]) -> set[tuple[str, str]]:
    return {(one["agent_id"], one["reason"]) for one in state_of(place, job)["waiting_for"]}


def test_two_hospitals_join_decide_on_their_desks_and_see_what_was_spent(
    place: Place, open_page: OpenPage, screenshots: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    parts = write_digits(place.folder, seed=0, agents=3)
    zip_images(parts["public"], place.folder / "scans.zip", count=60)
    operator(place, monkeypatch)
    for name in TALLIERS:
        join(place, name, "tallier")
    images = ("--backbone", "pixels:8", "--classes", ",".join("0123456789"))
    for number, name in enumerate(SITES, 1):
        place.labeler("embed", parts[f"agent-{number}"], *images, "--max-records", "2000", "--out", f"{name}.shard")
        join(place, name, "agent", "--shard", f"{name}.shard")

    ready = f"{place.environment['LABELER_URL']}/readyz"
    import httpx2

    wait_until(lambda: httpx2.get(ready, trust_env=False).status_code == 200, what="everybody")
    job = submit(place, "digits <b>of</b> the post")
    # The desks are processes beside the agents, over the same journals.
    desks = {
        name: json.loads(place.start(f"desk of {name}", "agent", "desk", "--home", name, "--json", told=True))["url"]
        for name in SITES
    }
    visits = {name: open_page(desks[name]) for name in SITES}
    for visit in visits.values():
        page = visit.page
        card = page.locator("article.task")
        expect(card.get_by_role("heading", name="digits <b>of</b> the post")).to_be_visible()
        assert "#" not in page.url, "the token has left the address"
        expect(page.locator("h1")).to_have_text("1 task waits for you")
        expect(card).to_contain_text("0.5")
        expect(card).to_contain_text("no bound")
        expect(card).to_contain_text("asked by first, through http")
        expect(card).to_contain_text("0, 1, 2, 3, 4, 5, 6, 7, 8, 9")
        assert page.locator("b").count() == 0, "a name is text, never markup"
        expect(page.locator("#budget")).to_contain_text("0 % of the budget is spent")
    looked_at(visits["hospital-a"], screenshots, "desk-waiting")

    # hospital-a stops and goes on; nothing is charged meanwhile.
    page = visits["hospital-a"].page
    page.get_by_label("Reason, told to whoever asks").fill("moving the server")
    page.get_by_role("button", name="Stop answering now").click()
    expect(page.locator("h1")).to_have_text("Stopped: nothing new is answered")
    expect(page.locator(".answering.halted")).to_contain_text("moving the server")
    page.get_by_role("button", name="Approve", exact=True).click()
    expect(page.locator("#decisions")).to_contain_text("approved")
    visits["hospital-b"].page.get_by_role("button", name="Approve", exact=True).click()
    expect(visits["hospital-b"].page.locator("#decisions")).to_contain_text("approved")
    wait_until(lambda: waits_for(place, job) == {("hospital-a", "later")}, what="a yes of the other, and a not now")
    looked_at(visits["hospital-a"], screenshots, "desk-stopped")
    assert state_of(place, job)["state"] in ("queued", "collecting")
    page.get_by_role("button", name="Answer again").click()
    expect(page.locator("h1")).to_have_text("Answering, and nothing waits for you")

    # The job runs, and both see what it has cost them.
    wait_until(lambda: state_of(place, job)["state"] == "completed", what="the job")
    place.labeler("export", job["job_id"], "--out", "labels.parquet")
    assert pq.read_table(place.folder / "labels.parquet").num_rows == 60
    for name, visit in visits.items():
        page = visit.page
        expect(page.locator("#jobs")).to_contain_text("digits <b>of</b> the post")
        expect(page.locator("#jobs")).to_contain_text(job["job_id"])
        expect(page.locator("#jobs")).to_contain_text("10 questions")
        expect(page.locator("#budget .figure").first).not_to_have_text("0 %")
        with page.expect_download() as waited:
            page.get_by_role("button", name="Download CSV").click()
        lines = Path(waited.value.path()).read_text().splitlines()
        assert len(lines) == 2
        (told,) = json.loads(place.labeler("agent", "history", "--home", name, "--json"))
        assert told["round"] in lines[1]
        assert told["instance_epsilon"] == pytest.approx(0.5, rel=0.01)

    # A second task is refused with a reason, which the requester reads.
    second = submit(place, "faces", epsilon=0.2)
    for visit in visits.values():
        card = visit.page.locator("article.task", has_text="faces")
        expect(card).to_be_visible()
        card.get_by_label("Reason for a refusal").fill("no ethics vote <i>yet</i>")
        card.get_by_role("button", name="Refuse").click()
        expect(visit.page.locator("#decisions")).to_contain_text("no ethics vote <i>yet</i>")
    wait_until(lambda: state_of(place, second)["state"] == "refused", what="the refusal")
    assert "no ethics vote <i>yet</i>" in json.dumps(state_of(place, second)["declined"])
    looked_at(visits["hospital-a"], screenshots, "desk-after")
    for visit in visits.values():
        assert visit.script_errors == []
        assert visit.failed_loads == []


def looked_at(visit: Any, folder: Path, name: str) -> None:
    """The page in both widths and both lights: nothing cut, nothing unreadable, nothing unnamed, axe finds nothing."""
    for width, scheme in PAGES:
        page = visit.page
        page.set_viewport_size({"width": width, "height": 900})
        page.emulate_media(color_scheme=scheme, reduced_motion="reduce")
        visit.keep(folder, f"{name}-{width}-{scheme}")
        assert visit.overflow_px() <= 0, (name, width)
        assert visit.naming_problems() == [], name
        assert visit.axe_problems() == [], name
