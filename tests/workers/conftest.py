"""Small real shards for tests of what runs, and a coordinator that only relays, for tests of one party."""

from __future__ import annotations

import asyncio
import socket
import subprocess
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Self

import numpy as np
import pytest
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from feature_store.shard import Shard
from labeler.messages import COORDINATOR, Kind, Message, frame, read_frames
from labeler.messages.bodies import AnswerSent, Mail, OpenRound, Poll, SumRequest
from labeler.randomness import seeded_source
from labeler.system.keys import PartyKeys, PublicKeys, verify
from labeler.tally import QueryBatch, Round
from tests import doors
from tests.command_line import labeler
from tests.processes import wait_until
from tests.workers.agent_site import Site
from tests.workers.builders import shard_of_rows
from workers.party.home import TallierConfig, create_tallier_home

__all__ = ["labeler"]

CLASSES = ("cat", "dog", "eel")
DIMENSION = 16

MakeShard = Callable[..., Shard]


@pytest.fixture
def make_shard(tmp_path: Path) -> MakeShard:
    """Write a shard of clearly separated classes; every test gets its own folder."""

    def make(
        name: str,
        *,
        records: int = 60,
        seed: int = 0,
        public: bool = False,
        classes: tuple[str, ...] = CLASSES,
        fingerprint: str = "backbone",
        max_records: int | None = 1000,
    ) -> Shard:
        rng = np.random.default_rng(seed)
        centres = np.random.default_rng(7).normal(size=(len(classes), DIMENSION))
        labels = (np.arange(records) % len(classes)).astype(np.int16)
        features = centres[labels] + 0.3 * rng.normal(size=(records, DIMENSION))
        return shard_of_rows(
            tmp_path / name, features, labels, classes=classes, fingerprint=fingerprint, public=public,
            names=[f"{name}/{number}.png" for number in range(records)], backbone={"kind": "pixels"},
            random_bytes=seeded_source(f"ids {name} {seed}".encode("utf-8", "surrogateescape")).bytes,
            max_records=None if public else max_records,
        )  # fmt: skip

    return make


