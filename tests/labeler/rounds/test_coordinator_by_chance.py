"""The coordinator's machine under every order of events that chance finds, with crashes before and after each commit.

A journal of the test's own keeps what the machine stores and nothing else, refuses what must never be, and is all that
is left after a crash. What leaves is compared with it: nothing is sent that is not stored, each round is charged once,
no sum is asked for before its charge is posted, contributors are fixed in a commit before that, a release comes once.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from labeler.errors import BadData, ProtocolViolation
from labeler.rounds import effects as fx
from labeler.rounds.coordinator import step
from labeler.rounds.effects import JobRun
from tests.labeler.rounds.test_coordinator import AGENTS, DEADLINE_S, TALLIERS, Table, parties, release, restarted

PARTIES = (*AGENTS, *TALLIERS)
ENDS = ("completed", "failed", "refused", "expired")


class Journal:
    """The stored state, checked by independent rules."""

    def __init__(self, run: JobRun) -> None:
        self.run = run
        self.posted: list[int] = []
        self.agreed_at: dict[int, int] = {}
        self.released: list[int] = []
        self.commits = 0

    def commit(self, stores: list[fx.Effect]) -> None:
        before, self.commits = self.run, self.commits + 1
        for one in stores:
            assert before.state not in ENDS or isinstance(one, fx.StoreReply), f"{one} after the end"
            self._keep(one)

    def _change(self, number: int, **fields: Any) -> None:
        rounds = list(self.run.rounds)
        rounds[number] = replace(rounds[number], **fields)
        self.run = replace(self.run, rounds=tuple(rounds))

    def _keep(self, store: fx.Effect) -> None:
        run = self.run
        match store:
            case fx.StoreBatches():
                for number, batch, digest in store.batches:
                    assert not run.rounds[number].round_digest
                    self._change(number, batch_digest=batch, round_digest=digest)
            case fx.StoreReply():
                self.run = replace(run, answers={**run.answers, store.agent_id: store.said})
            case fx.ReserveRounds():
                assert run.asked is None
                assert len(store.agents) >= run.task.quorum
                self.run = replace(run, asked=store.agents, state="collecting")
            case fx.Begin():
                assert run.rounds[store.number].state == "waiting"
                assert run.rounds[store.number].round_digest
                assert len(store.participants) >= run.task.quorum
                before = [one.state for one in run.rounds[: store.number]]
                assert set(before[:-1]) <= {"opened"}
                assert set(before[-1:]) <= {"posted", "opened"}, "nobody can refuse the one before any more"
                self._change(store.number, state="asked", participants=store.participants)
            case fx.StoreShareNote():
                assert run.rounds[store.number].state == "asked"
                self._change(store.number, has_shares=True)
            case fx.StoreHoldings():
                held = {**run.rounds[store.number].holdings, store.tallier_id: store.holdings}
                self._change(store.number, holdings=held)
            case fx.StoreRefusal():
                one = run.rounds[store.number]
                final = one.final | ({store.party_id} if store.is_final else set())
                self._change(store.number, refusals={**one.refusals, store.party_id: store.sentence}, final=final)
            case fx.FixContributors():
                assert run.rounds[store.number].state == "asked"
                assert all(one.state == "opened" for one in run.rounds[: store.number]), "charges keep their order"
                assert len(store.contributors) >= run.task.quorum
                assert set(store.contributors) <= set(run.rounds[store.number].participants)
                self._change(store.number, state="agreed", contributors=store.contributors)
                self.agreed_at[store.number] = self.commits
                self.run = replace(self.run, state="tallying")
            case fx.Post():
                assert run.rounds[store.number].state == "agreed"
                assert store.contributors == run.rounds[store.number].contributors
                assert self.agreed_at[store.number] < self.commits, "the contributors were durable before"
                assert store.number not in self.posted
                self.posted.append(store.number)
                self._change(store.number, state="posted")
            case fx.StoreSum():
                assert run.rounds[store.number].state == "posted"
                sums = {**run.rounds[store.number].sums, store.tallier_id: store.data}
                self._change(store.number, sums=sums)
            case fx.StoreRelease():
                assert run.rounds[store.number].state == "posted"
                assert len(run.rounds[store.number].sums) == run.task.talliers
                assert store.number not in self.released
                self.released.append(store.number)
                self._change(store.number, state="opened", sums={})
                self.run = replace(self.run, state=store.following)
            case fx.End():
                self.run = replace(run, state=store.state)
            case _:
                raise AssertionError(f"what is {store}?")


class Coordinator(RuleBasedStateMachine):
    """Events in any order; between them the process may die."""

    @initialize(rounds=st.integers(1, 2), dropouts=st.integers(0, 1), winner=st.booleans())
    def begin(self, rounds: int, dropouts: int, winner: bool) -> None:
        changes: dict[str, Any] = {"max_dropouts": dropouts}
        if winner:
            changes["release"] = "winner"
        table = Table(rounds=rounds, **changes)
        self.table = table
        self.steady_s, self.wall_s = 0.0, table.wall_s
        self.run = table.run
        self.journal = Journal(table.run)
        self.left: list[fx.Effect] = []

    @property
    def now(self) -> fx.Now:
        return fx.Now(self.wall_s, self.steady_s)

    def drive(self, event: fx.Event | None, dies: str = "never") -> None:
        """One event as a driver carries it out; with the process dying before or after the commit."""
        waiting: list[fx.Event | None] = [event]
        run = self.run
        stores: list[fx.Effect] = []
        sends: list[fx.Effect] = []
        while waiting:
            one = waiting.pop(0)
            run, effects = restarted(run, self.now) if one is None else step(run, one, self.now)
            if any(isinstance(effect, fx.Refuse) for effect in effects):
                assert effects == (effects[0],), "nothing counts of what is refused"
                return
            stores += [effect for effect in effects if isinstance(effect, fx.Store)]
            sends += [effect for effect in effects if isinstance(effect, fx.Send)]
            for effect in effects:
                waiting += self.computed(run, effect)
        if dies == "before the commit":
            self.restart()
            return
        if stores:
            self.journal.commit(stores)
        if dies == "after the commit":
            self.restart()
            return
        self.run = run
        for send in sends:
            self.check_sent(send)
        if run.is_storing:
            self.drive(fx.Stored())

    def restart(self) -> None:
        # A finished job is not read again.
        self.run = replace(self.journal.run, parties=self.run.parties)
        if self.run.state not in ENDS:
            self.drive(None)

    def computed(self, run: JobRun, effect: fx.Effect) -> list[fx.Event | None]:
        if isinstance(effect, fx.RequestSlot):
            return [fx.Admitted()]
        if isinstance(effect, fx.Prepare):
            batches = [(one.number, f"{one.number:064d}", f"{one.number + 50:064d}") for one in run.rounds]
            return [fx.QuestionsPrepared(tuple(batches))]
        if isinstance(effect, fx.MakeBodies):
            return [fx.BodiesMade(effect.number)]
        if isinstance(effect, fx.AskForTurn):
            return [fx.TurnGranted(effect.round_digest)]
        if isinstance(effect, fx.Unshard):
            return [fx.Opened(effect.number, release(run.rounds[effect.number].contributors))]
        return []

    def check_sent(self, send: fx.Effect) -> None:
        kept = self.journal.run
        if isinstance(send, fx.SendAsks | fx.OpenAt):
            one = kept.rounds[send.number]
            assert one.state != "waiting"
            assert one.participants
        if isinstance(send, fx.SendAsks):
            assert set(send.agents) <= set(kept.asked or ())
        if isinstance(send, fx.AskForSums):
            assert send.number in self.journal.posted
        if isinstance(send, fx.Relay):
            assert any(one.has_shares for one in kept.rounds)

    dying = st.sampled_from(("never", "never", "never", "before the commit", "after the commit"))
    agents = st.sampled_from(AGENTS)
    talliers = st.sampled_from(TALLIERS)

    def of_round(self, number: int) -> tuple[str, str]:
        return self.run.rounds[number % len(self.run.rounds)].round_digest or "9" * 64, self.run.task.digest

    @rule(dies=dying, after_s=st.sampled_from((0.0, 5.0, 40.0)))
    def tick(self, dies: str, after_s: float) -> None:
        self.steady_s += after_s
        self.wall_s += after_s
        self.drive(fx.Tick(), dies)

    @rule(dies=dying, agent=agents, answer=st.sampled_from(("willing", "willing", "willing", "later", "declined")))
    def answer(self, dies: str, agent: str, answer: Any) -> None:
        said = (
            fx.ProposalReply(answer, until_s=DEADLINE_S) if answer == "willing" else fx.ProposalReply(answer, "x", "no")
        )
        self.drive(fx.ReplyCame(agent, self.run.task.digest, said), dies)

    @rule()
    def everybody_is_willing(self) -> None:
        self.drive(fx.Tick())
        for agent in AGENTS:
            self.drive(fx.ReplyCame(agent, self.run.task.digest, fx.ProposalReply("willing", until_s=DEADLINE_S)))

    @rule(dies=dying, agent=st.sampled_from((*AGENTS, "stranger")), tallier=talliers, number=st.integers(0, 1))
    def share(self, dies: str, agent: str, tallier: str, number: int) -> None:
        self.drive(fx.ShareCame(*self.of_round(number), agent, tallier), dies)

    @rule(dies=dying, tallier=talliers, number=st.integers(0, 1), held=st.sets(agents), split=st.sampled_from("55556"))
    def holdings(self, dies: str, tallier: str, number: int, held: set[str], split: str) -> None:
        self.drive(fx.HoldingsCame(*self.of_round(number), tallier, dict.fromkeys(held, split * 32)), dies)

    @rule(dies=dying, number=st.integers(0, 1))
    def every_tallier_holds_all(self, dies: str, number: int) -> None:
        for tallier in TALLIERS:
            self.drive(fx.HoldingsCame(*self.of_round(number), tallier, dict.fromkeys(AGENTS, "5" * 32)), dies)

    @rule(dies=dying, party=st.sampled_from(PARTIES), number=st.integers(0, 1), is_final=st.booleans())
    def refusal(self, dies: str, party: str, number: int, is_final: bool) -> None:
        self.drive(fx.RefusalCame(*self.of_round(number), party, "no", is_final), dies)

    @rule(dies=dying, tallier=talliers, number=st.integers(0, 1), data=st.sampled_from((b"sum", b"sum", b"other")))
    def sum(self, dies: str, tallier: str, number: int, data: bytes) -> None:
        digest, of_task = self.of_round(number)
        stated = (digest, TALLIERS.index(tallier))
        self.drive(fx.SumCame(digest, of_task, tallier, self.run.task.release, stated, data), dies)

    @rule(dies=dying, gone=st.sets(st.sampled_from(PARTIES), max_size=1), rekeyed=st.sets(agents, max_size=1))
    def parties_change(self, dies: str, gone: set[str], rekeyed: set[str]) -> None:
        changed: dict[str, fx.Party | None] = {name: fx.Party(name, None, "9" * 64, "c" * 64, True) for name in rekeyed}
        self.drive(fx.PartiesChanged(parties(**(changed | dict.fromkeys(gone)))), dies)

    @rule(dies=dying, error=st.sampled_from((BadData("x"), ProtocolViolation("y"))), chance=st.integers(0, 9))
    def something_fails(self, dies: str, error: Any, chance: int) -> None:
        if chance == 0:
            self.drive(fx.Failed(error), dies)

    @invariant()
    def memory_and_journal_say_the_same(self) -> None:
        if hasattr(self, "run"):
            kept, known = self.journal.run, self.run
            assert (kept.state, kept.asked, kept.answers) == (known.state, known.asked, known.answers)
            names = ("state", "round_digest", "participants", "holdings", "refusals", "final", "contributors", "sums")
            for one, other in zip(kept.rounds, known.rounds, strict=True):
                assert all(getattr(one, name) == getattr(other, name) for name in (*names, "has_shares"))

    @invariant()
    def every_round_that_came_further_was_charged_once(self) -> None:
        if hasattr(self, "run"):
            further = [one.number for one in self.journal.run.rounds if one.state in ("posted", "opened")]
            assert sorted(self.journal.posted) == further


Coordinator.TestCase.settings = settings(deadline=None, max_examples=25, stateful_step_count=30)
TestCoordinatorByChance = Coordinator.TestCase
