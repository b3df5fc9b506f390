"""One schedule: who has the next turn, what goes wrong meanwhile, and in the end, with all faults gone, whether every
job ends.

Everything runs in one thread, so the seed decides everything. Each party's code runs in its own name (`_enter`): at
every moment between two of its effects (labeler.system.faults.between) it can be killed. Whatever it had only in memory
is then gone; its next turn boots it from its home.

Longer than 400 lines because a schedule is one thing: a party that takes a turn, dies or is disturbed changes what all
others meet.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache, partial
from pathlib import Path
from typing import Any, TypeVar, cast
from unittest.mock import patch

from sqlalchemy import Engine, create_engine

from labeler.errors import LabelerError, StorageFull
from labeler.rounds.coordinator import TURN_GRACE_S
from labeler.system.faults import listening
from labeler.system.keys import PartyKeys
from tests.full_disk import no_room
from tests.simulation.case import Case, JobPlan, Rates, source
from tests.simulation.contract import Outcome, VirtualClock
from tests.simulation.homes import REQUESTER, VARIANTS, Template, Templates
from tests.simulation.parties import MeetingRoom, Party, boot_agent, boot_tallier
from tests.simulation.post import Door, Killed, LossyMailbox, Network
from tests.simulation.subject import StepwiseCoordinator
from tests.simulation.ways import Way, questions, sizes_of
from tests.simulation.witness import Violation, Witness
from workers.agent.policy import Policy
from workers.party.home import KEYS_FILE, create_tallier_home, read_tallier_config

COORDINATOR = "coordinator"
SETTLE_S = 2 * 3600.0
"""After the last deadline: every round is over for everybody by then."""

_STEP_S = 0.5
_IDLE = 0.15
"""Chance that somebody has a turn whether or not there is anything to do."""

_FORGET_S = 8 * 86_400.0
"""After which talliers forget what they kept of rounds that were summed."""

_CALM_TURNS = 90
_LONG_TURNS = 30
_QUIET_TURNS = 3
_LAST_TURNS = 24
_LEAP_S = 120.0

T = TypeVar("T")


@dataclass
class _Agent:
    """The simulation's knowledge of an agent, apart from its home."""

    is_rekeyed: bool = False
    is_open: bool = True
    is_capped: bool = False
    is_absent: bool = False


@dataclass
class _Job:
    number: int
    plan: JobPlan
    task_digest: str
    job_id: str = ""
    is_refused: bool = False
    submitted_step: int = 0
    is_cancelled: bool = False


@dataclass
class _Counts:
    steps: int = 0
    moments: int = 0
    faults: Counter[str] = field(default_factory=Counter)


