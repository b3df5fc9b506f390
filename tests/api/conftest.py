"""A coordinator's journal in a folder of its own, with agents enrolled: what its decisions are tested on."""

from __future__ import annotations

import secrets
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, BinaryIO, cast

import pytest

from api.coordinator import submission
from api.coordinator.budgets import open_accounts
from api.coordinator.config import CoordinatorConfig
from api.coordinator.ownership import Owners, Reader
from api.coordinator.query_budgets import JobBudgets, RunningPrices
from api.coordinator.results import Results
from api.coordinator.stores import Stores
from api.coordinator.submission import Submissions
from api.coordinator.tasks import create_task
from api.coordinator.uploads import Upload, upload_of_features
from api.schema import JobRequest, JobView, TaskRequest
from labeler.batching import BATCH_QUERIES
from labeler.ledger.chain import Head
from labeler.ledger.database import open_database
from labeler.ledger.tasks import TaskRecord

FINGERPRINT = "f" * 16
CLASSES = ("cat", "dog", "owl")


@dataclass
class TestClock:
    """A clock that a test sets."""

    __test__ = False
    now: datetime = field(default_factory=lambda: datetime(2026, 3, 1, 12, tzinfo=UTC))

    def __call__(self) -> datetime:
        return self.now

    def turn(self, **by: float) -> None:
        self.now += timedelta(**by)


@dataclass
class House:
    """Stores over one real journal, and shortcuts to what tests do with them."""

    config: CoordinatorConfig
    stores: Stores
    clock: TestClock

    def __post_init__(self) -> None:
        self.database, self.ledger = self.stores.database, self.stores.ledger
        self.tasks, self.jobs, self.parties = self.stores.tasks, self.stores.jobs, self.stores.parties
        self.owners = Owners(self.tasks, self.jobs)

    @property
    def budgets(self) -> JobBudgets:
        return JobBudgets(self.config, self.stores, RunningPrices(self.config.home))

    @property
    def results(self) -> Results:
        return Results(self.config, self.stores, self.owners, self.budgets)

    @property
    def submissions(self) -> Submissions:
        return Submissions(self.config, self.stores, self.owners)

    def with_caps(self, *, federation: tuple[Any, Any], agents: tuple[Any, Any] = ("unlimited", "unlimited")) -> House:
        """The same house, with other caps (instance, agent); accounts are changed to them."""
        names = ("instance_epsilon", "agent_epsilon")
        config = CoordinatorConfig.model_validate(
            self.config.model_dump()
            | {"federation": dict(zip(names, federation, strict=True)), "agents": dict(zip(names, agents, strict=True))}
        )
        open_accounts(self.ledger, config, [party.party_id for party in self.parties.list(role="agent")])
        return replace(self, config=config)

    def enrol(
        self, agent_id: str, *, classes: tuple[str, ...] = CLASSES, fingerprint: str = FINGERPRINT, **facts: Any
    ) -> None:
        self.parties.enrol(agent_id, "agent", secrets.token_hex(32), secrets.token_hex(32))
        facts |= {"classes": list(classes), "backbone_fingerprint": fingerprint}
        self.parties.contact(agent_id, self.clock(), facts, Head(1, "a" * 64))
        open_accounts(self.ledger, self.config, [agent_id])

    def task(self, **fields: Any) -> TaskRecord:
        request = {"name": "animals", "method": "knn", "k": 5, "sigma_votes": 40.0, "max_queries": 100} | fields
        wanted = TaskRequest.model_validate({name: value for name, value in request.items() if value is not None})
        return create_task(wanted, by="tok-1", config=self.config, stores=self.stores, nonce=secrets.token_hex(16))

    def upload(self, count: int, *, start: int = 0) -> Upload:
        vectors = [[1.0 + (start + number) / 7, 2.0, -1.0] for number in range(count)]
        return upload_of_features(vectors, None, folder=self.config.home / "incoming", limits=self.config.limits)

    def submit(
        self, task: TaskRecord, count: int, *, key: str | None = None, start: int = 0, by: str = "tok-1", **fields: Any
    ) -> JobView:
        request = {"task_id": task.digest, "backbone_fingerprint": FINGERPRINT} | fields
        return self.submissions.submit(
            JobRequest.model_validate(request),
            self.upload(count, start=start),
            reader=Reader(by, "requester"),
            idempotency_key=key,
        )

    def begin(self, job_id: str, *, asked: tuple[str, ...] | None = None) -> None:
        """Settle whom a job asks, as the driver does: everybody, or those named."""
        job = self.jobs.get(job_id)
        task = self.tasks.get(job.task_digest)
        agents = task.participants if asked is None else asked
        with self.database.write() as connection:
            rounds = self.jobs.rounds(job_id, connection=connection)
            settlement = self.stores.settlement
            amounts = settlement.prices(job, rounds, task)
            settlement.divide(job, rounds, task, agents, amounts=amounts, connection=connection)
            self.jobs.willingness.fix_asked(job_id, agents, connection=connection)
            self.jobs.change(job_id, "collecting", expected=["queued"], connection=connection)

    def files(self) -> list[str]:
        """Everything that uploads have left in the home."""
        kept = [path for part in ("incoming", "jobs") for path in (self.config.home / part).rglob("*")]
        return sorted(path.relative_to(self.config.home).as_posix() for path in kept)


def config_fields(home: Path) -> dict[str, Any]:
    unlimited = {"instance_epsilon": "unlimited", "agent_epsilon": "unlimited"}
    return {
        "home": home,
        "redis_url": "redis://127.0.0.1:1/0",
        "public_url": "http://127.0.0.1:1",
        "federation": unlimited,
        "agents": unlimited,
        "backbones": {FINGERPRINT: "pixels"},
    }


_ON_DISK: list[BinaryIO] = []


def on_disk(data: bytes) -> BinaryIO:
    """A file that another process can read; closed when the test ends."""
    _ON_DISK.append(cast(BinaryIO, tempfile.TemporaryFile()))  # noqa: SIM115  # by the fixture below
    _ON_DISK[-1].write(data)
    _ON_DISK[-1].seek(0)
    return _ON_DISK[-1]


@pytest.fixture(autouse=True)
def _files_are_closed() -> Iterator[None]:
    yield
    while _ON_DISK:
        _ON_DISK.pop().close()


@pytest.fixture
def clock() -> TestClock:
    return TestClock()


@pytest.fixture
def small_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rounds as they are where the length of features is not known, so that a job of 5000 questions has two."""
    monkeypatch.setattr(submission, "batch_queries_of", lambda *_: BATCH_QUERIES)


@pytest.fixture
def house(tmp_path: Path, clock: TestClock) -> Iterator[House]:
    """Three agents, unlimited budgets, a journal on disk."""
    home = tmp_path / "home"
    home.mkdir(mode=0o700)
    config = CoordinatorConfig.model_validate(config_fields(home))
    with open_database(home / "journal.db", anchor=home / "journal.head", allow_unsynced=True) as database:
        house = House(config, Stores.over(database, clock=clock), clock)
        open_accounts(house.ledger, config)
        for name in ("east", "north", "west"):
            house.enrol(name)
        yield house
