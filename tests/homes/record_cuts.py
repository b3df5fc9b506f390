"""Record homes of the version just before rounds had one machine (commit 53e09ba): `before-machines.tar.xz`, and
`winners-before-machines.tar.xz` of tasks that release the winner alone.

    cd CHECKOUT; PYTHONPATH=$PWD python /somewhere/record_cuts.py OUT.tar.xz [winner]

A federation of two agents completes a job. Copies of its home are each given another, of the same task, and every
process of theirs is killed at once when one reaches the place the copy is named after. A copy of each is then
completed by the checkout itself, which tells the release that today's programs must arrive at, too, where all noise
was fixed. `labeler run` is interrupted and everything packed as the checkout's own `record_home.py` does it. Keys and
secrets were made for it and protect nothing. So that the jobs stay due, two bounds are lifted in the checkout to
40,000 days: `Seconds` of `api/coordinator/config.py` and `KEPT_LONGEST` of `workers/durable_ledger.py`.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import sqlite3
import sys
import tarfile
import tempfile
import time
from contextlib import closing, suppress
from pathlib import Path

from workers.key_care import make_token_offline

from api.client import Client
from tests.e2e.service.conftest import running
from tests.homes import record_home

RELEASE = "winner" if sys.argv[2:] == ["winner"] else "histogram"
CUTS = {
    "histogram": ("agent.charged", "agent.stored", "coordinator.agreed", "coordinator.opened"),
    "winner": ("coordinator.posted", "tallier.computed"),
}[RELEASE]
TIMING = f"job_deadline_s = {record_home.DAYS * 86_400}.0"
KEEPING = "[keeping]\nquestions_s = 31000000.0\nlabels_s = 3000000000.0\n"
NOT_KEPT = (*record_home.NOT_KEPT, "admin-token")


def make(home: Path) -> str:
    """A home whose first job is completed; its admin token."""
    with running(home, agents=2):
        pass
    settings = home / "coordinator" / "coordinator.toml"
    text = settings.read_text()
    found = re.search(r"^\[timing\]$", text, re.MULTILINE)
    text = text.replace("[timing]", f"[timing]\n{TIMING}", 1) if found else f"{text}\n[timing]\n{TIMING}\n"
    settings.write_text(f"{text}\n{KEEPING}")
    token = str(make_token_offline(home / "coordinator", name="recording", role="admin")["token"])
    with running(home, agents=2) as service, Client(service.url, token) as client:
        task = record_home.new_task(client, "kept", max_queries=2 * record_home.QUERIES, release=RELEASE)
        job = record_home.submit(client, task, record_home.features()[:6])
        record_home.wait(client, job.job_id, "completed")
    return token


def cut(home: Path, token: str, place: str) -> None:
    """Give a home a job and kill all its processes when one reaches a place."""
    with suppress(AssertionError, BrokenPipeError), running(home, agents=2) as service:
        pids = [int(pid) for pid in json.loads((home / "processes.json").read_text()).values()]
        armed = home.parent / "armed"
        armed.write_text(place)
        armed.rename(service.faults)
        with suppress(Exception), Client(service.url, token) as client:
            [task] = [one for one in client.tasks() if one.task["name"] == "kept"]
            record_home.submit(client, task, record_home.features()[24:30])
        end = time.monotonic() + 60
        while service.faults.exists():
            if time.monotonic() > end:
                raise SystemExit(f"nobody came to {place}")
            time.sleep(0.001)
        for pid in (service.process.pid, *pids):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(1.0)


def rows(home: Path, query: str) -> list[tuple[object, ...]]:
    with closing(sqlite3.connect(home / "coordinator" / "journal.db")) as db:
        return db.execute(query).fetchall()


def told(home: Path) -> dict[str, object]:
    """What the journals of a home say."""
    return record_home.facts(home) | {
        "rounds": rows(home, "SELECT job_id, number, state, round_digest FROM rounds ORDER BY job_id, number"),
    }


def completed(home: Path, token: str) -> list[object]:
    """The release of the half-done job as the checkout itself makes it."""
    from api.coordinator.labels import release_from_bytes

    [(job,)] = rows(home, "SELECT job_id FROM jobs WHERE state != 'completed'")
    with running(home, agents=2) as service, Client(service.url, token) as client:
        record_home.wait(client, str(job), "completed")
    [(data,)] = rows(home, f"SELECT data FROM releases WHERE job_id = '{job}'")
    release = release_from_bytes(data)
    return (release.labels if release.noisy_votes is None else release.noisy_votes).tolist()


def main() -> None:
    out = Path(sys.argv[1]).resolve()
    with tempfile.TemporaryDirectory(prefix="recording-") as scratch:
        root = Path(scratch) / "kept"
        first = Path(scratch) / "first" / "federation"
        first.parent.mkdir()
        token = make(first)
        facts = {}
        for place in CUTS:
            home = root / place / "federation"
            shutil.copytree(first, home, symlinks=True, ignore=shutil.ignore_patterns("redis", "logs"))
            cut(home, token, place)
            facts[place] = told(home)
            after = Path(scratch) / "after" / place / "federation"
            shutil.copytree(home, after, symlinks=True, ignore=shutil.ignore_patterns("redis", "logs"))
            facts[place]["release"] = completed(after, token)
        (root / "facts.json").write_text(json.dumps(facts, indent=1))
        if RELEASE == "histogram":
            (root / "run").mkdir()
            record_home.record_run(root / "run")
        for settings in root.rglob("coordinator.toml"):
            text = re.sub(r"^redis_url = .*$", 'redis_url = "redis://127.0.0.1:6379"', settings.read_text(), flags=re.M)
            settings.write_text(text.replace(f"{TIMING}\n", ""))
        for path in sorted(root.rglob("*")):
            is_kept = path.is_file() and not set(path.relative_to(root).parts) & set(NOT_KEPT)
            if is_kept and scratch.encode() in path.read_bytes():
                raise SystemExit(f"{path} names a path of this machine")

        def kept(member: tarfile.TarInfo) -> tarfile.TarInfo | None:
            parts = Path(member.name).parts
            if set(parts) & set(NOT_KEPT) or member.name.endswith(("-wal", "-shm", "journal.db.lock", ".log")):
                return None
            member.uid = member.gid = 0
            member.uname = member.gname = ""
            return member

        os.chdir("/")
        with tarfile.open(out, "w:xz", preset=9) as archive:
            archive.add(root, arcname=".", filter=kept)
    print(out, out.stat().st_size)


if __name__ == "__main__":
    main()