class World:
    """A federation and its schedule; see the module.

    Args:
        case: what runs.
        template: homes of its shape.
        folder: an empty folder, best in memory.
        traced: keep a trace.
    """

    def __init__(self, case: Case, template: Template, folder: Path, *, traced: bool = False) -> None:
        self.case = case
        self.template = template
        self.folder = folder / "federation"
        self.clock = VirtualClock()
        self._draw = source(case.seed, "schedule")
        self._traced = traced
        self._trace: list[str] = []
        self._counts = _Counts()
        self._stack: list[str] = []
        self._armed: dict[str, int] = {}
        self._later = source(case.seed, "later schedule")
        self._full: dict[str, int] = {}
        self._alive: dict[str, Party | StepwiseCoordinator] = {}
        self._agents = {
            name: _Agent(is_absent=number in case.absent, is_capped=number in case.capped)
            for number, name in enumerate(template.agents)
        }
        self._jobs = [
            _Job(number, plan, template.tasks[number % len(template.tasks)].digest)
            for number, plan in enumerate(case.jobs)
        ]
        self._room = MeetingRoom()
        template.copy(self.folder)
        self._name_agents()
        for number, name in enumerate(template.agents):
            self._use_records(name, VARIANTS[1] if case.shorter and number == 0 else VARIANTS[0])
        self.witness = Witness(
            self.folder,
            template,
            clock=self.clock.utc,
            step=lambda: self._counts.steps,
            unnamed=bool(case.unnamed),
        )
        self.mailbox = LossyMailbox(
            source(case.seed, "mailbox"), now=self.clock.unix_s, overheard=self.witness, moment=self._moment
        )
        self._steps_away = 0
        if case.away is not None:
            self.mailbox.leaves, self._steps_away = template.agents[case.away[0]], case.away[1]
        self._network = Network(
            source(case.seed, "network"),
            overheard=self.witness,
            reach=self._coordinator,
            enter=lambda action: self._enter(COORDINATOR, action),
        )
        self._set_rates(case.rates)

    def run(self) -> Outcome:
        """Run the schedule to its end, or to the first violation."""
        violation = ""
        with listening(self._moment):
            try:
                self._stormy()
                self._calm()
                self.witness.check_end()
            except Violation as found:
                violation = str(found)
                self._note(f"VIOLATION {violation}")
            finally:
                self.close()
        counts, mailbox, network = self._counts, self.mailbox, self._network
        counts.faults.update(lost=mailbox.lost + network.lost, doubled=mailbox.doubled + network.doubled)
        counts.faults.update(held=mailbox.held, replayed=network.replayed)
        return Outcome(
            seed=self.case.seed,
            steps=counts.steps,
            moments=counts.moments,
            faults=counts.faults,
            states=self.witness.states,
            violation=violation,
            trace=tuple(self._trace),
            wire=tuple(self.witness.wire),
        )

    def close(self) -> None:
        """Let go of everything."""
        for name in list(self._alive):
            self._bury(name)
        self.witness.close()

    # The two parts of a schedule.

    def _stormy(self) -> None:
        for step in range(self.case.steps):
            self._requests(step)
            self._come_back()
            self._mischief()
            self._turn(self._whose_turn())
            self._pass(self._draw.choice((0.0, 0.1, _STEP_S, 2.0)))

    def _come_back(self) -> None:
        """Bring an agent back that went away when it was first asked."""
        if not self.mailbox.away:
            return
        if self.case.away is not None and self._steps_away == self.case.away[1]:
            self._counts.faults["away"] += 1
            self._note(f"{self.mailbox.away} is away")
        self._steps_away -= 1
        if self._steps_away == 0:
            self._note(f"{self.mailbox.away} is back")
            self.mailbox.away = ""

    def _whose_turn(self) -> str:
        """Mostly somebody who has something to do: the coordinator, or who has mail."""
        draw, names = self._draw, self._names()
        if draw.random() < _IDLE:
            return draw.choice(names)
        busy = [name for name in names[1:] if name in self._alive and self.mailbox.all_pending([name])[name]]
        return draw.choice((COORDINATOR, *busy, *(name for name in names if name not in self._alive)))

    def _calm(self) -> None:
        """No more faults: every job comes to an end, before its deadline where nothing hinders it."""
        self._armed.clear()
        self._full.clear()
        self.mailbox.leaves = self.mailbox.away = ""
        self._set_rates(Rates())
        for name, agent in self._agents.items():
            if not agent.is_open:
                agent.is_open = True
                self._note(f"{name} allows everything again")
        self._requests(None)
        self.mailbox.release(all_of_them=True)
        self._note("calm")
        quiet = 0
        for number in range(_CALM_TURNS):
            before = self._all_turns(everybody=number % 5 == 4)  # mostly who has nothing to do is not asked
            quiet = quiet + 1 if self.witness.all_ended else 0
            if quiet >= _QUIET_TURNS:
                break
            if self.case.release != "winner" or number < _CALM_TURNS - _LONG_TURNS:
                self._pass(_STEP_S if before else 2 * _STEP_S)
            else:
                # A lost ask for winners is repeated when its turn has lasted as long as winners may take.
                self._pass(TURN_GRACE_S / 3)
        if not self.witness.all_ended and self._must_end:
            raise Violation("liveness", f"jobs are {self.witness.states} after {_CALM_TURNS} calm turns, not ended")
        self._pass(max((one.plan.deadline_s for one in self._jobs), default=0.0) + SETTLE_S + self.clock.back_s)
        for _ in range(_LAST_TURNS):
            self._all_turns(everybody=False)
            if self.witness.all_ended:
                break
            self._pass(2.0)
        for name in self._names()[1:]:
            if self.witness.keeps_something(name):
                self._turn(name)
        if not self.witness.all_ended:
            raise Violation("liveness", f"jobs are {self.witness.states} long after their deadlines")
        self._all_turns(everybody=False)
        self._pass(_FORGET_S)
        for name in self._names()[1:]:
            if self.witness.keeps_something(name):
                self._turn(name)
        if self._must_complete and set(self.witness.states) - {"completed"}:
            raise Violation("completion", f"nothing stood in the way of any job, and they are {self.witness.states}")

    @property
    def _must_complete(self) -> bool:
        """Return whether no job has a reason to end otherwise."""
        return self._must_end and not self.case.unnamed

    @property
    def _must_end(self) -> bool:
        """Whether no job has to wait for its deadline: what fails only costs time, and there was enough of it."""
        least_s = 500 + self.clock.passed_s / 10
        return not self.case.has_reasons_to_wait and all(one.plan.deadline_s >= least_s for one in self._jobs)

    def _all_turns(self, *, everybody: bool) -> bool:
        """A turn of the coordinator and of everybody who has mail; whether anybody had any."""
        self._turn(COORDINATOR)
        had_mail = False
        for name in self._names()[1:]:
            has_mail = self.mailbox.all_pending([name])[name] > 0
            had_mail = had_mail or has_mail
            if has_mail or everybody or name not in self._alive:
                self._turn(name)
        return had_mail

    # Requesters and disturbances.

    def _requests(self, step: int | None) -> None:
        for job in self._jobs:
            is_due = step is None or step >= job.plan.at_step
            if is_due and not job.job_id and not job.is_refused:
                self._submit(job, step or 0)
            after = job.plan.cancel_after
            is_named = bool(job.job_id) and not job.is_cancelled and after is not None
            if is_named and step is not None and step - job.submitted_step >= (after or 0):
                job.is_cancelled = True
                self._note(f"job {job.number} is cancelled")
                self._as_coordinator(partial(StepwiseCoordinator.cancel, job_id=job.job_id))

    def _submit(self, job: _Job, step: int) -> None:
        coordinator = self._coordinator()
        if coordinator is None:
            return
        job.submitted_step = step
        try:
            job.job_id = self._enter(COORDINATOR, lambda: _submit(coordinator, job, self.case.way))
            self.witness.submitted(job.job_id, job.number)
            self._note(f"job {job.number} is submitted")
        except Killed:
            # The requester does not know whether it was taken: the witness looks it up.
            found = self.witness.find_new_job()
            if found:
                job.job_id = found
                self.witness.submitted(found, job.number)
        except LabelerError as error:
            job.is_refused = not isinstance(error, StorageFull)  # then its requester asks again
            self._note(f"job {job.number} is refused: {error.problem_type}")

    def _mischief(self) -> None:
        rates, draw = self.case.rates, self._draw
        happened = self._counts.faults
        self.mailbox.release()
        if draw.random() < rates.kill:
            name = draw.choice(self._names())
            if name in self._alive:
                happened["killed"] += 1
                self._note(f"{name} dies")
                self._bury(name)
        if draw.random() < rates.arm:
            self._armed[draw.choice(self._names())] = draw.randrange(14)
        if draw.random() < rates.empty:
            happened["emptied"] += 1
            self._note("the mailbox is emptied")
            self.mailbox.empty()
        if draw.random() < rates.replay:
            self._network.replay()
        if draw.random() < rates.rekey:
            self._change_keys(draw.choice(self.template.agents))
        if draw.random() < rates.records:
            name, variant = draw.choice(self.template.agents), draw.choice(VARIANTS)
            if not (self.case.shorter and name == self.template.agents[0]):
                happened["records changed"] += 1
                self._use_records(name, variant)
                self._note(f"{name} has now {variant} of its records")
        if draw.random() < rates.policy:
            agent = self._agents[draw.choice(self.template.agents)]
            agent.is_open = not agent.is_open
            happened["policy changed"] += 1
        if draw.random() < rates.leap:
            happened["leaps"] += 1
            self._pass(draw.choice((_LEAP_S, 700.0)))
        later = self._later
        if later.random() < rates.full:
            name = COORDINATOR if later.random() < 0.4 else later.choice(self._names())
            self._full[name] = later.randrange(1, 16)
            self._note(f"the disk of {name} is full")
        if later.random() < rates.back:
            happened["clock set back"] += 1
            self.clock.back_s += later.choice((1.0, 90.0, 5000.0))
            self._note(f"the clock is {self.clock.back_s:.0f} s behind")

    def _change_keys(self, name: str) -> None:
        agent, keys = self._agents[name], self.template.spare[name]
        if agent.is_rekeyed:
            return
        self._counts.faults["rekeyed"] += 1
        self._note(f"{name} gets other keys")
        new = keys.public
        if self._as_coordinator(lambda coordinator: coordinator.enrol_anew(name, new.verify_key, new.seal_key)):
            agent.is_rekeyed = True
            keys.save(self.folder / name / KEYS_FILE)
            self._bury(name)

    def _as_coordinator(self, action: Callable[[StepwiseCoordinator], None]) -> bool:
        coordinator = self._coordinator()
        if coordinator is None:
            return False
        try:
            self._enter(COORDINATOR, lambda: action(coordinator))
        except (Killed, StorageFull):
            return False
        except LabelerError as error:
            self._note(f"coordinator says {error.problem_type}")
        return True

    # Turns.

    def _turn(self, name: str) -> None:
        if name == self.mailbox.away or (name in self._agents and self._agents[name].is_absent):
            return
        self._counts.steps += 1
        process = self._living(name)
        if process is None:
            return
        try:
            if name == COORDINATOR:
                self._enter(name, self._here().tick)
            elif not self._enter(name, cast(Party, process).turn):
                self._note(f"{name} is told to stop")
                self._bury(name)
        except Killed:
            pass
        except LabelerError as error:
            raise Violation("a party ended by itself", f"{name}: {type(error).__name__}: {error}") from error
        self.witness.look()

    def _living(self, name: str) -> Party | StepwiseCoordinator | None:
        """The process of a name, booted where it is not there; None where it died of that."""
        if name not in self._alive:
            try:
                self._alive[name] = self._enter(name, lambda: self._boot(name))
            except Killed:
                return None
            except StorageFull:
                self._note(f"{name} does not start: its disk is full")
                return None
            except LabelerError as error:
                raise Violation("a home cannot be opened", f"{name}: {type(error).__name__}: {error}") from error
            self._note(f"{name} starts")
        return self._alive[name]

    def _boot(self, name: str) -> Party | StepwiseCoordinator:
        home = self.folder / name
        if name == COORDINATOR:
            return StepwiseCoordinator(home, self.mailbox, self.clock)
        door = Door(self._network, name, self._moment)
        if name in self._agents:
            return boot_agent(home, door=door, policy=lambda: self._policy(name), clock=self.clock)
        return boot_tallier(home, door=door, room=self._room, clock=self.clock)

    def _policy(self, name: str) -> Policy:
        agent = self._agents[name]
        return self.template.policy(is_open=agent.is_open, is_capped=agent.is_capped)

    def _coordinator(self) -> StepwiseCoordinator | None:
        """The coordinator, if it is there or can be started."""
        is_inside = bool(self._stack) and self._stack[-1] == COORDINATOR
        return None if is_inside or self._living(COORDINATOR) is None else self._here()

    def _here(self) -> StepwiseCoordinator:
        return cast(StepwiseCoordinator, self._alive[COORDINATOR])

    def _enter(self, name: str, action: Callable[[], T]) -> T:
        """Run something in a party's name; where it is killed of it, it is gone."""
        self._stack.append(name)
        try:
            return action()
        except Killed as killed:
            if self._stack[-1] == name:
                self._counts.faults["killed"] += 1
                self._note(f"{name} dies at {killed}")
                self._stack[-1] = ""  # what it does while it is taken down is nobody's
                self._bury(name)
            raise
        finally:
            self._stack.pop()

    def _moment(self, name: str) -> None:
        """Note a moment between two effects of the running party."""
        who = self._stack[-1] if self._stack else ""
        if not who:
            return
        self._counts.moments += 1
        if name == "commit" and self._full.get(who):
            self._full[who] -= 1
            self._counts.faults["disk full"] += 1
            raise no_room()
        left = self._armed.get(who)
        if left is None:
            return
        if left > 0:
            self._armed[who] = left - 1
            return
        del self._armed[who]
        raise Killed(name)

    def _bury(self, name: str) -> None:
        process = self._alive.pop(name, None)
        if process is not None:
            self._enter("", process.close)

    # Small things.

    def _name_agents(self) -> None:
        """Return where the last tallier's site names the agents it sums, it names all but some."""
        if not self.case.unnamed:
            return
        agents = self.template.agents
        left_out = {agents[number] for number in self.case.unnamed}
        keys = {name: PartyKeys.load(self.folder / name / "keys.json").public.verify_key for name in agents}
        home = self.folder / self.template.talliers[-1]
        named = {name: key for name, key in keys.items() if name not in left_out}
        create_tallier_home(home, read_tallier_config(home).model_copy(update={"agents": named}))

    def _names(self) -> tuple[str, ...]:
        return (COORDINATOR, *self.template.agents, *self.template.talliers)

    def _use_records(self, name: str, variant: str) -> None:
        new = self.folder / name / "records.new"
        new.symlink_to(self.template.shard(name, variant))
        new.replace(self.folder / name / "records")

    def _pass(self, seconds: float) -> None:
        self.clock.passed_s += seconds

    def _set_rates(self, rates: Rates) -> None:
        self.mailbox.rates = self._network.rates = rates

    def _note(self, text: str) -> None:
        if self._traced:
            self._trace.append(f"{self._counts.steps:5d} {self.clock.passed_s:10.1f} s  {text}")


