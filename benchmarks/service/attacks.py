"""A well-behaved requester's job under attack: seconds from submission to labels, compared with quiet.

Each attack is bounded in count and in rate, comes from this machine, and goes to a federation that is started for it.
Attackers hold a separate requester's token, or none. Connections that only hold something occupied come from other
loopback addresses than the well-behaved requester's, as a stranger's would.

The service must keep a ratio: while an attack goes on, a job takes at most three times its quiet time.

Two attacks are on an agent's time, and need no service: questions sorted toward one record (`sorted_questions`), and
questions at which one record more makes too many tie (`tied_questions`).
"""

from __future__ import annotations

import io
import itertools
import json
import os
import socket
import tempfile
import threading
import time
import zipfile
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Final
from urllib.parse import urlsplit

import httpx2
import numpy as np
from PIL import Image

from api.limits import ANSWER_S
from benchmarks import BenchRow, in_turn, rows_of, seconds_of
from benchmarks.service.federation import embed_public, new_federation, running_service
from benchmarks.service.readers import beside_readers
from benchmarks.service.requesters import Wanted, WellBehaved, new_token, revoke_token
from benchmarks.service.service import MAX_QUERIES, QUERIES, TASK, wanted_of
from feature_store.index.build import build_index, processor_engine
from feature_store.index.engine_faiss import WINDOW
from feature_store.index.exact_index import every_query_tied
from feature_store.rows import FEATURE_SCALE, quantize
from labeler.randomness import os_source
from workers.agent.public_clock import ROOM
from workers.progress import ProgressCallback, silent
from workers.voting import NeighborIndexes

MOST_TIMES: Final = 3.0
"""A job may take this many times its quiet time."""

AGENTS: Final = 3
REQUESTS_PER_S: Final = 20.0
CONNECTIONS: Final = 1_100
UNREAD: Final = 200
ASKED: Final = 50
UPLOADS: Final = 16
STREAMS: Final = 50
BOMB_SIDE: Final = 8_000
BOMB_IMAGES: Final = 400
TOKENS: Final = 5
BROKEN: Final = 20
CANCELLED: Final = 25
VIEWERS: Final = 6
_ADDRESSES: Final = 10
DIMENSION, NEIGHBORS = 64, 50
"""Of questions sorted toward one record; the last is the bound that the agent's site declares."""


@dataclass(frozen=True, repr=False)
class Scene:
    """The knowledge of an attacker.

    Attributes:
        url: of the service.
        token: a requester's, the attacker's own.
        name: of that token.
        task_id: of a task of the attacker's.
        foreign_task_id: of the well-behaved requester's task.
        vectors: a body of a job in the attacker's task, without an idempotency key.
        administrator: of the service; revokes the attacker's token where the attack is about that.
    """

    url: str
    token: str
    name: str
    task_id: str
    foreign_task_id: str
    vectors: dict[str, object]
    administrator: str

    def client(self, *, token: str | None = None) -> httpx2.Client:
        """Return a plain client that tries nothing twice."""
        return httpx2.Client(base_url=self.url, headers={"Authorization": f"Bearer {token or self.token}"}, timeout=30)

    def submit(self, client: httpx2.Client, key: str, **changes: str) -> httpx2.Response:
        """Submit a job of vectors under an idempotency key."""
        return client.post("/v1/jobs", json=self.vectors | changes, headers={"Idempotency-Key": key})


Answers = Counter[int]
"""Answers of each status that an attack got; 0 for connections that were refused or cut."""

Attack = Callable[[Scene, Answers, ExitStack], None]
"""Starts itself, and puts its end on the stack."""


def bench_attacks(
    *, data: Path | None = None, full: bool = False, entries: int | None = None, progress: ProgressCallback = silent
) -> list[BenchRow]:
    """Measure jobs in quiet and under each attack, on one federation of real processes; readers have another one.

    Args:
        entries: of the ledger that is read; then the readers are the only attack.
    """
    jobs = 15 if full else 3
    rows: list[BenchRow] = []
    with tempfile.TemporaryDirectory(dir=data) as name:
        folder = Path(name)
        federation = new_federation(folder / "federation", AGENTS)
        public = embed_public(folder)
        wanted = wanted_of(public)
        (folder / "old").mkdir()
        asked = entries or (1_000_000 if full else 100_000)
        rows += beside_readers(folder / "old", wanted, agents=AGENTS, entries=asked, jobs=7 * jobs)
        if entries is not None:
            return rows
        with ExitStack() as running:
            service = running.enter_context(running_service(federation.home))
            token = new_token(service.url, service.token, "well-behaved")
            good = running.enter_context(WellBehaved(service.url, token, wanted))
            good.job_seconds()
            for case, attack in in_turn(progress, "Attacks", ATTACKS.items()):
                scene = _scene(service.url, service.token, good, wanted, case)
                quiet = [good.job_seconds() for _ in range(jobs)]
                rows += _rows(case, quiet, *_under(attack, scene, good, jobs))
    return rows + sorted_questions(repeats=jobs) + tied_questions(repeats=jobs)


