"""One federation of real processes that strangers and requesters attack; `labeler bench attacks` measures the same."""

from __future__ import annotations

from contextlib import AbstractContextManager

import pytest

from tests.e2e.conftest import SharedFederations
from tests.e2e.service.conftest import Service, digit_features, running
from workers.party.home import COORDINATOR_FILE
from workers.up import Plan
from workers.up.home import make_federation

__all__ = ["digit_features"]

MOST_IDLE = 80
"""Connections without a request under way, so that a few hundred are an attack."""


@pytest.fixture
def attacked(federations: SharedFederations, tmp_path_factory: pytest.TempPathFactory) -> Service:
    """A federation of two agents, for all attacks of this folder."""

    def start() -> AbstractContextManager[Service]:
        home = tmp_path_factory.mktemp("attacked") / "federation"
        home.mkdir(mode=0o700)
        settings = make_federation(home, Plan(agents=2)).coordinator / COORDINATOR_FILE
        text = settings.read_text()
        assert "[limits]" not in text
        settings.write_text(f"{text}\n[limits]\nmax_connections = {MOST_IDLE}\n")
        return running(home, agents=2)

    return federations.get("attacked", start)
