"""`labeler up` and the client's commands, against a whole federation of real processes."""

from __future__ import annotations

import json
import os
import signal
import socket
import stat
import subprocess
import sys
import tomllib
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from labeler.ledger.database import open_database
from labeler.ledger.tokens import TokenStore
from tests.e2e.service.conftest import running as forked
from tests.forked_command import run_forked
from tests.processes import is_gone, wait_until
from workers.up import FederationPlan
from workers.up.home import FIRST_TOKEN, TOKEN_FILE, make_federation, prepare_journal

pytestmark = pytest.mark.slow


@dataclass(frozen=True)
class Up:
    """A federation that runs.

    Attributes:
        home: its folder.
        told: what it printed.
        process: the supervisor.
    """

    home: Path
    told: dict[str, Any]
    process: subprocess.Popen[str]

    @property
    def pids(self) -> dict[str, int]:
        found: dict[str, int] = json.loads((self.home / "processes.json").read_text())
        return found

    def status_of(self, path: str) -> int:
        try:
            with urllib.request.urlopen(self.told["url"] + path, timeout=300) as answer:
                return int(answer.status)
        except OSError:
            return 0


def command(*arguments: object) -> list[str]:
    return [sys.executable, "-m", "workers.cli", *map(str, arguments)]


PATIENT = """
import sys
from workers.up.supervisor import Supervisor
Supervisor.stop.__kwdefaults__["grace_s"] = 240.0
sys.argv[0] = "labeler"
from workers.cli import main
main()
"""
"""The program, which kills a role that does not stop by itself only after a time that a busy machine does not take."""


@contextmanager
def running(home: Path, *arguments: object) -> Iterator[Up]:
    """`labeler up` until the block ends."""
    with (home.parent / f"{home.name}.err").open("a") as errors:
        process = subprocess.Popen(
            [sys.executable, "-c", PATIENT, *map(str, ("up", "--home", home, "--port", 0, "--json", *arguments))],
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            start_new_session=True,
        )
    assert process.stdout is not None
    with process.stdout:
        try:
            line = process.stdout.readline()
            assert line, (home.parent / f"{home.name}.err").read_text()
            yield Up(home, json.loads(line), process)
        finally:
            process.terminate()
            try:
                process.wait(timeout=300)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


@pytest.fixture(scope="module")
def up(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Up]:
    """Two agents with digits, up for the whole module."""
    with running(tmp_path_factory.mktemp("up") / "federation", "--agents", 2) as federation:
        yield federation


@pytest.fixture
def reachable(up: Up, monkeypatch: pytest.MonkeyPatch) -> Up:
    """The same, with its address and token in the environment."""
    monkeypatch.setenv("LABELER_URL", up.told["url"])
    monkeypatch.setenv("LABELER_TOKEN", up.told["token"])
    monkeypatch.setenv("COLUMNS", "200")
    return up


def made(folder: Path, *, agents: int) -> Path:
    """A federation that was made and has not run yet."""
    home = folder / "federation"
    home.mkdir(mode=0o700)
    make_federation(home, FederationPlan(agents=agents))
    return home


def children_of(pid: int) -> list[int]:
    """The processes that a process has started itself."""
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def unfinished_upload(up: Up) -> socket.socket:
    """A request under way that will not end by itself."""
    host, port = up.told["url"].removeprefix("http://").split(":")
    connection = socket.create_connection((host, int(port)), timeout=300)
    head = f"POST /v1/jobs HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {up.told['token']}\r\n"
    head += "Content-Type: application/json\r\nContent-Length: 90000\r\nExpect: 100-continue\r\n\r\n"
    connection.sendall(head.encode())
    assert connection.recv(1000).startswith(b"HTTP/1.1 100")
    return connection


# Up


