"""What agents answer to a proposal, over HTTP: signed, taken once, of their own tasks only, and shown with the job."""

from __future__ import annotations

import time
from typing import Any

from api.schema import JobView
from labeler.messages import COORDINATOR, Kind, Message, frame
from labeler.messages.bodies import Willing
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