class Relay:
    """A coordinator that only handles frames, over real HTTP behind a door: it checks signatures, relays,
    keeps what was meant for the coordinator. Tests write its mail and read its inbox.

    Attributes:
        url: where it listens.
        keys: of the coordinator.
        inbox: messages for the coordinator, in order of arrival.
        polls: bodies of the polls it got.
        enrolled: party id -> its public keys.
        failures: answers given instead of the next ones: (status, headers, body).
        lost_answers: how many of the next posts are taken without an answer that says so.
        head: of the journal it claims to have.
        takes_polls: it takes a poll behind what is posted.
        requests: how many it got, by path.
        is_witness: it tells parties how far it has seen their journals, as a coordinator does.
    """

    def __init__(self) -> None:
        self.keys = PartyKeys.generate()
        self.inbox: list[Message] = []
        self.polls: list[Poll] = []
        self.proofs: list[Message | None] = []
        self.enrolled: dict[str, PublicKeys] = {}
        self.failures: list[tuple[int, dict[str, str], bytes]] = []
        self.lost_answers = 0
        self.head: tuple[int, str] = (0, "")
        self.takes_polls = True
        self.requests: Counter[str] = Counter()
        self.is_witness = False
        self.seen: dict[str, tuple[int, str]] = {}
        self.sequence = 0
        self.url = ""
        self._mail: dict[str, list[bytes]] = defaultdict(list)
        self._asked_after: dict[str, int] = {}
        self._taken: dict[tuple[str, str], int] = defaultdict(int)

    def send(
        self, kind: Kind, recipient: str, body: bytes, *, task: str = "", round: str = "", **changes: Any
    ) -> Message:
        """Put a signed message of the coordinator into somebody's mail."""
        message = self.sign(kind, recipient, body, task=task, round=round, **changes)
        self.put(recipient, message)
        return message

    def sign(
        self, kind: Kind, recipient: str, body: bytes, *, task: str = "", round: str = "", **changes: Any
    ) -> Message:
        self.sequence += 1
        fields = {"sender": COORDINATOR, "recipient": recipient, "sequence": self.sequence} | changes
        return self.keys.message(kind, task_digest=task, round_digest=round, body=body, **fields)

    def send_as(
        self, keys: PartyKeys, kind: Kind, recipient: str, body: bytes, *, round: Round, **changes: Any
    ) -> Message:
        """Put a message into somebody's mail under these keys, as a party or an impostor signs it."""
        of_round = {"recipient": recipient, "task_digest": round.task_digest, "round_digest": round.digest}
        message = keys.message(kind, body=body, **(of_round | changes))
        self.put(recipient, message)
        return message

    def open_round(self, recipient: str, round: Round, agents: Mapping[str, PartyKeys], **changes: Any) -> None:
        keys = {name: keys.public.verify_key for name, keys in agents.items()}
        opening = OpenRound(**({"round": round, "participants": keys} | changes))
        self.send("open-round", recipient, opening.encode(), task=round.task_digest, round=round.digest)

    def ask_sum(self, recipient: str, round: Round, contributors: tuple[str, ...]) -> None:
        body = SumRequest(contributors, ledger_seq=5, ledger_hash="e" * 64).encode()
        self.send("sum", recipient, body, task=round.task_digest, round=round.digest)

    def make_tallier(self, home: Path, name: str) -> None:
        """Make a tallier's home, and enrol it."""
        public = self.keys.public
        config = TallierConfig(
            tallier_id=name, coordinator_url=self.url,
            coordinator_verify_key=public.verify_key, coordinator_seal_key=public.seal_key,
        )  # fmt: skip
        self.enrolled[name] = create_tallier_home(home, config)

    def put(self, recipient: str, message: Message) -> None:
        self._mail[recipient].append(frame([message]))

    def received(self, kind: str) -> list[Message]:
        return [message for message in self.inbox if message.header.kind == kind]

    def wait_for(self, kind: str, count: int = 1) -> list[Message]:
        """The first `count` messages of a kind, once they are there."""
        wait_until(lambda: len(self.received(kind)) >= count, what=f"{count} x {kind}")
        return self.received(kind)

    def wait_for_poll(self, count: int = 1) -> None:
        """Until a party has asked for its mail so often."""
        wait_until(lambda: len(self.polls) >= count, what=f"{count} polls")

    def wait_for_rest(self, party: str) -> None:
        """Until a party knows that all its mail is done with: what that has come to was taken, and was said to be."""
        wait_until(lambda: self._asked_after.get(party) == len(self._mail[party]), what=f"the rest of {party}")

    def turn_away(self, *, is_revoked: bool) -> None:
        """Not be there from now on, or not know who asks; return once that was said a few times."""
        status, problem = (403, b'{"type": "urn:labeler:problem:not-enrolled"}') if is_revoked else (503, b"")
        self.failures.extend((status, {}, problem) for _ in range(10_000))
        wait_until(lambda: len(self.failures) <= 9_996)

    def forget_mail(self, recipient: str) -> None:
        """Lose the mail that waits for a party; its numbers start again with the next message."""
        self._mail[recipient].clear()

    def mail_of(self, recipient: str) -> list[Message]:
        return [message for data in self._mail[recipient] for message in read_frames(data, max_messages=1)]

    async def _post(self, request: Request) -> Response:
        data = await request.body()
        self.requests["post"] += 1
        if self.failures:
            status, headers, body = self.failures.pop(0)
            return Response(body, status, headers)
        messages = read_frames(data, max_messages=258)
        end = next((place for place, one in enumerate(messages) if one.header.kind == "poll"), len(messages))
        if end < len(messages) and not self.takes_polls:
            problem = b'{"type": "urn:labeler:problem:protocol-violation", "detail": "may not send a poll"}'
            return Response(problem, 409)
        for message in messages[:end]:
            header = message.header
            verify(message, self.enrolled[header.sender].verify_key)
            if header.sequence <= self._taken[header.sender, header.recipient]:
                problem = b'{"type": "urn:labeler:problem:replayed", "detail": "seen before"}'
                return Response(problem, 409)
            self._taken[header.sender, header.recipient] = header.sequence
            if header.kind == "answered":
                sent = AnswerSent.decode(self.keys.open(message))
                self._saw(header.sender, (sent.journal_seq, sent.journal_hash))
            if header.recipient == COORDINATOR:
                self.inbox.append(message)
            else:
                self.put(header.recipient, message)
        if self.lost_answers:
            self.lost_answers -= 1
            return Response(b"", 502)
        if end == len(messages):
            return Response(b'{"taken": 1}', 202)
        return await self._answer(request, *messages[end:], is_answered_empty=False)

    async def _poll(self, request: Request) -> Response:
        messages = read_frames(await request.body(), max_messages=2)
        self.requests["poll"] += 1
        if self.failures:
            status, headers, body = self.failures.pop(0)
            return Response(body, status, headers)
        return await self._answer(request, *messages)

    async def _answer(
        self, request: Request, message: Message, *proof: Message, is_answered_empty: bool = True
    ) -> Response:
        party = message.header.sender
        verify(message, self.enrolled[party].verify_key)
        poll = Poll.decode(self.keys.open(message))
        self.polls.append(poll)
        self.proofs.append(proof[0] if proof else None)
        start = int(poll.after.partition("-")[0] or 0)
        if is_answered_empty:  # by itself: the answer to what was posted before has come
            self._asked_after[party] = start
        until = time.monotonic() + poll.wait_s
        while len(self._mail[party]) <= start and time.monotonic() < until and not await request.is_disconnected():
            await asyncio.sleep(0.01)
        mail = self._mail[party][start : start + 16]
        if not (mail or is_answered_empty):
            return Response(b"", 200)
        told = self.seen.get(party, (0, "")) if self.is_witness else (0, "")
        body = Mail(f"{start + len(mail)}-0", *self.head, *told).encode()
        return Response(frame([self.sign("poll", party, body)]) + b"".join(mail), 200)

    def _saw(self, party: str, head: tuple[int, str]) -> None:
        self.seen[party] = max(self.seen.get(party, (0, "")), head, key=lambda one: one[0])

    def app(self) -> Starlette:
        return Starlette(
            routes=[
                Route("/v1/messages", self._post, methods=["POST"]),
                Route("/v1/messages:poll", self._poll, methods=["POST"]),
            ]
        )


