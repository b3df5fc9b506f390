"""Three real processes on loopback find the winners, nothing else leaves them, and they end whatever happens."""

from __future__ import annotations

import json
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from scipy import stats

from labeler.errors import Forged, InvalidSetting, LabelerError, ProtocolViolation, Unavailable, WrongDigest
from tests.workers.winner.conftest import (
    HIGHEST,
    LOWEST,
    Identities,
    Outcome,
    free_addresses,
    make_identities,
    run_three,
    script,
    shares_of,
)
from workers.studies.winner_reference import reference_winners
from workers.winner.child import MpycEngine
from workers.winner.engine import WinnerJob
from workers.winner.party import order_to_bytes

ALARM = 1e-6

MakeJobs = Callable[..., list[WinnerJob]]


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


@pytest.mark.parametrize(
    ("queries", "classes", "threshold"),
    [
        (200, 10, None),
        (25, 7, 0),
        *(
            pytest.param(*shape, threshold, marks=pytest.mark.long)
            for shape in [(1, 2), (1, 10), (200, 10), (40, 2), (30, 3), (25, 7), (3, 257)]
            for threshold in (None, 0)
            if (*shape, threshold) not in [(200, 10, None), (25, 7, 0)]
        ),
    ],
)
def test_winners_are_those_of_the_reference(
    make_jobs: MakeJobs, rng: np.random.Generator, queries: int, classes: int, threshold: int | None
) -> None:
    jobs = make_jobs(queries, classes, threshold=threshold)
    shares = shares_of(hostile_sums(rng, queries, classes), jobs[0])
    check_equal(
        run_three(MpycEngine(), jobs, shares), reference_winners(shares, field=jobs[0].field, threshold=threshold)
    )


@pytest.mark.parametrize(
    "threshold",
    [
        -1,
        *(
            pytest.param(one, marks=pytest.mark.long)
            for one in (LOWEST - 10**12, LOWEST, 0, 1, HIGHEST, HIGHEST + 1, 10**12)
        ),
    ],
)
def test_a_query_is_abstained_exactly_where_its_best_sum_is_below_the_threshold(
    make_jobs: MakeJobs, threshold: int
) -> None:
    best = [LOWEST, -2, -1, 0, 1, 2, HIGHEST - 1, HIGHEST]
    sums = np.array([[LOWEST, value, value] for value in best])
    jobs = make_jobs(len(best), 3, threshold=threshold)
    expected = [-1 if value < threshold else 0 if value == LOWEST else 1 for value in best]
    check_equal(run_three(MpycEngine(), jobs, shares_of(sums, jobs[0])), np.array(expected, dtype=np.int16))


@pytest.mark.parametrize(("lowest", "highest"), [pytest.param(0, 1, marks=pytest.mark.long), (-(2**20) + 2, 2**20 - 1)])
def test_the_narrowest_and_the_widest_range_of_sums_are_compared_rightly(
    make_jobs: MakeJobs, lowest: int, highest: int
) -> None:
    jobs = make_jobs(4, 2, lowest=lowest, highest=highest)
    sums = np.array([[lowest, highest], [highest, lowest], [highest - 1, highest], [highest, highest]])
    check_equal(run_three(MpycEngine(), jobs, shares_of(sums, jobs[0])), np.array([1, 0, 1, 0], dtype=np.int16))


@pytest.mark.long
def test_jobs_of_several_chunks_are_put_together_in_order(make_jobs: MakeJobs, rng: np.random.Generator) -> None:
    """5,000 queries of ten classes take two chunks; the same shares give the same answer again."""
    jobs = make_jobs(5_000, 10)
    shares = shares_of(hostile_sums(rng, 5_000, 10), jobs[0])
    check_equal(run_three(MpycEngine(), jobs, shares), reference_winners(shares, field=jobs[0].field))


