"""`labeler simulate`: one round of a task among a thousand agents, or a hundred thousand, and what it costs.

    pool --deal--> groups of agents --ballots_of--> ballots --sum_group--> shares at each tallier --> opened, scored

Groups are computed in this process or shared out to others; whatever does the work, the sums are the same to the bit.
Noise and masks follow from the seed, so that a run can be repeated: they protect nobody, and the document says so.
"""

from __future__ import annotations

import hashlib
import json
import os
import resource
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any, Final

import numpy as np

from feature_store.durable import replace_file
from feature_store.query_selection import model_rows, select_queries
from labeler.errors import BadData, InvalidSetting
from labeler.linear_model import released_model
from labeler.methods import MethodName
from labeler.planning import price
from labeler.randomness import ByteSource, seeded_source
from labeler.release import Release, open_histogram
from labeler.solving import solve_sigma
from labeler.tally import AggregateShare, QueryBatch
from labeler.task import StatedLevel, Task, parse_task
from workers.progress import ProgressCallback, silent
from workers.simulated.ballots import ballots_of, check_method, group_size
from workers.simulated.federation import Federation, Pool
from workers.simulated.sums import sum_group, total_of, traffic_of

ONE_THREAD: Final = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")
TRAINING: Final = {"regularisation": 1.0, "radius": 0.3, "iterations": 60}
"""Of blind-average: models of short norm, which is what an agent pays for."""


@dataclass(frozen=True)
class Simulation:
    """What is asked of how many agents.

    Attributes:
        agents: sizes of the federation, each a round of its own.
        records: of each agent.
        ballot_radius: reverse-knn: of the ball that ballots are drawn onto; None bounds each agent's records instead.
        queries: public images asked about; for blind-average the rows of its model are asked, whatever this is.
        epsilon: the price at `level` that the noise is chosen for; None where `sigma` is given.
        sigma: noise nobody can subtract, in votes.
        level, delta: of the price.
        talliers: 2 or 3.
        seed: of the deal, the questions, the noise and the masks.
        processes: how many compute; 1 is this one.

    Raises:
        InvalidSetting: a number out of bounds, or neither or both of epsilon and sigma.
    """

    agents: tuple[int, ...] = (1_000, 10_000, 100_000)
    method: MethodName = "knn"
    k: int = 1
    records: int = 20
    queries: int = 100
    epsilon: float | None = 1.0
    sigma: float | None = None
    level: StatedLevel = "agent"
    delta: float = 1e-6
    talliers: int = 2
    seed: int = 0
    processes: int = 1
    engine: str = "auto"
    ballot_radius: int | None = None

    def __post_init__(self) -> None:
        check_method(self.method)
        if not self.agents or any(count < 1 for count in self.agents):
            raise InvalidSetting(f"a simulation has at least one agent, found {list(self.agents)}")
        if list(self.agents) != sorted(set(self.agents)):
            raise InvalidSetting("name sizes of a federation in ascending order, each once: 1000,10000,100000")
        if (self.epsilon is None) == (self.sigma is None):
            raise InvalidSetting("give the noise as sigma, or the price it is chosen for as epsilon; not both")
        if self.processes < 1 or self.records < 1 or self.queries < 1:
            raise InvalidSetting("a simulation has at least one process, one record per agent and one query")

    def task(self, agents: int, *, classes: Sequence[str], dimension: int) -> Task:
        """What is asked of a federation of one size.

        Raises:
            InvalidTask, UnsafeGrid: the task cannot be asked.
            InvalidSetting: no noise gives the price.
        """
        fields: dict[str, Any] = {
            "name": "simulation",
            "classes": list(classes),
            "method": self.method,
            "k": self.k,
            "sigma_votes": 1.0 if self.sigma is None else self.sigma,
            "delta": self.delta,
            "max_queries": self.queries,
            "agents": agents,
            "colluding_agents": min(1, agents - 1),
            "talliers": self.talliers,
        }
        if self.ballot_radius is not None:
            fields["ballot_radius"] = self.ballot_radius
        elif self.method == "reverse-knn":
            fields["max_agent_records"] = self.records
        if self.method == "blind-average":
            fields |= {"max_queries": dimension + 1, "training": {"min_records": self.records} | TRAINING}
        task = parse_task(fields)
        if self.epsilon is None:
            return task
        return task.model_copy(update={"sigma_votes": solve_sigma(task, self.epsilon, level=self.level)})


@dataclass(frozen=True, eq=False)
class Questions:
    """What is asked, and what is known of the answers.

    Attributes:
        score: the share of right labels that a release gives, from 0 to 1.
    """

    batch: QueryBatch
    score: Callable[[Task, Release], float]


