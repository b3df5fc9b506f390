"""The sums of very many agents' answers, in shares, group by group: what is added is forgotten.

    ballots --input_shares: checked, scaled, own noise added--> one share per tallier --add_shares--> one sum each

These are the functions of an agent and of a tallier in the service, called once per agent. Sums of groups add up to
the sum of all whichever agents made a group and whoever computed it, so neither the size of a group nor the number of
processes changes a bit of the answer, and memory does not grow with the number of agents. Only the histogram can be
opened: sums over more than some eight hundred agents leave the range in which winners are compared (labeler.sharing).
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from feature_store.keys import PartyKeys
from labeler.batch import QueryBatch
from labeler.contribution import input_shares
from labeler.messages import COORDINATOR, frame
from labeler.messages.rounds import Ask, TallierKey
from labeler.messages.shares import share_to_bytes
from labeler.randomness import ByteSource, seeded_source
from labeler.sharing import add_shares as add_words
from labeler.tally import AggregateShare, add_shares, round_of
from labeler.task import Task

SourceOf = Callable[[int], ByteSource]
"""The secret source of an agent, by its number, at its beginning."""


@dataclass(frozen=True, eq=False)
class GroupSum:
    """What talliers hold after a group of agents, and what it took.

    Attributes:
        shares: one per tallier, in tallier order.
        answer_s: CPU seconds in which agents checked, noised and split.
        tally_s: CPU seconds in which talliers added.
    """

    shares: tuple[AggregateShare, ...]
    answer_s: float
    tally_s: float


def sum_group(
    task: Task, batch: QueryBatch, ballots: NDArray[np.int64], *, first: int, source_of: SourceOf
) -> GroupSum:
    """The answers of a group of agents, added up by each tallier.

    Args:
        ballots: int64, shape (agents, num_queries, num_classes).
        first: number of the first agent of the group.
        source_of: each agent's source.

    Raises:
        PrivacyRefusal: ballots beyond the task's bounds.
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
    """One sum per tallier over the agents of all groups, ready to be opened (labeler.release).

    Args:
        groups: of different agents of one round, in the same order whoever computed them.
    """
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
    """The id of an agent."""
    return f"agent-{number}"


@dataclass(frozen=True)
class Traffic:
    """Bytes of one round's messages as they go over the wire, signed, sealed and framed; HTTP and TLS come on top.

    Attributes:
        shares: what one agent sends, one message per tallier, through the coordinator.
    """

    asked: int
    shares: tuple[int, ...]

    def of(self, agents: int) -> dict[str, int]:
        """Per party: an agent, the busiest tallier, and the coordinator, which passes everything on."""
        sent = sum(self.shares)
        return {
            "agent_receives": self.asked,
            "agent_sends": sent,
            "tallier_receives": agents * max(self.shares),
            "coordinator_receives": agents * sent,
            "coordinator_sends": agents * (self.asked + sent),
        }


def traffic_of(task: Task, batch: QueryBatch) -> Traffic:
    """Measured on real messages to and from one agent; all are equally long but for the digits of the agents' names."""
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
