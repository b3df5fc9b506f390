"""An enrolled agent turns on the running service: each attack is refused by name, and the round goes on."""

from __future__ import annotations

import http.client
import json
import secrets
import sqlite3
from collections.abc import Iterator
from contextlib import closing
from typing import Any

import httpx2
import numpy as np
import pytest

from api.schema import KeysRequest, PartyRequest
from labeler.messages import COORDINATOR, MAX_MESSAGE_BYTES, Kind, Message, frame, read_frames
from labeler.messages.bodies import AnswerSent, Ask, Poll, Proposal, Willing, share_to_bytes
from labeler.randomness import keyed_source, seeded_source
from labeler.sharing import ShareVector, split
from labeler.system.keys import PartyKeys
from tests.e2e.service.conftest import Service
from tests.e2e.service.harm import new_task, paid_at_instance_level, paused, posted, submit
from tests.processes import wait_until

pytestmark = pytest.mark.slow

HONEST = ("agent-1", "agent-2", "agent-3")
SENT = AnswerSent(1, "a" * 64).encode()


class Attacker:
    """An enrolled agent of which every byte is chosen by the test."""

    def __init__(self, name: str, url: str, fingerprint: str, classes: tuple[str, ...]) -> None:
        self.name = name
        self.keys = PartyKeys.generate()
        self.http = httpx2.Client(base_url=url, headers={"Content-Type": "application/octet-stream"}, timeout=300)
        self.facts = {"backbone_fingerprint": fingerprint, "classes": list(classes)}
        self.ask: Ask | None = None
        self._number = 0
        self._after = ""

    def message(self, kind: Kind, body: bytes, *, to: str = COORDINATOR, **changes: Any) -> Message:
        self._number += 1
        fields: dict[str, Any] = {"sender": self.name, "recipient": to, "sequence": self._number, "body": body}
        if self.ask is not None:
            fields |= {"task_digest": self.ask.task.digest, "round_digest": self.ask.round.digest}
        keys = changes.pop("keys", self.keys)
        message: Message = keys.message(kind, **fields | changes)
        return message

    def poll(self, *, wait_s: float = 0.0) -> list[Message]:
        body = Poll(
            after=self._after,
            wait_s=wait_s,
            journal_seq=1,
            journal_hash="a" * 64,
            coordinator_seq=0,
            coordinator_hash="",
            program="labeler/0.5",
            facts=self.facts,
        ).encode()
        asking = self.message("poll", body, task_digest="", round_digest="")
        answer = self.http.post("/v1/messages:poll", content=frame([asking]))
        assert answer.status_code == 200, answer.text
        first, *mail = read_frames(answer.content, max_messages=100)
        self._after = json.loads(self.keys.open(first))["after"]
        return mail

    def await_ask(self) -> Ask:
        """Poll until a question comes, as an honest agent does."""
        for _ in range(60):
            for message in self.poll(wait_s=5.0):
                if message.header.kind == "proposal":
                    self.agree(Proposal.decode(self.keys.open(message)))
                if message.header.kind == "ask":
                    self.ask = Ask.decode(self.keys.open(message))
                    return self.ask
        raise AssertionError("nobody asked")

    def agree(self, proposal: Proposal) -> None:
        """Say yes."""
        body = Willing(proposal.job_id, proposal.expires_at).encode()
        self.taken(self.message("willing", body, task_digest=proposal.task.digest, round_digest=""))

    def share(self, tallier: int, share: ShareVector | bytes) -> Message:
        """A share, or any bytes in its place, sealed to a tallier."""
        assert self.ask is not None
        body = share if isinstance(share, bytes) else share_to_bytes(share)
        known = self.ask.talliers[tallier]
        return self.message("input-share", body, to=known.tallier_id, seal_to=known.seal_key)

    def split(self, seed: bytes) -> tuple[ShareVector, ...]:
        """Shares of votes of its own making, a hundred for everything."""
        assert self.ask is not None
        votes = np.full((len(self.ask.batch), self.ask.task.num_classes), 100, dtype=np.int64)
        # Repeatable, and not marked as such: a tallier takes no share that is.
        source = keyed_source(seeded_source(seed).bytes(32), is_seeded=False)
        return split(votes, num_talliers=len(self.ask.talliers), source=source)

    def refused(self, *messages: Message) -> tuple[int, str]:
        """Hand messages in; the status and the name of the refusal."""
        return self.refused_bytes(frame(messages))

    def refused_bytes(self, data: bytes) -> tuple[int, str]:
        answer = self.http.post("/v1/messages", content=data)
        assert answer.headers["Content-Type"] == "application/problem+json", answer.text
        problem = answer.json()
        assert len(problem["detail"]) > 20
        return answer.status_code, problem["type"].removeprefix("urn:labeler:problem:")

    def taken(self, *messages: Message) -> None:
        answer = self.http.post("/v1/messages", content=frame(messages))
        assert (answer.status_code, answer.json()) == (202, {"taken": len(messages)})