def simulate(
    wanted: Simulation, pool: Pool, *, out: Path | None = None, progress: ProgressCallback = silent
) -> dict[str, Any]:
    """One round per size of the federation.

    Args:
        out: keeps what is done after each size; the same simulation then goes on after the last size kept.
        progress: told how many agents of each size have answered.

    Returns:
        The document of `labeler simulate --json`: settings, one row per size, and the exponent of the cost.

    Raises:
        InvalidSetting: a task that cannot be asked, more questions than public images, or `out` is of other settings.
    """
    settings = _settings(wanted, pool)
    done = {} if out is None else _kept(out, settings)
    questions = _questions(wanted, pool)
    # All of them before the first is answered, so that what cannot be asked is said at once.
    tasks = [wanted.task(agents, classes=pool.classes, dimension=pool.features.shape[1]) for agents in wanted.agents]
    with _workers(wanted, pool) as work:
        for task in tasks:
            if task.agents not in done:
                done[task.agents] = _round(wanted, pool, task, questions, work, progress)
                if out is not None:
                    replace_file(out, json.dumps(_document(settings, done), allow_nan=False).encode())
    return _document(settings, {agents: done[agents] for agents in wanted.agents})


def _document(settings: dict[str, Any], done: dict[int, dict[str, Any]]) -> dict[str, Any]:
    rows = [done[agents] for agents in sorted(done)]
    slopes = {"exponent": exponent(rows), "cpu_exponent": exponent(rows, of=_cpu_seconds)}
    return {"settings": settings, "rows": rows} | slopes | {"is_seeded": True}


def _cpu_seconds(row: dict[str, Any]) -> float:
    return float(sum(row["cpu_seconds"].values()))


def release_of(task: Task, batch: QueryBatch, federation: Federation, *, seed: int) -> Release:
    """What one round of a federation opens, computed in this process; for who asks tasks of its own.

    Args:
        task: of a histogram release, for as many agents as the federation has.
        federation: who holds what.
        seed: of noise and masks.
    """
    size = group_size(task, batch, federation)
    groups = [
        _answer(task, batch, federation.part(slice(start, start + size)), start, seed=seed, engine="auto").shares
        for start in range(0, len(federation), size)
    ]
    return open_histogram(total_of(groups), task)


def exponent(
    rows: Sequence[dict[str, Any]], *, of: Callable[[dict[str, Any]], float] = lambda row: float(row["seconds"])
) -> float | None:
    """The slope of log seconds over log agents by least squares: 1 where twice the agents take twice as long.

    None where there are fewer than two sizes.
    """
    if len(rows) < 2:
        return None
    agents, seconds = ([float(np.log(value(row))) for row in rows] for value in (lambda row: row["agents"], of))
    return float(np.polyfit(agents, seconds, 1)[0])


Shares = tuple[AggregateShare, ...]


@dataclass(frozen=True, eq=False)
class Done:
    """One group's sums, CPU seconds by stage, and the most memory that its process ever had, in KiB."""

    shares: Shares
    seconds: dict[str, float]
    process: int
    peak_kib: int


