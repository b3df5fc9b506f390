"""A Redis that may evict is refused by name, at the start and while the service runs."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.e2e.service.conftest import Service
from tests.e2e.service.harm import redis_of
from tests.forked_command import run_forked
from tests.processes import wait_until
from workers.homes.journals import backup_home

pytestmark = pytest.mark.slow


def test_redis_that_may_evict_is_refused_at_the_start_and_named_while_running(service: Service, tmp_path: Path) -> None:
    backup_home(service.home / "coordinator", tmp_path / "copy")
    with redis_of(service) as store, service.client() as client:
        store.config_set("maxmemory-policy", "allkeys-lru")
        try:
            code, said = run_forked("serve", "--home", tmp_path / "copy", "--port", 0)
            ready = client.readiness()
        finally:
            store.config_set("maxmemory-policy", "noeviction")
        wait_until(lambda: client.readiness().ready, what="redis to be well again")
    assert code == 1
    assert "maxmemory-policy 'allkeys-lru'" in said
    assert "set maxmemory-policy to noeviction" in said
    assert not ready.ready
    failing = {one.name: one.detail for one in ready.checks if not one.ok}
    assert "set maxmemory-policy to noeviction" in failing["redis"]