@contextmanager
def serving(
    relay: Relay, certificate: Path | None = None, key: Path | None = None, sockets: Sequence[socket.socket] = ()
) -> Iterator[int]:
    """Serve a relay behind a door (tests.doors) and at these sockets, and behind TLS where there is a certificate."""
    config = uvicorn.Config(
        relay.app(), log_level="critical", lifespan="off", ssl_certfile=certificate, ssl_keyfile=key
    )
    with doors.serving(uvicorn.Server(config), sockets) as number:
        yield number


@pytest.fixture
def relay(request: pytest.FixtureRequest) -> Iterator[Relay]:
    """A relay behind a door; in a test that is marked `process` at a port, where other processes find it."""
    relay = Relay()
    if request.node.get_closest_marker("process"):
        with socket.create_server(("127.0.0.1", 0)) as listening, serving(relay, sockets=[listening]):
            relay.url = f"http://127.0.0.1:{listening.getsockname()[1]}"
            yield relay
    else:
        with serving(relay) as number:
            relay.url = f"http://{doors.HOST}:{number}"
            yield relay


@pytest.fixture(scope="session")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of a private authority (ca.pem), and of a certificate of localhost that only it vouches for."""
    made = tmp_path_factory.mktemp("authority") / "tls"
    script = Path(__file__).parents[2] / "deploy" / "make-certificate.sh"
    subprocess.run([script, made, "localhost", "127.0.0.1", doors.HOST], check=True, capture_output=True)
    return made


@pytest.fixture
def encrypted(relay: Relay, authority: Path) -> Iterator[tuple[str, Path]]:
    """The relay behind TLS, and the file that vouches for it.

    Ask for it before `make_link`: it ends once its peers have hung up, or 30 s later.
    """
    with serving(relay, authority / "coordinator.pem", authority / "coordinator.key") as port:
        yield f"https://{doors.HOST}:{port}", authority / "ca.pem"


class Running:
    """A party's process, here a thread: its work until it stops, and how it ended. A `with` block ends it behind it."""

    def __init__(self, work: Callable[[threading.Event], None]) -> None:
        self.stop = threading.Event()
        self.error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, args=(work,))
        self._thread.start()

    def _run(self, work: Callable[[threading.Event], None]) -> None:
        try:
            work(self.stop)
        except BaseException as error:
            self.error = error

    def end(self) -> None:
        """Stop it, and fail if it had failed."""
        self.stop.set()
        self.join()
        if self.error is not None:
            raise self.error

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self.stop.set()
        if kind is None:  # else the test has failed already
            self.end()

    def join(self) -> None:
        self._thread.join(timeout=150)
        assert not self._thread.is_alive(), "it did not stop"


@pytest.fixture
def start() -> Iterator[Callable[[Callable[[threading.Event], None]], Running]]:
    """Start work in a thread; whatever still runs at the end of a test is stopped."""
    started: list[Running] = []

    def begin(work: Callable[[threading.Event], None]) -> Running:
        started.append(Running(work))
        return started[-1]

    yield begin
    for running in started:
        running.stop.set()
        running.join()


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A party that is turned away asks again at once."""
    monkeypatch.setattr("workers.party.link._LONGEST_PAUSE_S", 0.2)
    monkeypatch.setattr("workers.party.link._pause", lambda *_, **__: time.sleep(0.05))


@pytest.fixture
def site(tmp_path: Path, make_shard: MakeShard, relay: Relay, start: Any) -> Site:
    """An agent's home beside a relay, and nine questions."""
    batch = QueryBatch(make_shard("public", records=9, seed=99, public=True).features[:])
    site = Site(tmp_path / "agent", make_shard("own"), relay, batch, start)
    site.make()
    return site
