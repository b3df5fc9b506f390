"""An observer of everything in a simulated federation, which says what must not happen.

It reads every message at the moment it leaves, with the keys of all talliers, and the journals as they are on disk, by
connections of its own: what a process only has in memory does not count. What it compares with is computed here, apart
from the product: the exact votes by sorting, sums by adding what agents sent.

Longer than 400 lines because it is one list: every rule of docs/simulation.md, each checked in a few lines.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from datetime import timedelta
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from feature_store.shard import Shard
from labeler.driver.sending import SUM_GRACE_S
from labeler.errors import LabelerError, NotFound
from labeler.ledger.chain import Entry
from labeler.ledger.jobs import RoundRecord
from labeler.ledger.ledger import Ledger
from labeler.ledger.lifetimes import SET_ASIDE
from labeler.messages import COORDINATOR, Message
from labeler.messages.bodies import (
    RefusalBody,
    SumRequest,
    aggregate_from_bytes,
    holdings_from_bytes,
    share_from_bytes,
    winner_from_bytes,
)
from labeler.noise import DiscreteGaussian, noise_share, noise_source
from labeler.randomness import ByteSource, derive_key, keyed_source
from labeler.release import release_from_bytes
from labeler.setting import LEVELS
from labeler.sharing import unshard
from labeler.system.clock import Clock
from labeler.tally import BallotShare
from labeler.task import Level, Task
from tests.simulation.disks import AgentDisk, CoordinatorDisk, TallierDisk
from tests.simulation.homes import VARIANTS, Template
from tests.simulation.lives import Asked, Lives
from tests.simulation.prices import Paid, Standing, is_covered, price, wrongly_paid
from tests.simulation.soft_heads import soft_labels
from tests.simulation.ways import ROWS, is_same, next_model, numbers_of, questions
from workers.agent.agent import LOCAL_NOISE, NOISE

PUBLIC_REASONS = frozenset({"policy-refusal", "protocol-violation", "awaiting-approval", "not-enrolled"})
"""Why an agent may refuse a round that it was charged for and keeps: its policy was changed, or the ask has expired."""

GIVEN_UP = "protocol-violation"
REASONS_TO_END = frozenset({"", "quorum-not-reached"})
"""Why a job may end other than completed: whatever else it says is a defect, of the service or of a party."""

_FINISHED = ("completed", "failed", "refused", "cancelled", "expired")


class Violation(BaseException):
    """Something happened that must not happen. No `except Exception` of the product, which is in the midst of it, may
    hide that.

    Args:
        rule: which was broken.
        detail: how.
    """

    def __init__(self, rule: str, detail: str) -> None:
        super().__init__(f"{rule}: {detail}")


class Witness:
    """See the module.

    Args:
        folder: of the federation.
        template: what it was made from.
        clock: the time now.
        step: the number of turns so far.
        unnamed: a tallier opens no round, because its site does not name all the agents.
    """

    def __init__(
        self,
        folder: Path,
        template: Template,
        *,
        clock: Clock,
        step: Callable[[], int],
        unnamed: bool = False,
    ) -> None:
        self._template = template
        self._unnamed = unnamed
        self._clock = clock
        self._step = step
        self._owned = ExitStack()
        self._coordinator = CoordinatorDisk(folder / COORDINATOR, self._owned, clock)
        self._ledger, self._tasks = self._coordinator.ledger, self._coordinator.tasks
        self._agents = {name: AgentDisk(folder / name, self._owned, clock) for name in template.agents}
        self._talliers = {name: TallierDisk(folder / name, self._owned, clock) for name in template.talliers}
        self._keys = template.keys
        self._recipients = tuple((name, self._keys[name].public.seal_key) for name in template.talliers)
        self._by_digest: dict[str, Task] = {task.digest: task for task in template.tasks}
        self._numbers: dict[str, int] = {}
        self._shares: dict[tuple[str, str, str], bytes] = {}
        self._noise_keys: dict[tuple[str, str], bytes] = {}
        self._round_keys: dict[tuple[str, str], bytes] = {}
        self._sums: dict[tuple[str, str], bytes] = {}
        self._opened: dict[tuple[str, str], dict[str, Message]] = {}
        self._relayed: set[str] = set()
        self._asked: set[str] = set()
        self._contributors: dict[tuple[str, int], tuple[str, ...]] = {}
        self._releases: dict[tuple[str, int], bytes] = {}
        self._standing = Standing()
        has_lives = template.shape.way == "lives"
        self._lives = {name: Lives(self._paths(name)) for name in template.agents if has_lives}
        self._versions: dict[str, int] = {}
        self._seen_version = -1
        self.wire: list[tuple[int, int, str, str, str, int]] = []
        self.states: tuple[str, ...] = ()

    def close(self) -> None:
        """Let go of every journal."""
        self._owned.close()

    # Jobs.

    def submitted(self, job_id: str, number: int) -> None:
        """A requester got a job: it is looked for, also if nothing was committed since."""
        self._numbers[job_id] = number
        self._seen_version = -1

    def find_new_job(self) -> str | None:
        """A job that is in the journal and that no requester knows of."""
        return next((job_id for job_id in self._coordinator.jobs if job_id not in self._numbers), None)

    @property
    def all_ended(self) -> bool:
        """Return whether every job has come to an end."""
        return all(state in _FINISHED for state in self.states)

    # Messages.

    def posted(self, sender: str, messages: list[Message]) -> None:
        """Look at messages that a party posts."""
        for message in messages:
            self._record(message)
            kind, is_agent = message.header.kind, sender in self._agents
            if kind == "input-share":
                self._check_share(message)
            elif kind == "refused" and is_agent:
                self._check_refusal(message)
            elif kind == "holdings":
                self._check_holdings(message)
            elif kind == "aggregate-share":
                self._check_sum(message)
            elif kind == "winner":
                self._check_winners(message)

    def mailed(self, recipient: str, messages: list[Message]) -> None:  # noqa: ARG002  # the header has it
        """Look at messages that the coordinator puts into a party\'s mail: its own, and shares it passes on."""
        for message in messages:
            header = message.header
            if header.kind == "input-share":
                self._check_paid_for(message)
                self._relayed.add(header.round_digest)
            if header.sender != COORDINATOR:
                continue
            self._record(message)
            if header.kind == "ask":
                self._asked.add(header.round_digest)
                self._check_ask(message)
            elif header.kind == "sum":
                current = self._check_posted(message, "a sum was asked for")
                wanted = tuple(sorted(SumRequest.decode(message.body).contributors))
                if wanted != current.contributors:
                    raise Violation(
                        "contributors", f"a sum over {wanted} was asked for, agreed on {current.contributors}"
                    )
            elif header.kind == "answered":
                self._check_settled(message)

    def _record(self, message: Message) -> None:
        header = message.header
        ms = round(self._clock().timestamp() * 1000)
        self.wire.append((self._step(), ms, header.sender, header.recipient, header.kind, len(message.body)))

    def _check_share(self, message: Message) -> None:
        header = message.header
        agent, digest, tallier = header.sender, header.round_digest, header.recipient
        before = self._shares.setdefault((agent, digest, tallier), message.body)
        if before != message.body:
            raise Violation("one split", f"{agent} sends {tallier} another share of a round than before")
        if before is message.body:
            kept = self._agents[agent].rounds.kept(digest)
            if kept is not None and (kept.stage == "erased" or kept.recipients != self._recipients):
                raise Violation("erased is erased", f"{agent} answers a round of which it keeps nothing")
            if kept is None or kept.bodies is None or message.body not in kept.bodies:
                raise Violation("stored before sent", f"a share of {agent} leaves before it is stored")
            if (agent, digest) not in self._opened:
                self._check_paid_by(agent, message)
                if agent in self._lives:
                    self._check_spent(agent, message)
            self._round_keys[agent, digest] = self._agents[agent].keys.read(digest) or b""
            self._opened.setdefault((agent, digest), {})[tallier] = message

    def _check_paid_by(self, agent: str, message: Message) -> None:
        """A share leaves an agent whose own ledger has charged enough for it."""
        current = self._round(message, "a share was sent")
        charged: dict[str, dict[str, int]] = {level: {} for level in LEVELS}
        for (digest, level), (amount, _) in self._agents[agent].charges().items():
            if self._task_of(self._coordinator.round_of(digest).job_id).digest == message.header.task_digest:
                charged[level][digest] = amount
        task = self._by_digest[message.header.task_digest]
        if not is_covered(task, current.num_queries, charged, message.header.round_digest):
            raise Violation("paid before answered", f"{agent} answers a round and has paid too little")

    def _check_spent(self, agent: str, message: Message) -> None:
        """A share of votes for life leaves an agent that has written down what they spend, and set enough aside."""
        self._follow_lives(agent)
        if not self._lives[agent].votes(message.header.round_digest):
            raise Violation("spent before sent", f"{agent} sends votes for life and has not noted what they spend")
        task, journal = self._by_digest[message.header.task_digest], self._agents[agent]
        journal.read_entries()
        if task.lifetime_budget is None or sum(journal.set_aside().values()) < task.lifetime_budget.budget_nano:
            raise Violation("paid before answered", f"{agent} votes for life and has set too little aside")

    def _follow_lives(self, agent: str) -> None:
        """What the images of an agent have spent for life is what some sequence of its records' versions gives."""
        found = self._agents[agent].lived(after=self._lives[agent].rounds)
        if found is None:
            return
        digests, spent = found
        rounds = [self._coordinator.round_of(digest) for digest in digests]
        asked = [Asked(one.round_digest or "", self._task_of(one.job_id), self._questions(one)) for one in rounds]
        if wrong := self._lives[agent].follow(asked, spent):
            raise Violation("votes for life", f"{agent}: {wrong}")

    def _paths(self, agent: str) -> list[Path]:
        return [self._template.shard(agent, variant) for variant in VARIANTS]

    def _check_paid_for(self, message: Message) -> None:
        """A share is passed on of a round for which the coordinator's ledger holds enough."""
        current = self._round(message, "a share was passed on")
        task = self._by_digest[message.header.task_digest]
        self._read_entries()
        jobs = [job.job_id for job in self._coordinator.jobs.values() if job.task_digest == task.digest]
        rounds = [f"{one.job_id}/{one.number}" for job_id in jobs for one in self._coordinator.rounds(job_id)]
        name = f"{current.job_id}/{current.number}"
        for account in ("federation", f"agent:{message.header.sender}"):
            if not is_covered(task, current.num_queries, self._standing.of(account, rounds), name):
                raise Violation(
                    "paid before answered", f"a share for {name} is passed on, and {account} pays too little"
                )

    def _check_refusal(self, message: Message) -> None:
        agent, digest = message.header.sender, message.header.round_digest
        journal = self._agents[agent]
        if journal.memory.paid_by(digest) is None:
            return
        kept = journal.rounds.kept(digest)
        if kept is not None and (kept.stage == "erased" or kept.recipients != self._recipients):
            return
        reason = RefusalBody.decode(message.body).reason
        if reason not in PUBLIC_REASONS:
            raise Violation("charged, so answered", f"{agent} refuses a round it was charged for: {reason}")

    def _check_holdings(self, message: Message) -> None:
        tallier, digest = message.header.sender, message.header.round_digest
        told = holdings_from_bytes(self._keys[COORDINATOR].open(message))
        try:
            kept = self._talliers[tallier].memory.load(digest)
        except NotFound:
            raise Violation("stored before sent", f"{tallier} reports a round it has not stored") from None
        if kept.is_forgotten:
            return
        self._note_key(tallier, digest)
        for agent, sharing_id in told.items():
            share = kept.shares.get(agent)
            if share is None or share.sharing_id != sharing_id:
                raise Violation("stored before sent", f"{tallier} reports a share of {agent} that it has not stored")

    def _note_key(self, tallier: str, digest: str) -> None:
        """Return what a tallier can draw its noise of a round from, as long as it is on its disk."""
        key = self._talliers[tallier].keys.read(digest + ".shares")
        if key is not None and self._noise_keys.setdefault((tallier, digest), key) != key:
            raise Violation("one draw", f"{tallier} draws its noise of a round from another key than before")

    def _noise(self, tallier: str, current: RoundRecord, task: Task) -> NDArray[np.int64]:
        """Return what a tallier must have added, from the key that was on its disk while the round was open."""
        shape = (current.num_queries, task.num_classes)
        if task.tallier_sigma_grid is None:
            return np.zeros(shape, np.int64)
        key = self._noise_keys[tallier, current.round_digest or ""]
        drawn = noise_source(key, current.round_digest or "", current.contributors, is_seeded=False)
        return DiscreteGaussian(task.tallier_sigma_grid).sample(drawn, shape)

    def _check_sum(self, message: Message) -> None:
        current = self._check_posted(message, "a sum was sent")
        tallier, digest = message.header.sender, message.header.round_digest
        data = self._keys[COORDINATOR].open(message)
        aggregate = aggregate_from_bytes(data)
        if tuple(sorted(aggregate.contributors)) != current.contributors:
            raise Violation(
                "contributors", f"{tallier} sums {sorted(aggregate.contributors)}, agreed on {current.contributors}"
            )
        kept = self._talliers[tallier].memory.load(digest)
        if kept.aggregate != data:
            raise Violation("stored before sent", f"the sum of {tallier} leaves before it is stored")
        if self._sums.setdefault((tallier, digest), data) != data:
            raise Violation("one draw", f"{tallier} sends another sum of a round than before")
        task = self._by_digest[message.header.task_digest]
        parts = [self._share_words(agent, digest, tallier) for agent in current.contributors]
        added = self._noise(tallier, current, task)
        if not np.array_equal(np.sum([*parts, added.view(np.uint64)], axis=0, dtype=np.uint64), aggregate.words):
            raise Violation("the same answer", f"the sum of {tallier} is not that of what agents sent it and its noise")

    def _check_winners(self, message: Message) -> None:
        current = self._check_posted(message, "winners were sent")
        found = winner_from_bytes(self._keys[COORDINATOR].open(message))
        if tuple(sorted(found.contributors)) != current.contributors:
            raise Violation("contributors", f"winners over {sorted(found.contributors)}, not {current.contributors}")

    def _check_posted(self, message: Message, what: str) -> RoundRecord:
        current = self._round(message, what)
        state = self._ledger.state(f"{current.job_id}/{current.number}")
        if current.state not in ("posted", "opened") or state != "posted":
            raise Violation("posted before opened", f"{what} while its round is {current.state} and its charge {state}")
        return current

    def _check_ask(self, message: Message) -> None:
        current = self._round(message, "an ask was sent")
        state = self._ledger.state(f"{current.job_id}/{current.number}")
        if current.state == "waiting" or state is None or state == "void":
            raise Violation("reserved before asked", f"asked while the round is {current.state}, its charge {state}")

    def _check_settled(self, message: Message) -> None:
        current = self._round(message, "a settlement was sent")
        if current.state != "opened" and self._coordinator.jobs[current.job_id].state not in _FINISHED:
            raise Violation("settled last", f"a round is said to be settled while it is {current.state}")

    def _round(self, message: Message, what: str) -> RoundRecord:
        try:
            return self._coordinator.round_of(message.header.round_digest)
        except NotFound:
            raise Violation("stored before sent", f"{what} for a round that is in no journal") from None

    def _task_of(self, job_id: str) -> Task:
        return self._by_digest[self._coordinator.jobs[job_id].task_digest]

    # What agents sent.

    def _share_words(self, agent: str, digest: str, tallier: str) -> NDArray[np.uint64]:
        message = self._opened.get((agent, digest), {}).get(tallier)
        if message is None:
            raise Violation("the same answer", f"{agent} was summed and has sent {tallier} nothing")
        share = share_from_bytes(self._keys[tallier].open(message), max_entries=10_000)
        if isinstance(share, BallotShare):
            raise TypeError("a histogram has no ballots beside its noise")
        return share.expand()

    def _contribution(self, agent: str, current: RoundRecord, task: Task) -> NDArray[np.int64]:
        """Return what an agent has sent all talliers together, in grid units; its exact votes must be in it."""
        digest, terms = current.round_digest, task.winner_terms
        sent = self._opened.get((agent, digest), {})
        if set(sent) != set(self._template.talliers):
            raise Violation("the same answer", f"{agent} was summed and has not sent to every tallier")
        shares = [
            share_from_bytes(self._keys[name].open(sent[name]), max_entries=10_000, terms=terms)
            for name in self._template.talliers
        ]
        ballots = [one for one in shares if isinstance(one, BallotShare)]
        if ballots and terms is not None:
            votes = unshard([one.ballots.expand() for one in ballots], field=terms.field)[:, : task.num_classes]
            noise = unshard([one.noise.expand() for one in ballots], field=terms.field)
            vector = votes * task.scale + noise
        else:
            vectors = [one.expand() for one in shares if not isinstance(one, BallotShare)]
            vector = unshard(vectors, field=None if terms is None else terms.field)
        numbers = np.asarray(vector, dtype=np.int64)
        if not any(self._is_of(agent, said, path, current, task, numbers) for said, path in self._said(agent, current)):
            raise Violation("exact votes", f"{agent} has sent votes that no version of its records gives")
        return numbers

    def _said(self, agent: str, current: RoundRecord) -> Iterator[tuple[NDArray[np.int64], Path]]:
        """What every version of an agent's records says in a round, grid units; of votes for life every sequence."""
        way, task, asked = self._template.shape.way, self._task_of(current.job_id), self._questions(current)
        for path in self._paths(agent):
            if way == "lives":
                for votes in self._lives[agent].votes(current.round_digest or ""):
                    yield votes * np.int64(task.scale), path
            elif way == "heads":
                source = self._source(agent, LOCAL_NOISE, path, current, task)
                yield soft_labels(task, path, asked, source=source), path
            else:
                yield numbers_of(task, way, path, asked, self._model(current, task)), path

    def _is_of(
        self,
        agent: str,
        said: NDArray[np.int64],
        path: Path,
        current: RoundRecord,
        task: Task,
        sent: NDArray[np.int64],
    ) -> bool:
        """Return whether numbers are, to the last bit, what a version of an agent's records says, and its noise."""
        way = self._template.shape.way
        if not task.agents_add_shares:
            return is_same(way, sent, said)
        noise = noise_share(task, self._source(agent, NOISE, path, current, task), len(said))
        return is_same(way, sent, said + noise)

    def _source(self, agent: str, purpose: bytes, path: Path, current: RoundRecord, task: Task) -> ByteSource:
        """Return what an agent draws its noise of a round from, with this version of its records."""
        context = (task.digest.encode(), current.batch_digest.encode(), Shard.open(path, verify=False).version.encode())
        key = derive_key(self._round_keys[agent, current.round_digest], purpose, *context)
        return keyed_source(key, is_seeded=False)

    def _model(self, current: RoundRecord, task: Task) -> bytes:
        """The public model that a step begins from, from what the steps before have opened; empty elsewhere."""
        if task.sampled is None:
            return b""
        theta = np.zeros((ROWS, task.num_classes))
        for before in self._coordinator.rounds(current.job_id)[: current.number]:
            data = self._coordinator.store.release(before.job_id, before.number)
            opened = None if data is None else release_from_bytes(data).noisy_votes
            if opened is None:
                raise Violation("steps in order", f"step {current.number} was answered before step {before.number}")
            theta = next_model(theta, opened, len(before.contributors))
        return theta.tobytes()

    def _questions(self, current: RoundRecord) -> NDArray[np.int16]:
        rounds = self._coordinator.rounds(current.job_id)
        way = self._template.shape.way
        start = 0 if way == "steps" else current.first_query - rounds[0].first_query
        features = questions(way, self._numbers[current.job_id], [one.num_queries for one in rounds])
        return features[start : start + current.num_queries]

    # Journals.

    def look(self) -> None:
        """Look at the coordinator's journal, if anything was written."""
        version = self._coordinator.version()
        if version == self._seen_version:
            return
        self._seen_version = version
        known = self._coordinator.jobs
        lost = sorted(self._numbers.keys() - known.keys())
        if lost:
            raise Violation("stored before told", f"its requester was told that {lost[0]} is taken, and it is not")
        self.states = tuple(known[job_id].state for job_id in self._numbers)
        for job_id in self._numbers:
            job = known[job_id]
            reason = str((job.problem or {}).get("type", "")).rpartition(":")[2]
            # A round that nobody summed in time is given up by its talliers, which have erased its shares.
            is_too_late = self._clock() > job.expires_at + timedelta(seconds=SUM_GRACE_S)
            # And one that names somebody unknown to a tallier's site is declined by it, in words of its site.
            is_unnamed = self._unnamed and f"{self._template.talliers[-1]} says: [agents] " in str(job.problem)
            if reason not in REASONS_TO_END and not (reason == GIVEN_UP and (is_too_late or is_unnamed)):
                raise Violation("completion", f"{job_id} is {job.state} because of {reason}, which nobody caused")
            if self._versions.get(job_id) != job.version:
                self._versions[job_id] = job.version
                for current in self._coordinator.rounds(job_id):
                    self._look_at_round(current)
        self._read_entries()
        for agent in self._lives:
            self._follow_lives(agent)

    def _look_at_round(self, current: RoundRecord) -> None:
        name = (current.job_id, current.number)
        before = self._contributors.get(name)
        if before is not None and before != current.contributors:
            raise Violation("contributors", f"{before} were agreed on, and now {current.contributors}")
        if current.contributors:
            self._contributors[name] = current.contributors
        if current.state in ("posted", "opened") and not current.contributors:
            raise Violation("contributors", "a charge was posted before contributors were agreed on")
        if current.state != "opened":
            return
        release = self._coordinator.store.release(*name)
        if release is None or self._releases.setdefault(name, release) != release:
            raise Violation("one release", f"the release of {name} was replaced or lost")
        if release is self._releases[name]:
            self._check_release(current, release)

    def _check_release(self, current: RoundRecord, data: bytes) -> None:
        task = self._task_of(current.job_id)
        release = release_from_bytes(data)
        parts = [self._contribution(agent, current, task) for agent in current.contributors]
        parts += [self._noise(tallier, current, task) for tallier in self._template.talliers]
        total = np.sum(parts, axis=0)
        if not np.array_equal(release.labels, np.argmax(total, axis=1)):
            raise Violation(
                "the same answer", f"the labels of {current.job_id}/{current.number} are not those of the sum"
            )
        if release.noisy_votes is not None and not np.array_equal(release.noisy_votes, total / np.float64(task.scale)):
            raise Violation("the same answer", f"the histogram of {current.job_id}/{current.number} is not the sum")
        if len(current.contributors) < task.quorum:
            raise Violation("quorum", f"{current.contributors} were opened, the quorum is {task.quorum}")

    def _read_entries(self) -> None:
        for entry in self._coordinator.read_entries():
            self._standing.add(entry)
            if entry.kind == "void":
                self._check_void(entry)

    def _check_void(self, entry: Entry) -> None:
        job_id, _, number = entry.reservation_id.rpartition("/")
        if not number.isdigit():
            return
        current = self._coordinator.rounds(job_id)[int(number)]
        if current.round_digest in self._relayed:
            raise Violation(
                "paid for what left", f"the charge of {entry.reservation_id} is given back, and shares left"
            )
        if current.round_digest in self._asked and not set(current.participants) <= current.final_refusals:
            raise Violation(
                "paid for what left", f"the charge of {entry.reservation_id} is given back, and it was asked"
            )

    # The end.

    def check_end(self) -> None:
        """Return what has to hold when everything has come to its end."""
        self.look()
        for agent in self._lives:
            self._follow_lives(agent)
        for name, ledger in self._ledgers().items():
            try:
                ledger.verify()
            except LabelerError as error:
                raise Violation("the chain", f"{name}: {error}") from None
            left = [one.account for one in ledger.balances() if one.reserved]
            if left:
                raise Violation("nothing hangs", f"{name} still has reserved charges in {left}")
        self._check_charges()
        self._check_queries()
        for name, journal in self._journals().items():
            left = [key for key in journal.keys.names() if key != "home"]
            if left:
                raise Violation("erased at the end", f"{name} still has {len(left)} keys of rounds")

    def keeps_something(self, name: str) -> bool:
        """Return whether a party still has something to erase or to give back by its own clock."""
        journal = self._agents.get(name) or self._talliers[name]
        return journal.keys.names() != ["home"] or journal.has_reserved()

    def _ledgers(self) -> dict[str, Ledger]:
        return {COORDINATOR: self._ledger} | {name: one.ledger for name, one in self._journals().items()}

    def _journals(self) -> dict[str, AgentDisk | TallierDisk]:
        return {**self._agents, **self._talliers}

    def _check_charges(self) -> None:
        """Each account is charged once for each round, the same here and there, and for nothing else."""
        paid: dict[tuple[str, str, str], int] = {}
        for entry in self._coordinator.entries:
            if entry.kind == "post":
                name = (entry.reservation_id, entry.account, entry.level)
                if name in paid:
                    raise Violation("charged once", f"{name} is posted twice")
                paid[name] = entry.amount
        rounds = [one for job_id in self._numbers for one in self._coordinator.rounds(job_id)]
        by_digest = {one.round_digest: one for one in rounds if one.round_digest}
        known = {f"{one.job_id}/{one.number}" for one in rounds}
        for reservation, account, _ in paid:
            if reservation not in known and not reservation.startswith(SET_ASIDE):
                raise Violation("charged once", f"{account} is charged for {reservation}, which is no round")
        for one in rounds:
            reservation = f"{one.job_id}/{one.number}"
            whom = {account for name, account, _ in paid if name == reservation}
            missing = {"federation", *(f"agent:{agent}" for agent in one.contributors)} - whom
            if one.contributors and one.state in ("posted", "opened") and missing:
                raise Violation("charged once", f"{reservation} was not charged to {sorted(missing)}")
            if one.state == "waiting" and whom:
                raise Violation("charged once", f"{reservation} was never asked and is charged to {sorted(whom)}")
        by_name = {f"{one.job_id}/{one.number}": one for one in rounds}
        for account in sorted({account for _, account, _ in paid}):
            for level in LEVELS:
                mine = ((name, nano) for (name, *of), nano in paid.items() if of == [account, level])
                charges = [(by_name[name], nano) for name, nano in mine if name in by_name]
                self._check_price(account, level, charges)
        for agent, journal in self._agents.items():
            own = journal.charges()
            if any(count != 1 for _, count in own.values()):
                raise Violation("charged once", f"{agent} has charged itself twice for a round")
            if any(digest not in by_digest for digest, _ in own):
                raise Violation("charged once", f"{agent} has charged itself for a round of no job")
            for level in LEVELS:
                of_level = [(by_digest[name], amount) for (name, of), (amount, _) in own.items() if of == level]
                self._check_price(f"{agent} itself", level, of_level)
                for current, amount in of_level:
                    task = self._task_of(current.job_id)
                    told = paid.get((f"{current.job_id}/{current.number}", f"agent:{agent}", level))
                    # Of a model's steps both have the same prices, by the check above, and each its own first step.
                    has_own_first = task.sampled is not None and price(task, level, current.num_queries) is not None
                    if told not in (None, amount) and not has_own_first:
                        raise Violation(
                            "charged once", f"{agent} has charged itself {amount} for what is {told} elsewhere"
                        )
            for one in rounds:
                is_summed = one.state == "opened" and agent in one.contributors
                if is_summed and (one.round_digest, "instance") not in own:
                    raise Violation("charged once", f"{agent} was summed and has charged itself nothing")

    def _check_price(self, account: str, level: Level, paid: list[tuple[RoundRecord, int]]) -> None:
        """An account has paid what its rounds cost: of each task in the order of its ledger."""
        of_tasks: dict[str, list[Paid]] = {}
        for one, amount in paid:
            digest = self._task_of(one.job_id).digest
            of_tasks.setdefault(digest, []).append(Paid(f"{one.job_id}/{one.number}", one.num_queries, amount))
        for digest, charges in of_tasks.items():
            if wrong := wrongly_paid(self._by_digest[digest], level, charges):
                raise Violation("the price", f"{account} has {wrong}")

    def _check_queries(self) -> None:
        """Of every task each query was asked once at most, and what was not asked can be asked again."""
        for task in self._template.tasks:
            record = self._tasks.get(task.digest)
            jobs = [job_id for job_id in self._numbers if self._task_of(job_id).digest == task.digest]
            rounds = [one for job_id in jobs for one in self._coordinator.rounds(job_id) if one.state != "waiting"]
            asked = [query for one in rounds for query in range(one.first_query, one.first_query + one.num_queries)]
            if len(asked) != len(set(asked)):
                raise Violation("asked once", f"queries {sorted(asked)} of a task were asked, some of them twice")
            returned = self._tasks.returned([task.digest]).get(task.digest, 0)
            if record.next_query - returned != len(asked):
                raise Violation(
                    "no query is lost",
                    f"{record.next_query} queries were given out, {returned} came back, {len(asked)} were asked",
                )
