"""Bodies of what is said before anything is charged: read back as written, or refused."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from labeler.errors import AwaitingApproval, LabelerError, PolicyRefusal, ProtocolViolation, WrongDigest
from labeler.messages.bodies import Declined, Proposal, Refusal, TallierKey, Willing, Withdrawn
from labeler.task import parse_task

TASK = parse_task(
    {
        "name": "t",
        "classes": ["ant", "bee", "cow"],
        "k": 5,
        "sigma_votes": 40.0,
        "delta": 1e-5,
        "max_queries": 20,
        "agents": 3,
        "backbone_fingerprint": "f" * 16,
    }
)
KEYS = tuple(TallierKey(f"t{number}", f"{number}" * 64, f"{number + 3}" * 64) for number in range(TASK.talliers))
PROPOSAL = Proposal("job-1", TASK, (9, 9, 2), KEYS, 2e9)


def test_bodies_are_read_back_as_they_were_written() -> None:
    assert Proposal.decode(PROPOSAL.encode()) == PROPOSAL
    for body in (Willing("job-1", 2e9), Withdrawn("job-1"), Declined("job-1", Refusal("policy-refusal", "no", True))):
        assert type(body).decode(body.encode()) == body


def test_a_person_who_has_to_approve_is_no_final_no() -> None:
    assert not Declined.of("job-1", AwaitingApproval("a person")).refusal.is_final
    assert Declined.of("job-1", PolicyRefusal("never")).refusal.is_final


def test_a_proposal_is_another_one_where_its_job_rounds_or_deadline_differ_and_not_where_keys_do() -> None:
    others = [replace(PROPOSAL, **changes) for changes in ({"job_id": "j"}, {"sizes": (20,)}, {"expires_at": 1.9e9})]
    assert len({PROPOSAL.digest, *(one.digest for one in others)}) == 4
    rotated = replace(PROPOSAL, talliers=(replace(KEYS[0], seal_key="9" * 64), *KEYS[1:]))
    assert rotated.digest == PROPOSAL.digest


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"sizes": []}, "1 to 100000 rounds"),
        ({"sizes": [0, 3]}, "queries of a round"),
        ({"sizes": [True]}, "queries of a round"),
        ({"sizes": [20, 1]}, "21 queries, and its task has 20"),
        ({"talliers": []}, "names 0"),
        ({"job_id": ""}, "job_id"),
        ({"job_id": "a\nb"}, "job_id"),
        ({"expires_at": "soon"}, "finite number"),
        ({"task_digest": "0" * 64}, "another digest"),
        ({"extra": 1}, "exactly the fields"),
        ({"version": "labeler-proposal/2"}, "version"),
    ],
)
def test_what_is_no_proposal_is_refused(changes: dict[str, Any], said: str) -> None:
    content = json.loads(PROPOSAL.encode()) | changes
    with pytest.raises((ProtocolViolation, WrongDigest), match=said):
        Proposal.decode(json.dumps(content, sort_keys=True).encode())


@pytest.mark.parametrize("body", [b"", b"{}", b"[]", b"\xff", b'{"version":"labeler-willing/1","job_id":1,"until":2}'])
def test_whatever_the_bytes_are_only_our_errors_come_of_them(body: bytes) -> None:
    for kind in (Proposal, Willing, Declined, Withdrawn):
        with pytest.raises(LabelerError):
            kind.decode(body)
