"""One party, or a stranger, against everybody: what it says, sends or holds open harms itself at most."""

from __future__ import annotations

import socket
from collections.abc import Mapping
from typing import Any

import httpx2
import pytest

from api.routes.jobs import MAX_STREAMS_OF_A_TOKEN
from labeler.driver.intake import Delivery
from labeler.ledger.jobs import RoundRecord
from labeler.messages import COORDINATOR, MAX_MESSAGE_BYTES, Message, frame, read_frames
from labeler.messages.bodies import Mail
from labeler.system.keys import PartyKeys
from tests.api.routes.conftest import Service, eventually

OCTETS = {"Content-Type": "application/octet-stream"}


def poll(
    service: Service,
    who: str,
    *,
    sequence: int = 1,
    facts: Mapping[str, Any] | None = None,
    seen: tuple[int, str] = (0, ""),
    proof: Message | None = None,
) -> httpx2.Response:
    message = service.polling(who, sequence, facts=facts or {}, coordinator_seq=seen[0], coordinator_hash=seen[1])
    return service.post(message, *([] if proof is None else [proof]), path="/v1/messages:poll")


def submit(service: Service) -> httpx2.Response:
    with service.http("requester") as http:
        return http.post("/v1/jobs", json=service.vectors())


def asked(service: Service) -> RoundRecord:
    """The one round of a job of vectors, once its agents have been asked."""
    job_id = submit(service).json()["job_id"]
    service.agree(job_id)
    eventually(lambda: service.coordinator.stores.jobs.rounds(job_id)[0].state == "asked")
    return service.coordinator.stores.jobs.rounds(job_id)[0]


def test_one_party_that_lies_about_the_journal_stops_only_itself(own: Service) -> None:
    refused = poll(own, "agent-a", seen=(10**9, "a" * 64))
    assert (refused.status_code, refused.json()["type"]) == (503, "urn:labeler:problem:journal-behind")
    assert "sent no answer with this coordinator's signature" in refused.json()["detail"]
    assert submit(own).status_code == 202
    with own.http("admin") as http, own.http(None) as stranger:
        claims = {party["party_id"]: party["claim"] for party in http.get("/v1/parties").json()["parties"]}
        checks = {check["name"]: check for check in http.get("/readyz").json()["checks"]}
        told = stranger.get("/readyz").text
    assert "entry 1000000000" in claims["agent-a"]
    assert not claims["agent-b"]
    assert checks["journal"]["ok"]
    assert "agent-a" in checks["journal"]["detail"]
    assert "agent-a" not in told


def test_the_coordinators_own_signed_word_for_a_longer_journal_stops_the_service(own: Service) -> None:
    first = poll(own, "agent-a")
    answer = read_frames(first.content, max_messages=10)[0]
    true = Mail.decode(answer.body)
    assert poll(own, "agent-a", sequence=2, seen=(true.coordinator_seq, true.coordinator_hash), proof=answer).is_success
    # What this coordinator said before its journal was replaced by an older copy.
    body = Mail(after="", coordinator_seq=10**6, coordinator_hash="b" * 64).encode()
    lost = own.coordinator._keys.message("poll", sender=COORDINATOR, recipient="agent-a", sequence=9, body=body)
    assert poll(own, "agent-a", sequence=3, seen=(10**6, "b" * 64), proof=lost).status_code == 503
    refused = submit(own)
    assert (refused.status_code, refused.json()["type"]) == (503, "urn:labeler:problem:journal-behind")
    with own.http(None) as stranger, own.http("admin") as http:
        told, named = (one.get("/readyz") for one in (stranger, http))
    assert not {check["name"]: check for check in named.json()["checks"]}["journal"]["ok"]
    assert (told.status_code, "agent-a" in told.text) == (503, False)
    with own.http("admin") as http:
        assert http.delete("/v1/parties/agent-a").status_code == 200
    assert submit(own).status_code in (202, 409)


@pytest.mark.usefixtures("no_discarding")
def test_a_stranger_is_refused_by_its_first_header_before_its_body_was_sent(service: Service) -> None:
    body = bytes(1000)
    message = PartyKeys.generate().message("answered", sender="nobody", recipient=COORDINATOR, sequence=1, body=body)
    size = MAX_MESSAGE_BYTES
    for path in ("/v1/messages", "/v1/messages:poll"):
        length = size if path == "/v1/messages" else 1_000_000
        head = (
            f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Type: {OCTETS['Content-Type']}\r\n"
            f"Content-Length: {length}\r\n\r\n"
        )
        with service.connect() as connection:
            connection.sendall(head.encode() + frame([message])[:-1])
            assert connection.recv(1000).startswith(b"HTTP/1.1 403")


