"""A coordinator's journal that was edited, cut off or restored from an older copy is not served; and the way back."""

from __future__ import annotations

import os
import re
import shutil
import sqlite3
import time
import tomllib
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from api.client import Client
from api.client_http import ServiceProblem
from labeler.errors import JournalBehind
from tests.e2e.service.conftest import AGENTS, Stopped
from tests.e2e.service.harm import new_task, spent_at, started, submit
from tests.forked_command import run_forked
from tests.processes import wait_until
from workers.homes.journals import accept_restored_journal, verify_journal
from workers.up.redis_server import RedisServer

pytestmark = pytest.mark.slow


@pytest.fixture
def copy(stopped: Stopped, tmp_path: Path) -> Path:
    """The coordinator's home, to be damaged."""
    shutil.copytree(stopped.coordinator, tmp_path / "coordinator")
    return tmp_path / "coordinator"


def edit(home: Path, older: Path) -> None:
    """Change what one entry charges, with the triggers out of the way."""
    with closing(sqlite3.connect(home / "journal.db")) as connection, connection:
        for name in ("stay", "remain", "follow"):
            connection.execute(f"DROP TRIGGER ledger_entries_{name}")
        assert connection.execute("UPDATE ledger_entries SET amount = amount + 1 WHERE seq = 9").rowcount == 1


def cut_off(home: Path, older: Path) -> None:
    path = home / "journal.db"
    os.truncate(path, path.stat().st_size // 2)


def go_back(home: Path, older: Path) -> None:
    """An older copy of the journal, beside an anchor that remembers better."""
    for name in ("journal.db-wal", "journal.db-shm"):
        (home / name).unlink(missing_ok=True)
    shutil.copy2(older / "journal.db", home / "journal.db")


@pytest.mark.parametrize(
    ("harm", "sentence"),
    [
        (edit, "entry 9"),
        pytest.param(cut_off, "malformed|damaged|cannot be read", marks=pytest.mark.long),
        pytest.param(
            go_back,
            "this is an older copy, and what was charged since is missing from it. Restore the newest backup",
            marks=pytest.mark.long,
        ),
    ],
    ids=["edited", "cut off", "older"],
)
def test_a_journal_that_cannot_be_trusted_is_not_served_and_said_why(
    stopped: Stopped, copy: Path, labeler: Any, harm: Any, sentence: str
) -> None:
    harm(copy, stopped.older)
    code, said = run_forked("serve", "--home", copy, "--port", 0)
    assert code == 1
    assert re.search(sentence, said), said
    verified = labeler("journal", "verify", "--home", copy)
    assert verified.code == 1
    assert re.search(sentence, verified.err), verified.err


@pytest.fixture
def restored(stopped: Stopped) -> tuple[str, str]:
    """The older journal in its place and accepted; the head at which it goes on, and one nobody ever saw."""
    go_back(stopped.coordinator, stopped.older)
    with pytest.raises(JournalBehind):
        verify_journal(stopped.coordinator)
    accepted = accept_restored_journal(stopped.coordinator, reason="the disk was lost; backup of the morning")
    return accepted["head"], f"{accepted['entries']}:{'1' * 64}"


@pytest.mark.long
def test_a_restored_journal_has_nothing_left_and_serves_only_sites_that_consent_to_it(
    stopped: Stopped, restored: tuple[str, str], digit_features: np.ndarray, labeler: Any
) -> None:
    head, wrong = restored
    own = {name: spent_at(stopped.parties[name]) for name in AGENTS}
    assert set(own.values()) == {2 * stopped.paid}
    found = labeler("journal", "trust-restored", "--home", stopped.parties["tallier-0"], "--head", wrong)
    assert found.code == 0, found.err
    with RedisServer(stopped.home / "redis"), ExitStack() as held, stopped.client() as client:
        with serving(stopped):
            for name, home in stopped.parties.items():
                role = "agent" if name in AGENTS else "tallier"
                held.enter_context(started(stopped.home / "logs" / f"{name}.log", role, "run", "--home", home))
            wait_until(lambda: failing(client)["journal"] != "", what="a witness")
            said = failing(client)["journal"]
            assert re.search(r"(agent|tallier)-\d has seen entry \d+ of the coordinator's journal", said), said
            with pytest.raises(ServiceProblem, match="charges are missing") as refusal:
                submit(client, new_task(client, "before anybody consented"), digit_features)
            assert (refusal.value.status, refusal.value.type) == (503, "urn:labeler:problem:journal-behind")
            assert {one.left_nano for one in client.budget().accounts if one.cap_nano is not None} == {0}

            for name, home in stopped.parties.items():
                assert not client.readiness().ready, f"ready before {name} had consented"
                consent = labeler("journal", "trust-restored", "--home", home, "--head", head)
                assert consent.code == 0, consent.err
                assert head.split(":")[1][:16] in consent.out
                assert len(list(home.glob("coordinator.head.*"))) == (2 if name == "tallier-0" else 1)
            wait_until(lambda: client.readiness().ready, what="everybody's next poll")
            with pytest.raises(ServiceProblem) as refusal:
                submit(client, new_task(client, "with nothing left"), digit_features)
            assert (refusal.value.status, refusal.value.type) == (409, "urn:labeler:problem:budget-exceeded")
            assert refusal.value.members["left_nano"] == 0

        # What may still be spent is for a person to say, after comparing with the sites.
        settings = stopped.coordinator / "coordinator.toml"
        settings.write_text(
            re.sub("^instance_epsilon = .*", "instance_epsilon = 50.0", settings.read_text(), flags=re.M)
        )
        with serving(stopped):
            wait_until(lambda: is_ready(client), what="the coordinator")
            done = client.wait(submit(client, new_task(client, "afterwards"), digit_features[12:]).job_id)
            assert done.state == "completed"
    assert {name: spent_at(stopped.parties[name]) for name in AGENTS} == dict.fromkeys(AGENTS, 3 * stopped.paid)
    assert verify_journal(stopped.coordinator)["entries"] > int(head.split(":")[0])


def serving(stopped: Stopped) -> Any:
    """The coordinator, and with the embedder what a job needs beside its parties, where they were before."""
    port = tomllib.loads((stopped.coordinator / "coordinator.toml").read_text())["public_url"].rsplit(":", 1)[1]
    held = ExitStack()
    logs = stopped.home / "logs"
    held.enter_context(started(logs / "coordinator.log", "serve", "--home", stopped.coordinator, "--port", port))
    held.enter_context(started(logs / "embedder.log", "embedder", "--home", stopped.coordinator))
    with stopped.client() as client:
        wait_until(lambda: answers(client), what="the coordinator")
    return held


def answers(client: Client) -> bool:
    try:
        client.readiness()
    except ServiceProblem:
        time.sleep(0.1)
        return False
    return True


def is_ready(client: Client) -> bool:
    return answers(client) and client.readiness().ready


def failing(client: Client) -> dict[str, str]:
    """What /readyz finds wrong, by the name of the part; empty where nothing is."""
    return {one.name: "" if one.ok else one.detail for one in client.readiness().checks}
