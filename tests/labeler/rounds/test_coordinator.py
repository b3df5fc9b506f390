"""The coordinator's machine, without threads, clocks or stores: what it wants done, and what it refuses."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest

from labeler.errors import (
    BadData,
    LabelerError,
    NotReady,
    PrivacyRefusal,
    ProtocolViolation,
    QuorumNotReached,
    TooLarge,
    WrongDigest,
)
from labeler.release import Release
from labeler.rounds import effects as fx
from labeler.rounds.coordinator import LONGEST_PAUSE_S, REKEYED, step
from labeler.rounds.effects import JobRun, RoundRun
from tests.labeler.tasks import make_task

AGENTS = ("east", "north", "west")
TALLIERS = ("t0", "t1", "t2")
PATIENCE_S, AGAIN_S = 10.0, 4.0
DEADLINE_S = 1_000_000.0


task = partial(
    make_task, name="animals", classes=("cat", "dog", "owl"), k=5, sigma_votes=40.0, delta=1e-5, colluding_agents=1,
    max_dropouts=0, backbone_fingerprint="f" * 16, nonce="0" * 32,
)  # fmt: skip


def parties(**changes: fx.Party | None) -> dict[str, fx.Party]:
    found = {name: fx.Party(name, None, f"{number + 1}" * 64, "a" * 64, True) for number, name in enumerate(AGENTS)}
    found |= {name: fx.Party(name, number, f"{number + 5}" * 64, "b" * 64) for number, name in enumerate(TALLIERS)}
    for name, party in changes.items():
        if party is None:
            del found[name]
        else:
            found[name] = party
    return found


NO = fx.ProposalReply("declined", "policy-refusal", "no")
OTHER_NORTH = fx.Party("north", None, "9" * 64, "a" * 64, True)
HELD = dict.fromkeys(AGENTS, "5" * 32)


class Table:
    """One job on a table: events in, effects out; computations are done at once."""

    def __init__(self, *, rounds: int = 1, **changes: Any) -> None:
        self.steady_s, self.wall_s = 0.0, 500_000.0
        self.run = JobRun(
            job_id="job-1",
            task=task(**changes),
            participants=AGENTS,
            num_queries=2 * rounds,
            expires_at_s=DEADLINE_S,
            patience=fx.Patience(PATIENCE_S, AGAIN_S),
            state="queued",
            rounds=tuple(RoundRun(number, 2 * number, 2) for number in range(rounds)),
            parties=parties(),
        )
        self.is_prepared = True
        self.is_turn = True
        self.too_large = False
        self.opens: Release | LabelerError | None = None
        self.effects: list[fx.Effect] = []

    @property
    def now(self) -> fx.Now:
        return fx.Now(self.wall_s, self.steady_s)

    def tell(self, event: fx.Event) -> list[fx.Effect]:
        """Everything that one event leads to, computations among it, and what is stored made durable."""
        found: list[fx.Effect] = []
        waiting = [event]
        while waiting:
            self.run, effects = step(self.run, waiting.pop(0), self.now)
            found += effects
            for effect in effects:
                waiting += self.computed(effect)
            if not waiting and self.run.is_storing:
                waiting.append(fx.StepStored())
        self.effects += found
        return found

    def computed(self, effect: fx.Effect) -> list[fx.Event]:
        if isinstance(effect, fx.RequestSlot):
            return [fx.JobAdmitted()]
        if isinstance(effect, fx.Prepare) and self.is_prepared:
            batches = [(number, f"{number:064d}", f"{number + 50:064d}") for number in self.run.untied]
            return [fx.QuestionsPrepared(tuple(batches))]
        if isinstance(effect, fx.MakeBodies):
            too_large = fx.JobFailed(TooLarge("too large"), effect.number)
            return [too_large] if self.too_large else [fx.BodiesMade(effect.number)]
        if isinstance(effect, fx.AskForTurn) and self.is_turn:
            self.is_turn = False
            return [fx.TurnGranted(effect.round_digest)]
        if isinstance(effect, fx.Unshard):
            opens = self.opens or release(self.run.rounds[effect.number].contributors)
            return [fx.JobFailed(opens) if isinstance(opens, LabelerError) else fx.ReleaseKnown(effect.number, opens)]
        return []

    def tick(self, *, after_s: float = 0.0, mail: dict[str, int] | None = None) -> list[fx.Effect]:
        self.steady_s += after_s
        self.wall_s += after_s
        return self.tell(fx.Tick(mail or {}))

    def say(self, **said: str | fx.ProposalReply) -> list[fx.Effect]:
        found = []
        for agent, word in said.items():
            known = {"yes": fx.ProposalReply("willing", until_s=DEADLINE_S), "no": NO}
            answer = known[word] if isinstance(word, str) else word
            found += self.tell(fx.ReplyCame(agent, self.run.task.digest, answer))
        return found

    def message(self, kind: type[Any], *more: Any, number: int = 0) -> list[fx.Effect]:
        return self.tell(kind(self.run.rounds[number].round_digest, self.run.task.digest, *more))

    def hold(self, *agents: str, number: int = 0) -> list[fx.Effect]:
        held = dict.fromkeys(agents, "5" * 32)
        return [one for tallier in TALLIERS for one in self.message(fx.HoldingsCame, tallier, held, number=number)]

    def sum(self, *talliers: str, number: int = 0) -> list[fx.Effect]:
        found = []
        kind = self.run.task.release
        for tallier in talliers:
            stated = (self.run.rounds[number].round_digest, TALLIERS.index(tallier))
            found += self.message(fx.SumCame, tallier, kind, stated, tallier.encode(), number=number)
        return found

    def asked(self) -> Table:
        self.tick()
        self.say(east="yes", north="yes", west="yes")
        return self

    def posted(self) -> Table:
        self.asked().hold(*AGENTS)
        return self

    def agreed(self) -> list[fx.Effect]:
        """Let every tallier report all shares, and make nothing durable: return what the last report leads to."""
        digests = (self.run.rounds[0].round_digest, self.run.task.digest)
        for tallier in TALLIERS:
            self.run, found = step(self.run, fx.HoldingsCame(*digests, tallier, HELD), self.now)
        return list(found)


def restarted(job: JobRun, now: fx.Now) -> tuple[JobRun, tuple[fx.Effect, ...]]:
    """Step a job without what only memory holds, as a new process reads it from its journal."""
    rounds = tuple(replace(one, done=frozenset(), is_made=False, decided_at_s=None, gone_at_s={}) for one in job.rounds)
    fresh = replace(job, rounds=rounds, is_admitted=False, is_storing=False, decided_at_s=None, asked_at_s={}, mail={})
    return step(fresh, fx.Tick(), now)


def release(contributors: tuple[str, ...] = AGENTS, **changes: Any) -> Release:
    fields: dict[str, Any] = {
        "kind": "histogram",
        "labels": np.zeros(2, np.int16),
        "noisy_votes": np.zeros((2, 3)),
        "contributors": frozenset(contributors),
        "is_seeded": False,
    }
    return Release(**(fields | changes))


def of(found: list[fx.Effect], *kinds: type[Any]) -> list[Any]:
    return [one for one in found if isinstance(one, kinds)]


def names(found: list[fx.Effect]) -> list[str]:
    return [type(one).__name__ for one in found if isinstance(one, fx.Store)]


def refusal(found: list[fx.Effect]) -> LabelerError:
    (only,) = of(found, fx.RefuseMessage)
    assert isinstance(only.error, LabelerError)
    return only.error


def ended(found: list[fx.Effect]) -> fx.End:
    (only,) = of(found, fx.End)
    assert isinstance(only, fx.End)
    return only


def test_a_job_goes_its_way_in_the_order_that_keeps_the_promise() -> None:
    table = Table()
    first = table.tick()
    assert of(first, fx.SendProposals) == [fx.SendProposals(AGENTS)]
    table.say(east="yes", north="yes")
    assert not of(table.effects, fx.ReserveRounds)
    asked = table.say(west="yes")
    assert names(asked) == ["StoreReply", "ReserveRounds", "Begin"]
    assert of(asked, fx.OpenAt, fx.SendAsks) == [fx.SendAsks(0, AGENTS)]
    shared = table.message(fx.ShareCame, "east", "t0")
    assert of(shared, fx.OpenAt, fx.Relay) == [fx.OpenAt(0, TALLIERS), fx.Relay()], "once there is something to hold"
    assert not of(table.message(fx.ShareCame, "north", "t0"), fx.OpenAt)
    held = table.hold(*AGENTS)
    assert names(held) == ["StoreHoldings", "StoreHoldings", "StoreHoldings", "FixContributors", "Post"]
    assert of(held, fx.AskForSums) == [fx.AskForSums(0, TALLIERS)]
    assert not of(table.sum("t0", "t1"), fx.Unshard)
    opened = table.sum("t2")
    assert names(opened) == ["StoreSum", "StoreRelease"]
    assert of(opened, fx.TellSettled) == [fx.TellSettled((0,))]
    assert table.run.state == "completed"
    assert table.run.rounds[0].sums == {}


def test_contributors_are_durable_before_the_charge_is_even_asked_for() -> None:
    """The step that fixes them ends there; only `Stored` begins the next."""
    table = Table().asked()
    assert names(table.agreed()) == ["StoreHoldings", "FixContributors"]
    assert table.run.is_storing
    digests = (table.run.rounds[0].round_digest, table.run.task.digest)
    for event in (fx.Tick(), fx.HoldingsCame(*digests, "t0", HELD), fx.PartiesChanged(parties())):
        table.run, found = step(table.run, event, table.now)
        assert not of(list(found), fx.Post, fx.AskForSums)
    table.run, found = step(table.run, fx.StepStored(), table.now)
    assert names(list(found)) == ["Post"]
    stores = [place for place, one in enumerate(found) if isinstance(one, fx.Post)]
    sends = [place for place, one in enumerate(found) if isinstance(one, fx.AskForSums)]
    assert sends == [] or stores < sends


def test_rounds_are_asked_one_after_the_other() -> None:
    table = Table(rounds=3).asked()
    for number in range(3):
        assert [one.number for one in of(table.effects, fx.SendAsks)] == list(range(number + 1))
        table.hold(*AGENTS, number=number)
        found = table.sum(*TALLIERS, number=number)
        assert of(found, fx.StoreRelease)[0].following == ("completed" if number == 2 else "collecting")
    assert [one.number for one in of(table.effects, fx.Post)] == [0, 1, 2]


def test_a_job_that_loses_its_quorum_before_anybody_is_asked_is_refused() -> None:
    table = Table()
    table.tick()
    no = replace(NO, sentence="not this one\x1b[2J")
    assert not of(table.say(north=no), fx.End), "those who are about to answer are still heard"
    found = table.say(east="yes", west="yes")
    assert ended(found).state == "refused"
    assert "north says: not this one?[2J" in str(ended(found).error)
    assert of(found, fx.SendWithdrawn)[0].agents == ("east", "west")
    assert not of(table.effects, fx.Begin, fx.Post)


def test_a_lost_quorum_is_not_waited_for_longer_than_the_patience() -> None:
    table = Table()
    table.tick()
    table.say(north="no")
    assert not of(table.tick(after_s=PATIENCE_S - 0.1), fx.End)
    assert ended(table.tick(after_s=0.2)).state == "refused"


def test_who_declined_is_not_asked_where_a_quorum_remains_and_who_is_silent_is_waited_for_with_patience() -> None:
    table = Table(max_dropouts=1)
    table.tick()
    found = table.say(east="yes", west="yes")
    assert not of(found, fx.ReserveRounds)
    found = table.tick(after_s=PATIENCE_S)
    assert of(found, fx.ReserveRounds) == [fx.ReserveRounds(("east", "west"))]
    assert set(table.run.rounds[0].participants) == {"east", "west"}
    late = table.say(north="yes")
    assert of(late, fx.SendWithdrawn) == [fx.SendWithdrawn(("north",))]


def test_a_job_that_waits_for_a_person_expires_at_no_charge() -> None:
    table = Table()
    table.tick()
    table.say(east="yes", west="yes", north=fx.ProposalReply("later", "awaiting-approval", "a person has to approve"))
    assert of(table.tick(after_s=AGAIN_S), fx.SendProposals) == [fx.SendProposals(("north",))]
    found = table.tick(after_s=DEADLINE_S)
    assert ended(found).state == "expired"
    assert "north had not agreed" in str(ended(found).error)
    assert not of(table.effects, fx.Begin)


def test_a_posted_round_does_not_expire() -> None:
    table = Table().posted()
    assert not of(table.tick(after_s=DEADLINE_S), fx.End)
    table.sum(*TALLIERS)
    assert table.run.state == "completed"


def test_a_batch_that_fits_into_no_message_is_not_asked() -> None:
    table = Table()
    table.too_large = True
    table.asked()
    assert ended(table.effects).state == "failed"
    assert not of(table.effects, fx.Begin, fx.SendAsks)


def test_nobody_is_asked_while_a_tallier_is_missing() -> None:
    table = Table()
    table.run = replace(table.run, parties=parties(t1=None))
    table.asked()
    assert not of(table.effects, fx.SendProposals, fx.Begin)
    found = table.tell(fx.PartiesChanged(parties()))
    assert of(found, fx.SendAsks)


def test_refusals_of_all_end_the_job_and_one_that_passes_does_not_take_a_final_one_back() -> None:
    table = Table().asked()
    table.message(fx.RefusalCame, "north", "no", True)
    assert not of(table.message(fx.RefusalCame, "north", "later", False), fx.StoreRefusal)
    table.hold()
    table.message(fx.RefusalCame, "east", "no", True)
    found = table.message(fx.RefusalCame, "west", "no", True)
    assert ended(found).state == "failed", "it was begun, so it is not called refused"
    assert isinstance(ended(found).error, QuorumNotReached)
    assert table.run.rounds[0].final == set(AGENTS)


def test_an_agent_whose_keys_were_changed_is_given_up_once_every_tallier_has_reported_and_a_moment_has_passed() -> None:
    table = Table(max_dropouts=1).asked()
    before = table.run.rounds[0].participants
    table.tell(fx.PartiesChanged(parties(north=OTHER_NORTH)))
    found = table.tick(after_s=AGAIN_S)
    assert of(found, fx.SendAsks) == [fx.SendAsks(0, ("east", "west"))], "another answer of north's pays for nothing"
    assert of(found, fx.OpenAt)
    assert table.run.rounds[0].participants == before, "talliers are told the keys that the round began with"
    found = table.hold("east", "west")
    assert not of(found, fx.FixContributors, fx.StoreRefusal)
    found = table.tick(after_s=PATIENCE_S)
    assert of(found, fx.StoreRefusal) == [fx.StoreRefusal(0, "north", REKEYED, False)]
    assert of(found, fx.FixContributors) == [fx.FixContributors(0, ("east", "west"))]


def test_an_agent_that_is_away_since_before_its_round_began_is_given_up_and_asked_nothing_when_it_is_back() -> None:
    table = Table(max_dropouts=1, rounds=2).asked()
    away = fx.PartiesChanged(parties(north=None))
    table.tell(away)
    table.hold("east", "west")
    table.tick(after_s=PATIENCE_S)
    assert table.run.rounds[1].participants.keys() == {"east", "west"}
    table.sum(*TALLIERS)
    table.tell(fx.PartiesChanged(parties()))
    assert not [one for one in of(table.tick(after_s=AGAIN_S), fx.SendAsks) if "north" in one.agents]
    table.tell(away)
    table.message(fx.RefusalCame, "west", "no", True, number=1)
    table.hold("east", number=1)
    assert ended(table.tick(after_s=PATIENCE_S)).state == "failed", "nobody waits for it until the deadline"


@pytest.mark.parametrize("kind", [fx.ShareCame, fx.AgentDone, fx.RefusalCame])
def test_who_was_not_asked_has_no_part_in_a_round_and_what_it_sends_keeps_no_charge(kind: type[Any]) -> None:
    table = Table(max_dropouts=1)
    table.tick()
    table.say(east="yes", west="yes", north="no")
    table.tick(after_s=PATIENCE_S)
    assert table.run.rounds[0].participants.keys() == {"east", "west"}
    before = table.run
    more = {fx.ShareCame: ("t0",), fx.AgentDone: (), fx.RefusalCame: ("no", True)}[kind]
    assert isinstance(refusal(table.message(kind, "north", *more)), WrongDigest)
    assert table.run == before, "a share that is noted would keep the charge from being given back"
    found = table.hold(*AGENTS)  # every tallier says that it holds its share
    assert of(found, fx.FixContributors) == [fx.FixContributors(0, ("east", "west"))]


@pytest.mark.parametrize("who", ["north", "stranger"])
def test_only_enrolled_parties_are_heard_and_only_a_tallier_says_what_it_holds(who: str) -> None:
    table = Table().asked()
    before = table.run
    assert isinstance(refusal(table.message(fx.HoldingsCame, who, {"east": "5" * 32})), ProtocolViolation)
    assert isinstance(refusal(table.message(fx.RefusalCame, "stranger", "no", True)), ProtocolViolation)
    assert table.run == before


def test_who_is_missing_is_asked_again_after_a_pause_that_grows_with_the_mail_and_never_without_end() -> None:
    table = Table().asked()
    table.message(fx.HoldingsCame, "t0", {"east": "5" * 32})
    assert not of(table.tick(after_s=AGAIN_S - 0.1), fx.SendAsks)
    found = table.tick(after_s=0.2)
    assert of(found, fx.SendAsks) == [fx.SendAsks(0, AGENTS)], "until every tallier has reported"
    assert of(found, fx.OpenAt) == [fx.OpenAt(0, ("t1", "t2"))]
    assert not of(table.tick(after_s=AGAIN_S, mail={"t0": 2}), fx.SendAsks)
    assert of(table.tick(after_s=2 * AGAIN_S, mail={"t0": 2}), fx.SendAsks)
    assert of(table.tick(after_s=LONGEST_PAUSE_S, mail={"t0": 10_000}), fx.SendAsks)


def test_talliers_that_get_no_share_learn_of_the_round_after_a_pause() -> None:
    table = Table().asked()
    assert not of(table.effects, fx.OpenAt)
    assert not of(table.tick(after_s=AGAIN_S - 0.1), fx.OpenAt)
    assert of(table.tick(after_s=0.1), fx.OpenAt) == [fx.OpenAt(0, TALLIERS)]
    again = Table().asked()
    again.message(fx.ShareCame, "east", "t0")
    owed = restarted(again.run, again.now)[1]
    assert of(list(owed), fx.OpenAt) == [fx.OpenAt(0, TALLIERS)], "at once by a coordinator that died behind a share"
    assert not of(again.tick(after_s=AGAIN_S - 0.1), fx.OpenAt), "it was sent with the share"
    assert of(again.tick(after_s=0.1), fx.OpenAt) == [fx.OpenAt(0, TALLIERS)], "and may have been lost"


def test_messages_never_repeat_a_question_only_ticks_do() -> None:
    table = Table().asked()
    table.steady_s += 10 * AGAIN_S
    assert not of(table.message(fx.AgentDone, "east"), fx.SendAsks, fx.OpenAt)


def test_after_a_restart_what_is_owed_is_asked_for_once_more() -> None:
    for prepared, owed in (
        (Table(), fx.RequestSlot),
        (Table().asked(), fx.SendAsks),
        (Table().posted(), fx.AskForSums),
    ):
        _, effects = restarted(prepared.run, prepared.now)
        assert of(list(effects), owed)
        assert not names(list(effects))
    agreed = Table().asked()
    agreed.agreed()
    assert names(list(restarted(agreed.run, agreed.now)[1])) == ["Post"]


@pytest.mark.parametrize(
    ("event", "error"),
    [
        (fx.AgentDone("9" * 64, "TASK", "east"), WrongDigest),
        (fx.AgentDone("ROUND", "9" * 64, "east"), WrongDigest),
        (fx.AgentDone("ROUND", "TASK", "stranger"), WrongDigest),
        (fx.ShareCame("ROUND", "TASK", "east", "north"), ProtocolViolation),
        (fx.ShareCame("ROUND", "TASK", "east", "nobody"), ProtocolViolation),
        (fx.ShareCame("ROUND", "TASK", "stranger", "t0"), WrongDigest),
        (fx.ReplyCame("stranger", "TASK", fx.ProposalReply("willing", until_s=1e9)), WrongDigest),
        (fx.ReplyCame("east", "9" * 64, fx.ProposalReply("willing", until_s=1e9)), WrongDigest),
        (fx.SumCame("ROUND", "TASK", "t0", "histogram", ("ROUND", 0), b"x"), NotReady),
        (fx.SumCame("ROUND", "TASK", "t0", "histogram", ("9" * 64, 0), b"x"), WrongDigest),
        (fx.SumCame("ROUND", "TASK", "t0", "histogram", ("ROUND", 1), b"x"), WrongDigest),
        (fx.SumCame("ROUND", "TASK", "t0", "winner", ("ROUND", 0), b"x"), ProtocolViolation),
    ],
    ids=lambda one: type(one).__name__ if not isinstance(one, type) else one.__name__,
)
def test_foreign_early_and_malformed_messages_are_refused_and_change_nothing(
    event: Any, error: type[LabelerError]
) -> None:
    table = Table().asked()
    words = {"ROUND": table.run.rounds[0].round_digest, "TASK": table.run.task.digest}
    fields = {}
    for name in event.__dataclass_fields__:
        value = getattr(event, name)
        value = (words.get(value[0], value[0]), value[1]) if name == "stated" else value
        fields[name] = words.get(value, value) if isinstance(value, str) else value
    before = table.run
    assert isinstance(refusal(table.tell(type(event)(**fields))), error)
    assert table.run is before


def test_a_second_share_is_passed_on_and_a_late_one_is_not() -> None:
    table = Table().asked()
    found = table.message(fx.ShareCame, "east", "t0")
    assert names(found) == ["StoreShareNote"]
    assert of(found, fx.Relay)
    again = table.message(fx.ShareCame, "east", "t0")
    assert names(again) == []
    assert of(again, fx.Relay)
    table.hold(*AGENTS)
    assert isinstance(refusal(table.message(fx.ShareCame, "west", "t0")), WrongDigest)


def test_the_same_sum_twice_changes_nothing_and_another_is_refused_for_ever() -> None:
    table = Table().posted()
    table.sum("t0")
    assert names(table.sum("t0")) == []
    stated = (table.run.rounds[0].round_digest, 0)
    other = table.message(fx.SumCame, "t0", "histogram", stated, b"another")
    assert isinstance(refusal(other), PrivacyRefusal)
    assert not of(table.effects, fx.StoreRelease)


def test_nothing_is_taken_for_a_round_that_is_over() -> None:
    table = Table().posted()
    table.sum(*TALLIERS)
    assert isinstance(refusal(table.message(fx.HoldingsCame, "t0", {})), WrongDigest)
    assert isinstance(refusal(table.message(fx.AgentDone, "east")), WrongDigest)
    late = table.say(east=fx.ProposalReply("willing", until_s=2e9))
    assert of(late, fx.SendWithdrawn)


@pytest.mark.parametrize(
    "opens",
    [release(("east", "north")), release(is_seeded=True), ProtocolViolation("the sums do not belong together")],
)
def test_what_was_not_charged_for_is_not_released(opens: Release | LabelerError) -> None:
    table = Table().posted()
    table.opens = opens
    found = table.sum(*TALLIERS)
    assert ended(found).state == "failed"
    assert not of(found, fx.StoreRelease)


def test_the_next_round_is_asked_while_one_is_summed_and_charged_after_it_is_opened() -> None:
    table = Table(rounds=3).posted()
    assert [one.state for one in table.run.rounds] == ["posted", "asked", "waiting"]
    assert of(table.effects, fx.SendAsks)[-1] == fx.SendAsks(1, AGENTS)
    for tallier in TALLIERS:
        found = table.message(fx.HoldingsCame, tallier, HELD, number=1)
        assert not of(found, fx.FixContributors, fx.Post), "not before the first one is opened"
    found = table.sum(*TALLIERS)
    (release,) = of(found, fx.StoreRelease)
    (fixed,) = of(found, fx.FixContributors)
    assert found.index(release) < found.index(fixed)
    assert [one.state for one in table.run.rounds] == ["opened", "posted", "asked"]
    assert of(found, fx.SendAsks) == [fx.SendAsks(2, AGENTS)], "what was asked a moment ago is not asked again"


def test_a_next_round_that_cannot_be_asked_ends_the_job_after_what_is_paid_for_was_opened() -> None:
    table = Table(rounds=2).asked()
    table.too_large = True
    assert not of(table.hold(*AGENTS), fx.End)
    found = table.sum(*TALLIERS)
    assert of(found, fx.StoreRelease)
    assert ended(found).state == "failed"
    assert [one.number for one in of(table.effects, fx.Begin)] == [0]


def test_a_refusal_of_the_next_round_ends_the_job_where_it_did_and_keeps_what_was_opened() -> None:
    table = Table(rounds=2).posted()
    for agent in AGENTS:
        found = table.message(fx.RefusalCame, agent, "over its cap", True, number=1)
        assert not of(found, fx.End), "the first one is charged, and will be opened"
    found = table.sum(*TALLIERS)
    assert of(found, fx.StoreRelease)
    assert ended(found).state == "failed"
    assert not of(found, fx.Post)


def test_a_contributor_that_a_tallier_has_shut_out_since_ends_the_round() -> None:
    table = Table().posted()
    found = table.message(fx.HoldingsCame, "t1", {"east": "5" * 32})
    assert "t1 shut out north, west" in str(ended(found).error)


@pytest.mark.parametrize("kind", ["histogram", "winner"])
def test_a_tallier_that_will_never_sum_a_posted_round_ends_its_job_and_nothing_is_opened(kind: Any) -> None:
    table = Table(release=kind, rounds=2).posted()
    found = table.message(fx.RefusalCame, "t1", "the round's time was over before it was summed", True)
    assert "t1 says: the round's time was over" in str(ended(found).error)
    assert ended(found).state == "failed"
    assert not of(found, fx.StoreRelease, fx.Post)
    assert of(found, fx.TellSettled) == [fx.TellSettled((0, 1))], "the next one was asked already"


def test_a_tallier_that_cannot_open_a_round_ends_its_job_at_once_and_one_that_has_no_room_is_asked_again() -> None:
    table = Table().asked()
    table.message(fx.ShareCame, "east", "t0")
    found = table.message(fx.RefusalCame, "t1", "as many rounds are open as may be", False)
    assert not of(found, fx.End)
    assert table.run.rounds[0].refusals == {"t1": "as many rounds are open as may be"}
    assert fx.OpenAt(0, TALLIERS) in of(table.tick(after_s=10 * AGAIN_S), fx.OpenAt)
    found = table.message(fx.RefusalCame, "t1", "the round names 'west', who is unknown here", True)
    assert "t1 says: the round names 'west', who is unknown here" in str(ended(found).error)
    assert ended(found).state == "failed"
    assert of(found, fx.TellSettled) == [fx.TellSettled((0,))]
    assert not of(found, fx.Post, fx.FixContributors)


def test_no_agent_is_asked_again_for_a_next_round_that_a_tallier_cannot_open() -> None:
    table = Table(rounds=2).posted()
    table.message(fx.RefusalCame, "t2", "it cannot", True, number=1)
    assert not of(table.tick(after_s=10 * AGAIN_S), fx.SendAsks), "each answer would be charged for nothing"
    found = table.sum(*TALLIERS)
    assert of(found, fx.StoreRelease), "the first is paid for"
    assert "t2 says: it cannot" in str(ended(found).error)


def test_winners_are_asked_for_when_it_is_the_rounds_turn_and_of_all_talliers_at_once() -> None:
    table = Table(release="winner")
    table.is_turn = False
    table.posted()
    assert of(table.effects, fx.AskForTurn)
    assert not of(table.effects, fx.AskForSums)
    table.is_turn = True
    found = table.tick(after_s=1.0)
    assert of(found, fx.AskForSums) == [fx.AskForSums(0, TALLIERS)]
    assert of(table.message(fx.RefusalCame, "t1", "somebody left", False), fx.TurnFailed)
    found = table.message(fx.RefusalCame, "t2", "the ballots do not sum", True)
    assert "t2 says: the ballots do not sum" in str(ended(found).error)


@pytest.mark.parametrize("state", ["cancelled", "failed"])
def test_whoever_took_part_is_told_when_somebody_else_ends_the_job(state: fx.JobState) -> None:
    table = Table(rounds=2).asked()
    found = table.tell(fx.Ended(state))
    assert of(found, fx.TellSettled) == [fx.TellSettled((0,))]
    assert of(found, fx.SendWithdrawn) == [fx.SendWithdrawn(AGENTS)]
    assert names(found) == []
    assert table.tick() == []


def test_questions_of_other_rounds_are_not_those_of_the_job() -> None:
    table = Table(rounds=2)
    table.is_prepared = False
    table.asked()
    before = table.run
    wrong = table.tell(fx.QuestionsPrepared(((0, "1" * 64, "2" * 64), (0, "1" * 64, "2" * 64))))
    assert refusal(wrong)
    assert table.run is before


def test_rows_of_a_model_are_made_once_agents_have_said_whether_they_will() -> None:
    """They judge themselves how many there have to be, so their refusal is heard in either order."""
    late_fields = {"method": "blind-average", "k": 1, "training": {"min_records": 10, "regularisation": 1.0}}
    early, late = Table(), Table(**late_fields)
    assert of(early.tick(), fx.Prepare)
    assert not of(late.tick(), fx.Prepare)
    refused = late.say(**dict.fromkeys(AGENTS, fx.ProposalReply("declined", "too-few-rows", "too few rows")))
    assert not of(refused, fx.Prepare)
    assert ended(refused).state == "refused"
    willing = Table(**late_fields)
    willing.tick()
    assert of(willing.say(east="yes", north="yes", west="yes"), fx.Prepare)
    assert willing.run.state == "collecting"


def test_nobody_is_asked_for_its_word_before_there_are_questions() -> None:
    """A job whose images cannot be decoded ends here: a yes for nothing would reveal something for nothing."""
    table = Table()
    table.is_prepared = False
    for _ in range(3):
        found = table.tick(after_s=10.0)
        assert of(found, fx.Prepare)
        assert not of(found, fx.SendProposals)
    failed = table.tell(fx.JobFailed(BadData("image 1 cannot be decoded")))
    assert ended(failed).state == "failed"
    assert not of(failed, fx.SendProposals, fx.SendWithdrawn)
    ready = Table()
    assert of(ready.tick(), fx.SendProposals) == [fx.SendProposals(AGENTS)]


def test_between_two_looks_nothing_is_to_be_done() -> None:
    """`WaitUntil` is not too late: at the moment it names something is due, or it is the deadline."""
    table = Table().asked()
    for _ in range(20):
        (wait,) = of(table.tick(), fx.WaitUntil)[-1:]
        assert table.steady_s < wait.steady_s <= table.steady_s + DEADLINE_S
        early = table.tick(after_s=max(0.0, wait.steady_s - table.steady_s - 0.01))
        assert not of(early, fx.SendAsks, fx.OpenAt)
        assert of(table.tick(after_s=0.02), fx.SendAsks, fx.OpenAt)
