"""One round of a task among a thousand agents, or a hundred thousand, in one process: its cost, and its labels.

    pool --deal--> groups of agents --ballots_of--> ballots --sum_group--> shares at each tallier --> opened, scored.

The functions of an agent in the service draw each agent's noise, masks and shares, and those of a tallier add for each
tallier. Sums of groups add up to the sum of all. So the size of a group changes no bit of the answer, and memory does
not grow with the number of agents. Only the histogram can be opened: sums over more than some eight hundred agents
leave the range in which winners are compared (`labeler.sharing`). Noise and masks follow from the seed, so a run can be
repeated: they protect nobody.

Many agents answer over one pool of labeled features, each as it would alone. An agent is a row of places in the pool,
so memory follows the pool and not the federation. If there are more places than records, records are dealt again,
though never twice to one agent.

    knn            one matrix product scores all records of a group of agents; every agent keeps its own first k.
    reverse-knn    one search finds the nearest queries of all records of a group.
    ensemble       the heads of a group are trained one after the other, as agents do.
    blind-average  the models of a group are trained together (benchmarks.learning.linear_users).

Votes are equal bit for bit to `workers.voting` of one agent after the other: similarities are exact integers, and the
same functions count. Heads are equal, models of blind-average up to rounding. Tests compare both with the real agents.
"""

from __future__ import annotations

import hashlib
import json
import math
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from benchmarks.learning.linear_users import train_users
from benchmarks.machine import memory_bytes
from benchmarks.sums import task_at
from checks.audit.run import Pool, digits_pool
from feature_store.index.build import build_index
from feature_store.index.definition import NO_KEY, pack, ranks_of
from feature_store.query_selection import model_rows, select_queries
from labeler.errors import InvalidSetting
from labeler.linear_model import released_model
from labeler.messages import COORDINATOR, frame
from labeler.messages.bodies import Ask, TallierKey, share_to_bytes
from labeler.methods import MethodName
from labeler.methods.blind_average import linear_terms, weight_sum
from labeler.methods.ensemble import one_hot_ballots
from labeler.methods.knn import knn_ballots
from labeler.methods.reverse_knn import reverse_knn_ballots
from labeler.planning import price
from labeler.randomness import ByteSource, seeded_source
from labeler.records import FEATURE_ONE, Rows
from labeler.release import Release, input_shares, open_histogram
from labeler.sharing import add_shares as add_words
from labeler.system.keys import PartyKeys
from labeler.tally import AggregateShare, QueryBatch, add_shares, round_of
from labeler.task import Task
from workers.learning.linear import predict, train_head
from workers.progress import ProgressCallback, silent

TRAINING: Final = {"regularisation": 1.0, "radius": 0.3, "iterations": 60}
"""Training of blind-average: models of short norm, because an agent pays for the norm."""

SourceOf = Callable[[int], ByteSource]
"""Returns the secret source of an agent, by its number, at its start."""


@dataclass(frozen=True)
class Simulation:
    """A task and a number of agents.

    Attributes:
        records: of each agent.
        queries: public images asked about; for blind-average the rows of its model are asked, whatever this is.
        epsilon: the price at agent level that the noise is chosen for.
        seed: of the deal, the questions, the noise and the masks.
    """

    agents: int
    method: MethodName = "knn"
    k: int = 1
    records: int = 20
    queries: int = 100
    epsilon: float = 1.0
    delta: float = 1e-6
    seed: int = 0

    def __post_init__(self) -> None:
        if min(self.agents, self.records, self.queries) < 1:
            raise InvalidSetting("a round has at least one agent, one record per agent and one query")

    def task(self, pool: Pool) -> Task:
        """Return the task."""
        fields: dict[str, Any] = {
            "name": "simulation",
            "classes": list(pool.classes),
            "method": self.method,
            "k": self.k,
            "delta": self.delta,
            "max_queries": self.queries,
            "agents": self.agents,
            "colluding_agents": min(1, self.agents - 1),
            "talliers": 2,
        }
        if self.method == "reverse-knn":
            fields["max_agent_records"] = self.records
        if self.method == "blind-average":
            training = {"min_records": self.records} | TRAINING
            fields |= {"max_queries": pool.features.shape[1] + 1, "training": training}
        return task_at(self.epsilon, fields, level="agent")


