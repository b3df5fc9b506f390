"""Record a home of the version whose code is on the path, as the tests of upgrades keep it: NAME.tar.xz.

    cd CHECKOUT; PYTHONPATH=$PWD python /somewhere/record_home.py OUT.tar.xz

It runs a real federation of three agents on scikit-learn's digits, lets three jobs complete, has one refused, kills
everything in a fourth right after its charge was posted, and interrupts a `labeler run` in its third round. What the
journals say is written beside the homes by plain SQL, so that today's code is compared with numbers that it did not
make. Its keys and secrets were made for it and protect nothing. While it is recorded
`job_deadline_s` is ten thousand days, so that the fourth job can still be completed; lift its bound in the checkout.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import sqlite3
import sys
import tarfile
import tempfile
import time
from pathlib import Path

import numpy as np
from PIL import Image
from sklearn.datasets import load_digits

import workers.jobs.preparation
from api.client import Client
from api.schema import TaskRequest
from feature_store.backbones import load_backbone
from feature_store.faults import listening
from feature_store.job_files.releases import release_from_bytes
from feature_store.journal import rounds as steps
from feature_store.quantize import quantize
from tests.e2e.service.conftest import running
from workers import cli

DAYS = 10_000
QUERIES = 6
NOT_KEPT = ("redis", "logs", "examples", ".lock", "processes.json")


def features() -> np.ndarray:
    backbone = load_backbone("pixels:8")
    return quantize(backbone.embed([Image.fromarray((one * (255 / 16)).round().astype(np.uint8)) for one in
                                    load_digits().images[:120]]))  # fmt: skip


def new_task(client: Client, name: str, **changes: object) -> object:
    fields = {"method": "knn", "k": 5, "sigma_votes": 20.0, "delta": 1e-5, "max_queries": QUERIES} | changes
    return client.create_task(TaskRequest(name=name, **fields))


def submit(client: Client, task: object, rows: np.ndarray) -> object:
    return client.submit(task.task_id, features=rows, backbone_fingerprint=task.task["backbone_fingerprint"])


def record_federation(home: Path) -> None:
    with running(home, agents=3):
        pass
    settings = home / "coordinator" / "coordinator.toml"
    text = settings.read_text()
    found = re.search(r"^\[timing\]$", text, re.MULTILINE)
    line = f"job_deadline_s = {DAYS * 86_400}.0"
    settings.write_text(text.replace("[timing]", f"[timing]\n{line}", 1) if found else f"{text}\n[timing]\n{line}\n")
    # The first token was shown, so another is made.
    from workers.homes.keys import make_token_offline

    token = make_token_offline(home / "coordinator", name="recording", role="admin")["token"]
    asked = features()
    with (
        contextlib.suppress(AssertionError, BrokenPipeError),
        running(home) as service,
        Client(service.url, token) as client,
    ):
        for number, changes in enumerate(({}, {"method": "reverse-knn", "k": 1}, {"sigma_votes": 30.0})):
            job = submit(client, new_task(client, f"done {number}", **changes), asked[number * 6 : number * 6 + 6])
            wait(client, job.job_id, "completed")
        with contextlib.suppress(Exception):
            submit(client, new_task(client, "too dear", sigma_votes=0.9, k=50), asked[18:24])
        task = new_task(client, "half", sigma_votes=25.0)
        armed = home.parent / "armed"
        armed.write_text(f"coordinator.posted {service.process.pid}")
        armed.rename(service.faults)
        job = submit(client, task, asked[24:30])
        service.process.wait(60)
        assert service.process.returncode == -signal.SIGKILL, service.process.returncode
        time.sleep(1.0)


def wait(client: Client, job_id: str, state: str) -> None:
    end = time.monotonic() + 60
    while client.job(job_id).state != state:
        assert time.monotonic() < end, client.job(job_id)
        time.sleep(0.2)


def record_run(root: Path) -> None:
    """A `labeler run` that stops right after its third round was posted."""
    from workers.embedder.shards import embed_images

    digits = load_digits(n_class=4)
    order = np.random.default_rng(0).permutation(len(digits.target))
    names = ("zero", "one", "two", "three")
    with tempfile.TemporaryDirectory() as images:
        for name, rows in {"agent-1": order[:60], "agent-2": order[60:120], "public": order[120:180]}.items():
            for image, label, row in zip(digits.images[rows], digits.target[rows], rows, strict=True):
                path = Path(images) / name / names[label] / f"digit-{row:04d}.png"
                path.parent.mkdir(parents=True, exist_ok=True)
                Image.fromarray((image * 15).astype(np.uint8)).save(path)
            embed_images(
                Path(images) / name, "pixels:8", root / f"{name}.shard", classes=names, public=name == "public"
            )
    (root / "task.toml").write_text('[task]\nname = "digits"\nk = 5\nsigma_votes = 3.0\ndelta = 1e-4\n[queries]\n')
    workers.jobs.preparation.BATCH_QUERIES = 10
    opened: dict[int, list[list[int]]] = {}
    posted = 0
    store = steps.store_release

    def storing(connection, job_id, number, data):  # type: ignore[no-untyped-def]
        opened[number] = release_from_bytes(data).noisy_votes.tolist()
        return store(connection, job_id, number, data)

    def stop(name):  # type: ignore[no-untyped-def]
        nonlocal posted
        posted += name == "coordinator.posted"
        if posted == 3:
            raise KeyboardInterrupt

    steps.store_release = storing
    os.chdir(root)
    sys.argv = ["labeler", "run", "task.toml", "--shard", "agent-1.shard", "--shard", "agent-2.shard",
                "--queries", "public.shard", "--out", "job"]  # fmt: skip
    with contextlib.suppress(SystemExit), listening(stop):
        cli.main()
    assert not Path("job/pseudo_labels.parquet").exists()
    (root / "opened.json").write_text(json.dumps(opened))


def facts(home: Path) -> dict[str, object]:
    """What the journals say, by plain SQL."""
    told = {}
    for journal in sorted(home.rglob("journal.db")):
        with contextlib.closing(sqlite3.connect(journal)) as db:
            db.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()
            tables = {name for (name,) in db.execute("SELECT name FROM sqlite_master WHERE type = 'table'")}
            told[journal.parent.relative_to(home).as_posix()] = {
                "version": db.execute("SELECT value FROM journal_about WHERE name = 'version'").fetchone()[0],
                "head": db.execute("SELECT seq, hash FROM ledger_entries ORDER BY seq DESC LIMIT 1").fetchone(),
                "accounts": db.execute("SELECT * FROM ledger_accounts ORDER BY account, level").fetchall(),
                "rows": {name: db.execute(f"SELECT count(*) FROM {name}").fetchone()[0] for name in sorted(tables)},
                "jobs": db.execute("SELECT job_id, state FROM jobs ORDER BY created_at").fetchall()
                if "jobs" in tables else [],
            }  # fmt: skip
    return told


def main() -> None:
    out = Path(sys.argv[1]).resolve()
    with tempfile.TemporaryDirectory(prefix="recording-") as scratch:
        root = Path(scratch) / "kept"
        home = root / "federation"
        home.mkdir(parents=True, mode=0o700)
        (root / "run").mkdir()
        record_federation(home)
        (root / "facts.json").write_text(json.dumps(facts(home), indent=1))
        record_run(root / "run")
        settings = home / "coordinator" / "coordinator.toml"
        lines = [
            'redis_url = "redis://127.0.0.1:6379"' if line.startswith("redis_url") else line
            for line in settings.read_text().splitlines()
            if not line.startswith("job_deadline_s")
        ]
        settings.write_text("\n".join(lines) + "\n")
        for path in sorted(root.rglob("*")):
            if (
                path.is_file()
                and not set(path.relative_to(root).parts) & set(NOT_KEPT)
                and scratch.encode() in path.read_bytes()
            ):
                raise SystemExit(f"{path} names a path of this machine")

        def kept(member: tarfile.TarInfo) -> tarfile.TarInfo | None:
            parts = Path(member.name).parts
            if set(parts) & set(NOT_KEPT) or member.name.endswith(("-wal", "-shm", "journal.db.lock")):
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
