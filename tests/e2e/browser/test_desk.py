"""The walk of two hospitals: they join by invitation, decide on their desks in a browser, and see what was spent."""

from __future__ import annotations

import json
import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from queue import Queue
from typing import Any

import pyarrow.parquet as pq
import pytest
from playwright.sync_api import expect

from api.console.site import serve_desk
from labeler.system.files import exclusive
from tests.e2e.place import EMBED, TALLIERS, Place, is_ready, place
from tests.feature_store.conftest import write_pictures
from tests.processes import wait_until
from tests.workers.builders import policy_of
from tests.workers.conftest import Running
from workers.agent import images
from workers.agent.images import LOCK_FILE, ImageFolder
from workers.agent.service import run_agent
from workers.agent.site import SiteConsole
from workers.digits import write_digits, zip_images
from workers.embedder.shards import delete_records
from workers.party.home import AgentConfig, EmbedSettings, create_agent_home

__all__ = ["place"]

OpenPage = Callable[..., Any]
SITES = ("hospital-a", "hospital-b")
PAGES = [(1400, "light"), (1400, "dark"), (390, "light"), (390, "dark")]

pytestmark = [pytest.mark.slow, pytest.mark.long]


def submit(place: Place, name: str, *, epsilon: float = 0.5) -> dict[str, Any]:
    (place.folder / "task.toml").write_text(
        f'[task]\nname = "{name}"\nmethod = "reverse-knn"\nk = 1\nepsilon = {epsilon}\ndelta = 1e-5\n'
        '[queries]\nstrategy = "clustered"\ncount = 10\n'
    )
    told: dict[str, Any] = place.document("submit", "scans.zip", "--task", "task.toml", "--name", name)
    return told


def state_of(place: Place, job: dict[str, Any]) -> dict[str, Any]:
    told: dict[str, Any] = place.document("status", job["job_id"])
    return told


def waits_for(place: Place, job: dict[str, Any]) -> set[tuple[str, str]]:
    return {(one["agent_id"], one["reason"]) for one in state_of(place, job)["waiting_for"]}


