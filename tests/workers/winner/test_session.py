"""Three real talliers on loopback find the winners, nothing else leaves them, and they end whatever happens."""

from __future__ import annotations

import json
import queue
import socket
import ssl
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from benchmarks.speed.winner import read_orders, write_trio
from labeler.errors import Forged, InvalidSetting, LabelerError, ProtocolViolation, Unavailable, WrongDigest
from labeler.randomness import os_source
from labeler.sharing import WinnerTerms
from tests import doors
from tests.oracles.winner_reference import reference_winners
from tests.workers.winner.conftest import (
    HIGHEST,
    LOWEST,
    Identities,
    Outcome,
    free_addresses,
    make_identities,
    run_three,
    shares_of,
)
from workers.winner import session
from workers.winner.certificates import pinned_context
from workers.winner.engine import WinnerJob, WinnerOrder
from workers.winner.links import PROTOCOL_NAME, Links
from workers.winner.session import SecureEngine

MakeJobs = Callable[..., list[WinnerJob]]

ZEROS = np.zeros((2, 3), dtype=np.uint64)
"""A share of no votes, for jobs of two queries and three classes."""


@pytest.fixture(autouse=True)
def short_farewells(monkeypatch: pytest.MonkeyPatch) -> None:
    """A tallier that gives up waits for the third one for a moment; the tests here do not need it to be long."""
    monkeypatch.setattr(session, "CLOSE_LIMIT_S", 0.3)


def check_equal(outcomes: Sequence[Outcome], expected: NDArray[np.int16]) -> None:
    for outcome in outcomes:
        if isinstance(outcome, LabelerError):
            raise outcome
        assert outcome.dtype == np.int16
        np.testing.assert_array_equal(outcome, expected)


def hostile_sums(rng: np.random.Generator, queries: int, classes: int) -> NDArray[np.int64]:
    """Random sums over the whole range, full and partial ties, leads of one unit, and the ends of the range."""
    sums = rng.integers(LOWEST, HIGHEST + 1, (queries, classes))
    sums[0::5] = rng.integers(-1, 2, sums[0::5].shape)
    sums[1::5] = rng.integers(LOWEST, HIGHEST + 1, (len(sums[1::5]), 1))
    sums[2::5] = rng.choice([LOWEST, HIGHEST], sums[2::5].shape)
    sums[3::5] = rng.integers(LOWEST, 0, sums[3::5].shape)
    return sums


@pytest.mark.parametrize(("queries", "classes", "threshold"), [(200, 10, None), (25, 7, 0), (1, 2, -1), (3, 257, None)])
def test_winners_are_those_of_the_reference(
    make_jobs: MakeJobs, rng: np.random.Generator, queries: int, classes: int, threshold: int | None
) -> None:
    jobs = make_jobs(queries, classes, threshold=threshold)
    shares = shares_of(hostile_sums(rng, queries, classes), jobs[0])
    check_equal(
        run_three(SecureEngine(), jobs, shares), reference_winners(shares, field=jobs[0].field, threshold=threshold)
    )


