"""Writes what this version keeps on disk to tests/golden/storage/VERSION.tar.xz, which later versions must open.

    python -m tests.golden.write_storage      # a real federation runs for half a minute; needs redis-server

An archive holds homes of a coordinator, an agent and a tallier after one job, with evidence of the first two; the
folder of a `labeler run`; and numbers.json, which this version read from all of it. Images, features and noise of
`labeler run` follow from seeds. Keys and noise of the service are real, of a federation that is gone. That of 1.0.0
was written by the code of commit 446975e3, its last.
"""

from __future__ import annotations

import json
import lzma
import shutil
import tarfile
import tempfile
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq

from feature_store.results.evidence import read_signed
from feature_store.results.models import model_of_bytes
from feature_store.results.questions import QUESTIONS, read_stored_questions
from feature_store.shard import Shard
from labeler.system.keys import PartyKeys
from workers.homes.evidence import check_evidence
from workers.homes.journals import verify_journal
from workers.run.labeling import run_job
from workers.run.preparation import LabelingJob
from workers.run.task_file import TaskFile
from workers.up.home import SHARD_NAME

STORAGE = Path(__file__).parent / "storage"
HOMES = ("coordinator", "agent-1", "tallier-0")
EVIDENCE = ("coordinator", "agent-1")
SEED = 5


def read_all(root: Path) -> dict[str, Any]:
    """Open everything below a folder, and return its numbers: whole ones, names and digests."""
    (job,) = (root / "coordinator" / "jobs").iterdir()
    shard, questions = (
        Shard.open(root / "agent-1" / SHARD_NAME, verify=True),
        read_stored_questions(job / QUESTIONS),
    )
    answers, images = pq.read_table(job / "labels.parquet"), pq.read_table(job / "image-labels.parquet")
    done = json.loads((root / "run" / "report.json").read_text())
    for name in EVIDENCE:
        checked = check_evidence(read_signed((root / f"{name}.evidence.json").read_bytes()), home=root / name)
        assert not checked.wrong, checked.wrong
    assert run_again(root)["job_id"] == done["job_id"]
    said = pq.read_table(root / "run" / "pseudo_labels.parquet")["label"].to_pylist()
    return {
        "journals": {name: verify_journal(root / name) for name in HOMES},
        "keys": {name: PartyKeys.load(root / name / "keys.json").public.verify_key for name in HOMES},
        "shard": [shard.version, shard.record_ids.tolist(), shard.labels.tolist(), int(shard.features.sum())],
        "questions": [questions.features.shape[0], int(questions.features.sum())],
        "answers": [answers["label"].to_pylist(), answers["noisy_votes"].to_pylist()],
        "images": images["label"].to_pylist(),
        "student": sorted(model_of_bytes((job / "student.safetensors").read_bytes(), name="student").arrays),
        "run": [done["job_id"], said],
    }


def run_again(root: Path) -> dict[str, Any]:
    """Run the job of the run's folder, or only read it where it is done: then nobody is asked."""
    task = {"name": "stored", "method": "knn", "k": 3, "sigma_votes": 5.0, "delta": 1e-5}
    file = TaskFile.model_validate({"task": task, "queries": {"strategy": "random", "count": 6}})
    shards = tuple(root / name for name in (f"agent-1/{SHARD_NAME}", "agent-2.shard"))
    return run_job(LabelingJob(file, shards, root / "public.shard", root / "run", seed=SEED), warn=lambda _: None)


def write(target: Path) -> None:
    """Run a federation of two agents for one job, and a job in one process; store what they leave."""
    from api.schema import Selection, TaskRequest
    from labeler.ledger.evidence import EvidenceScope
    from tests.e2e.service.conftest import running
    from tests.e2e.service.harm import digits_as_files
    from workers.homes.evidence import make_evidence

    with tempfile.TemporaryDirectory() as folder:
        root, up = Path(folder) / "storage", Path(folder) / "up"
        root.mkdir()
        photos = digits_as_files(Path(folder) / "photos", 900, 40)
        with running(up, agents=2) as service, service.client() as client:
            wanted = {"name": "stored", "method": "reverse-knn", "sigma_votes": 2.0, "delta": 1e-5, "max_queries": 8}
            task = client.create_task(TaskRequest.model_validate(wanted))
            job = client.submit(task.task_id, images=photos, selection=Selection(strategy="clustered", count=8))
            assert client.wait(job.job_id).state == "completed"
            client.labels(job.job_id, Path(folder) / "labels.parquet")  # waits until every image has its label
        left = shutil.ignore_patterns("*.lock", "*.sock", "*-shm", "*-wal", "incoming", "embedding")
        for name in HOMES:
            (home,) = (one for one in (up / name, up / "agents" / name, up / "talliers" / name) if one.is_dir())
            shutil.copytree(home, root / name, ignore=left)
        shutil.copytree(up / "agents" / "agent-2" / SHARD_NAME, root / "agent-2.shard", ignore=left)
        (job_folder,) = (root / "coordinator" / "jobs").iterdir()
        shutil.copytree(job_folder / "public.shard", root / "public.shard")
        for name in EVIDENCE:
            (root / f"{name}.evidence.json").write_bytes(make_evidence(root / name, EvidenceScope()).to_bytes())
        run_again(root)
        (root / "numbers.json").write_text(json.dumps(read_all(root)))
        with lzma.open(target, "wb", preset=9) as packed, tarfile.open(fileobj=packed, mode="w") as archive:
            for path in sorted(root.rglob("*")):
                if path.suffix not in (".png", ".html"):  # made again from what is there
                    archive.add(path, path.relative_to(root), recursive=False)


if __name__ == "__main__":
    write(STORAGE / f"{version('private-labeler')}.tar.xz")
