"""Two coordinators on one real PostgreSQL and one home: whichever dies or hangs, jobs end, and are charged once."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import psycopg
import pyarrow.parquet as pq
import pytest

from api.client import Client
from api.schema import JobView
from labeler.batch import QueryBatch
from labeler.errors import LabelerError
from tests.e2e.service.conftest import Service, running, wait_until
from tests.e2e.service.harm import QUERIES, new_task, paid_at_instance_level, posted, submit
from tests.e2e.service.test_crash_matrix import Thief, expected_release
from tests.e2e.service.test_postgresql import journal_of
from tests.forked_command import ForkedCommand, run_forked
from tests.postgres_server import PostgresServer
from workers.federation.home import make_federation
from workers.federation.up import Plan

pytestmark = [pytest.mark.slow, pytest.mark.timeout(240)]

SETTINGS = "[side_by_side]\nlease_s = 5\n"


@pytest.fixture(scope="module")
def service(postgres_server: PostgresServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    """A federation whose coordinator would share; alone it leads at once."""
    home = tmp_path_factory.mktemp("side") / "federation"
    with running(home, journal=postgres_server.new_database(), more=SETTINGS) as found:
        yield found


@contextmanager
def another(service: Service) -> Iterator[str]:
    """A second coordinator of the same home; its URL."""
    log = service.home.parent / "another.log"
    command = ("serve", "--home", service.home / "coordinator", "--port", 0, "--json")
    process = ForkedCommand(*command, errors=log)
    try:
        line = process.stdout.readline()
        assert line, log.read_text()
        yield json.loads(line)["url"]
    finally:
        process.end()


def leader(service: Service) -> tuple[str, int]:
    """Where the coordinator that leads is reached, and how often one has begun to; empty where nobody leads."""
    with psycopg.connect(journal_of(service)) as connection:
        found = connection.execute(
            "SELECT CASE WHEN until >= clock_timestamp() THEN url ELSE '' END, term FROM coordinator_leases"
        ).fetchone()
    assert found is not None
    return str(found[0]), int(found[1])


def ended(client: Client, job_id: str) -> bool:
    """Whether a job has ended; while nobody leads nobody says."""
    try:
        return client.job(job_id).state == "completed"
    except LabelerError:
        return False


def check(service: Service, thief: Thief, job: JobView, features: np.ndarray, place: Path, *urls: str) -> None:
    """Whoever is asked shows the one answer that the keys of the round determine."""
    with service.client() as client:
        task = client.task(job.task_id)
    expected = expected_release(service, thief, task.task, QueryBatch(features[:QUERIES], first_query=0))
    for number, url in enumerate(urls):
        with Client(url, service.token) as client:
            table = pq.read_table(client.labels(job.job_id, place / f"labels-{number}.parquet", of="questions"))
        assert table["label"].to_pylist() == expected.labels.tolist()
        assert np.array_equal(np.array(table["noisy_votes"].to_pylist()), expected.noisy_votes)


def test_a_leader_that_is_killed_in_a_round_is_replaced_and_the_job_is_charged_once(
    service: Service, digit_features: np.ndarray, tmp_path: Path
) -> None:
    with another(service) as url, service.client() as client, Client(url, service.token) as beside:
        term = leader(service)[1]
        before = posted(client)
        with Thief(service.home) as thief:
            task = new_task(beside, "killed")  # by the one that follows, which passes it on
            service.faults.with_suffix(".new").write_text("coordinator.posted")
            service.faults.with_suffix(".new").rename(service.faults)
            job = submit(beside, task, digit_features)
            wait_until(lambda: not service.faults.exists(), what="the kill")
            wait_until(lambda: ended(beside, job.job_id), what="the job")
        assert leader(service)[1] == term + 1, "the lease was taken once"
        wait_until(lambda: ended(client, job.job_id), what="the one that was started again")
        paid = paid_at_instance_level(client, before)
        charge = beside.job(job.job_id).price.instance_charge_nano
        assert paid == dict.fromkeys(("federation", "agent:agent-1", "agent:agent-2", "agent:agent-3"), charge)
        check(service, thief, job, digit_features, tmp_path, service.url, url)
        new_task(client, "goes on")


@pytest.mark.long
def test_a_leader_that_hangs_longer_than_its_lease_is_replaced_and_ends_when_it_comes_back(
    service: Service, digit_features: np.ndarray, tmp_path: Path
) -> None:
    with another(service) as url, service.client() as client, Client(url, service.token) as beside:
        wait_until(lambda: leader(service)[0] == service.url or restart(service), what="the first one to lead")
        pid, before = service.pid("coordinator"), posted(client)
        with Thief(service.home) as thief:
            task = new_task(beside, "hangs")
            job = submit(beside, task, digit_features[QUERIES:])
            os.kill(pid, signal.SIGSTOP)
            try:
                wait_until(lambda: leader(service)[0] == url, what="the other one to lead")
                assert beside.job(job.job_id).job_id == job.job_id, "it answers by itself"
            finally:
                os.kill(pid, signal.SIGCONT)
            wait_until(lambda: ended(beside, job.job_id), what="the job")
        wait_until(lambda: service.pid("coordinator") != pid, what="the one that hung to end, and to be started again")
        wait_until(lambda: ended(client, job.job_id), what="the one that was started again")
        charge = beside.job(job.job_id).price.instance_charge_nano
        paid = paid_at_instance_level(client, before)
        assert paid == dict.fromkeys(("federation", "agent:agent-1", "agent:agent-2", "agent:agent-3"), charge)
        check(service, thief, job, digit_features[QUERIES:], tmp_path, service.url, url)


def restart(service: Service) -> bool:
    """Have the lease taken anew; False, so that whoever waits looks again."""
    if leader(service)[0] not in ("", service.url):
        with psycopg.connect(journal_of(service), autocommit=True) as connection:
            connection.execute("UPDATE coordinator_leases SET until = '-infinity'")
    return False


def test_one_that_shares_with_nobody_is_refused_beside_them(service: Service) -> None:
    settings = service.home / "coordinator" / "coordinator.toml"
    alone = service.home / "coordinator" / "alone.toml"
    alone.write_text(settings.read_text().replace(SETTINGS, ""))
    wait_until(lambda: bool(leader(service)[0]), what="somebody to lead")
    settings.rename(settings.with_suffix(".kept"))
    try:
        alone.rename(settings)
        code, said = run_forked("serve", "--home", service.home / "coordinator", "--port", 0)
    finally:
        settings.with_suffix(".kept").rename(settings)
    assert code == 75
    assert "another coordinator runs on the home" in said


def test_coordinators_side_by_side_need_postgresql(tmp_path: Path) -> None:
    place = tmp_path / "federation"
    place.mkdir(mode=0o700)
    home = make_federation(place, Plan(agents=2)).coordinator
    settings = home / "coordinator.toml"
    settings.write_text(f"{settings.read_text()}\n{SETTINGS}")
    code, said = run_forked("serve", "--home", home, "--port", 0)
    assert code == 2
    assert "share a journal in PostgreSQL" in said