@pytest.mark.long
def test_eight_jobs_at_the_same_time_do_not_mix(make_jobs: MakeJobs) -> None:
    def one(number: int) -> list[Outcome]:
        jobs = make_jobs(20, 10, job_id=f"job-{number}")
        sums = np.zeros((20, 10), dtype=np.int64)
        sums[np.arange(20), (np.arange(20) + number) % 10] = 1
        return run_three(MpycEngine(), jobs, shares_of(sums, jobs[0]))

    with ThreadPoolExecutor(max_workers=8) as pool:
        for number, outcomes in enumerate(pool.map(one, range(8))):
            check_equal(outcomes, ((np.arange(20) + number) % 10).astype(np.int16))


@pytest.mark.parametrize(
    ("changed", "named"),
    [
        ({"num_queries": 3}, "num_queries"),
        pytest.param({"threshold": 5}, "threshold", marks=pytest.mark.long),
        pytest.param({"highest": HIGHEST + 1}, "highest", marks=pytest.mark.long),
        pytest.param({"highest": 4 * HIGHEST}, "modulus", marks=pytest.mark.long),
        ({"agreement": "1" * 64}, "agreement"),
    ],
)
def test_a_party_with_other_parameters_is_refused_and_the_error_names_them(
    make_jobs: MakeJobs, changed: dict[str, Any], named: str
) -> None:
    jobs = make_jobs(2, 3)
    jobs[1] = replace(jobs[1], **changed)
    shares = [np.zeros((job.num_queries, 3), dtype=np.uint64) for job in jobs]
    began = time.monotonic()
    outcomes = run_three(MpycEngine(), jobs, shares)
    assert time.monotonic() - began < 50  # the time limit is 60
    assert all(isinstance(outcome, ProtocolViolation | Unavailable) for outcome in outcomes), outcomes
    assert any(isinstance(outcome, ProtocolViolation) and named in str(outcome) for outcome in outcomes), outcomes


def test_a_party_of_another_job_is_refused(make_jobs: MakeJobs) -> None:
    jobs = make_jobs(2, 3)
    jobs[2] = replace(jobs[2], job_id="another")
    outcomes = run_three(MpycEngine(), jobs, [np.zeros((2, 3), dtype=np.uint64)] * 3)
    assert any(isinstance(outcome, WrongDigest) for outcome in outcomes), outcomes
    assert all(isinstance(outcome, WrongDigest | Unavailable) for outcome in outcomes), outcomes


@pytest.mark.parametrize("impostor", [0, *(pytest.param(other, marks=pytest.mark.long) for other in (1, 2))])
def test_a_party_with_another_certificate_is_refused(make_jobs: MakeJobs, tmp_path: Path, impostor: int) -> None:
    """The impostor pins the true certificates of the others, and has one of its own for itself."""
    own = make_identities(tmp_path)
    jobs = make_jobs(2, 3, time_limit_s=4.0)
    true = jobs[impostor].certificates
    claimed = tuple(own.certificates[party] if party == impostor else true[party] for party in range(3))
    jobs[impostor] = replace(jobs[impostor], certificates=claimed, identity_path=own.paths[impostor])
    outcomes = run_three(MpycEngine(), jobs, [np.zeros((2, 3), dtype=np.uint64)] * 3)
    assert all(isinstance(outcome, Forged | Unavailable) for outcome in outcomes), outcomes


def test_a_tallier_whose_key_is_not_that_of_its_pinned_certificate_says_so(
    make_jobs: MakeJobs, identities: Identities, tmp_path: Path
) -> None:
    share = [np.zeros((2, 3), dtype=np.uint64)]
    job = make_jobs(2, 3)[0]
    for path, match in ((identities.paths[1], "not the one the job pins"), (tmp_path / "absent.pem", "cannot be read")):
        outcome = run_three(MpycEngine(), [replace(job, identity_path=path)], share)[0]
        assert isinstance(outcome, InvalidSetting), outcome
        assert match in str(outcome)


def test_an_address_that_is_taken_is_said(make_jobs: MakeJobs) -> None:
    job = make_jobs(2, 3)[1]
    with socket.create_server((job.addresses[1].host, job.addresses[1].port)):
        outcome = run_three(MpycEngine(), [job], [np.zeros((2, 3), dtype=np.uint64)])[0]
    assert isinstance(outcome, Unavailable), outcome
    assert "cannot listen" in str(outcome)