def simulate(wanted: Simulation, pool: Pool, *, progress: ProgressCallback = silent) -> dict[str, Any]:
    """Run one round; return its seconds, CPU seconds by stage, bytes per party, memory, price and share of right
    labels.
    """
    task = wanted.task(pool)
    batch, score = _questions(wanted, pool)

    def source_of(number: int) -> ByteSource:
        return seeded_source(f"labeler-simulate/1 {wanted.seed} {task.digest} {number}".encode())

    # Do first what a process does once, whatever the size: load libraries, make the table of the noise.
    few = Federation.dealt(pool, 2, records=wanted.records, seed=wanted.seed)
    sum_group(task, batch, ballots_of(task, batch, few), first=0, source_of=source_of)
    began = time.perf_counter()
    federation = Federation.dealt(pool, wanted.agents, records=wanted.records, seed=wanted.seed)
    size, groups = group_size(task, batch, federation), []
    seconds = {"votes": 0.0, "noise_and_shares": 0.0, "talliers": 0.0}
    for start in range(0, wanted.agents, size):
        progress(f"{wanted.agents:,} agents", start, wanted.agents)
        voting = time.process_time()
        ballots = ballots_of(task, batch, federation.part(slice(start, start + size)))
        seconds["votes"] += time.process_time() - voting
        summed = sum_group(task, batch, ballots, first=start, source_of=source_of)
        seconds["noise_and_shares"] += summed.answer_s
        seconds["talliers"] += summed.tally_s
        groups.append(summed.shares)
    progress(f"{wanted.agents:,} agents", wanted.agents, wanted.agents)
    sums = total_of(groups)
    release = open_histogram(sums, task)
    took, cost = time.perf_counter() - began, price(task)
    return {
        "settings": asdict(wanted) | {"pool": pool.name, "sigma_votes": task.sigma_votes, "is_seeded": True},
        "seconds": took,
        "cpu_seconds": seconds,
        "bytes": traffic_of(task, batch).of(task.agents),
        "peak_mib": memory_bytes("VmHWM") / 2**20,
        "epsilon": {level: cost.to_json()[level]["epsilon"] for level in ("instance", "agent")},
        "sums_sha256": hashlib.sha256(b"".join(one.words.tobytes() for one in sums)).hexdigest(),
        "labels_right": score(task, release),
        "copies_of_a_record": wanted.agents * wanted.records / len(pool.labels),
    }


def _questions(wanted: Simulation, pool: Pool) -> tuple[QueryBatch, Callable[[Task, Release], float]]:
    """Return the questions, and a function that scores a release of them by its share of right labels."""
    if wanted.method == "blind-average":

        def model_right(task: Task, release: Release) -> float:
            model = released_model(task, [release], asked)
            return 0.0 if model is None else float((model.predict(pool.public) == pool.truth).mean())

        asked = model_rows(pool.features.shape[1])
        return QueryBatch(asked), model_right
    chosen = select_queries(pool.public, strategy="random", count=wanted.queries, seed=wanted.seed)
    truth = pool.truth[chosen.rows]
    return QueryBatch(chosen.features), lambda _, release: float((release.labels == truth).mean())


@dataclass(frozen=True, eq=False)
class GroupSum:
    """Each tallier's share of a group's sum, and CPU seconds of agents (checks, noise, shares) and of talliers."""

    shares: tuple[AggregateShare, ...]
    answer_s: float
    tally_s: float


def sum_group(
    task: Task, batch: QueryBatch, ballots: NDArray[np.int64], *, first: int, source_of: SourceOf
) -> GroupSum:
    """Add up the answers of a group of agents, by each tallier.

    Args:
        ballots: int64, shape (agents, num_queries, num_classes).
        first: number of the first agent of the group.
        source_of: each agent's source.
    """
    round, began = round_of(task, batch), time.process_time()
    answers = [
        input_shares(own, task, round, agent_id=name_of(number), source=source_of(number))
        for number, own in enumerate(ballots, start=first)
    ]
    answered = time.process_time()
    shares = tuple(
        add_shares(index, round, {shares[index].agent_id: shares[index].share for shares in answers})
        for index in range(task.talliers)
    )
    return GroupSum(shares, answered - began, time.process_time() - answered)


def total_of(groups: Sequence[tuple[AggregateShare, ...]]) -> tuple[AggregateShare, ...]:
    """Return one sum per tallier over the agents of all groups of one round, ready to be opened (labeler.release)."""
    return tuple(_joined(parts) for parts in zip(*groups, strict=True))


def _joined(parts: Sequence[AggregateShare]) -> AggregateShare:
    digests = json.dumps([part.sharings_digest for part in parts])
    words = add_words([part.words for part in parts])
    words.setflags(write=False)
    return replace(
        parts[0],
        contributors=frozenset().union(*(part.contributors for part in parts)),
        sharings_digest=hashlib.sha256(b"labeler-simulated-sharings/1\n" + digests.encode()).hexdigest(),
        words=words,
        is_seeded=any(part.is_seeded for part in parts),
    )