def test_it_tells_all_that_is_needed_in_one_line_and_nobody_had_to_try_again(up: Up) -> None:
    assert up.told["url"].startswith("http://127.0.0.1:")
    assert up.told["token"].startswith("lab_")
    assert up.told["dashboard"] == f"{up.told['url']}/dashboard#token={up.told['token']}"
    assert up.told["home"] == str(up.home)
    assert up.told["agents"] == ["agent-1", "agent-2"]
    assert up.status_of("/readyz") == 200
    for path in (up.home / "logs").glob("*.log"):
        said = path.read_text()
        assert "cannot be reached" not in said, path.name
        assert "does not accept" not in said, path.name


def test_every_role_is_a_fork_of_one_process_and_agents_alone_load_a_library_for_their_index(up: Up) -> None:
    names = {"redis", "coordinator", "embedder", "agent-1", "agent-2", "tallier-0", "tallier-1", "tallier-2"}
    assert set(up.pids) == names
    roles = {pid for name, pid in up.pids.items() if name != "redis"}
    assert len({*up.pids.values(), up.process.pid}) == len(names) + 1
    parents = {int(Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[1]) for pid in roles}
    assert len(parents) == 1
    assert parents != {up.process.pid}
    agents = {up.pids["agent-1"], up.pids["agent-2"]}
    for pid in roles | parents:
        mapped = Path(f"/proc/{pid}/maps").read_text()
        loaded = {name for name in ("libtorch", "faiss", "matplotlib", "sklearn") if name in mapped}
        assert loaded == ({"faiss"} if pid in agents else set())


def test_a_second_up_on_the_same_home_is_sent_away(up: Up) -> None:
    code, said = run_forked("up", "--home", up.home)
    assert code == 75
    assert "another process works on the federation" in said


def test_logs_are_json_lines_without_the_token(reachable: Up, labeler: Any) -> None:
    labeler("budget")
    logs = [path for path in (reachable.home / "logs").glob("*.log") if path.stat().st_size]
    assert {path.stem for path in logs} >= {"coordinator", "agent-1", "tallier-0", "embedder"}
    for path in logs:
        for line in path.read_text().splitlines():
            assert isinstance(json.loads(line), dict), (path.name, line)
        assert reachable.told["token"] not in path.read_text()


def holds(path: Path, secret: bytes) -> bool:
    """Whether a file holds a secret; one that a running process has removed since it was listed holds nothing."""
    with suppress(FileNotFoundError):
        return path.is_file() and secret in path.read_bytes()
    return False


def test_a_home_is_private_and_holds_the_token_in_one_file_and_else_as_a_hash(up: Up) -> None:
    holding = [path for path in up.home.rglob("*") if holds(path, up.told["token"].encode())]
    assert holding == [up.home / TOKEN_FILE]
    assert stat.S_IMODE(holding[0].stat().st_mode) == 0o600
    assert stat.S_IMODE(up.home.stat().st_mode) & 0o077 == 0


def test_a_token_that_was_revoked_or_lost_is_made_anew_and_the_one_shown_before_still_opens(tmp_path: Path) -> None:
    home = tmp_path / "federation"
    home.mkdir(mode=0o700)
    federation = make_federation(home, FederationPlan(agents=1))
    first, is_new = prepare_journal(federation)
    assert is_new
    assert prepare_journal(federation) == (first, False)
    (home / TOKEN_FILE).unlink()
    second, is_new = prepare_journal(federation)
    assert is_new
    with closing(open_database(home / "coordinator" / "journal.db")) as database:
        store = TokenStore(database)
        assert store.find(first) is not None
        found = store.find(second)
        assert found is not None
        store.revoke(found.token_id)
    third, is_new = prepare_journal(federation)
    assert is_new
    assert len({first, second, third}) == 3


@pytest.mark.long
def test_an_agent_that_cannot_start_does_not_stop_the_others(tmp_path: Path) -> None:
    home = made(tmp_path, agents=2)
    (home / "agents" / "agent-2" / "policy.toml").write_text("allow = everything")
    with running(home) as federation:
        assert federation.status_of("/readyz") == 200
    assert "agent-2 ended (exit code 1)" in (tmp_path / "federation.err").read_text()