def sorted_questions(*, repeats: int = 3, questions: int = 20_000, records: int = 1_500) -> list[BenchRow]:
    """Measure an agent's search of questions that were sorted toward one record, against the same ones in any order.

    In seconds of the processor, with that record and without it: the order of search is secret, so all are alike.
    """
    rng = np.random.default_rng(20261128)
    private = quantize(rng.normal(size=(records, DIMENSION)))
    rising = np.linspace(-8, 8, questions)[:, None] * (private[0] / FEATURE_SCALE)
    toward = quantize(rising + 0.6 * rng.normal(size=rising.shape))
    asked = {"sorted": toward, "in any order": toward[rng.permutation(questions)]}
    worlds = {"with the record": private, "without it": private[1:]}

    def search(how: str, who: str) -> None:
        index = NeighborIndexes(dimension=DIMENSION).of_questions(asked[how], order=os_source())
        index.search(worlds[who], NEIGHBORS)

    cases = list(itertools.product(asked, worlds))
    # In turns, so that other work on the machine slows all of them; the first turn loads what they need.
    turns = [[seconds_of(partial(search, *case), time.process_time) for case in cases] for _ in range(1 + repeats)]
    usual = dict(zip(cases, np.median(turns[1:], axis=0).tolist(), strict=True))
    found = [(f"{how}, {who}", "seconds, median", usual[how, who], None) for how, who in cases]
    for who in worlds:
        found.append(
            (f"sorted / in any order, {who}", "time ratio", usual["sorted", who] / usual["in any order", who], None)
        )
    settings = {"questions": questions, "records": records, "dimension": DIMENSION, "k": NEIGHBORS, "runs": repeats}
    return rows_of("questions sorted toward one record", found, settings=settings)


def tied_questions(*, repeats: int = 3, questions: int = 2_000, records: int = 10_000) -> list[BenchRow]:
    """Measure an agent's search at questions where all ties fit FAISS's window, but for one record.

    Times are seconds of the processor, with that record and without it. They are also parts of the public clock's plan
    for the search: the longer of two searches of drawn rows, as they are and with every query settled as if it tied.
    """
    rng = np.random.default_rng(20261129)
    drawn = quantize(rng.normal(size=(records, DIMENSION)))
    asked = quantize(rng.normal(size=(1, DIMENSION)) + 1e-3 * rng.normal(size=(questions, DIMENSION)))
    private = drawn.copy()
    private[: WINDOW + 1] = asked[0]  # the nearest of every question, all equal
    ids = rng.permutation(records).astype(np.int64)
    worlds = {"with the record": slice(None), "without it": slice(1, None)}
    indexes = {who: build_index(private[rows], ids[rows], engine=processor_engine()) for who, rows in worlds.items()}
    probe = build_index(drawn, ids, engine=processor_engine())

    def settled() -> None:
        with every_query_tied():
            probe.search(asked, 1)

    works: dict[str, Callable[[], object]] = {who: partial(index.search, asked, 1) for who, index in indexes.items()}
    works |= {"drawn rows": partial(probe.search, asked, 1), "drawn rows, every query settled": settled}
    turns = [[seconds_of(work, time.process_time) for work in works.values()] for _ in range(1 + repeats)]
    usual = dict(zip(works, np.median(turns[1:], axis=0).tolist(), strict=True))
    planned = ROOM * max(usual["drawn rows"], usual["drawn rows, every query settled"])
    found: list[tuple[str, str, float, str | None]] = [
        (how, "seconds, median", seconds, None) for how, seconds in usual.items()
    ]
    found += [(f"{who} / its plan", "time ratio", usual[who] / planned, "at most 1") for who in worlds]
    settings = {"questions": questions, "records": records, "dimension": DIMENSION, "k": 1, "runs": repeats}
    return rows_of("questions at which one record makes too many tie", found, settings=settings)


