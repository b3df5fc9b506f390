"""The service on a real PostgreSQL: sessions that are cut in a round."""

from __future__ import annotations

import tomllib

import numpy as np
import psycopg
import pytest

from tests.e2e.service.conftest import Service
from tests.e2e.service.harm import new_task, paid_at_instance_level, paused, posted, submit
from tests.processes import wait_until

pytestmark = pytest.mark.slow


def journal_of(service: Service) -> str:
    settings = tomllib.loads((service.home / "coordinator" / "coordinator.toml").read_text())
    return str(settings["journal"])


@pytest.mark.long
def test_a_coordinator_whose_sessions_are_cut_in_a_round_goes_on_and_charges_once(
    on_postgresql: Service, digit_features: np.ndarray
) -> None:
    assert not (on_postgresql.home / "coordinator" / "journal.db").exists()
    with on_postgresql.client() as client, psycopg.connect(journal_of(on_postgresql), autocommit=True) as administrator:
        before = posted(client)
        with paused(on_postgresql.pid("tallier-1")):
            job = submit(client, new_task(client, "cut"), digit_features)
            wait_until(lambda: client.job(job.job_id).state == "collecting", what="the round")
            cut = administrator.execute(
                "SELECT pg_terminate_backend(pid, 5000) FROM pg_stat_activity "
                "WHERE pid <> pg_backend_pid() AND datname = current_database()"
            ).fetchall()
            assert len(cut) >= 2, "at least the session that holds the lock, and one that works"
        done = client.wait(job.job_id)
        assert done.state == "completed"
        paid = paid_at_instance_level(client, before)
    charge = done.price.instance_charge_nano
    assert paid == dict.fromkeys(("federation", "agent:agent-1", "agent:agent-2", "agent:agent-3"), charge)