def _submit(coordinator: StepwiseCoordinator, job: _Job, way: Way) -> str:
    plan = job.plan
    sizes = sizes_of(way, plan.sizes)
    return coordinator.submit(
        f"job-{job.number}",
        job.task_digest,
        questions(way, job.number, sizes),
        sizes=sizes,
        deadline_s=plan.deadline_s,
        by=REQUESTER,
    )


@contextmanager
def shared_statements() -> Iterator[None]:
    """Let SQLite journals that are opened meanwhile share the statements that they compile.

    A compiled statement belongs to a dialect, and each engine makes one. A service opens one journal; a schedule opens
    dozens, and would compile everything for each of them, which takes longer than what they execute.
    """
    first = _first()

    def alike(url: str, **options: Any) -> Engine:
        engine = create_engine(url, **options)
        engine.dialect = first.dialect
        engine._compiled_cache = first._compiled_cache
        return engine

    with patch("labeler.ledger.database.create_engine", alike):
        yield


@cache
def _first() -> Engine:
    """Connected once, to nothing: a dialect learns on its first connection which SQLite it speaks to."""
    engine = create_engine("sqlite://")
    engine.connect().close()
    engine.dispose()
    return engine


def run_case(case: Case, templates: Templates, folder: Path, *, traced: bool = False) -> Outcome:
    """Run one schedule in an empty folder."""
    with shared_statements():
        template = templates.of(case.shape)
        return World(case, template, folder, traced=traced).run()