def _scene(url: str, administrator: str, good: WellBehaved, wanted: Wanted, case: str) -> Scene:
    name = f"attacker: {case}"
    token = new_token(url, administrator, name)
    with WellBehaved(url, token, wanted) as own:
        return Scene(url, token, name, own.task_id, good.task_id, own.body(), administrator)


def _under(attack: Attack, scene: Scene, good: WellBehaved, jobs: int) -> tuple[list[float], list[float], Answers]:
    answers: Answers = Counter()
    with ExitStack() as attacking:
        attack(scene, answers, attacking)
        return [good.job_seconds() for _ in range(jobs)], [good.price_seconds() for _ in range(jobs)], answers


def _rows(
    case: str, quiet: list[float], attacked: list[float], priced: list[float], answers: Answers
) -> list[BenchRow]:
    settings = {
        "jobs": len(quiet),
        "agents": AGENTS,
        "queries": QUERIES,
        "cores": os.cpu_count(),
        "answers": {str(status): count for status, count in sorted(answers.items())},
    }
    usual, now = float(np.median(quiet)), float(np.median(attacked))
    found = [
        ("in quiet", "seconds, median", usual, None),
        ("under attack", "seconds, median", now, None),
        ("under attack", "seconds, longest", max(attacked), None),
        ("under attack", "seconds of a new price, longest", max(priced), None),
        ("attack / quiet", "time ratio", now / usual, f"at most {MOST_TIMES:g}"),
    ]
    return rows_of(case, found, settings=settings)


def replays(scene: Scene, answers: Answers, attacking: ExitStack) -> None:
    """Send the key of one finished job again and again."""
    client = attacking.enter_context(scene.client())
    scene.submit(client, "the-same-again")
    _again(attacking, answers, lambda _: scene.submit(client, "the-same-again"))


def many_jobs(scene: Scene, answers: Answers, attacking: ExitStack) -> None:
    """Submit new small jobs, as many as the service takes."""
    client = attacking.enter_context(scene.client())
    _again(attacking, answers, lambda number: scene.submit(client, f"job-{number}"), per_s=2.0)