def test_two_hospitals_join_decide_on_their_desks_and_see_what_was_spent(
    place: Place, open_page: OpenPage, screenshots: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    parts = write_digits(place.folder, seed=0, agents=3)
    zip_images(parts["public"], place.folder / "scans.zip", count=60)
    url = f"http://127.0.0.1:{place.port}"
    monkeypatch.setenv("LABELER_URL", url)
    monkeypatch.setenv("LABELER_TOKEN", place.make_coordinator(url))
    told = place.start("coordinator", "serve", "--home", "coordinator", "--port", url.rsplit(":", 1)[1], told=True)
    assert json.loads(told) == {"level": "INFO", "url": url}
    place.start("embedder", "embedder", "--home", "coordinator")
    for name in TALLIERS:
        place.join(name, "tallier")
        place.start(name, "tallier", "--home", name)
    for number, name in enumerate(SITES, 1):
        if name == "hospital-b":  # its agent embeds by itself
            place.join(name, "agent", "--images", str(as_folder(parts[f"agent-{number}"])), *EMBED)
        else:
            place.labeler("embed", parts[f"agent-{number}"], *EMBED, "--out", f"{name}.shard")
            place.join(name, "agent", "--shard", f"{name}.shard")
        place.start(name, "agent", "--home", name)
    wait_until(is_ready, what="everybody")
    job = submit(place, "digits <b>of</b> the post")
    # The desks are processes beside the agents, over the same journals.
    desks = {
        name: json.loads(place.start(f"desk of {name}", "agent", "desk", "--home", name, "--json", told=True))["url"]
        for name in SITES
    }
    visits = {name: open_page(desks[name]) for name in SITES}
    expect(visits["hospital-a"].page.locator("#images")).to_be_hidden()
    expect(visits["hospital-b"].page.locator("#folder")).to_contain_text("files are embedded")
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


def as_folder(parquet: Path) -> Path:
    """The images of a Parquet file in one folder per class."""
    for number, row in enumerate(pq.read_table(parquet).to_pylist()):
        file = parquet.with_suffix("") / str(row["label"]) / f"{number}.png"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(row["image"]["bytes"] if isinstance(row["image"], dict) else row["image"])
    return parquet.with_suffix("")


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


def test_the_folder_of_images_is_shown_as_it_is_and_embedded_by_a_click(
    tmp_path: Path, open_page: OpenPage, screenshots: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scans = write_pictures(
        tmp_path / "scans of the radiology", [f"{label}/{n}.png" for label in ("ill", "well") for n in range(60)]
    )
    settings = EmbedSettings(max_records=1000, backbone="pixels:4", classes=("ill", "well"))
    config = AgentConfig(
        agent_id="hospital-a",
        coordinator_url="https://labels.example.org",
        shard="records.shard",
        images=str(scans),
        embedding=settings,
    )
    home = tmp_path / "agent"
    create_agent_home(home, config, policy_of())
    folder = ImageFolder(home, config)

    def die(stage: str, done: int, total: int) -> None:
        if done >= 64:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        folder.embed(progress=die)
    stop, addresses, console = threading.Event(), Queue[str](), SiteConsole(home)
    serving = threading.Thread(
        target=serve_desk, args=(console,), kwargs={"host": "127.0.0.1", "port": 0, "stop": stop}
        | {"on_ready": addresses.put},
    )  # fmt: skip
    serving.start()
    try:
        visit = open_page(addresses.get(timeout=240))
        page, card = visit.page, visit.page.locator("#folder")
        expect(page.locator("h1")).to_have_text("Your images wait to be embedded")
        expect(card).to_contain_text("64 of 120 files")
        with exclusive(home / LOCK_FILE, "it"):
            expect(page.locator("h1")).to_have_text("Embedding your images, then answering")
            expect(page.locator("#stopping")).to_contain_text("Silent until the images are embedded")
            expect(page.locator("#problems .note")).to_have_count(0)
            expect(card.get_by_role("button")).to_have_count(0)
            looked_at(visit, screenshots, "desk-embedding")
        card.get_by_role("button", name="Go on embedding").click()
        expect(card).to_contain_text("All of 120 files are embedded")
        # The agent starts once, so that there is a journal.
        monkeypatch.setattr(images, "FIRST_POLL_S", 0.01)
        with Running(lambda end: run_agent(home, stop=end, wait_s=0.2)):
            wait_until((home / "journal.head").exists, what="the journal")
        write_pictures(scans, ["well/new.png", "well/newer.png", "ill/3.png"], size=(5, 5))
        (scans / "ill/4.png").unlink()
        expect(card).to_contain_text("2 files are new, 1 file has changed, 1 file is gone")
        expect(page.locator("h1")).to_have_text("Answering, and nothing waits for you")
        looked_at(visit, screenshots, "desk-changed")
        delete_records(home / "records.shard", images=["well/7.png"])
        expect(page.locator("#deletions")).to_contain_text("0 rounds")
        expect(page.locator("#deletions")).to_contain_text("cast no more votes for life")
        expect(card).to_contain_text("Take them out of the folder")
        expect(card.get_by_role("button")).to_have_count(0)
        looked_at(visit, screenshots, "desk-deleted")
        (scans / "well/7.png").unlink()
        card.get_by_role("button", name="Embed now").click()
        expect(card).to_contain_text("All of 120 files are embedded")
        shutil.rmtree(scans)
        expect(card.get_by_role("alert")).to_contain_text("whether its disk is mounted")
        looked_at(visit, screenshots, "desk-missing")
        assert visit.script_errors == []
        assert visit.failed_loads == []
    finally:
        stop.set()
        serving.join(240)
        console.close()