def _round(
    wanted: Simulation, pool: Pool, task: Task, questions: Questions, work: _Workers, progress: ProgressCallback
) -> dict[str, Any]:
    batch, stage = questions.batch, f"{task.agents:,} agents"
    # What is done once in a process, whatever the size: libraries are loaded, the table of the noise is made.
    few = pool.deal(2 * work.count, records=wanted.records, seed=wanted.seed)
    list(work.all(task, batch, few, 1))
    began = time.perf_counter()
    federation = pool.deal(task.agents, records=wanted.records, seed=wanted.seed)
    size = min(group_size(task, batch, federation), -(-task.agents // work.count))
    seconds = {"votes": 0.0, "noise_and_shares": 0.0, "talliers": 0.0}
    groups: list[Shares] = []
    peaks = {os.getpid(): 0}
    answered = 0
    progress(stage, 0, task.agents)
    for done in work.all(task, batch, federation, size):
        groups.append(done.shares)
        answered += len(done.shares[0].contributors)
        seconds = {name: spent + done.seconds[name] for name, spent in seconds.items()}
        peaks[done.process] = max(peaks.get(done.process, 0), done.peak_kib)
        progress(stage, answered, task.agents)
    sums = total_of(groups)
    release = open_histogram(sums, task)
    took = time.perf_counter() - began
    peaks[os.getpid()] = _peak_kib()
    cost = price(task)
    return {
        "agents": task.agents,
        "seconds": took,  # of everything but what each process does once
        "cpu_seconds": seconds,
        "bytes": traffic_of(task, batch).of(task.agents),
        "peak_mib": sum(peaks.values()) / 1024,
        "sigma_votes": task.sigma_votes,
        "epsilon": {level: cost.to_json()[level]["epsilon"] for level in ("instance", "agent")},
        "sums_sha256": hashlib.sha256(b"".join(one.words.tobytes() for one in sums)).hexdigest(),
        "labels_right": questions.score(task, release),
        "processes": work.count,
        "copies_of_a_record": pool.copies(task.agents, wanted.records),
    }


def _questions(wanted: Simulation, pool: Pool) -> Questions:
    if wanted.method == "blind-average":

        def model_right(task: Task, release: Release) -> float:
            return float((released_model(task, [release], asked).predict(pool.public) == pool.truth).mean())

        asked = model_rows(pool.features.shape[1])
        return Questions(QueryBatch(asked), model_right)
    chosen = select_queries(pool.public, strategy="random", count=wanted.queries, seed=wanted.seed)
    truth = pool.truth[chosen.rows]
    return Questions(QueryBatch(chosen.features), lambda _, release: float((release.labels == truth).mean()))


def source_of(seed: int, task: Task, number: int) -> ByteSource:
    """The noise and masks of one simulated agent: of its own, and known to whoever knows the seed."""
    return seeded_source(f"labeler-simulate/1 {seed} {task.digest} {number}".encode())


def _answer(task: Task, batch: QueryBatch, agents: Federation, first: int, *, seed: int, engine: str) -> Done:
    began = time.process_time()
    ballots = ballots_of(task, batch, agents, engine=engine)
    voted = time.process_time() - began
    summed = sum_group(task, batch, ballots, first=first, source_of=lambda number: source_of(seed, task, number))
    spent = {"votes": voted, "noise_and_shares": summed.answer_s, "talliers": summed.tally_s}
    return Done(summed.shares, spent, os.getpid(), _peak_kib())


class _Workers:
    """Who computes groups: this process, or several that hold the pool."""

    def __init__(self, wanted: Simulation, executor: ProcessPoolExecutor | None) -> None:
        self._wanted, self._executor = wanted, executor
        self.count = 1 if executor is None else wanted.processes

    def all(self, task: Task, batch: QueryBatch, federation: Federation, size: int) -> Iterator[Done]:
        """Every group of a federation, in order."""
        starts = range(0, len(federation), size)
        if self._executor is None:
            for start in starts:
                part = federation.part(slice(start, start + size))
                yield _answer(task, batch, part, start, seed=self._wanted.seed, engine=self._wanted.engine)
            return
        # A child holds the pool; of a group it is told the places alone.
        orders = ((task, batch, federation.places[start : start + size], start) for start in starts)
        yield from self._executor.map(_ordered, orders)


@contextmanager
def _workers(wanted: Simulation, pool: Pool) -> Iterator[_Workers]:
    if wanted.processes == 1:
        yield _Workers(wanted, None)
        return
    before = {name: os.environ.get(name) for name in ONE_THREAD}
    # Each process computes on one core: their matrix libraries must not each take all.
    os.environ.update(dict.fromkeys(ONE_THREAD, "1"))
    try:
        with ProcessPoolExecutor(
            wanted.processes,
            mp_context=get_context("spawn"),
            initializer=_hold,
            initargs=(pool.features, pool.labels, wanted.seed, wanted.engine),
        ) as executor:
            yield _Workers(wanted, executor)
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


_HELD: dict[str, Any] = {}
"""In a child: the pool and the settings, sent once."""


def _hold(features: Any, labels: Any, seed: int, engine: str) -> None:
    _HELD.update(features=features, labels=labels, seed=seed, engine=engine)


def _ordered(order: tuple[Task, QueryBatch, Any, int]) -> Done:
    task, batch, places, first = order
    agents = Federation(_HELD["features"], _HELD["labels"], places)
    return _answer(task, batch, agents, first, seed=_HELD["seed"], engine=_HELD["engine"])


def _peak_kib() -> int:
    """The most memory this process ever had resident."""
    status = Path("/proc/self/status")
    if status.exists():
        # What the system tells of resource use begins with what the parent had when it started this process.
        return next(int(line.split()[1]) for line in status.read_text().splitlines() if line.startswith("VmHWM:"))
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak // 1024 if os.uname().sysname == "Darwin" else peak


def _settings(wanted: Simulation, pool: Pool) -> dict[str, Any]:
    return {
        "method": wanted.method,
        "k": wanted.k,
        "records": wanted.records,
        **({} if wanted.ballot_radius is None else {"ballot_radius": wanted.ballot_radius}),
        "queries": pool.features.shape[1] + 1 if wanted.method == "blind-average" else wanted.queries,
        "target": {"epsilon": wanted.epsilon, "sigma_votes": wanted.sigma, "level": wanted.level},
        "delta": wanted.delta,
        "talliers": wanted.talliers,
        "seed": wanted.seed,
        "pool": {
            "name": pool.name,
            "private": len(pool.labels),
            "public": len(pool.truth),
            "dimension": int(pool.features.shape[1]),
            "classes": len(pool.classes),
            "sha256": hashlib.sha256(pool.features.tobytes() + pool.labels.tobytes()).hexdigest(),
        },
    }


def _kept(out: Path, settings: dict[str, Any]) -> dict[int, dict[str, Any]]:
    """Rows of an earlier run of the same simulation by their size; none where there is no file."""
    if not out.exists():
        return {}
    try:
        document = json.loads(out.read_bytes())
        same = document["settings"] == settings
        rows = {row["agents"]: row for row in document["rows"]}
    except (ValueError, KeyError, TypeError):
        raise BadData(f"{out.name} holds no simulation; name another file with --out") from None
    if not same:
        raise InvalidSetting(
            f"{out.name} holds a simulation with other settings; name another file with --out, or remove that one"
        )
    return rows
