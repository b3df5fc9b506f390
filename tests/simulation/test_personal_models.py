"""Personal models change nothing that leaves a site: a whole federated job, with and without `training.personal`.

The real coordinator, agents and talliers run one schedule in which messages are lost. Who sends what to whom at which
moment is the same, and how long it is, but for the task itself, which the coordinator sends with each proposal and ask.
"""

from __future__ import annotations

import errno
import json
import stat
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from feature_store.results.models import read_model
from labeler.task import Task
from tests.simulation import ways
from tests.simulation.campaign import memory_folder, run_case
from tests.simulation.case import Case, case_of
from tests.simulation.contract import Outcome
from tests.simulation.homes import Templates
from tests.simulation.seeds import comes_through, seeds_where
from workers.agent import personal

PERSONAL = {"helper": "interpolation"}
ADDED = len(json.dumps({"personal": PERSONAL}, separators=(",", ":"))) - 1
"""Characters of a task that the field adds: its braces are the comma's."""


def schedule() -> Case:
    """One in which messages are lost and nobody dies, so that no moment of a death is drawn."""

    def is_one(case: Case) -> bool:
        rates = case.rates
        return case.way == "steps" and comes_through(case) and bool(rates.lose) and not (rates.arm or rates.full)

    return case_of(seeds_where(is_one, 1)[0])


class Run:
    """The outcome of the schedule, what each agent kept, and the digests of the tasks."""

    def __init__(self, folder: Path) -> None:
        case = schedule()
        templates = Templates(folder / "templates")
        place = folder / "schedule"
        place.mkdir()
        self.outcome: Outcome = run_case(case, templates, place)
        template = templates.of(case.shape)
        self.tasks: tuple[Task, ...] = template.tasks
        self.kept = {
            name: sorted((place / "federation" / name).glob("shared-models/*.safetensors")) for name in template.agents
        }
        assert not self.outcome.violation
        assert set(self.outcome.states) == {"completed"}


@pytest.fixture(scope="module")
def without() -> Iterator[Run]:
    with memory_folder() as folder:
        yield Run(folder)


def with_field(monkeypatch: pytest.MonkeyPatch) -> None:
    fields = ways._FIELDS["steps"]
    training = dict(fields["training"]) | {"personal": PERSONAL}
    monkeypatch.setitem(ways._FIELDS, "steps", dict(fields) | {"training": training})


def check_same_traffic(run: Run, before: Run) -> None:
    assert run.outcome.steps == before.outcome.steps
    longer: dict[str, set[tuple[str, int]]] = {"coordinator": set(), "others": set()}
    for new, old in zip(run.outcome.wire, before.outcome.wire, strict=True):
        assert new[:-1] == old[:-1]
        sender, kind, more = old[2], old[4], new[-1] - old[-1]
        if more:
            longer["coordinator" if sender == "coordinator" else "others"].add((kind, more))
    assert longer == {"coordinator": {("proposal", ADDED), ("ask", ADDED)}, "others": set()}


@pytest.mark.parametrize("disk", ["has room", "is full"])
def test_a_whole_job_sends_the_same_with_and_without_the_field_whether_or_not_its_models_can_be_kept(
    disk: str, without: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    with_field(monkeypatch)
    if disk == "is full":

        def full(*_: object, **__: object) -> None:
            raise OSError(errno.ENOSPC, "No space left on device")

        monkeypatch.setattr(personal, "replace_file", full)
    with memory_folder() as folder:
        run = Run(folder)
        check_same_traffic(run, without)
        assert [len(kept) for kept in without.kept.values()] == [0] * len(without.kept)
        used = {task.digest for task in run.tasks} & {path.stem for paths in run.kept.values() for path in paths}
        assert bool(used) == (disk == "has room")
        for paths in run.kept.values():
            for path in paths:
                kept = read_model(path)
                assert kept.card["last_step"] == ways.STEPS - 1
                assert np.abs(kept.arrays["weights"]).max() > 0
                assert stat.S_IMODE(path.stat().st_mode) == 0o600