@pytest.fixture
def attacker(service: Service) -> Iterator[Attacker]:
    with service.client() as client:
        facts = next(one for one in client.parties().parties if one.party_id == "agent-1")
        assert facts.backbone_fingerprint is not None
        name = f"mallory-{secrets.token_hex(4)}"
        attacker = Attacker(name, service.url, facts.backbone_fingerprint, tuple(facts.classes))
        public = attacker.keys.public
        client.enrol(PartyRequest(party_id=name, role="agent", verify_key=public.verify_key, seal_key=public.seal_key))
        with attacker.http:
            attacker.poll()
            yield attacker
        client.revoke_party(attacker.name)


def test_attacks_of_an_enrolled_agent_are_refused_by_name_and_the_round_goes_on(
    service: Service, attacker: Attacker, digit_features: np.ndarray
) -> None:
    with service.client() as client:
        before = posted(client)
        # A tallier is held up, so that the round waits until every attack was made.
        with paused(service.pid("tallier-1")):
            job = submit(client, new_task(client, "attacked", max_dropouts=1), digit_features)
            attacker.await_ask()
            send_what_is_refused(attacker, service.url)
            send_two_different_shares(attacker, service)
        done = client.wait(job.job_id)
        assert done.state == "completed"
        assert done.rounds[0].answered == HONEST, "two different shares of one agent: neither counts"
        assert attacker.refused(attacker.share(0, attacker.split(b"one")[0])) == (409, "wrong-digest"), "a late share"
        accounts = ("federation", *(f"agent:{name}" for name in (*HONEST, attacker.name)))
        assert paid_at_instance_level(client, before) == dict.fromkeys(accounts, done.price.instance_charge_nano)
        wait_until(lambda: client.readiness().ready, what="everybody")

        # Old keys after a rotation, and any after it was revoked, get it nowhere.
        new = PartyKeys.generate()
        client.rotate(attacker.name, KeysRequest(verify_key=new.public.verify_key, seal_key=new.public.seal_key))
        assert attacker.refused(attacker.message("answered", SENT)) == (403, "forged")
        client.revoke_party(attacker.name)
        assert attacker.refused(attacker.message("answered", SENT, keys=new)) == (403, "not-enrolled")


def send_what_is_refused(attacker: Attacker, url: str) -> None:
    """Messages of which each is refused at the door."""
    assert attacker.ask is not None
    stranger, other = PartyKeys.generate(), "0" * 64
    nan = b'{"is_final":true,"reason":NaN,"sentence":"x","version":"labeler-refused/1"}'
    elsewhere = attacker.ask.talliers[0].seal_key
    send = attacker.message
    refusals = {
        "signed with other keys": (send("answered", SENT, keys=stranger), (403, "forged")),
        "in another's name": (send("answered", SENT, sender="agent-1"), (403, "forged")),
        "by a stranger": (send("answered", SENT, sender="eve", keys=stranger), (403, "not-enrolled")),
        "of a round never opened": (send("answered", SENT, round_digest=other), (409, "wrong-digest")),
        "of another task": (send("answered", SENT, task_digest=other), (409, "wrong-digest")),
        "a tallier's report": (send("holdings", b"{}"), (409, "protocol-violation")),
        "a share for an agent": (
            send("input-share", b"x", to="agent-1", seal_to=elsewhere),
            (409, "protocol-violation"),
        ),
        "NaN in a refusal": (send("refused", nan), (409, "protocol-violation")),
    }
    for what, (message, expected) in refusals.items():
        assert attacker.refused(message) == expected, what
    huge = (200).to_bytes(4, "big") + (MAX_MESSAGE_BYTES + 1).to_bytes(8, "big")
    assert attacker.refused_bytes(huge) == (413, "too-large")
    assert announced(url, MAX_MESSAGE_BYTES + 1) == 413
    assert attacker.refused_bytes(frame([send("answered", SENT)])[:-1]) == (409, "protocol-violation")