def test_a_certificate_is_good_for_its_own_number_only(make_jobs: MakeJobs, identities: Identities) -> None:
    """Tallier 2 comes as tallier 1: a certificate everybody pins, at another number than it is pinned for."""
    jobs = make_jobs(2, 3, time_limit_s=4.0)
    swapped = tuple(identities.certificates[party] for party in (0, 2, 1))
    jobs[1] = replace(jobs[1], certificates=swapped, identity_path=identities.paths[2])
    outcomes = run_three(MpycEngine(), jobs, [np.zeros((2, 3), dtype=np.uint64)] * 3)
    assert isinstance(outcomes[0], Forged), outcomes
    assert all(isinstance(outcome, Forged | Unavailable | ProtocolViolation) for outcome in outcomes), outcomes


def test_the_others_stop_when_a_party_is_killed_and_the_same_shares_work_afterwards(
    make_jobs: MakeJobs, rng: np.random.Generator
) -> None:
    jobs = make_jobs(1_000, 10, time_limit_s=120.0)
    shares = shares_of(hostile_sums(rng, 1_000, 10), jobs[0])
    dying = MpycEngine(
        command=script(
            "import os, sys\n"
            "from workers.winner import party\n"
            "seen = []\n"
            "def record(peer, data):\n"
            "    seen.append(len(data))\n"
            "    if sum(seen) > 200_000: os.kill(os.getpid(), 9)\n"
            "party.main(record=record)"
        )
    )
    began = time.monotonic()
    outcomes = run_three([MpycEngine(), dying, MpycEngine()], jobs, shares)
    assert time.monotonic() - began < 100  # the time limit is 120
    assert all(isinstance(outcome, Unavailable) for outcome in outcomes), outcomes
    jobs = [replace(job, addresses=addresses) for job, addresses in zip(jobs, [free_addresses()] * 3, strict=True)]
    check_equal(run_three(MpycEngine(), jobs, shares), reference_winners(shares, field=jobs[0].field))


@pytest.mark.long
def test_a_party_that_hangs_ends_the_job_at_its_time_limit(make_jobs: MakeJobs) -> None:
    jobs = make_jobs(2, 3, time_limit_s=3.0)
    hanging = MpycEngine(command=script("import time; time.sleep(100)"))
    began = time.monotonic()
    outcomes = run_three([MpycEngine(), hanging, MpycEngine()], jobs, [np.zeros((2, 3), dtype=np.uint64)] * 3)
    assert time.monotonic() - began < 90  # the one that hangs would end after 100
    assert all(isinstance(outcome, Unavailable) for outcome in outcomes), outcomes
    # Or the other one's time limit came first, and it has left.
    assert any(said in str(outcomes[0]) for said in ("no connection with tallier 1", "tallier 2 has left"))


def test_a_job_that_is_told_to_stop_stops_at_once(make_jobs: MakeJobs) -> None:
    stop = threading.Event()
    timer = threading.Timer(1.0, stop.set)
    timer.start()
    began = time.monotonic()
    outcomes = run_three(MpycEngine(), make_jobs(2, 3)[:1], [np.zeros((2, 3), dtype=np.uint64)], stops=[stop])
    assert time.monotonic() - began < 50  # the time limit is 60
    assert isinstance(outcomes[0], Unavailable)
    assert "stopped" in str(outcomes[0])
    timer.join()