def bombs(scene: Scene, answers: Answers, attacking: ExitStack) -> None:
    """Send small archives of huge black images, as large as the service takes; cancel each job after it was sent."""
    client = attacking.enter_context(scene.client())
    sizes = [BOMB_IMAGES]

    def send(number: int) -> httpx2.Response:
        selection = {"strategy": "random", "count": 1}
        archive = {"archive": ("black.zip", black_images(sizes[0]), "application/zip")}
        answer = _uploaded(client, scene.task_id, selection, archive, {"Idempotency-Key": f"bomb-{number}"})
        if answer.is_success:
            client.delete(f"/v1/jobs/{answer.json()['job_id']}")
        else:
            sizes[0] = max(1, sizes[0] // 2)
        return answer

    _again(attacking, answers, send, per_s=1.0)


def slow_headers(scene: Scene, answers: Answers, attacking: ExitStack) -> None:
    """Open connections that never finish their headers, and reopen them when they are cut."""
    _holding(
        scene,
        answers,
        attacking,
        b"GET /healthz HTTP/1.1\r\nHost: here\r\nX-Slow: ",
        count=CONNECTIONS,
        per_s=10 * REQUESTS_PER_S,
    )


def unread_answers(scene: Scene, answers: Answers, attacking: ExitStack) -> None:
    """Ask for much on each of many connections and read nothing."""
    asked = ASKED * b"GET /openapi.json HTTP/1.1\r\nHost: here\r\n\r\n"
    _holding(scene, answers, attacking, asked, count=UNREAD, per_s=UNREAD / ANSWER_S)


def large_uploads(scene: Scene, answers: Answers, attacking: ExitStack) -> None:
    """Begin uploads of 2 GiB each with one token, and send little of them."""
    head = f"POST /v1/jobs HTTP/1.1\r\nHost: here\r\nAuthorization: Bearer {scene.token}\r\n"
    form = f"Content-Type: multipart/form-data; boundary=x\r\nContent-Length: {2**31}\r\n\r\n"
    _holding(scene, answers, attacking, (head + form).encode() + bytes(2**18), count=UPLOADS, per_s=1.0)


def _holding(scene: Scene, answers: Answers, attacking: ExitStack, sent: bytes, *, count: int, per_s: float) -> None:
    """Hold connections on which this was sent, and open others in place of the oldest."""
    place = urlsplit(scene.url)
    held: list[socket.socket] = []

    def let_go() -> None:
        for one in held:
            one.close()

    attacking.callback(let_go)

    def connect(number: int) -> None:
        source = f"127.0.1.{1 + number % _ADDRESSES}"
        try:
            one = socket.create_connection(
                (place.hostname or "", place.port or 80), timeout=2, source_address=(source, 0)
            )
            one.sendall(sent)
            held.append(one)
            if len(held) > count:
                held.pop(0).close()
            answers[200] += 1
        except OSError:
            answers[0] += 1

    for number in range(count):
        connect(number)
    _again(attacking, answers, connect, per_s=per_s)


def wrong_tokens(scene: Scene, answers: Answers, attacking: ExitStack) -> None:
    """Guess tokens, each with another address in X-Forwarded-For."""
    client = attacking.enter_context(scene.client(token="lab_wrong"))

    def guess(number: int) -> httpx2.Response:
        forwarded = {"X-Forwarded-For": f"198.51.100.{number % 250}", "Authorization": f"Bearer lab_{number:043d}"}
        return client.get("/v1/jobs", headers=forwarded)

    _again(attacking, answers, guess, per_s=5 * REQUESTS_PER_S)


def foreign_tasks(scene: Scene, answers: Answers, attacking: ExitStack) -> None:
    """Submit jobs in another requester's task."""
    client, task_id = attacking.enter_context(scene.client()), scene.foreign_task_id
    _again(attacking, answers, lambda number: scene.submit(client, f"foreign-{number}", task_id=task_id))


def revoked_streams(scene: Scene, answers: Answers, attacking: ExitStack) -> None:
    """Hold event streams of a job open after the token that opened them was revoked."""
    client = attacking.enter_context(scene.client())
    made = scene.submit(client, "watched").json()

    def watch() -> None:
        with suppress(httpx2.HTTPError), client.stream("GET", f"/v1/jobs/{made['job_id']}/events") as stream:
            answers[stream.status_code] += 1
            for _ in stream.iter_lines():
                pass

    watchers = [threading.Thread(target=watch, daemon=True) for _ in range(STREAMS)]
    for watcher in watchers:
        watcher.start()
    revoke_token(scene.url, scene.administrator, name=scene.name)


def broken_images(scene: Scene, answers: Answers, attacking: ExitStack) -> None:
    """Submit jobs whose one image is cut off, with several tokens: none of them may reach a site."""
    picture = io.BytesIO()
    Image.effect_noise((64, 64), 50).save(picture, format="png")
    images = {"images": ("cut-off.png", picture.getvalue()[:1000], "image/png")}

    def send(client: httpx2.Client, task_id: str) -> httpx2.Response:
        return _uploaded(client, task_id, {"strategy": "all"}, images)

    _of_several(scene, answers, attacking, send, BROKEN)


def cancelled_jobs(scene: Scene, answers: Answers, attacking: ExitStack) -> None:
    """Submit small jobs with several tokens, each cancelled at once, while sites are asked to approve."""

    def send(client: httpx2.Client, task_id: str) -> httpx2.Response:
        answer = client.post("/v1/jobs", json=scene.vectors | {"task_id": task_id})
        return client.delete(f"/v1/jobs/{answer.json()['job_id']}") if answer.is_success else answer

    _of_several(scene, answers, attacking, send, CANCELLED)


def _uploaded(
    client: httpx2.Client,
    task_id: str,
    selection: dict[str, object],
    files: dict[str, tuple[str, bytes, str]],
    headers: dict[str, str] | None = None,
) -> httpx2.Response:
    """Submit a job of images."""
    request = json.dumps({"task_id": task_id, "selection": selection})
    return client.post("/v1/jobs", files={"request": (None, request, "application/json"), **files}, headers=headers)


def _of_several(
    scene: Scene,
    answers: Answers,
    attacking: ExitStack,
    send: Callable[[httpx2.Client, str], httpx2.Response],
    count: int,
) -> None:
    """Send `count` jobs of each token at once, each token in a separate task; then one a second."""
    callers = []
    for number in range(TOKENS):
        token = new_token(scene.url, scene.administrator, f"{scene.name}, {number}")
        client = attacking.enter_context(scene.client(token=token))
        made = client.post("/v1/tasks", json=TASK | {"max_queries": MAX_QUERIES}).json()
        callers.append((client, str(made["task_id"])))
    for _ in range(count):
        for caller in callers:
            answers[send(*caller).status_code] += 1
    _again(attacking, answers, lambda number: send(*callers[number % TOKENS]), per_s=1.0)


def large_enrolments(scene: Scene, answers: Answers, attacking: ExitStack) -> None:
    """Send a mebibyte of brackets without a token, where an invited site sends some 600 bytes."""
    body = json.dumps({"token": [[] for _ in range(260_000)]}).encode()
    client = attacking.enter_context(httpx2.Client(base_url=scene.url, timeout=30))
    headers = {"Content-Type": "application/json"}
    _again(attacking, answers, lambda _: client.post("/v1/enrolments", content=body, headers=headers))


def dear_prices(scene: Scene, answers: Answers, attacking: ExitStack) -> None:
    """Ask for the noise of a price of a million winners, always another one; each takes seconds of a processor."""
    task = TASK | {"method": "ensemble", "k": 1, "release": "winner", "max_queries": 1_000_000}
    del task["sigma_votes"]
    for place in range(VIEWERS):
        token = new_token(scene.url, scene.administrator, f"{scene.name}, {place}", "viewer")
        client = attacking.enter_context(scene.client(token=token))

        def ask(number: int, place: int = place, client: httpx2.Client = client) -> httpx2.Response:
            asked = task | {"epsilon": 2 + (VIEWERS * number + place) / 1000}
            return client.post("/v1/jobs:estimate", json={"task": asked}, timeout=60)

        _again(attacking, answers, ask, per_s=1.0)


ATTACKS: Final[dict[str, Attack]] = {
    "a finished job replayed, 20 a second": replays,
    "new jobs, 2 a second": many_jobs,
    "archives of black images, one a second, cancelled": bombs,
    f"{CONNECTIONS} connections that never finish their headers": slow_headers,
    f"{UNREAD} connections that ask for {ASKED} documents each and never read": unread_answers,
    f"{UPLOADS} uploads of 2 GiB of one token, at once": large_uploads,
    "wrong tokens, 100 a second, X-Forwarded-For rotating": wrong_tokens,
    "jobs in a foreign task, 20 a second": foreign_tasks,
    f"{STREAMS} event streams of a revoked token": revoked_streams,
    f"{TOKENS} tokens with {BROKEN} images each that cannot be decoded, then one a second": broken_images,
    f"{TOKENS} tokens that cancel {CANCELLED} jobs each, then one a second": cancelled_jobs,
    "enrolments of 1 MiB without a token, 20 a second": large_enrolments,
    f"{VIEWERS} viewers that price a million winners each, always anew": dear_prices,
}
"""Every attack by its name in the table."""


def black_images(count: int) -> bytes:
    """Return an archive of black images of 64 megapixels each: some hundred bytes for each of them."""
    picture = io.BytesIO()
    Image.new("L", (BOMB_SIDE, BOMB_SIDE)).save(picture, format="png", compress_level=9)
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED, compresslevel=9) as archive:
        for number in range(count):
            archive.writestr(f"black-{number:04d}.png", picture.getvalue())
    return packed.getvalue()


def _again(
    attacking: ExitStack,
    answers: Answers,
    act: Callable[[int], httpx2.Response | None],
    *,
    per_s: float = REQUESTS_PER_S,
) -> None:
    """Repeat an action at a rate, in a thread, until the attack ends."""
    ended = threading.Event()

    def work() -> None:
        begun = time.monotonic()
        for number in itertools.count():
            # A rate and no burst afterwards: what could not be sent in time is skipped.
            if ended.wait(max(0.0, begun + number / per_s - time.monotonic())):
                return
            try:
                answer = act(number)
            except httpx2.HTTPError:
                answers[0] += 1
            else:
                if answer is not None:
                    answers[answer.status_code] += 1

    worker = threading.Thread(target=work, daemon=True)
    worker.start()
    attacking.callback(worker.join, 60.0)
    attacking.callback(ended.set)