def send_two_different_shares(attacker: Attacker, service: Service) -> None:
    """First what only a tallier can see to be no share, then two splits, and each message a second time."""
    assert attacker.ask is not None
    good, twin = attacker.split(b"one"), attacker.split(b"another")
    floats = np.full((len(attacker.ask.batch), attacker.ask.task.num_classes), np.nan)
    attacker.taken(attacker.share(1, b"no share"), attacker.share(2, floats.tobytes()))
    share = attacker.share(0, good[0])
    attacker.taken(share, attacker.share(0, twin[0]))
    assert attacker.refused(share) == (409, "replayed")
    wait_until(lambda: at_tallier(service, attacker.name) == {"excluded"}, what="the tallier to meet the second share")
    attacker.taken(attacker.share(1, good[1]), attacker.share(2, good[2]))
    answered = attacker.message("answered", SENT)
    attacker.taken(answered)
    assert attacker.refused(answered) == (409, "replayed")


def test_a_second_share_behind_the_agreement_ends_the_job_instead_of_holding_it_up(
    service: Service, attacker: Attacker, digit_features: np.ndarray
) -> None:
    with service.client() as client:
        before = posted(client)
        job = submit(client, new_task(client, "held up", colluding_agents=1), digit_features)
        attacker.await_ask()
        good, twin = attacker.split(b"one"), attacker.split(b"another")
        attacker.taken(attacker.share(0, good[0]), attacker.share(1, good[1]))
        everybody = {*HONEST, attacker.name}
        wait_until(lambda: reported(service, job.job_id) >= everybody, what="the tallier to say whose shares it holds")
        with paused(service.pid("tallier-0")):
            attacker.taken(attacker.share(0, twin[0]), attacker.share(2, good[2]))
            wait_until(lambda: client.job(job.job_id).rounds[0].state == "posted", what="the agreement")
        done = client.wait(job.job_id)
        assert done.state == "failed"
        assert done.problem is not None
        assert f"tallier-0 shut out {attacker.name}, who sent it two different shares" in done.problem.detail
        accounts = ("federation", *(f"agent:{name}" for name in (*HONEST, attacker.name)))
        assert paid_at_instance_level(client, before) == dict.fromkeys(accounts, done.price.instance_charge_nano)


def at_tallier(service: Service, agent_id: str) -> set[str]:
    """What the first tallier keeps of an agent's shares."""
    journal = service.home / "talliers" / "tallier-0" / "journal.db"
    with closing(sqlite3.connect(f"file:{journal}?mode=ro", uri=True)) as database:
        found = database.execute("SELECT state FROM tallier_shares WHERE agent_id = ?", (agent_id,))
        return {state for (state,) in found}


def reported(service: Service, job_id: str) -> set[str]:
    """The agents whose shares the first tallier has told the coordinator that it holds."""
    journal = service.home / "coordinator" / "journal.db"
    with closing(sqlite3.connect(f"file:{journal}?mode=ro", uri=True)) as database:
        found = database.execute(
            "SELECT holdings FROM round_holdings WHERE tallier_id = 'tallier-0' AND job_id = ?", (job_id,)
        )
        return {agent for (held,) in found for agent in json.loads(held)}


def announced(url: str, size: int) -> int:
    """The answer to a request that only says how much it would send."""
    connection = http.client.HTTPConnection(url.removeprefix("http://"), timeout=300)
    with closing(connection):
        connection.putrequest("POST", "/v1/messages")
        connection.putheader("Content-Type", "application/octet-stream")
        connection.putheader("Content-Length", str(size))
        connection.endheaders()
        with connection.getresponse() as answer:
            return answer.status
