"""Requesters among each other: whoever wants much, sends what is broken or cancels keeps nobody waiting."""

from __future__ import annotations

import io
import zipfile
from collections import Counter
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from api.client import Client
from tests.e2e.service.conftest import Service
from tests.e2e.service.harm import QUERIES, journal_rows, new_task, paused, submit
from tests.processes import wait_until

pytestmark = pytest.mark.slow


@pytest.fixture
def alice(service: Service) -> Iterator[Client]:
    with service.client() as admin:
        made = admin.create_token("alice", "requester")
    with service.client(token=made.token) as client:
        yield client


@pytest.fixture
def mallory(service: Service) -> Iterator[Client]:
    with service.client() as admin:
        made = admin.create_token("mallory", "requester")
    with service.client(token=made.token) as client:
        yield client


MUCH = 12


def test_whoever_wants_much_waits_for_itself(
    service: Service, alice: Client, mallory: Client, digit_features: np.ndarray
) -> None:
    """One requester's jobs stand in the queue before another's only job comes; requesters take turns, jobs do not."""
    tasks = [new_task(mallory, f"much {number}") for number in range(MUCH)]
    with paused(service.pid("agent-1")), paused(service.pid("agent-2")):
        much = [submit(mallory, task, digit_features).job_id for task in tasks]
        mine = submit(alice, new_task(alice, "a little"), digit_features).job_id
    ended = alice.wait(mine)
    finished = {job: mallory.wait(job).updated_at for job in much}
    assert (ended.state, ended.queries_done) == ("completed", QUERIES)
    before = sum(at < ended.updated_at for at in finished.values())
    assert before <= MUCH // 2, f"{before} of {MUCH} were done before the one of somebody who came last"


TOKENS = 5
TRAINING = {"min_records": 10, "regularisation": 1.0}


def truncated_image() -> bytes:
    """The first half of a picture."""
    whole = io.BytesIO()
    Image.fromarray(np.random.default_rng(1).integers(0, 255, (32, 32, 3), dtype=np.uint8)).save(whole, "PNG")
    return whole.getvalue()[: len(whole.getvalue()) // 2]


def test_five_tokens_with_images_that_cannot_be_decoded_ask_no_site_and_close_none(
    service: Service, alice: Client, digit_features: np.ndarray, tmp_path: Path
) -> None:
    """A hundred such jobs had every site refuse everybody for a day, at no charge, because each was asked."""
    with zipfile.ZipFile(tmp_path / "one.zip", "w") as archive:
        archive.writestr("0.png", truncated_image())
    homes = sorted((service.home / "agents").iterdir())
    before = [journal_rows(home, "proposal_answers") for home in homes]
    states: Counter[str] = Counter()
    with service.client() as admin:
        tokens = [admin.create_token(f"mallory-{number}", "requester").token for number in range(TOKENS)]
    for token in tokens:
        with service.client(token=token) as client:
            if token == tokens[0]:
                task = new_task(client, "broken model", method="blind-average", k=1, max_queries=65, training=TRAINING)
            else:
                task = new_task(client, "broken", max_queries=1)
            job_id = client.submit(task.task_id, images=tmp_path / "one.zip").job_id
            states[client.wait(job_id).state] += 1
    assert states == {"failed": TOKENS}
    assert [journal_rows(home, "proposal_answers") for home in homes] == before, "no site was asked for its word"
    done = alice.wait(submit(alice, new_task(alice, "after the broken ones"), digit_features).job_id)
    assert (done.state, done.queries_done) == ("completed", QUERIES)


def has_agreed(client: Client, job_id: str) -> bool:
    return [one.agent_id for one in client.job(job_id).waiting_for] == ["agent-2"]


@pytest.mark.parametrize("of_each", [3, pytest.param(25, marks=pytest.mark.long)])
def test_five_tokens_that_cancel_what_sites_agreed_to_keep_nobody_from_an_answer(
    service: Service, alice: Client, digit_features: np.ndarray, of_each: int
) -> None:
    """One site is away, so a job waits once the other has said yes; then it is cancelled, at no charge."""
    with service.client() as admin:
        tokens = [admin.create_token(f"cancels-{number}", "requester").token for number in range(TOKENS)]
    with paused(service.pid("agent-2")):
        for token in tokens:
            with service.client(token=token) as client:
                task = new_task(client, "cancelled", max_queries=QUERIES)
                for _ in range(of_each):
                    job_id = submit(client, task, digit_features).job_id
                    wait_until(partial(has_agreed, client, job_id), what="a yes of agent-1")
                    assert client.cancel(job_id).state == "cancelled"
    done = alice.wait(submit(alice, new_task(alice, "after the cancelled ones"), digit_features).job_id)
    assert (done.state, done.queries_done) == ("completed", QUERIES)