def name_of(number: int) -> str:
    """Return the id of an agent."""
    return f"agent-{number}"


@dataclass(frozen=True)
class Traffic:
    """Bytes of one round's messages as they go over the wire, signed, sealed and framed; HTTP and TLS come on top.

    Attributes:
        shares: of one agent, one message per tallier, through the coordinator.
    """

    asked: int
    shares: tuple[int, ...]

    def of(self, agents: int) -> dict[str, int]:
        """Return bytes per party: an agent, the busiest tallier, and the coordinator, which passes everything on."""
        sent = sum(self.shares)
        return {
            "agent_receives": self.asked,
            "agent_sends": sent,
            "tallier_receives": agents * max(self.shares),
            "coordinator_receives": agents * sent,
            "coordinator_sends": agents * (self.asked + sent),
        }


def traffic_of(task: Task, batch: QueryBatch) -> Traffic:
    """Measure real messages to and from one agent; all are equally long except for the digits of the agents' names."""
    round, agent = round_of(task, batch), name_of(task.agents - 1)
    parties = [PartyKeys.generate() for _ in range(task.talliers)]
    talliers = tuple(
        TallierKey(f"tallier-{index}", keys.public.seal_key, keys.public.verify_key)
        for index, keys in enumerate(parties)
    )
    ask = parties[0].message(
        "ask",
        sender=COORDINATOR,
        recipient=agent,
        sequence=1,
        body=Ask(task, batch, talliers, expires_at=2e9).encode(),
        task_digest=task.digest,
        round_digest=round.digest,
    )
    nothing = np.zeros((len(batch), task.num_classes), dtype=np.int64)
    shares = input_shares(nothing, task, round, agent_id=agent, source=seeded_source(0))
    sent = [
        parties[0].message(
            "input-share",
            sender=agent,
            recipient=tallier.tallier_id,
            sequence=1,
            body=share_to_bytes(share.share),
            seal_to=tallier.seal_key,
            task_digest=task.digest,
            round_digest=round.digest,
        )
        for tallier, share in zip(talliers, shares, strict=True)
    ]
    return Traffic(len(frame([ask])), tuple(len(frame([message])) for message in sent))


NOBODY: Final = -1
"""Pads the row of an agent with fewer records than the largest."""

GROUP_NUMBERS: Final = 2**22
"""Numbers of one group of agents: 32 MiB in double precision."""

Ballots = NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class Federation:
    """Agents and their records. Private; does not print.

    Attributes:
        features: the pool, int16, shape (records, dimension), quantized.
        labels: int16, shape (records,), classes.
        places: int32, shape (agents, most): the records of each agent in ascending order of record id, then NOBODY.
    """

    features: NDArray[np.int16] = field(repr=False)
    labels: NDArray[np.int16] = field(repr=False)
    places: NDArray[np.int32] = field(repr=False)

    @classmethod
    def dealt(cls, pool: Pool, agents: int, *, records: int, seed: int) -> Federation:
        """Give every agent `records` records, drawn without repetition until the pool is used up, and then again.

        Args:
            records: of each.
            seed: of the deal; the first agents of a larger federation hold what those of a smaller one do.
        """
        rng, at_once = np.random.default_rng([seed, 2]), len(pool.labels) // records
        deals = [
            rng.permutation(len(pool.labels))[: at_once * records].reshape(at_once, records).astype(np.int32)
            for _ in range(math.ceil(agents / at_once))
        ]
        return cls(pool.features, pool.labels, np.concatenate(deals)[:agents])

    def __len__(self) -> int:
        return len(self.places)

    @property
    def most_records(self) -> int:
        """The most records of one agent."""
        return int(self.places.shape[1])

    def part(self, agents: slice) -> Federation:
        """Return some of the agents, over the same pool."""
        return Federation(self.features, self.labels, self.places[agents])

    def record_labels(self) -> NDArray[np.int16]:
        """Return labels, int16, shape (agents, most_records); NOBODY where there is no record."""
        return np.where(self.places == NOBODY, np.int16(NOBODY), self.labels[self.places])

    def record_features(self) -> NDArray[np.int16]:
        """Return features, int16, shape (agents, most_records, dimension); anything where there is no record."""
        return np.asarray(self.features[self.places])


