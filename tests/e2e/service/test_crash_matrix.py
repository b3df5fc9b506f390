"""Whoever dies, at whatever step: the job completes, paid for once, with the one answer its rounds' keys determine."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
from PIL import Image
from sklearn.datasets import load_digits

from api.schema import TaskRequest
from feature_store.shard import Shard
from labeler.budget import Account
from labeler.release import Release
from labeler.system.erasable import keys_in
from labeler.system.faults import FAULT_POINTS
from labeler.tally import QueryBatch, round_of
from labeler.task import ReleaseKind, parse_task
from tests.answering import AnsweringAgent
from tests.e2e.service.conftest import Service, running, wait_until
from tests.one_round import run_round
from workers.agent.agent import InMemoryLedger

QUERIES = 6
AGENTS = 3
WINNER_STEPS = ("tallier.computed",)
"""Steps of a round that opens winners; all others are shown on one that opens the histogram."""

KILL_REDIS_AT = (
    "coordinator.reserved",
    "coordinator.proposed",
    "coordinator.asked",
    "agent.computed",
    "tallier.stored",
    "coordinator.posted",
)
KILLS = [(name.split(".")[0], name) for name in FAULT_POINTS] + [("redis", name) for name in KILL_REDIS_AT]
# Victims take turns: who dies again soon after it was started waits longer for its next start.
CELLS = sorted(KILLS, key=lambda kill: [name for name, _ in KILLS[: KILLS.index(kill)]].count(kill[0]))

QUICK = (
    ("coordinator", "coordinator.posted"),
    ("embedder", "embedder.claimed"),
    ("agent", "agent.charged"),
    ("tallier", "tallier.fixed"),
    ("redis", "agent.computed"),
)
"""One real kill of each role for every run of the tests; all of them are for `make test-all`."""


@pytest.fixture(scope="module", params=["sqlite", pytest.param("postgresql", marks=pytest.mark.long)])
def fragile(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    """A federation that is killed part by part; the coordinator's journal on either database."""
    journal = None
    if request.param == "postgresql":
        journal = request.getfixturevalue("postgres_server").new_database()
    with running(tmp_path_factory.mktemp("crashes") / "federation", agents=AGENTS, journal=journal) as service:
        yield service


class Thief:
    """Copies every agent's key of a round while the round is open, which is what it takes to know the answer later; and
    every tallier's, where talliers add the noise."""

    def __init__(self, home: Path) -> None:
        self._home = home
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self.keys: dict[tuple[str, str], set[bytes]] = {}

    def __enter__(self) -> Thief:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._stop.wait(0.002):
            for folder in (*self._home.glob("agents/*/erasable"), *self._home.glob("talliers/*/erasable")):
                for name, key in keys_in(folder).items():
                    self.keys.setdefault((folder.parent.name, name), set()).add(key)


def expected_release(service: Service, thief: Thief, task_fields: dict[str, object], batch: QueryBatch) -> Release:
    """What the parties' keys of this round determine, computed in this process."""
    task = parse_task(task_fields)
    agents = []
    for home in sorted((service.home / "agents").iterdir()):
        shard = Shard.open(next(home.glob("*.shard")))
        (key,) = thief.keys[home.name, round_of(task, batch).digest]
        agents.append(
            AnsweringAgent(
                home.name,
                shard,
                noise_secret=key,
                ledger=InMemoryLedger({"instance": Account(home.name, "instance", 10**15)}),
            )
        )
    tallier_keys: list[bytes] = []
    if task.noise_by == "talliers":
        for number in range(task.talliers):
            (key,) = thief.keys[f"tallier-{number}", round_of(task, batch).digest + ".shares"]
            tallier_keys.append(key)
    return run_round(task, batch, agents, post_charge=lambda _: None, tallier_keys=tallier_keys)