def test_the_process_of_a_job_ends_when_its_parent_is_gone(make_jobs: MakeJobs) -> None:
    job = make_jobs(2, 3, time_limit_s=60.0)[0]
    process = subprocess.Popen(MpycEngine()._command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert process.stdin is not None
    assert process.stdout is not None
    with process.stdin, process.stdout:
        process.stdin.write(order_to_bytes(job, np.zeros((2, 3), dtype=np.uint64)))
        process.stdin.flush()
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(timeout=2.0)
        process.stdin.close()
        process.wait(timeout=50.0)  # the time limit is 60


def test_a_party_without_enough_memory_says_so_or_dies_alone(make_jobs: MakeJobs) -> None:
    """All queries in one chunk do not fit into 256 MiB; in chunks of the usual size they do."""
    jobs = make_jobs(20_000, 10, memory_limit_bytes=2**28)
    code = "from workers.winner import mpyc_party, party\nmpyc_party.CHUNK_COMPARISONS = 1 << 20\nparty.main()"
    shares = [np.zeros((20_000, 10), dtype=np.uint64)] * 3
    outcomes = run_three(MpycEngine(command=script(code)), jobs, shares)
    assert all(isinstance(outcome, Unavailable) for outcome in outcomes), outcomes


@pytest.mark.parametrize(
    ("evil", "padding"),
    [(0, 1), *(pytest.param(*cell, marks=pytest.mark.long) for cell in ((1, 0), (0, 0), (1, 1), (2, 0), (2, 1)))],
)
def test_a_pickle_is_refused_and_not_executed(make_jobs: MakeJobs, tmp_path: Path, evil: int, padding: int) -> None:
    """The evil party sends, wherever words are due, a pickle that would make a file at whoever loads it."""
    witness = tmp_path / "executed"
    code = (
        "import os, pickle\n"
        "from workers.winner import mpyc_party, party\n"
        "class Evil:\n"
        f"    def __reduce__(self): return (os.mkdir, ({str(witness)!r},))\n"
        "data = pickle.dumps(Evil())\n"
        f"data += bytes(-len(data) % 8 + {padding})\n"
        "mpyc_party.WordCodec.dumps = lambda self, residues: data\n"
        "party.main()"
    )
    engines = [MpycEngine(command=script(code)) if party == evil else MpycEngine() for party in range(3)]
    outcomes = run_three(engines, make_jobs(2, 3), [np.zeros((2, 3), dtype=np.uint64)] * 3)
    assert all(isinstance(outcome, LabelerError) for outcome in outcomes), outcomes
    assert any(
        isinstance(outcome, ProtocolViolation) and f"tallier {evil} sent" in str(outcome) for outcome in outcomes
    ), outcomes
    assert not witness.exists()


@pytest.mark.parametrize(
    "sent",
    ["bytes(8)", *(pytest.param(one, marks=pytest.mark.long) for one in ("b''", "bytes(8 * 1000)", "b'\\xff' * 8"))],
)
def test_words_of_a_wrong_number_or_size_end_the_job(make_jobs: MakeJobs, sent: str) -> None:
    code = (
        "from workers.winner import mpyc_party, party\n"
        f"mpyc_party.WordCodec.dumps = lambda self, residues: {sent}\n"
        "party.main()"
    )
    engines = [MpycEngine(), MpycEngine(command=script(code)), MpycEngine()]
    outcomes = run_three(engines, make_jobs(2, 3, time_limit_s=20.0), [np.zeros((2, 3), dtype=np.uint64)] * 3)
    assert all(isinstance(outcome, LabelerError) for outcome in outcomes), outcomes


def test_a_party_listens_on_its_configured_address_only(make_jobs: MakeJobs) -> None:
    """On Linux all of 127.0.0.0/8 is this machine: only the address named answers."""
    job = make_jobs(2, 3, time_limit_s=4.0)[1]
    address = job.addresses[1]
    with ThreadPoolExecutor(1) as pool:
        outcome = pool.submit(run_three, MpycEngine(), [job], [np.zeros((2, 3), dtype=np.uint64)])
        listening: set[str] = set()
        while not outcome.done():
            listening |= {line for line in listeners() if line.endswith(f":{address.port:04X}")}
            time.sleep(0.05)
    assert listening == {f"0100007F:{address.port:04X}"}
    assert isinstance(outcome.result()[0], Unavailable)


def listeners() -> Iterator[str]:
    """Local addresses that listen, as the kernel writes them."""
    for table in ("tcp", "tcp6"):
        for line in Path("/proc/net", table).read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A":
                yield fields[1]


def recorded(make_jobs: MakeJobs, sums: NDArray[np.int64], folder: Path) -> NDArray[np.uint64]:
    """Every word of every message that tallier 0 received while the winners of these sums were found."""
    jobs = make_jobs(*sums.shape)
    folder.mkdir()
    code = (
        "from workers.winner import party\n"
        f"files = [open({str(folder)!r} + '/' + str(peer), 'wb', buffering=0) for peer in range(3)]\n"
        "party.main(record=lambda peer, data: files[peer].write(data))"
    )
    shares = shares_of(sums, jobs[0])
    outcomes = run_three([MpycEngine(command=script(code)), MpycEngine(), MpycEngine()], jobs, shares)
    check_equal(outcomes, reference_winners(shares, field=jobs[0].field))
    return np.concatenate([words_of((folder / str(peer)).read_bytes()) for peer in (1, 2)])


def words_of(data: bytes) -> NDArray[np.uint64]:
    """The residues in a stream of messages, behind its hello."""
    place, words = 4 + int.from_bytes(data[:4], "little"), []
    assert json.loads(data[4:place])["job_id"] == "job"
    while place < len(data):
        size = int.from_bytes(data[place + 8 : place + 12], "little")
        words.append(np.frombuffer(data[place + 12 : place + 12 + size], dtype="<u8"))
        place += 12 + size
    assert place == len(data)
    return np.concatenate(words)


def test_what_a_tallier_receives_is_the_same_noise_whatever_the_sums_are(make_jobs: MakeJobs, tmp_path: Path) -> None:
    """Every word received is a share of degree 1 or 2 or a share of a masked number: uniform, apart from the answer."""
    unanimous = np.zeros((300, 4), dtype=np.int64)
    unanimous[:, 0] = HIGHEST
    close = np.full((300, 4), LOWEST)
    close[:, 0] += 1
    first, second = (recorded(make_jobs, sums, tmp_path / name) for name, sums in (("u", unanimous), ("c", close)))
    assert abs(len(first) - len(second)) < 20
    modulus = make_jobs(1, 2)[0].field.modulus
    counts = [
        [np.bincount((words.astype(np.float64) / modulus * 100).astype(np.int64).clip(0, 99), minlength=100)
         for words in (first, second)],
        [np.bincount((words % np.uint64(97)).astype(np.int64), minlength=97) for words in (first, second)],
    ]  # fmt: skip
    for one, other in counts:
        assert stats.chisquare(one).pvalue > ALARM / 6
        assert stats.chisquare(other).pvalue > ALARM / 6
        assert stats.chi2_contingency(np.array([one, other])).pvalue > ALARM / 6


def test_a_share_that_does_not_fit_is_refused_before_anything_starts(make_jobs: MakeJobs) -> None:
    job = make_jobs(2, 3)[0]
    with pytest.raises(InvalidSetting, match="shape"):
        MpycEngine().winners(job, np.zeros((3, 3), dtype=np.uint64))
    with pytest.raises(ProtocolViolation, match="no residue"):
        MpycEngine().winners(job, np.full((2, 3), 2**63, dtype=np.uint64))
    with pytest.raises(ProtocolViolation, match="uint64"):
        MpycEngine().winners(job, np.zeros((2, 3)))  # type: ignore[arg-type]  # as a caller without types might


@pytest.mark.parametrize("end", ["os.kill(os.getpid(), 9)", "os.write(1, b'W')", "os.write(1, b'W' + bytes(10**6))"])
def test_a_process_that_answers_nothing_or_nonsense_is_an_error(make_jobs: MakeJobs, end: str) -> None:
    engine = MpycEngine(command=script(f"import os; {end}"))
    with pytest.raises((Unavailable, ProtocolViolation)):
        engine.winners(make_jobs(2, 3)[0], np.zeros((2, 3), dtype=np.uint64))


def test_no_process_is_left_behind(make_jobs: MakeJobs) -> None:
    before = children()
    run_three(MpycEngine(), make_jobs(2, 3), [np.zeros((2, 3), dtype=np.uint64)] * 3)
    stop = threading.Event()
    stop.set()
    run_three(MpycEngine(), make_jobs(2, 3), [np.zeros((2, 3), dtype=np.uint64)] * 3, stops=[stop] * 3)
    assert children() == before


def children() -> set[int]:
    """Processes this one has started and not waited for."""
    task = Path("/proc/self/task")
    return {int(pid) for thread in task.iterdir() for pid in (thread / "children").read_text().split()}