def test_jobs_of_more_chunks_than_there_is_room_for_are_put_together_in_order(
    make_jobs: MakeJobs, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Forty chunks, of which four are under way at a time; the same shares give the same answer again."""
    monkeypatch.setattr("workers.winner.tournament.CHUNK_COMPARISONS", 500)
    monkeypatch.setattr(session, "Room", lambda: session_room(2_000))
    jobs = make_jobs(4_000, 10)
    shares = shares_of(hostile_sums(rng, 4_000, 10), jobs[0])
    for _ in range(2):
        check_equal(run_three(SecureEngine(), jobs, shares), reference_winners(shares, field=jobs[0].field))


session_room = session.Room


def planted(make_jobs: MakeJobs, name: str, classes: int, **settings: Any) -> list[WinnerOrder]:
    """A job at its three talliers in which query q has the winner q + 1."""
    jobs = make_jobs(5, classes, job_id=name, **settings)
    sums = np.zeros((5, classes), dtype=np.int64)
    sums[np.arange(5), (np.arange(5) + 1) % classes] = 7
    return [WinnerOrder(job, share) for job, share in zip(jobs, shares_of(sums, jobs[0]), strict=True)]


def together(orders: Sequence[Sequence[WinnerOrder]]) -> list[list[Outcome]]:
    """One computation of what each of three talliers was given, on one set of addresses."""
    addresses = free_addresses()
    moved = [
        [WinnerOrder(replace(order.job, addresses=addresses), order.share, order.rows) for order in given]
        for given in orders
    ]
    with ThreadPoolExecutor(3) as pool:
        return list(pool.map(SecureEngine().winners, moved))


def with_rows(orders: list[WinnerOrder], *, is_sound: bool) -> list[WinnerOrder]:
    """The like with rows of two agents, of which one may not sum to what it must."""
    field = orders[0].job.field
    rows = [field.uniform(os_source(), 10).reshape(2, 5) for _ in range(2)]
    rows.append(field.subtract(np.zeros_like(rows[0]), field.add(*rows)))
    if not is_sound:
        rows[2][1, 3] = (int(rows[2][1, 3]) + 1) % field.modulus
    jobs = [replace(order.job, contributors=("a", "b"), checks_rows=True) for order in orders]
    return [WinnerOrder(job, order.share, row) for job, order, row in zip(jobs, orders, rows, strict=True)]


def test_several_jobs_are_computed_together_and_one_that_fails_spoils_no_other(make_jobs: MakeJobs) -> None:
    """Different numbers of classes, thresholds, fields and checks; and four that cannot be computed."""
    good = {
        "a": planted(make_jobs, "a", 10),
        "b": planted(make_jobs, "b", 3, threshold=7, lowest=-10, highest=10),
        "c": with_rows(planted(make_jobs, "c", 6), is_sound=True),
        "d": planted(make_jobs, "d", 6, threshold=8),
    }
    rows = with_rows(planted(make_jobs, "rows", 6), is_sound=False)
    missing = planted(make_jobs, "missing", 4)
    other = planted(make_jobs, "other", 4)
    other[2] = WinnerOrder(replace(other[2].job, threshold=3), other[2].share)
    off = planted(make_jobs, "off", 4)
    share = off[1].share.copy()
    share[2, 3] = (int(share[2, 3]) + 10**9) % off[1].job.field.modulus
    off[1] = WinnerOrder(off[1].job, share)
    names = ["off", "a", "rows", "b", "missing", "c", "other", "d"]
    lots = good | {"off": off, "rows": rows, "missing": missing, "other": other}
    given = [[lots[name][party] for name in names] for party in range(3)]
    # Tallier 1 was not asked for one of them, and tallier 2 has all in another order.
    del given[1][names.index("missing")]
    given[2].reverse()
    for party, outcomes in enumerate(together(given)):
        found = {order.job.job_id: outcome for order, outcome in zip(given[party], outcomes, strict=True)}
        for name in "abc":
            check_equal([found[name]], (np.arange(5) + 1).astype(np.int16) % lots[name][0].job.num_classes)
        check_equal([found["d"]], np.full(5, -1, dtype=np.int16))
        for name, match in (("rows", "do not sum to what their task allows: 'b'"), ("off", "outside the range")):
            assert isinstance(found[name], ProtocolViolation)
            assert match in str(found[name])
        assert isinstance(found["other"], ProtocolViolation)
        assert "threshold" in str(found["other"])
        if party != 1:
            assert isinstance(found["missing"], WrongDigest)
            assert "tallier 1 was not given this job" in str(found["missing"])


@pytest.mark.parametrize(
    ("changed", "named"),
    [
        ({"num_queries": 3}, "num_queries"),
        ({"threshold": 5}, "threshold"),
        ({"highest": HIGHEST + 1}, "highest"),
        ({"highest": 4 * HIGHEST}, "modulus"),
        ({"agreement": "1" * 64}, "agreement"),
    ],
)
def test_a_party_with_other_parameters_is_refused_and_the_error_names_them(
    make_jobs: MakeJobs, changed: dict[str, Any], named: str
) -> None:
    jobs = make_jobs(2, 3)
    jobs[1] = replace(jobs[1], **changed)
    shares = [np.zeros((job.num_queries, 3), dtype=np.uint64) for job in jobs]
    outcomes = run_three(SecureEngine(), jobs, shares)
    assert all(isinstance(outcome, ProtocolViolation | Unavailable) for outcome in outcomes), outcomes
    assert any(isinstance(outcome, ProtocolViolation) and named in str(outcome) for outcome in outcomes), outcomes


@pytest.mark.parametrize("impostor", [0, 1, 2, "2 as 1"])
def test_a_party_with_another_certificate_is_refused(
    make_jobs: MakeJobs, identities: Identities, tmp_path: Path, impostor: int | str
) -> None:
    """The impostor pins the true certificates of the others, and has another one for itself; or tallier 2 comes as
    tallier 1, with a certificate that everybody pins, at another number than it is pinned for.
    """
    jobs = make_jobs(2, 3)
    if isinstance(impostor, int):
        own, pinned = make_identities(tmp_path), list(identities.certificates)
        pinned[impostor] = own.certificates[impostor]
        jobs[impostor] = replace(jobs[impostor], certificates=tuple(pinned), identity_path=own.paths[impostor])
    else:
        swapped = tuple(identities.certificates[party] for party in (0, 2, 1))
        jobs[1] = replace(jobs[1], certificates=swapped, identity_path=identities.paths[2])
    # Without the third, which could turn the impostor away before tallier 0 has met it.
    there = jobs if impostor == 0 else [jobs[0], jobs[2 if impostor == 2 else 1]]
    stop = threading.Event()
    with ThreadPoolExecutor(3) as pool:
        calls = [pool.submit(SecureEngine().winners, [WinnerOrder(job, ZEROS)], stop) for job in there]
        wait(calls[:1], timeout=120)
        stop.set()  # who listens for a tallier that never comes would wait to the end
        outcomes = [call.result()[0] for call in calls]
    assert all(isinstance(outcome, Forged | Unavailable | ProtocolViolation) for outcome in outcomes), outcomes
    # Who connects sees the certificate of who listens. Who listens only turns an impostor away, and may be who leaves.
    assert impostor == 0 or isinstance(outcomes[0], Forged), outcomes


def test_a_tallier_whose_key_is_not_that_of_its_pinned_certificate_says_so(
    make_jobs: MakeJobs, identities: Identities, tmp_path: Path
) -> None:
    job = make_jobs(2, 3)[0]
    for path, match in ((identities.paths[1], "not the one the job pins"), (tmp_path / "absent.pem", "cannot be read")):
        outcome = run_three(SecureEngine(), [replace(job, identity_path=path)], [ZEROS])[0]
        assert isinstance(outcome, InvalidSetting), outcome
        assert match in str(outcome)


def test_an_address_that_is_taken_is_said(make_jobs: MakeJobs) -> None:
    job = make_jobs(2, 3)[1]
    with doors.opened(lambda theirs, _: theirs.close(), job.addresses[1].port):
        outcome = run_three(SecureEngine(), [job], [ZEROS])[0]
    assert isinstance(outcome, Unavailable), outcome
    assert "cannot listen" in str(outcome)


@pytest.mark.process
def test_the_others_stop_when_a_party_is_killed_and_the_same_shares_work_afterwards(
    make_jobs: MakeJobs, socket_addresses: Any, rng: np.random.Generator, tmp_path: Path
) -> None:
    """A separate process, killed by SIGKILL in the middle of what it receives."""
    job = make_jobs(1_000, 10, addresses=socket_addresses)[0]
    shares = shares_of(hostile_sums(rng, 1_000, 10), job)
    terms = WinnerTerms(scale=100, lowest=LOWEST, highest=HIGHEST, row_total=None, threshold=None)
    write_trio(tmp_path, shares, terms)
    code = (
        "import os, sys\n"
        "from pathlib import Path\n"
        "from benchmarks.speed.winner import read_orders\n"
        "from workers.winner.session import SecureEngine\n"
        "seen = []\n"
        "def record(peer, data):\n"
        "    seen.append(len(data))\n"
        "    if sum(seen) > 100_000: os.kill(os.getpid(), 9)\n"
        "SecureEngine(record=record).winners(read_orders(Path(sys.argv[1]), 1))\n"
    )
    dying = subprocess.Popen([sys.executable, "-c", code, str(tmp_path)])
    with ThreadPoolExecutor(2) as pool:
        calls = [pool.submit(SecureEngine().winners, read_orders(tmp_path, party)) for party in (0, 2)]
        outcomes = [call.result()[0] for call in calls]
    assert dying.wait() == -9
    assert all(isinstance(outcome, Unavailable) for outcome in outcomes), outcomes
    with ThreadPoolExecutor(3) as pool:
        found = list(pool.map(SecureEngine().winners, [read_orders(tmp_path, party) for party in range(3)]))
    check_equal([one[0] for one in found], reference_winners(shares, field=job.field))


def test_a_party_that_hangs_ends_the_job_at_its_time_limit(make_jobs: MakeJobs) -> None:
    jobs = make_jobs(2, 3, time_limit_s=2.0)
    is_over = threading.Event()
    engines = [SecureEngine(), SecureEngine(record=lambda *_: is_over.wait()), SecureEngine()]
    with ThreadPoolExecutor(3) as pool:
        calls = [
            pool.submit(engine.winners, [WinnerOrder(job, ZEROS)]) for engine, job in zip(engines, jobs, strict=True)
        ]
        outcomes = [calls[party].result()[0] for party in (0, 2)]
        is_over.set()
        outcomes.append(calls[1].result()[0])
    assert all(isinstance(outcome, Unavailable) for outcome in outcomes), outcomes


@pytest.mark.process
def test_a_party_listens_on_its_configured_address_only_and_stops_when_it_is_told_to(
    make_jobs: MakeJobs, socket_addresses: Any
) -> None:
    """On Linux all of 127.0.0.0/8 is this machine: only the address named answers."""
    job, stop = make_jobs(2, 3, addresses=socket_addresses)[1], threading.Event()
    address, listening = job.addresses[1], set[str]()
    with ThreadPoolExecutor(1) as pool:
        call = pool.submit(SecureEngine().winners, [WinnerOrder(job, ZEROS)], stop)
        while not listening and not call.done():
            time.sleep(0.01)
            listening = {line for line in listeners() if line.endswith(f":{address.port:04X}")}
        stop.set()
        outcome = call.result()[0]
    assert listening == {f"0100007F:{address.port:04X}"}
    assert isinstance(outcome, Unavailable)
    assert "stopped" in str(outcome)


def listeners() -> Iterator[str]:
    """Local addresses that listen, as the kernel writes them."""
    for table in ("tcp", "tcp6"):
        for line in Path("/proc/net", table).read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A":
                yield fields[1]


@pytest.mark.parametrize("evil", [0, 1, 2])
@pytest.mark.parametrize("length", [-1, 1, None])
def test_a_message_of_a_wrong_length_ends_the_computation(
    make_jobs: MakeJobs, monkeypatch: pytest.MonkeyPatch, evil: int, length: int | None
) -> None:
    """Whatever is sent where words are due: one byte less, one more, or nothing."""
    true = Links.send

    def send(links: Links, peer: int, channel: tuple[int, int], data: bytes) -> None:
        if links.party == evil and channel[0] == 0:
            data = b"" if length is None else data[:length] if length < 0 else data + b"."
        true(links, peer, channel, data)

    monkeypatch.setattr(Links, "send", send)
    outcomes = run_three(SecureEngine(), make_jobs(2, 3), [ZEROS] * 3)
    assert all(isinstance(outcome, LabelerError) for outcome in outcomes), outcomes
    if evil < 2 or length is not None:
        assert any(isinstance(outcome, ProtocolViolation) and "are due" in str(outcome) for outcome in outcomes), (
            outcomes
        )


@pytest.mark.parametrize("evil", [0, 1, 2])
def test_words_that_are_not_those_of_the_protocol_give_a_class_or_nothing(
    make_jobs: MakeJobs, monkeypatch: pytest.MonkeyPatch, evil: int
) -> None:
    """A tallier that sends random bytes of the right length voids the round, or chooses labels; it breaks nothing."""
    true = Links.send

    def send(links: Links, peer: int, channel: tuple[int, int], data: bytes) -> None:
        is_of_chunk = channel[0] == 0 and channel[1] < 2**31
        true(links, peer, channel, os_source().bytes(len(data)) if links.party == evil and is_of_chunk else data)

    monkeypatch.setattr(Links, "send", send)
    jobs = make_jobs(40, 10)
    for outcome in run_three(SecureEngine(), jobs, shares_of(np.zeros((40, 10), dtype=np.int64), jobs[0])):
        assert isinstance(outcome, ProtocolViolation | Unavailable), outcome


def raw_hello(job: WinnerJob) -> bytes:
    """Return the first words of a tallier about this job."""
    hello = json.dumps({"jobs": {job.job_id: job.parameters | {"signature": ""}}}).encode()
    return struct.pack("<I", len(hello)) + hello


@pytest.mark.parametrize("speaks", [[], ["labeler-winner/3"]])
def test_a_tallier_of_another_version_is_told_nothing_and_the_job_can_be_tried_again(
    make_jobs: MakeJobs, identities: Identities, speaks: list[str]
) -> None:
    """As one that was not updated yet connects, and as it listens: it names no protocol, or another."""
    jobs = make_jobs(2, 3)
    received: list[bytes] = []

    def connects() -> None:
        context = pinned_context(identities.paths[0], trusted=[identities.certificates[1]], is_server=False)
        context.set_alpn_protocols(speaks)
        received.append(talked(context, (jobs[1].addresses[1].host, jobs[1].addresses[1].port)))

    with ThreadPoolExecutor(1) as pool:
        call = pool.submit(SecureEngine().winners, [WinnerOrder(jobs[1], ZEROS)])
        connects()
        outcome = call.result()[0]
    assert isinstance(outcome, Unavailable)
    assert "tallier 0 runs another version of the program" in str(outcome)
    # Neither does it when it is the one that listens.
    address = jobs[0].addresses[1]
    context = pinned_context(identities.paths[1], trusted=[identities.certificates[0]], is_server=True)
    context.set_alpn_protocols(speaks)
    came: queue.SimpleQueue[socket.socket] = queue.SimpleQueue()
    with doors.opened(lambda theirs, _: came.put(theirs), address.port), ThreadPoolExecutor(1) as pool:
        call = pool.submit(SecureEngine().winners, [WinnerOrder(jobs[0], ZEROS)])
        plain = came.get()
        try:
            with context.wrap_socket(plain, server_side=True) as encrypted:
                received.append(until_end(encrypted))
        except OSError:
            # It has left even before its last word of the handshake.
            received.append(b"")
        outcome = call.result()[0]
    assert isinstance(outcome, Unavailable)
    assert "tallier 1 runs another version of the program" in str(outcome)
    assert received == [b"", b""]


def talked(context: ssl.SSLContext, address: tuple[str, int], data: bytes = b"") -> bytes:
    """Connect once somebody listens, say this, and give what is said until the end."""
    while True:
        try:
            plain = socket.create_connection(address)
            break
        except OSError:
            time.sleep(0.02)
    with plain, context.wrap_socket(plain) as encrypted:
        encrypted.sendall(data)
        return until_end(encrypted)


def until_end(encrypted: ssl.SSLSocket) -> bytes:
    data = b""
    try:
        while piece := encrypted.recv(65_536):
            data += piece
    except OSError:
        pass
    return data


@pytest.mark.parametrize(
    ("sent", "match"),
    [
        (struct.pack("<I", 2**31), "no hello"),
        (struct.pack("<I", 4) + b"[[[[", "no hello"),
        (struct.pack("<I", 11) + b'{"jobs": 1}', "no hello"),
        (None, "more than can be due"),
    ],
)
def test_a_peer_that_says_what_no_tallier_says_ends_the_computation_and_fills_no_memory(
    make_jobs: MakeJobs, identities: Identities, sent: bytes | None, match: str
) -> None:
    job = make_jobs(2, 3)[1]
    data = raw_hello(job) + struct.pack("<III", 0, 0, 2**30) if sent is None else sent
    context = pinned_context(identities.paths[0], trusted=[identities.certificates[1]], is_server=False)
    context.set_alpn_protocols([PROTOCOL_NAME])
    with ThreadPoolExecutor(1) as pool:
        call = pool.submit(SecureEngine().winners, [WinnerOrder(job, ZEROS)])
        talked(context, (job.addresses[1].host, job.addresses[1].port), data)
        outcome = call.result()[0]
    assert isinstance(outcome, ProtocolViolation)
    assert match in str(outcome)


def test_a_share_that_does_not_fit_is_refused_before_anything_starts(make_jobs: MakeJobs) -> None:
    job = make_jobs(2, 3)[0]
    with pytest.raises(InvalidSetting, match="shape"):
        WinnerOrder(job, np.zeros((3, 3), dtype=np.uint64))
    with pytest.raises(ProtocolViolation, match="no residue"):
        WinnerOrder(job, np.full((2, 3), 2**63, dtype=np.uint64))
    with pytest.raises(ProtocolViolation, match="uint64"):
        WinnerOrder(job, np.zeros((2, 3)))  # type: ignore[arg-type]  # as a caller without types might


def test_an_order_does_not_print_its_share(make_jobs: MakeJobs) -> None:
    order = WinnerOrder(make_jobs(1, 2)[0], np.array([[123_456, 7]], dtype=np.uint64))
    assert "123456" not in repr(order)


def test_nothing_is_left_behind(make_jobs: MakeJobs) -> None:
    jobs, stopped = make_jobs(2, 3), make_jobs(2, 3)  # their ports stay open files until the test ends
    files, threads = open_files(), set(threading.enumerate())
    run_three(SecureEngine(), jobs, [ZEROS] * 3)
    stop = threading.Event()
    stop.set()
    run_three(SecureEngine(), stopped, [ZEROS] * 3, stops=[stop] * 3)
    # What earlier tests of this process have left may end meanwhile.
    assert open_files() <= files
    assert set(threading.enumerate()) <= threads


def open_files() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))
