"""Posts of parties: an answer to a proposal is taken once, and a post that ends with a poll is answered as a poll."""

from __future__ import annotations

import threading
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import httpx2
import pytest

from api.client import Client
from api.schema import JobView, KeysRequest
from labeler.driver.mail import Letter
from labeler.ledger.chain import EMPTY, Head
from labeler.messages import COORDINATOR, Kind, Message, frame, read_frames
from labeler.messages.bodies import Mail, Willing
from labeler.system.keys import PartyKeys
from tests.api.routes.conftest import AGENTS, ConfigOf, Service, asking_once, eventually, running

AGENT = AGENTS[0]


def willing(service: Service, job: Any, number: int) -> Message:
    body = Willing(job.job_id, UNTIL).encode()
    return service.keys[AGENT].message(
        "willing", sender=AGENT, recipient=COORDINATOR, task_digest=job.task_id, sequence=number, body=body
    )


def kinds(answer: httpx2.Response) -> list[str]:
    return [message.header.kind for message in read_frames(answer.content, max_messages=9)]


def has_answered(service: Service, job: Any) -> bool:
    return AGENT in service.coordinator.stores.jobs.willingness.answers(job.job_id)


def test_what_is_posted_is_taken_and_the_mail_comes_with_the_answer(own: Service) -> None:
    job = submitted(own)
    first = own.post(own.polling(AGENT, 1), path="/v1/messages:poll")
    assert kinds(first) == ["poll", "proposal"]
    note = Mail.decode(read_frames(first.content, max_messages=9)[0].body)
    # Nothing has come since, so the answer is empty after its time; what is posted has had its effect.
    empty = own.post(willing(own, job, 2), own.polling(AGENT, 3, after=note.after))
    assert (empty.status_code, empty.content, has_answered(own, job)) == (200, b"", True)
    own.coordinator.mailroom._mailbox.send_all([Letter(AGENT, frame([willing(own, job, 9)]), "coordinator:999")])
    both = own.post(willing(own, job, 4), own.polling(AGENT, 5, after=note.after))
    assert (both.status_code, kinds(both)) == (200, ["poll", "willing"])
    # An answer that was lost comes again.
    again = own.post(own.polling(AGENT, 6, after=note.after), path="/v1/messages:poll")
    assert kinds(again) == ["poll", "willing"]


def test_a_party_is_told_how_far_its_journal_was_and_one_behind_is_refused_at_once(own: Service) -> None:
    stores = own.coordinator.stores
    first = own.post(own.polling(AGENT, 1, journal_seq=5, journal_hash="a" * 64), path="/v1/messages:poll")
    note = Mail.decode(read_frames(first.content, max_messages=9)[0].body)
    assert (note.journal_seq, note.journal_hash) == (0, "")
    with stores.database.write() as connection:
        stores.parties.answered({AGENT: Head(8, "c" * 64)}, connection=connection)
    for number, (seq, digest) in enumerate([(5, "a"), (8, "d"), (0, "")], start=2):
        older = own.polling(AGENT, number, journal_seq=seq, journal_hash=digest * 64)
        answer = own.post(older, path="/v1/messages:poll")
        assert (answer.status_code, answer.json()["type"]) == (503, "urn:labeler:problem:journal-behind")
    grown = own.post(own.polling(AGENT, 9, journal_seq=30, journal_hash="e" * 64), path="/v1/messages:poll")
    note = Mail.decode(read_frames(grown.content, max_messages=9)[0].body)
    assert (note.journal_seq, note.journal_hash) == (8, "c" * 64), "it compares, and answers nothing where it is a copy"


def test_where_a_message_is_refused_so_is_the_post_and_no_mail_is_handed_out_or_dropped(own: Service) -> None:
    job = submitted(own)
    first = own.post(own.polling(AGENT, 1), path="/v1/messages:poll")
    after = Mail.decode(read_frames(first.content, max_messages=9)[0].body).after
    message = willing(own, job, 2)
    assert own.post(message).status_code == 202
    refused = own.post(message, own.polling(AGENT, 3, after=after))
    assert (refused.status_code, refused.json()["type"]) == (409, "urn:labeler:problem:replayed")
    assert own.coordinator.mailroom._mailbox.all_pending([AGENT]) == {AGENT: 1}, (
        "the mail that the refused poll says is done with"
    )
    # Its number is not used up either.
    assert kinds(own.post(own.polling(AGENT, 3), path="/v1/messages:poll")) == ["poll", "proposal"]