@pytest.mark.slow
@pytest.mark.timeout(240)
@pytest.mark.parametrize(
    ("victim", "point"),
    [
        pytest.param(*cell, id=f"{cell[0]} at {cell[1]}", marks=[] if cell in QUICK else pytest.mark.long)
        for cell in CELLS
    ],
)
def test_a_killed_process_costs_time_and_nothing_else(
    fragile, digit_features, tmp_path: Path, victim: str, point: str
) -> None:
    number = CELLS.index((victim, point))
    features = digit_features[number * QUERIES : (number + 1) * QUERIES]
    release: ReleaseKind = "winner" if point in WINNER_STEPS else "histogram"
    with Thief(fragile.home) as thief, fragile.client() as client:
        task = client.create_task(
            TaskRequest(
                name=f"{victim} {point}",
                method="knn",
                k=5,
                sigma_votes=20.0,
                delta=1e-5,
                max_queries=QUERIES,
                release=release,
            )
        )
        before = {(one.account, one.level): one for one in client.budget().accounts}
        if victim == "redis":  # no job waits for it to be back after the kill before
            wait_until(lambda: client.readiness().ready, what="redis to be back")
        pid = f"\n{fragile.pid('redis')}" if victim == "redis" else ""
        armed = fragile.faults.with_suffix(".new")
        armed.write_text(point + pid)
        armed.rename(fragile.faults)
        if victim == "embedder":
            job = client.submit(task.task_id, images=digits_as_files(tmp_path / "digits", number * QUERIES))
        else:
            job = client.submit(task.task_id, features=features, backbone_fingerprint=task.task["backbone_fingerprint"])
        done = client.wait(job.job_id)
        # A post is answered with its sender's next mail, so an agent may learn that it was sent when the job is over.
        wait_until(lambda: not fragile.faults.exists(), seconds=10.0, what="the fault point to be reached")
        assert done.state == "completed"
        after = {(one.account, one.level): one for one in client.budget().accounts}
        charge = done.price.instance_charge_nano
        for key, balance in after.items():
            if key[1] == "instance":
                assert balance.posted_nano - before[key].posted_nano == charge
                assert balance.reserved_nano == 0
        table = pq.read_table(client.labels(job.job_id, tmp_path / "labels.parquet", of="questions"))
    expected = expected_release(fragile, thief, task.task, QueryBatch(features, first_query=0))
    assert table["label"].to_pylist() == expected.labels.tolist()
    if expected.noisy_votes is not None:
        assert np.array_equal(np.array(table["noisy_votes"].to_pylist()), expected.noisy_votes)


@pytest.mark.slow
@pytest.mark.timeout(240)
@pytest.mark.parametrize(
    "point",
    ["tallier.fixed", *(pytest.param(point, marks=pytest.mark.long) for point in ("tallier.stored", "tallier.summed"))],
)
def test_a_tallier_killed_between_storing_and_sending_never_draws_its_noise_again(
    fragile: Service, digit_features: np.ndarray, tmp_path: Path, point: str
) -> None:
    """Talliers add the noise; what is released is what the keys say that they had drawn, bit for bit."""
    place = len(CELLS) + ["tallier.fixed", "tallier.stored", "tallier.summed"].index(point)
    features = digit_features[place * QUERIES : (place + 1) * QUERIES]
    with Thief(fragile.home) as thief, fragile.client() as client:
        task = client.create_task(
            TaskRequest(
                name=f"noise by talliers, {point}",
                method="knn",
                k=5,
                sigma_votes=20.0,
                delta=1e-5,
                max_queries=QUERIES,
                dishonest_talliers=1,
            )
        )
        assert task.price.dishonest_talliers == 1
        armed = fragile.faults.with_suffix(".new")
        armed.write_text(point)
        armed.rename(fragile.faults)
        job = client.submit(task.task_id, features=features, backbone_fingerprint=task.task["backbone_fingerprint"])
        done = client.wait(job.job_id)
        assert not fragile.faults.exists(), "the fault point was not reached"
        assert done.state == "completed"
        table = pq.read_table(client.labels(job.job_id, tmp_path / "labels.parquet", of="questions"))
    expected = expected_release(fragile, thief, task.task, QueryBatch(features, first_query=0))
    assert table["label"].to_pylist() == expected.labels.tolist()
    assert np.array_equal(np.array(table["noisy_votes"].to_pylist()), expected.noisy_votes)


def digits_as_files(folder: Path, start: int) -> Path:
    """The images that the features were made of: vectors need no embedder, so it would not be there to be killed."""
    folder.mkdir()
    for number in range(QUERIES):
        pixels = (load_digits().images[start + number] * (255 / 16)).round().astype(np.uint8)
        Image.fromarray(pixels).save(folder / f"{number}.png")
    return folder


def test_every_role_is_killed_in_every_run_of_the_tests() -> None:
    assert set(QUICK) <= set(KILLS)
    assert {victim for victim, _ in QUICK} == {victim for victim, _ in KILLS}


def row(victim: str, point: str) -> str:
    """One row of the table in docs/round.md."""
    return f"| {victim} | `{point}` | {FAULT_POINTS[point].rstrip('.')} | completed, charged once, the same answer |"


def test_the_table_of_kills_names_every_kill() -> None:
    text = (Path(__file__).parents[3] / "docs" / "round.md").read_text()
    written = text.split("<!-- crash matrix -->")[1].strip().splitlines()[2:]
    assert written == [row(victim, point) for victim, point in KILLS]
