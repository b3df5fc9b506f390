"""One kind of mistake ends every command with one code, whether this machine or a service refuses."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from api.client import Client, ServiceProblem
from api.problems import PROBLEMS, TYPE_PREFIX
from labeler.errors import LabelerError, TryAgain, exit_code_of
from labeler.system.files import exclusive
from tests.api.routes.conftest import FINGERPRINT, Service
from tests.command_line import Labeler, labeler  # noqa: F401  # a fixture
from tests.labeler.test_errors import every_error

PAGE = Path(__file__).parents[3] / "docs" / "how-to" / "failures.md"
CODES = PAGE.read_text().split("## Exit codes")[1].split("\n## ")[0]
TABLE = {kind: int(code) for code, kind in re.findall(r"^\| (\d+) \| [^|]+ \| (.+?) \|$", CODES, re.MULTILINE)}

TOLD: dict[str, list[str]] = {
    "an argument or option is wrong": ["plan --nonsense", "frobnicate", "export", "agent --nonsense", "status"],
    "a setting is out of bounds": [
        "plan --sigma -1",
        "embed pictures --out x --engine none",
        "submit pictures --task {task} --count 1000 {to}",
        "submit pictures --task large.toml {to}",
        "export {job} --out x --format xml {to}",
    ],
    "a file or folder that was named is not there": [
        "run none.toml --shard a --queries b --out c",
        "run --shard none --queries none --out c --epsilon 1",
        "duplicates none",
        "declare none --max-records 9",
        "delete none",
        "delete none --persons none.txt",
        "pretrain none --out x",
        "predict none.safetensors pictures --out x.parquet",
        "student none",
        "export none --out x",
        "submit none --task {task} {to}",
        "agent join none --home h",
        "agent budget --home none",
        "agent run --home none",
        "tallier run --home none",
        "serve --home none",
        "journal verify --home none",
        "evidence --home none",
    ],
    "a file is damaged, or is not what it should be": [
        "duplicates pictures",
        "predict damaged pictures --out x.parquet",
        "agent join damaged --home h",
        "delete pictures",
    ],
    "the budget does not cover it": ["submit pictures --task {dear} --strategy all {to}"],
    "the token is unknown, or its role is not sufficient": [
        "status {by} --token lab_unknown",
        "budget {by} --token lab_unknown",
        "export {job} --out x {by} --token lab_unknown",
        "submit pictures --task {task} --strategy all {by} --token {viewer}",
    ],
    "the service has no such job or task": [
        "status job-00000000000000000000 {to}",
        "export job-00000000000000000000 --out x {to}",
        "student job-00000000000000000000 --out x {to}",
    ],
    "the job is not finished, or ended without labels": [
        "export {job} --out x {to}",
        "student {job} --out x {to}",
        "student pictures",
        "export pictures --out x",
        "status pictures",
    ],
    "nothing answers, or not in time": [
        "status --url http://127.0.0.1:9 --token t",
        "budget --url http://127.0.0.1:9 --token t",
        "export job-1 --out x --url http://127.0.0.1:9 --token t",
    ],
}


@pytest.fixture
def names(service: Service, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, str]]:
    """A folder with pictures and damaged files, and what the commands name of a running service."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("workers.commands.console._ABSENT_PATIENCE_S", 0.1)
    (tmp_path / "pictures").mkdir()
    for number in range(3):
        Image.new("RGB", (4, 4), (number, 0, 0)).save(tmp_path / "pictures" / f"{number}.png")
    (tmp_path / "damaged").write_bytes(b"no file of ours")
    large = '[task]\nname = "t"\nepsilon = 1e300\ndelta = 1e-5\n[queries]\nstrategy = "all"\n'
    (tmp_path / "large.toml").write_text(large)
    requester, handlers = service.tokens["requester"], logging.root.handlers[:]
    with Client(service.url, requester) as client:
        of = {"features": np.eye(3, 8), "backbone_fingerprint": FINGERPRINT}
        job = client.submit(service.task().task_id, **of).job_id
        yield {
            "task": service.task().task_id,
            "dear": service.task(sigma_votes=0.05).task_id,
            "job": job,
            "by": f"--url {service.url}",
            "to": f"--url {service.url} --token {requester}",
            "viewer": service.tokens["viewer"],
        }
        client.cancel(job)
    logging.root.handlers[:] = handlers  # services log to the streams of one test


@pytest.mark.process
@pytest.mark.parametrize("kind", TOLD)
def test_one_mistake_has_one_code_in_every_command(kind: str, names: dict[str, str], labeler: Labeler) -> None:  # noqa: F811
    found = {}
    for line in TOLD[kind]:
        ended = labeler(*line.format(**names).split())
        found[line] = (ended.code, ended.err[-200:])
    assert {line: said for line, said in found.items() if said[0] != TABLE[kind]} == {}


def test_what_runs_into_another_process_a_full_disk_or_ctrl_c_is_tried_again(
    labeler: Labeler,  # noqa: F811
    names: dict[str, str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert labeler("embed", "pictures", "--public", "--backbone", "pixels", "--out", "shard").code == 0
    with exclusive(tmp_path / "shard" / ".lock", "shard"):
        assert labeler("declare", "shard", "--max-records", 9).code == TABLE["another process works there"]
    for raised, kind in ((OSError(28, "full"), "the disk is full"), (KeyboardInterrupt(), "you stopped it (Ctrl-C)")):

        def stopped(*_: object, error: BaseException = raised, **__: object) -> None:
            raise error

        for place, line in (("workers.plan.make_plan", "plan --sigma 25"), ("api.client.Client.jobs", "status {to}")):
            with monkeypatch.context() as patched:
                patched.setattr(place, stopped)
                assert labeler(*line.format(**names).split()).code == TABLE[kind]


@pytest.mark.parametrize("kind", every_error(), ids=lambda kind: kind.__name__)
def test_a_service_that_refuses_ends_a_command_as_the_same_refusal_here_does(kind: type[LabelerError]) -> None:
    urn = TYPE_PREFIX + kind.problem_type
    status, title = next(PROBLEMS[one] for one in kind.__mro__ if one in PROBLEMS)
    refused = ServiceProblem(type=urn, status=status, title=title, detail="")
    assert refused.exit_code == exit_code_of(urn) == kind.exit_code
    assert ServiceProblem(type=TYPE_PREFIX + "invalid-request", status=422, title="", detail="").exit_code == 2
    assert (kind.exit_code == TryAgain.exit_code) == issubclass(kind, TryAgain)


def test_every_kind_of_the_page_is_tried() -> None:
    elsewhere = {"another process works there", "the disk is full", "you stopped it (Ctrl-C)"}
    by_themselves = {kind for kind, code in TABLE.items() if code == 0 or kind.startswith("a check")}
    assert TOLD.keys() | elsewhere | by_themselves == TABLE.keys()