def test_settings_that_cannot_be_read_are_refused_before_anything_starts(tmp_path: Path) -> None:
    """With 2, wrong usage or setting: 75 means that the same command may go through later, and this one cannot."""
    home = made(tmp_path, agents=1)
    settings = home / "coordinator" / "coordinator.toml"
    settings.write_text(settings.read_text() + "speling = 1\n")
    code, said = run_forked("up", "--home", home, "--port", 0)
    assert code == 2
    assert "speling" in said
    assert "Ready" not in said


def test_a_coordinator_that_cannot_start_is_a_failure_with_the_end_of_its_log(tmp_path: Path) -> None:
    home = made(tmp_path, agents=1)
    (home / "coordinator" / "keys.json").write_text("no keys")
    code, said = run_forked("up", "--home", home, "--port", 0)
    assert code == 1, "nothing that passes by itself"
    assert "coordinator cannot start" in said
    assert "keys.json" in said
    assert "Ready" not in said


# The client's commands


def submission(up: Up) -> tuple[object, ...]:
    examples = up.home / "examples"
    return ("submit", examples / "digits.zip", "--task", examples / "task.toml")


def test_a_job_is_submitted_followed_by_its_id_paid_for_and_exported(
    reachable: Up, labeler: Any, tmp_path: Path
) -> None:
    def left() -> dict[tuple[str, str], int]:
        accounts = labeler("budget", "--json").document["accounts"]
        return {(one["account"], one["level"]): one["posted_nano"] for one in accounts}

    before, out = left(), tmp_path / "labels.parquet"
    result = labeler(*submission(reachable), "--out", out, "--name", "first digits")
    assert result.code == 0, result.err
    assert "completed" in result.out
    assert "epsilon 0.5 per private image" in result.out
    table = pq.read_table(out)
    assert table.num_rows == 200
    assert set(table["origin"].to_pylist()) <= {"asked", "inferred"}
    assert min(table["confidence"].to_pylist()) > 0.1

    listed = labeler("status")
    assert "first digits" in listed.out
    job = next(one for one in labeler("status", "--json").document if one["name"] == "first digits")
    assert job["job_id"] in listed.out
    assert labeler("status", job["job_id"], "--json").document["state"] == "completed"
    for form in ("parquet", "jsonl", "label-studio", "csv"):
        result = labeler("export", job["job_id"], "--format", form, "--out", tmp_path / form)
        assert result.code == 0, result.err
    assert len((tmp_path / "jsonl").read_text().splitlines()) == 200

    after, charge = left(), job["price"]["instance_charge_nano"]
    assert charge > 0
    for account in ("federation", "agent:agent-1", "agent:agent-2"):
        assert after[account, "instance"] - before[account, "instance"] == charge
    shown = labeler("budget", "--agent", "agent-1")
    assert "image" in shown.out
    assert "#" in shown.out
    assert "federation" not in shown.out
    own = labeler("agent", "budget", "--home", reachable.home / "agents" / "agent-1", "--json")
    assert own.document[-1]["spent_nano"] == after["agent:agent-1", "instance"]