def ballots_of(task: Task, batch: QueryBatch, agents: Federation) -> Ballots:
    """Return what each agent of a group contributes, without noise.

    Args:
        task: what is asked, of a method of SIMULATED.
        agents: the group and its records; of `group_size` agents at most.

    Returns:
        int64, shape (agents, num_queries, num_classes). Private.
    """
    return _WAYS[task.method](task, batch, agents)


def group_size(task: Task, batch: QueryBatch, federation: Federation) -> int:
    """Return how many agents answer at once: as many as keep within GROUP_NUMBERS, at least one."""
    records, dimension = federation.most_records, int(federation.features.shape[1])
    votes = len(batch) * task.num_classes
    found = {"knn": records * len(batch), "ensemble": records * (records + 4 * task.num_classes)}.get(task.method, 0)
    return max(1, GROUP_NUMBERS // max(votes, records * dimension, found))


def _knn(task: Task, batch: QueryBatch, agents: Federation) -> Ballots:
    labels = agents.record_labels()
    count, most = labels.shape
    features = agents.record_features().reshape(count * most, -1).astype(np.float32)
    scores = batch.features.astype(np.float32) @ features.T  # exact: see feature_store.index.definition
    # A place in an agent's row is the rank of the record's id, and ties need nothing else.
    keys = pack(scores.reshape(len(batch), count, most), np.arange(most, dtype=np.int64))
    keys[:, labels == NOBODY] = NO_KEY
    k = min(task.k, most)
    if k < most:
        keys.partition(k - 1, axis=2)
    first = keys[:, :, :k]
    nobody = first == NO_KEY
    ranks = np.where(nobody, 0, ranks_of(first))
    nearest = np.where(nobody, np.int16(NOBODY), labels[np.arange(count)[None, :, None], ranks])
    votes = knn_ballots(nearest.reshape(-1, k), num_classes=task.num_classes)
    return np.ascontiguousarray(votes.reshape(len(batch), count, -1).swapaxes(0, 1))


def _reverse_knn(task: Task, batch: QueryBatch, agents: Federation) -> Ballots:
    # Cut to the smallest ids, as `Records.first` cuts.
    labels = agents.record_labels()[:, : task.max_agent_records]
    features = agents.record_features()[:, : task.max_agent_records]
    has_record = labels != NOBODY
    queries = build_index(batch.features, np.arange(len(batch)))
    nearest = queries.search(features[has_record], min(task.k, len(batch))).record_ids
    # Every agent has separate cells in one long table of votes.
    of_agent = np.repeat(np.arange(len(labels), dtype=np.int64), has_record.sum(axis=1))
    votes = reverse_knn_ballots(
        nearest + of_agent[:, None] * len(batch),
        labels[has_record],
        num_queries=len(labels) * len(batch),
        num_classes=task.num_classes,
    )
    return votes.reshape(len(labels), len(batch), -1)


def _ensemble(task: Task, batch: QueryBatch, agents: Federation) -> Ballots:
    rows, labels = agents.record_features().astype(np.float32) / FEATURE_ONE, agents.record_labels()
    held = [Rows.of(own[named != NOBODY], named[named != NOBODY]) for own, named in zip(rows, labels, strict=True)]
    heads = np.stack([train_head(one, num_classes=task.num_classes) for one in held])
    votes = one_hot_ballots(predict(heads, batch.features).ravel(), num_classes=task.num_classes)
    return votes.reshape(len(labels), len(batch), -1)


def _blind_average(task: Task, batch: QueryBatch, agents: Federation) -> Ballots:
    terms, spec = linear_terms(task), weight_sum(task)
    features = agents.record_features().astype(np.float32) / FEATURE_ONE
    weights = train_users(features, agents.record_labels(), terms=terms)
    shape = (len(batch), task.num_classes)
    return np.stack([spec.quantize(own / terms.sensitivity).reshape(shape) for own in weights])


_WAYS: Final[Mapping[str, Callable[[Task, QueryBatch, Federation], Ballots]]] = {
    "knn": _knn,
    "reverse-knn": _reverse_knn,
    "ensemble": _ensemble,
    "blind-average": _blind_average,
}

SIMULATED: Final[tuple[MethodName, ...]] = ("knn", "reverse-knn", "ensemble", "blind-average")
"""Methods that can answer for many agents at once. aux-distill fits each agent's private heads alone, and federated
asks repeatedly about a changed model.
"""


if __name__ == "__main__":  # in a separate interpreter, so that its memory is its alone
    given = Simulation(**json.loads(sys.argv[1]))
    sys.stdout.write(json.dumps(simulate(given, digits_pool(seed=given.seed))))