def test_shares_too_large_for_their_round_or_too_many_do_not_reach_redis(own: Service) -> None:
    one = asked(own)
    task = own.coordinator.stores.jobs.get(one.job_id).task_digest

    def send(sequence: int, size: int) -> tuple[int, str]:
        message = own.keys["agent-a"].message(
            "input-share",
            sender="agent-a",
            recipient="tallier-0",
            task_digest=task,
            round_digest=one.round_digest,
            sequence=sequence,
            body=bytes(size),
            seal_to=own.keys["tallier-0"].public.seal_key,
        )
        with own.http(None) as http:
            answer = http.post("/v1/messages", content=frame([message]), headers=OCTETS)
        return answer.status_code, answer.json().get("type", "").rpartition(":")[2]

    def has_shares() -> bool:
        return own.coordinator.stores.jobs.rounds(one.job_id)[0].has_shares

    assert send(1, 2**20) == (413, "too-large")
    assert not has_shares()
    answers = [send(number, 1000)[0] for number in range(2, 8)]
    assert answers == [202] * 4 + [409] * 2
    assert has_shares()


def test_a_token_keeps_a_bounded_number_of_event_streams_open_and_closing_one_frees_its_place(own: Service) -> None:
    job_id = submit(own).json()["job_id"]

    def watch(role: Any) -> tuple[socket.socket, bytes]:
        connection = own.connect()
        connection.sendall(
            f"GET /v1/jobs/{job_id}/events HTTP/1.1\r\nHost: x\r\n"
            f"Authorization: Bearer {own.tokens[role]}\r\n\r\n".encode()
        )
        return connection, connection.recv(2000)

    held = [watch("viewer") for _ in range(MAX_STREAMS_OF_A_TOKEN)]
    try:
        assert all(said.startswith(b"HTTP/1.1 200") for _, said in held)
        beyond, said = watch("viewer")
        beyond.close()
        assert said.startswith(b"HTTP/1.1 429")
        assert b"retry-after" in said.lower()
        other, said = watch("requester")
        other.close()
        assert said.startswith(b"HTTP/1.1 200")
        held.pop()[0].close()

        def is_free() -> bool:
            again, answer = watch("viewer")
            again.close()
            return answer.startswith(b"HTTP/1.1 200")

        eventually(is_free)
    finally:
        for connection, _ in held:
            connection.close()


def test_a_large_document_is_refused_before_it_is_parsed_and_says_to_use_parquet(service: Service) -> None:
    rows = b",".join([b"[" + b",".join([b"0"] * 8) + b"]"] * 260_000)
    fields = b'{"task_id":"' + b"a" * 64 + b'","backbone_fingerprint":"f","features":['
    with service.http("requester") as http:
        headers = {"Content-Type": "application/json"}
        many = http.post("/v1/jobs", content=fields + rows + b"]}", headers=headers)
        large = http.post("/v1/jobs", content=fields + b" " * (16 * 2**20) + rows + b"]}", headers=headers)
    for answer in (many, large):
        assert (answer.status_code, answer.json()["type"]) == (413, "urn:labeler:problem:too-large")
        assert "Parquet" in answer.json()["detail"]


def test_whoever_sends_nothing_or_what_is_refused_for_itself_begins_no_turn_of_the_driver(own: Service) -> None:
    begun: list[Delivery] = []

    def begin(delivery: Delivery) -> None:
        begun.append(delivery)
        delivery.done(0)

    own.coordinator.mailroom._deliver = begin
    stale = own.keys["agent-a"].message("holdings", sender="agent-a", recipient=COORDINATOR, sequence=1, body=b"")
    with own.http(None) as http:
        nothing = http.post("/v1/messages", content=b"", headers=OCTETS)
        refused = http.post("/v1/messages", content=frame([stale]), headers=OCTETS)
    assert (nothing.status_code, nothing.json()) == (202, {"taken": 0})
    assert refused.json()["type"] == "urn:labeler:problem:protocol-violation", "an agent holds nothing of others"
    assert begun == []