@pytest.mark.long
def test_ctrl_c_while_waiting_leaves_the_job_running(reachable: Up, labeler: Any, tmp_path: Path) -> None:
    for name in ("agent-1", "agent-2"):
        os.kill(reachable.pids[name], signal.SIGSTOP)
    try:
        arguments = command(*submission(reachable), "--wait")
        with subprocess.Popen(arguments, stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as waiting:
            assert waiting.stderr is not None
            # Its first line about the job: the submission was answered, and it waits.
            while not (line := waiting.stderr.readline()).startswith("queued"):
                assert line, "it ended before it waited"
            assert _unfinished(labeler)
            waiting.send_signal(signal.SIGINT)
            _, errors = waiting.communicate(timeout=300)
    finally:
        for name in ("agent-1", "agent-2"):
            os.kill(reachable.pids[name], signal.SIGCONT)
    assert waiting.returncode == 75
    assert "the job goes on without you" in " ".join(errors.split())
    wait_until(lambda: not _unfinished(labeler))


def _unfinished(labeler: Any) -> list[str]:
    jobs = json.loads(labeler("status", "--json").out)
    return [job["job_id"] for job in jobs if job["state"] in ("queued", "collecting", "tallying")]


# Administration


def test_tokens_are_made_through_a_running_service_with_a_role(reachable: Up, labeler: Any) -> None:
    made = json.loads(labeler("keys", "token", "--name", "auditor", "--role", "viewer", "--json").out)
    assert made["token"].startswith("lab_")
    assert labeler("budget", "--token", made["token"]).code == 0
    refused = labeler(*submission(reachable), "--token", made["token"])
    assert refused.code == 1


def test_a_new_agent_is_enrolled_while_the_service_runs_and_revoked(
    reachable: Up, labeler: Any, tmp_path: Path
) -> None:
    home = tmp_path / "hospital-c"
    shard = reachable.home / "agents" / "agent-1" / "images.shard"
    url = reachable.told["url"]
    made = labeler("agent", "init", "--home", home, "--id", "hospital-c", "--coordinator", url, "--shard", shard)
    assert made.code == 0, made.err
    public = home / "keys.public.json"
    enrolled = labeler("keys", "enrol", public, "--yes", "--json")
    assert enrolled.code == 0, enrolled.err
    assert json.loads(enrolled.out)["party_id"] == "hospital-c"
    assert labeler("budget", "--agent", "hospital-c").code == 0
    old = json.loads(enrolled.out)["fingerprint"]
    assert labeler("keys", "rotate", "--home", home).code == 0
    assert labeler("keys", "enrol", public, "--yes").code == 1
    rotated = labeler("keys", "enrol", public, "--yes", "--rotate", "--json")
    assert rotated.code == 0, rotated.err
    assert json.loads(rotated.out)["fingerprint"] != old
    revoked = labeler("keys", "revoke", "hospital-c")
    assert revoked.code == 0
    assert "revoked" in revoked.out


# The end: no test behind this one finds the federation of this module


def test_ctrl_c_stops_everything_without_a_kill_and_a_second_start_goes_on_with_the_same_token(up: Up) -> None:
    errors = up.home.parent / "federation.err"
    before = errors.read_text()
    with ExitStack() as held_up:
        pids = [*up.pids.values(), *children_of(up.process.pid)]
        held_up.enter_context(unfinished_upload(up))
        up.process.send_signal(signal.SIGINT)
        assert up.process.wait(timeout=300) == 0
        wait_until(lambda: all(is_gone(pid) for pid in pids))
        assert "killed" not in errors.read_text().removeprefix(before)
        for name in ("embedder", "agent-1", "tallier-0"):
            last = (up.home / "logs" / f"{name}.log").read_text().splitlines()[-1]
            assert "stopped" in json.loads(last)["message"], (name, last)
    with forked(up.home, agents=2) as second:
        assert second.token == up.told["token"]
        settings = tomllib.loads((up.home / "agents" / "agent-1" / "agent.toml").read_text())
        assert settings["coordinator_url"] == second.url
        pids = [second.pid(name) for name in ("redis", "coordinator", "embedder", "agent-1", "agent-2", "tallier-0")]
        second.process.kill()
        wait_until(lambda: all(is_gone(pid) for pid in pids))
    with closing(open_database(up.home / "coordinator" / "journal.db", read_only=True)) as database:
        assert TokenStore(database).find(up.told["token"]) is not None
        assert [one.name for one in TokenStore(database).list()].count(FIRST_TOKEN) == 1