def test_a_poll_that_is_none_of_the_sender_takes_the_post_with_it(own: Service) -> None:
    job = submitted(own)
    forged = own.polling(AGENT, 3, keys=own.keys[AGENTS[1]])
    foreign = own.polling(AGENTS[1], 3)
    unknown = own.polling(AGENT, 3, facts={"classes": 5})
    proof = own.polling(AGENT, 4)
    cases = {
        "forged": ([forged], 403, "forged"),
        "another party's": ([foreign], 409, "protocol-violation"),
        "facts that nobody knows": ([unknown], 409, "protocol-violation"),
        "more behind it": ([own.polling(AGENT, 3), proof, willing(own, job, 5)], 413, "too-large"),
    }
    for what, (behind, status, kind) in cases.items():
        answer = own.post(willing(own, job, 2), *behind)
        assert (answer.status_code, answer.json()["type"]) == (status, f"urn:labeler:problem:{kind}"), what
        assert not has_answered(own, job), what
    alone = own.post(own.polling(AGENT, 3))
    assert (alone.status_code, alone.json()["type"]) == (409, "urn:labeler:problem:protocol-violation")


def test_trouble_of_the_poll_is_no_refusal_of_what_was_taken(own: Service) -> None:
    job = submitted(own)
    ahead = {"coordinator_seq": 10**9, "coordinator_hash": "a" * 64}
    answer = own.post(willing(own, job, 2), own.polling(AGENT, 3, **ahead))
    assert (answer.status_code, answer.content, has_answered(own, job)) == (200, b"", True)
    told = own.post(own.polling(AGENT, 4, **ahead), path="/v1/messages:poll")
    assert (told.status_code, told.json()["type"]) == (503, "urn:labeler:problem:journal-behind")


def test_a_poll_that_is_held_behind_messages_ends_when_the_server_stops(
    config_of: ConfigOf, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("api.server.GRACE_S", 120)
    answers: list[httpx2.Response] = []
    with running(asking_once(config_of(tmp_path / "home"))) as service:
        job = submitted(service)
        first = service.post(service.polling(AGENT, 1), path="/v1/messages:poll")
        after = Mail.decode(read_frames(first.content, max_messages=9)[0].body).after
        held = [willing(service, job, 2), service.polling(AGENT, 3, after=after, wait_s=30.0)]
        thread = threading.Thread(target=lambda: answers.append(service.post(*held)))
        thread.start()
        eventually(lambda: has_answered(service, job))
        began = time.monotonic()
    thread.join(240)
    assert [(answer.status_code, answer.content) for answer in answers] == [(200, b"")]
    assert time.monotonic() - began < 29  # it would be held for 30


UNTIL = time.time() + 3600


def submitted(service: Service) -> JobView:
    """A job whose proposal lies in the mail of the agent, which was heard from before."""
    coordinator = service.coordinator
    coordinator.stores.parties.contact(AGENT, datetime.now(UTC), {}, EMPTY)
    with service.http("requester") as http:
        job = JobView.model_validate(http.post("/v1/jobs", json=service.vectors()).json())
    eventually(lambda: coordinator.mailroom._mailbox.all_pending([AGENT]) == {AGENT: 1})
    return job


def signed(service: Service, agent: str, kind: Kind, body: bytes, job: JobView, number: int, **changes: Any) -> Message:
    fields: dict[str, Any] = {"task_digest": job.task_id, "sequence": number, "body": body}
    return service.keys[agent].message(kind, **({"sender": agent, "recipient": COORDINATOR} | fields | changes))


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
        answer = own.post(message)
        kind = answer.json().get("type", "").removeprefix("urn:labeler:problem:")
        assert (answer.status_code, kind) == expected, what
    said = own.coordinator.stores.jobs.willingness.answers(job.job_id)
    assert {agent: one.answer for agent, one in said.items()} == {AGENTS[0]: "willing"}


def test_old_keys_behind_a_rotation_and_any_behind_a_revocation_get_a_party_nowhere(own: Service) -> None:
    job, new = submitted(own), PartyKeys.generate()

    def refused(number: int) -> tuple[int, str]:
        answer = own.post(willing(own, job, number))
        return answer.status_code, answer.json()["type"].removeprefix("urn:labeler:problem:")

    with Client(own.url, own.tokens["admin"]) as admin:
        admin.rotate(AGENT, KeysRequest(verify_key=new.public.verify_key, seal_key=new.public.seal_key))
        assert refused(2) == (403, "forged")
        own.keys[AGENT] = new
        admin.revoke_party(AGENT)
        assert refused(3) == (403, "not-enrolled")
    assert not has_answered(own, job)
