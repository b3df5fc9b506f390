"""What agents answer to a proposal, over HTTP: signed, taken once, of their own tasks only, and shown with the job."""

from __future__ import annotations

import time
from typing import Any

import pytest

from api.schema import JobView
from labeler.messages import COORDINATOR, Kind, Message, frame
from labeler.messages.bodies import Declined, Refusal, Willing
from tests.api.routes.conftest import AGENTS, FINGERPRINT, Service

OCTETS = {"Content-Type": "application/octet-stream"}
UNTIL = time.time() + 3600


def submitted(service: Service) -> JobView:
    job = {"task_id": service.task().task_id, "features": [[1.0] * 8], "backbone_fingerprint": FINGERPRINT}
    with service.http("requester") as http:
        return JobView.model_validate(http.post("/v1/jobs", json=job).json())


def shown(service: Service, job: JobView) -> JobView:
    with service.http("requester") as http:
        return JobView.model_validate(http.get(f"/v1/jobs/{job.job_id}").json())


def signed(service: Service, agent: str, kind: Kind, body: bytes, job: JobView, number: int, **changes: Any) -> Message:
    fields: dict[str, Any] = {"task_digest": job.task_id, "sequence": number, "body": body}
    return service.keys[agent].message(kind, **({"sender": agent, "recipient": COORDINATOR} | fields | changes))


def post(service: Service, message: Message) -> tuple[int, str]:
    with service.http(None) as http:
        answer = http.post("/v1/messages", content=frame([message]), headers=OCTETS)
    return answer.status_code, str(answer.json().get("type", "")).removeprefix("urn:labeler:problem:")


@pytest.mark.parametrize(
    ("reason", "says", "slug", "status"),
    [
        ("policy-refusal", "allow.methods: another", "quorum-not-reached", 503),
        ("refused-by-person", "a person at the site has refused task 1: no vote yet", "refused-by-person", 403),
    ],
)
def test_a_signed_no_ends_the_job_at_no_charge_and_its_sentence_stands_beside_it(
    own: Service, reason: str, says: str, slug: str, status: int
) -> None:
    job = submitted(own)
    later = Declined(job.job_id, Refusal("awaiting-approval", "a person has to approve", False))
    assert post(own, signed(own, AGENTS[0], "declined", later.encode(), job, 1)) == (202, "")
    waiting = {one.agent_id: one.reason for one in shown(own, job).waiting_for}
    assert waiting == {AGENTS[0]: "approval", AGENTS[1]: "answer", AGENTS[2]: "answer"}
    for number, agent in enumerate(AGENTS[1:]):
        yes = Willing(job.job_id, UNTIL).encode()
        assert post(own, signed(own, agent, "willing", yes, job, number + 1)) == (202, "")
    assert [one.agent_id for one in shown(own, job).waiting_for] == [AGENTS[0]]
    no = Declined(job.job_id, Refusal(reason, says, True))
    assert post(own, signed(own, AGENTS[0], "declined", no.encode(), job, 2)) == (202, "")
    end = time.monotonic() + 90
    while (seen := shown(own, job)).state == "queued":
        assert time.monotonic() < end, "the job did not end"
        time.sleep(0.02)
    assert (seen.state, seen.declined) == ("refused", {AGENTS[0]: says})
    assert seen.problem is not None
    assert (seen.problem.type, seen.problem.status) == (f"urn:labeler:problem:{slug}", status)
    assert seen.problem.title == {503: "Too few agents answered", 403: "A person at a site has refused this"}[status]
    assert seen.problem.detail.count(f"{AGENTS[0]} says: {says}") == 1
    assert seen.task_name == own.coordinator.stores.tasks.get(job.task_id).task.name
    assert {one.spent for one in own.coordinator.ledger.balances()} == {0}


def test_answers_that_are_no_answer_of_this_job_are_refused_by_name(own: Service) -> None:
    job, yes = submitted(own), Willing("job-nobody-has", UNTIL).encode()
    good = Willing(job.job_id, UNTIL).encode()
    tallier = own.keys["tallier-0"].message(
        "willing", sender="tallier-0", recipient=COORDINATOR, task_digest=job.task_id, sequence=1, body=good
    )
    first = signed(own, AGENTS[0], "willing", good, job, 3)
    cases = {
        "no such job": (signed(own, AGENTS[0], "willing", yes, job, 1), (409, "wrong-digest")),
        "another task": (signed(own, AGENTS[0], "willing", good, job, 2, task_digest="0" * 64), (409, "wrong-digest")),
        "a tallier": (tallier, (409, "protocol-violation")),
        "not a body": (signed(own, AGENTS[0], "willing", b"{}", job, 2), (409, "protocol-violation")),
        "good": (first, (202, "")),
        "replayed": (first, (409, "replayed")),
        "for another agent": (
            signed(own, AGENTS[0], "willing", good, job, 4, recipient=AGENTS[1]), (409, "protocol-violation"),
        ),
        "forged": (signed(own, AGENTS[1], "willing", good, job, 1, sender=AGENTS[2]), (403, "forged")),
    }  # fmt: skip
    for what, (message, expected) in cases.items():
        assert post(own, message) == expected, what
    said = own.coordinator.stores.jobs.willingness.answers(job.job_id)
    assert {agent: one.answer for agent, one in said.items()} == {AGENTS[0]: "willing"}
