"""The service on a real PostgreSQL: the README's script, sessions that are cut in a round, a second coordinator."""

from __future__ import annotations

import http.client
import json
import sys
import threading
import tomllib
from pathlib import Path
from urllib.parse import urlsplit

import numpy as np
import psycopg
import pytest
from PIL import Image

from api.client_http import FormBody, Part
from tests.e2e.service.conftest import Service
from tests.e2e.service.harm import QUERIES, new_task, paid_at_instance_level, paused, posted, submit
from tests.e2e.service.test_readme_service import block, run, spent
from tests.forked_command import run_forked
from tests.processes import wait_until
from workers.homes.new import set_line
from workers.up import Plan
from workers.up.home import make_federation

pytestmark = pytest.mark.slow


def journal_of(service: Service) -> str:
    settings = tomllib.loads((service.home / "coordinator" / "coordinator.toml").read_text())
    return str(settings["journal"])


@pytest.mark.long
def test_the_python_script_of_the_readme_runs_on_postgresql(on_postgresql: Service, tmp_path: Path) -> None:
    assert journal_of(on_postgresql).startswith("postgresql://")
    assert not (on_postgresql.home / "coordinator" / "journal.db").exists()
    before = spent(on_postgresql)
    run([sys.executable, "-c", block("python", "connect")], on_postgresql, tmp_path)
    assert spent(on_postgresql) > before


@pytest.mark.long
def test_a_coordinator_whose_sessions_are_cut_in_a_round_goes_on_and_charges_once(
    on_postgresql: Service, digit_features: np.ndarray
) -> None:
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


@pytest.mark.long
def test_a_second_coordinator_is_refused_and_an_upload_under_way_at_the_first_survives(
    on_postgresql: Service, tmp_path: Path
) -> None:
    with on_postgresql.client() as client:
        task = new_task(client, "uploaded")
        form = FormBody([Part("request", json.dumps({"task_id": task.task_id}).encode()), *images(tmp_path)])
        body = b"".join(form)
        place = urlsplit(on_postgresql.url)
        connection = http.client.HTTPConnection(place.hostname or "", place.port, timeout=60)
        connection.putrequest("POST", "/v1/jobs")
        for name, value in (form.headers | {"Authorization": f"Bearer {on_postgresql.token}"}).items():
            connection.putheader(name, value)
        connection.endheaders()
        upload = Upload(connection, body)
        home = on_postgresql.home / "coordinator"
        wait_until(lambda: any((home / "incoming").glob("*/*")), what="the beginning of the upload")
        begun = sorted((home / "incoming").glob("*/*"))

        code, said = run_forked("serve", "--home", home, "--host", "127.0.0.1", "--port", 0)
        assert code == 75, said
        assert "another coordinator runs on the home" in said

        other = make_federation(new_folder(tmp_path / "other"), Plan(agents=2)).coordinator
        set_line(other / "coordinator.toml", "journal", journal_of(on_postgresql))
        code, said = run_forked("serve", "--home", other, "--host", "127.0.0.1", "--port", 0)
        assert code == 75, said
        assert "another process holds the journal" in said
        assert "password" not in said

        assert sorted((home / "incoming").glob("*/*")) == begun
        upload.finish()
        answer = connection.getresponse()
        told = json.loads(answer.read())
        connection.close()
        assert answer.status in (200, 201, 202), told
        assert client.wait(told["job_id"]).state == "completed"


def new_folder(path: Path) -> Path:
    path.mkdir(mode=0o700)
    return path


def images(folder: Path) -> list[Part]:
    """Six images of noise, which no compression makes small."""
    rng = np.random.default_rng(5)
    paths = [folder / f"image-{number}.png" for number in range(QUERIES)]
    for path in paths:
        Image.fromarray(rng.integers(0, 256, (256, 256, 3), dtype=np.uint8)).save(path)
    return [Part("images", path, path.name) for path in paths]


class Upload:
    """A body that comes slowly, as fast as the coordinator demands, until it is told to come at once."""

    PIECE, EVERY_S = 8 * 1024, 0.5

    def __init__(self, connection: http.client.HTTPConnection, body: bytes) -> None:
        self._connection = connection
        self._rest = memoryview(body)
        self._told = threading.Event()
        self._thread = threading.Thread(target=self._send, daemon=True)
        self._thread.start()

    def _send(self) -> None:
        while len(self._rest) > self.PIECE and not self._told.is_set():
            self._connection.send(self._rest[: self.PIECE])
            self._rest = self._rest[self.PIECE :]
            self._told.wait(self.EVERY_S)

    def finish(self) -> None:
        self._told.set()
        self._thread.join()
        assert len(self._rest) > self.PIECE, "it was still under way"
        self._connection.send(self._rest)
