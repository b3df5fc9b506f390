"""The coordinator's side of a job, as a pure machine: `step(job, event, now) -> (job, effects)`.

    queued ---------------------------> collecting --------------------------> tallying ---------> completed
      |  admitted, proposed, prepared;     |  rounds, one after the other:         |
      |  a quorum is willing: divided      |  waiting > asked > agreed > posted > opened
      |                                    |              |         |         |     the next is asked already.
      |                                    |    contributors    charge     release
      |                                    |    permanent       posted     stored, once
      v                                    v
    refused (quorum lost, at no charge), failed, expired, cancelled (by somebody else: `Ended`).

It keeps no clock, sends nothing and stores nothing: its effects say what to store and what to send. A driver makes the
stores of a step durable before anything of that step leaves. The machine is level-triggered: it asks again for
everything that is missing. It waits longer the more mail is pending at the parties concerned. So a crash of any party,
or lost mail, only costs time: a job without its memory (`labeler.rounds.effects`) asks for the rest.

Four rules hold whichever process dies when. The agents whose shares a round takes, and their keys, are stored before
anybody is asked. Contributors are durable before the charge is posted (`FixContributors` ends a step, and `Stored`
begins the next). The charge is posted in the step whose sends ask for the first sum. A release is stored once and never
replaced.

An agent whose keys change while a round runs takes part from the next round on; its new key adds nothing to this one.
If a task releases the winner, three equal answers are the release, and rounds take turns (`queues`). Messages that are
late, foreign, contradictory or of finished rounds are refused with an error (`Refuse`); repeated ones change nothing.

More than 400 lines: one state machine, whose rules are read together.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from labeler.errors import (
    InvalidSetting,
    LabelerError,
    NotReady,
    PrivacyRefusal,
    ProtocolViolation,
    QuorumNotReached,
    RefusedByPerson,
    WrongDigest,
)
from labeler.rounds import effects as fx
from labeler.rounds.effects import UNFINISHED, JobRun, RoundRun
from labeler.sharing import winner_time_limit_s

LONGEST_PAUSE_S = 30.0
"""Longest pause between two requests for one thing, whatever mail waits, and between checks for prepared questions."""

TURN_GRACE_S = 30.0
"""Extra time, beyond the talliers' own limit, before a round that waits for its winners loses its turn."""

REKEYED = "its keys were changed while this batch was being collected; it takes part again from the next one on"

LEAST_LOOK_S = 0.05
PREPARING_LOOK_S = 1.0
"""Pause between checks for questions while another process makes them."""

_OPEN_STATES = ("asked", "agreed", "posted")


def step(job: JobRun, event: fx.Event, now: fx.Now) -> tuple[JobRun, tuple[fx.Effect, ...]]:
    """Return the job after an event, and its effects.

    Args:
        job: as the last step left it.

    Returns:
        The job, and effects in order: stores, sends and computations as `labeler.rounds.effects` describes them. If
        the event is a refused message, the job is unchanged and the only effect is `Refuse`.
    """
    turn = _Turn(job, now, is_tick=isinstance(event, fx.Tick))
    try:
        turn.take(event)
    except LabelerError as error:
        return job, (fx.RefuseMessage(error),)
    if not isinstance(event, fx.TurnGranted):  # it was asked for a moment ago, and `go_on` would ask again
        turn.go_on()
    return turn.job, turn.done()


class _Turn:
    """One step under way."""

    def __init__(self, job: JobRun, now: fx.Now, *, is_tick: bool) -> None:
        self.job = job
        self._now = now
        self._is_tick = is_tick
        self._effects: list[fx.Effect] = []
        self._looks: list[float] = []

    def done(self) -> tuple[fx.Effect, ...]:
        """Return the effects, and the time until which nothing more is to be done."""
        job = self.job
        if job.state in UNFINISHED and not job.is_storing:
            if self._now.wall_s <= job.expires_at_s:
                self._looks.append(self._now.steady_s + job.expires_at_s - self._now.wall_s + LEAST_LOOK_S)
            if self._looks:
                self._effects.append(fx.WaitUntil(max(self._now.steady_s + LEAST_LOOK_S, min(self._looks))))
        return tuple(self._effects)

    # Events.

    def take(self, event: fx.Event) -> None:
        """Apply an event.

        Raises:
            LabelerError: it is a message that is refused.
        """
        job = self.job
        match event:
            case fx.Tick():
                self.job = replace(job, mail=event.mail)
            case fx.PartiesChanged():
                self.job = replace(job, parties=event.parties)
            case fx.JobAdmitted():
                self.job = replace(job, is_admitted=True)
            case fx.StepStored():
                self.job = replace(job, is_storing=False)
            case fx.QuestionsPrepared():
                self._prepared(event)
            case fx.BodiesMade():
                self._change_round(self._round(event.number), is_made=True)
            case fx.TurnGranted():
                self._ask_all_for_winners(event)
            case fx.ReleaseKnown():
                self._opened(event)
            case fx.JobFailed():
                current = job.current
                if event.number is not None and current is not None and event.number > current.number:
                    # The one before is paid for, and is opened first; then this one fails like any other.
                    self.job = replace(job, looks_ahead=False)
                else:
                    self._fail(event.error)
            case fx.Ended():
                if event.state in UNFINISHED or job.state not in (*UNFINISHED, event.state):
                    raise InvalidSetting(f"the job is {job.state}, and does not become {event.state} by its end")
                self._ended(event.state)
            case fx.ReplyCame():
                self._answered(event)
            case fx.ShareCame():
                self._share(event)
            case fx.AgentDone():
                one = self._open_round(event, event.agent_id)
                self._change_round(one, done=one.done | {event.agent_id})
            case fx.HoldingsCame():
                one = self._open_round(event, None)
                if (party := job.parties.get(event.tallier_id)) is None or party.tallier is None:
                    raise ProtocolViolation("what is held of a round is said by an enrolled tallier alone")
                if one.holdings.get(event.tallier_id) != event.holdings:
                    held = {**one.holdings, event.tallier_id: dict(event.holdings)}
                    self._change_round(one, holdings=held)
                    self._effects += [fx.StoreHoldings(one.number, event.tallier_id, dict(event.holdings)), fx.Tell()]
            case fx.RefusalCame():
                self._refusal(event)
            case fx.SumCame():
                self._sum_came(event)

    def _prepared(self, event: fx.QuestionsPrepared) -> None:
        job = self.job
        if job.state not in UNFINISHED or not job.untied:
            return
        if sorted(number for number, _, _ in event.batches) != list(job.untied):
            raise InvalidSetting("the questions are not those of the job's rounds")
        for number, batch_digest, round_digest in event.batches:
            self._change_round(self._round(number), batch_digest=batch_digest, round_digest=round_digest)
        self._effects += [fx.StoreBatches(event.batches), fx.Tell()]

    def _answered(self, event: fx.ReplyCame) -> None:
        job = self.job
        if event.task_digest != job.task.digest or event.agent_id not in job.participants:
            raise WrongDigest("the answer is about a job of another task, or one the sender has no part in")
        if job.answers.get(event.agent_id) != event.said:
            self.job = replace(job, answers={**job.answers, event.agent_id: event.said})
            self._effects += [fx.StoreReply(event.agent_id, event.said), fx.Tell()]
        is_late = job.state not in UNFINISHED or (job.asked is not None and event.agent_id not in job.asked)
        if is_late and event.said.answer == "willing":
            self._withdraw_from([event.agent_id])

    def _share(self, event: fx.ShareCame) -> None:
        one = self._open_round(event, event.agent_id)
        if (tallier := self.job.parties.get(event.tallier_id)) is None or tallier.tallier is None:
            raise ProtocolViolation("a share goes to an enrolled tallier, sealed to its key")
        if one.state != "asked":
            # A late share could only be refused at the tallier.
            raise WrongDigest("the contributors of this round are fixed; the agent can take part in the next")
        if not one.has_shares:
            # Durable before it leaves: a charge is given back only where no share did.
            self._effects.append(fx.StoreShareNote(one.number))
            self._open_at(self._change_round(one, has_shares=True))
        self._effects.append(fx.Relay())

    def _refusal(self, event: fx.RefusalCame) -> None:
        if (party := self.job.parties.get(event.party_id)) is None:
            raise ProtocolViolation("a round is refused by an enrolled party alone")
        is_agent = party.tallier is None
        one = self._open_round(event, event.party_id if is_agent else None)
        self._keep_refusal(one, event.party_id, event.sentence, event.is_final)
        if not is_agent:
            self._effects.append(fx.TurnFailed(one.round_digest))

    def _sum_came(self, event: fx.SumCame) -> None:
        one = self._open_round(event, None)
        tallier = self.job.parties.get(event.tallier_id)
        number = None if tallier is None else tallier.tallier
        if event.stated != (one.round_digest, number):
            what = "sum is" if event.kind == "histogram" else "winners are"
            raise WrongDigest(f"a tallier's {what} of another round, or of another tallier")
        if event.kind != self.job.task.release:
            raise ProtocolViolation(
                "the sums of a winner round stay with the talliers; none is taken here"
                if event.kind == "histogram"
                else "the task of this round releases the histogram; it takes no winners"
            )
        known = one.sums.get(event.tallier_id)
        if known == event.data:
            return
        if known is not None:
            raise PrivacyRefusal(
                f"tallier {event.tallier_id!r} has sent another sum of round {one.round_digest[:12]!r}; a round is "
                "summed once, so the second is refused for ever. Find out why its journal forgot the first"
            )
        if one.state != "posted":
            raise NotReady(
                f"round {one.round_digest[:12]!r} is {one.state}; a sum is taken while its round is posted only"
            )
        self._change_round(one, sums={**one.sums, event.tallier_id: event.data})
        self._effects.append(fx.StoreSum(one.number, one.round_digest, event.tallier_id, event.data))

    def _open_round(self, event: Any, agent_id: str | None) -> RoundRun:
        """Return the round a message belongs to, if it is open and the agent takes part in it.

        Raises:
            WrongDigest: another task, a finished round, or one without this agent.
        """
        one = self.job.round_with(event.round_digest)
        if one is None:
            raise WrongDigest("the message belongs to a round that this coordinator never opened")
        if self.job.task.digest != event.task_digest:
            raise WrongDigest("the message names another task than its round is of")
        if one.state not in _OPEN_STATES or self.job.state not in ("collecting", "tallying"):
            raise WrongDigest("the round is over, or was not begun; nothing more is taken for it")
        if agent_id is not None and agent_id not in (one.participants or self.job.participants):
            # An agent that was not asked is not charged; noting its share would keep a charge from being given back.
            raise WrongDigest(f"agent {agent_id!r} takes no part in this round")
        return one

    # Next steps.

    def go_on(self) -> None:
        """Take every step that is possible now."""
        while self.job.state in UNFINISHED and not self.job.is_storing:
            current = self.job.current
            if current is None:
                self.job = replace(self.job, state="completed")
                self._effects += [fx.Complete(), self._leave(), fx.Tell()]
                return
            if self._now.wall_s > self.job.expires_at_s and current.state != "posted":
                self._expire()
                return
            before = self.job
            if before.state == "queued":
                self._settle_whom()
            elif current.state == "waiting":
                self._begin(current)
            elif current.state == "asked":
                self._collect(current)
            elif current.state == "agreed":
                self._post(current)
            else:
                self._sum(current)
            self._look_ahead()
            if (self.job.state, self._steps) == (before.state, [one.state for one in before.rounds]):
                return

    @property
    def _steps(self) -> list[str]:
        return [one.state for one in self.job.rounds]

    def _settle_whom(self) -> None:
        """Get the questions, then the willing agents; once both are known, divide the job and continue.

        A job without questions, because its images cannot be decoded, is never proposed to agents. Each yes that leads
        to nothing is a free answer about a site's budget (labeler.ledger.promises).
        """
        # With a model's rows, agents judge themselves whether they have enough, so they are asked first.
        # Such a job is only admitted once its images are decoded.
        is_first_heard = self.job.task.traits.model_rows(self.job.task) is not None
        if not self.job.is_admitted:
            self._effects.append(fx.RequestSlot(needs_features=is_first_heard))
            if is_first_heard:
                self._looks.append(self._now.steady_s + PREPARING_LOOK_S)
            return
        if self.job.untied and not is_first_heard:
            self._prepare()
            return
        asked = self.job.asked or self._pursue()
        if asked is None:
            return
        if self.job.untied:
            self._prepare()
            return
        self.job = replace(self.job, state="collecting", asked=asked, decided_at_s=None, asked_at_s={})
        self._effects += [fx.ReserveRounds(asked), fx.Tell()]

    def _prepare(self) -> None:
        if self.job.untied:
            self._effects.append(fx.Prepare())
            self._looks.append(self._now.steady_s + PREPARING_LOOK_S)

    def _pursue(self) -> tuple[str, ...] | None:
        """Propose the job to agents that have not replied, and settle which agents it asks; None while that is open."""
        standing = fx.stand(self.job, wall_s=self._now.wall_s)
        parties, quorum = self.job.parties, self.job.task.quorum
        if self._talliers() is not None:
            able = [agent for agent in standing.open if parties[agent].is_heard]
            due = tuple(agent for agent in able if self._is_due((agent, "proposal"), through=[agent]))
            if due:
                self._effects.append(fx.SendProposals(due))
        is_lost = len(standing.willing) + len(standing.open) < quorum
        if not is_lost and len(standing.willing) < quorum:
            if self.job.decided_at_s is not None:
                self.job = replace(self.job, decided_at_s=None)
            return None
        if self.job.decided_at_s is None:
            self.job = replace(self.job, decided_at_s=self._now.steady_s)
        if standing.open and self._waits_since(self.job.decided_at_s):
            # Lost or won already; agents about to reply are still heard, so that all reasons are known.
            return None
        if is_lost:
            self._fail(_lost_before(self.job, standing))
            return None
        return tuple(standing.willing)

    def _begin(self, current: RoundRun) -> None:
        if self._talliers() is None:
            return
        if not current.round_digest:
            self._prepare()
            return
        if not current.is_made:
            # Before the charge: a batch that is too large for a message costs nothing.
            self._effects.append(fx.MakeBodies(current.number))
            return
        agents, parties = self.job.agents, self.job.parties
        keys = {agent: parties[agent].verify_key for agent in agents if agent in parties}
        if len(keys) < self.job.task.quorum:
            self._fail(
                QuorumNotReached(
                    f"{len(keys)} of {len(agents)} agents that were willing are enrolled with keys in force, so the "
                    f"quorum of {self.job.task.quorum} cannot be reached; nobody was asked in this batch"
                )
            )
            return
        # Durable before the first question leaves: from here on nobody can say that nothing left.
        self._effects += [fx.Begin(current.number, keys), fx.Tell()]
        self._change_round(current, state="asked", participants=keys)

    def _collect(self, current: RoundRun) -> None:
        talliers = self._talliers()
        if talliers is None:
            return
        if self._has_ended_by_tallier(current, talliers):
            return
        # An agent that was not asked was not charged, whatever talliers report to hold.
        answered = current.held_by_all(talliers) & current.participants.keys()
        refused = current.final - answered
        gone = self._rekeyed(current) - answered - refused
        current = self.job.rounds[current.number]
        quorum, agents = self.job.task.quorum, self.job.agents
        missing = [agent for agent in agents if agent not in answered | refused | gone]
        is_won, is_lost = len(answered) >= quorum, len(answered) + len(missing) < quorum
        if is_won or is_lost:
            if current.decided_at_s is None:
                current = self._change_round(current, decided_at_s=self._now.steady_s)
            if not missing or not self._waits_since(current.decided_at_s):
                if is_won:
                    self._agree(current, answered)
                else:
                    self._fail(
                        QuorumNotReached(
                            f"{len(refused | gone)} of {len(agents)} agents refused or had their keys changed "
                            f"meanwhile, so the quorum of {quorum} cannot be reached; nothing was opened. Their "
                            "reasons stand beside the round"
                        )
                    )
                return
        self._ask(current, talliers, [agent for agent in missing if self._can_answer(current, agent)])

    def _open_at(self, current: RoundRun) -> None:
        """Announce the round, before its first share, to every tallier that has not reported."""
        unaware = tuple(one for one in self._talliers() or () if one not in current.holdings)
        if unaware:
            asked = {(one, current.round_digest): self._now.steady_s for one in unaware}
            self.job = replace(self.job, asked_at_s={**self.job.asked_at_s, **asked})
            self._effects.append(fx.OpenAt(current.number, unaware))

    def _agree(self, current: RoundRun, answered: frozenset[str]) -> None:
        contributors = tuple(sorted(answered))
        self._change_round(current, state="agreed", contributors=contributors)
        self._effects += [fx.FixContributors(current.number, contributors), fx.Tell()]
        # The charge is posted in the next step, once this is durable.
        self.job = replace(self.job, state="tallying", is_storing=True, asked_at_s={})

    def _rekeyed(self, current: RoundRun) -> frozenset[str]:
        """Return agents that cannot answer in this round, because their keys differ from those the round knows.

        They are given up once every tallier has reported and a pause has passed, in which shares signed with the old
        key may still arrive. People see the reason, but it is never recorded as the agent's refusal: nobody knows what
        it sent.
        """
        if len(current.holdings) < self.job.task.talliers:
            return frozenset()
        since = dict(current.gone_at_s)
        gone = set()
        for agent in self.job.agents:
            if self._can_answer(current, agent):
                continue
            if not self._waits_since(since.setdefault(agent, self._now.steady_s)):
                gone.add(agent)
        if since != current.gone_at_s:
            current = self._change_round(current, gone_at_s=since)
        for agent in sorted(gone - current.refusals.keys()):
            current = self._keep_refusal(current, agent, REKEYED, False)
        return frozenset(gone)

    def _can_answer(self, current: RoundRun, agent: str) -> bool:
        """Return whether its share would be accepted; an agent with keys new to the round would pay for nothing."""
        party = self.job.parties.get(agent)
        return party is not None and party.verify_key == current.participants.get(agent)

    def _ask(self, current: RoundRun, talliers: Sequence[str], agents: Sequence[str]) -> None:
        """Open the round at every tallier that has not reported, then ask every agent that is missing.

        Talliers have nothing to do before the first share, so a round is announced together with it: they run once
        instead of twice. If no share comes, they hear of it after a pause, so that a tallier's fault becomes known.
        """
        digest = current.round_digest
        unaware = [one for one in talliers if one not in current.holdings]
        waits = {one for one in unaware if not current.has_shares and (one, digest) not in self.job.asked_at_s}
        opened = tuple(one for one in unaware if self._is_due((one, digest), through=[one]) and one not in waits)
        if opened:
            self._effects.append(fx.OpenAt(current.number, opened))
        # A share in a tallier's mail is on its way, so its agent need not be asked again.
        due = tuple(agent for agent in agents if self._is_due((agent, digest), through=[agent, *talliers]))
        if due:
            self._effects.append(fx.SendAsks(current.number, due))

    def _post(self, current: RoundRun) -> None:
        self._effects += [fx.Post(current.number, current.num_queries, current.contributors), fx.Tell()]
        self._change_round(current, state="posted")

    def _sum(self, current: RoundRun) -> None:
        talliers = self._talliers()
        if talliers is None:
            return
        missing = [one for one in talliers if one not in current.sums]
        if not missing:
            self._effects.append(fx.Unshard(current.number, tuple(current.sums[one] for one in talliers)))
            return
        if self._has_ended_by_tallier(current, talliers):
            return
        for one in missing:
            report = current.holdings.get(one)
            lost = [] if report is None else [agent for agent in current.contributors if agent not in report]
            if lost:
                # An agent achieves that by sending a second, different share after its first. The contributors are
                # permanent, so waiting would not help.
                self._fail(
                    ProtocolViolation(
                        f"{one} shut out {', '.join(lost[:5])}, who sent it two different shares after the "
                        "contributors were agreed on, so their sum cannot be made. What was charged stands; ask that "
                        "site what happened, or revoke its keys, then submit the job again"
                    )
                )
                return
        if self.job.task.release == "winner":
            limit_s = winner_time_limit_s(current.num_queries, self.job.task.num_classes) + TURN_GRACE_S
            self._effects.append(fx.AskForTurn(current.round_digest, len(talliers) - len(missing), limit_s))
            self._look_at_line()
            return
        due = tuple(one for one in missing if self._is_due((one, "sum"), through=[one]))
        if due:
            self._effects.append(fx.AskForSums(current.number, due))

    def _has_ended_by_tallier(self, current: RoundRun, talliers: Sequence[str]) -> bool:
        """End the job if a tallier can never open or sum the round; the charge stays."""
        for one in talliers:
            if one in current.final:
                self._fail(ProtocolViolation(f"{one} says: {printable(current.refusals[one])}"))
                return True
        return False

    def _look_ahead(self) -> None:
        """Ask the next round while this one is summed: nobody can refuse this one any more.

        The contributors of the next are fixed, and its charge is posted, only when it is the first that is not opened.
        So charges keep their order and a refusal stops the job at the same place. The cost is a possible refund: if
        this round cannot be opened, or the job is cancelled now, the next was asked, and stays charged.
        """
        current = self.job.current
        if current is None or self.job.state not in UNFINISHED or self.job.is_storing or current.state != "posted":
            return
        if not self.job.looks_ahead or self.job.task.steps > 1:
            # A training step asks about what the one before it opens.
            return
        talliers = self._talliers()
        if talliers is None or current.number + 1 == len(self.job.rounds) or self._now.wall_s > self.job.expires_at_s:
            return
        following, parties = self.job.rounds[current.number + 1], self.job.parties
        if following.state == "waiting" and sum(one in parties for one in self.job.agents) >= self.job.task.quorum:
            self._begin(following)
        elif following.state == "asked" and not following.final.intersection(talliers):
            done = following.held_by_all(talliers) | following.final
            missing = [one for one in self.job.agents if one not in done and self._can_answer(following, one)]
            self._ask(following, talliers, missing)

    def _ask_all_for_winners(self, event: fx.TurnGranted) -> None:
        one, talliers = self.job.round_with(event.round_digest), self._talliers()
        if one is not None and one.state == "posted" and talliers is not None:
            # All or none, since each needs the others.
            self._effects.append(fx.AskForSums(one.number, talliers))
        self._look_at_line()

    def _look_at_line(self) -> None:
        self._looks.append(self._now.steady_s + min(1.0, max(LEAST_LOOK_S, self.job.patience.ask_again_s)))

    def _opened(self, event: fx.ReleaseKnown) -> None:
        job, one, release = self.job, self._round(event.number), event.release
        if job.state not in UNFINISHED or one.state != "posted":
            return
        if release.is_seeded and not job.is_simulated:
            self._fail(
                ProtocolViolation("an agent's noise came from a known seed; such a round protects nobody, and is void")
            )
            return
        if release.contributors != frozenset(one.contributors):
            self._fail(
                ProtocolViolation("the talliers summed other agents than the charge was posted for; the round is void")
            )
            return
        is_last = all(other.state == "opened" for other in job.rounds if other.number != one.number)
        following: fx.JobState = "completed" if is_last else "collecting"
        self._change_round(one, state="opened", sums={}, opened=release if job.task.steps > 1 else None)
        others = {other.round_digest for other in self.job.rounds if other.state == "asked"}
        asked_at_s = {what: at_s for what, at_s in self.job.asked_at_s.items() if what[1] in others}
        self.job = replace(self.job, state=following, asked_at_s=asked_at_s)
        self._effects += [fx.StoreRelease(one.number, release, following), fx.TellSettled((one.number,)), fx.Tell()]
        self._effects.append(self._leave() if is_last else fx.ReleaseSlot((one.round_digest,), has_ended=False))

    # Ends.

    def _expire(self) -> None:
        later = [agent for agent, said in self.job.answers.items() if said.answer == "later"]
        waits = self.job.state == "queued" and later
        error = QuorumNotReached(
            f"the deadline passed while {', '.join(sorted(later)[:5])} had not agreed to take part; nobody was asked, "
            "and nothing is charged. Submit the job again"
            if waits
            else "the deadline passed before enough agents and talliers had answered; submit the job again"
        )
        self._end("expired", error)

    def _fail(self, error: LabelerError) -> None:
        if self.job.state not in UNFINISHED:
            return
        is_begun = any(one.state != "waiting" for one in self.job.rounds)
        is_refused = isinstance(error, QuorumNotReached | RefusedByPerson) and not is_begun
        self._end("refused" if is_refused else "failed", error)

    def _end(self, state: fx.JobState, error: LabelerError) -> None:
        """End the job: what was asked stays charged, what was not is given back, in one transaction."""
        self._effects.append(fx.End(state, error))
        self._ended(state)

    def _ended(self, state: fx.JobState) -> None:
        """Tell the participants that nothing more comes; those of opened rounds were told already."""
        was = self.job
        self.job = replace(was, state=state, is_storing=False, asked_at_s={})
        self._effects.append(self._leave())
        if state != "completed":
            rest = tuple(one.number for one in was.rounds if one.state in _OPEN_STATES)
            if rest:
                self._effects.append(fx.TellSettled(rest))
            if any(one.state == "waiting" for one in was.rounds):
                self._withdraw_from([agent for agent, said in was.answers.items() if said.answer == "willing"])
        self._effects.append(fx.Tell())

    def _leave(self) -> fx.ReleaseSlot:
        return fx.ReleaseSlot(tuple(one.round_digest for one in self.job.rounds if one.round_digest), has_ended=True)

    def _withdraw_from(self, agents: Sequence[str]) -> None:
        enrolled = tuple(agent for agent in agents if agent in self.job.parties)
        if enrolled:
            self._effects.append(fx.SendWithdrawn(enrolled))

    # Helpers.

    def _round(self, number: int) -> RoundRun:
        if not 0 <= number < len(self.job.rounds):
            raise InvalidSetting(f"round {number} is none of the job's {len(self.job.rounds)}")
        return self.job.rounds[number]

    def _change_round(self, one: RoundRun, **changes: Any) -> RoundRun:
        changed = replace(one, **changes)
        rounds = list(self.job.rounds)
        rounds[one.number] = changed
        self.job = replace(self.job, rounds=tuple(rounds))
        return changed

    def _keep_refusal(self, one: RoundRun, party_id: str, sentence: str, is_final: bool) -> RoundRun:
        """Store a refusal; a temporary one does not replace a final one."""
        was_final = party_id in one.final
        if (was_final and not is_final) or (was_final == is_final and one.refusals.get(party_id) == sentence):
            return one
        self._effects += [fx.StoreRefusal(one.number, party_id, sentence, is_final), fx.Tell()]
        final = one.final | {party_id} if is_final else one.final
        return self._change_round(one, refusals={**one.refusals, party_id: sentence}, final=final)

    def _talliers(self) -> tuple[str, ...] | None:
        """Return the enrolled talliers in order; None while one of them is not enrolled."""
        by_number = {one.tallier: one.party_id for one in self.job.parties.values() if one.tallier is not None}
        wanted = range(self.job.task.talliers)
        return tuple(by_number[number] for number in wanted) if all(one in by_number for one in wanted) else None

    def _waits_since(self, since_s: float | None) -> bool:
        until_s = (self._now.steady_s if since_s is None else since_s) + self.job.patience.patience_s
        if self._now.steady_s < until_s:
            self._looks.append(until_s)
            return True
        return False

    def _is_due(self, what: tuple[str, str], *, through: Sequence[str]) -> bool:
        """Return whether to ask now, for the first time or again; if so, record it as asked.

        The more mail waits with the parties concerned, the longer the pause: they are busy, and every repetition is
        work for all of them. Repeating at a fixed pace would keep a loaded service from catching up. The amount of mail
        is known at ticks, so only they repeat.
        """
        now_s, pause_s = self._now.steady_s, self.job.patience.ask_again_s
        before_s = self.job.asked_at_s.get(what)
        if before_s is not None:
            waiting = max((self.job.mail.get(party_id, 0) for party_id in through), default=0)
            again_s = before_s + min(pause_s * (1 + waiting), max(pause_s, LONGEST_PAUSE_S))
            if now_s < again_s or not self._is_tick:
                self._looks.append(again_s)
                return False
        self.job = replace(self.job, asked_at_s={**self.job.asked_at_s, what: now_s})
        self._looks.append(now_s + pause_s)
        return True


def _lost_before(job: JobRun, standing: fx.Standing) -> QuorumNotReached | RefusedByPerson:
    """Return why a job without an asked agent is lost; a person's refusal is named if it is the only reason."""
    reasons = {one: job.answers[one] for one in standing.declined if one in job.answers}
    people = [agent for agent, said in reasons.items() if said.reason == RefusedByPerson.problem_type]
    is_theirs = len(standing.willing) + len(standing.open) + len(people) >= job.task.quorum
    said = {agent: reasons[agent].sentence for agent in (people if is_theirs else reasons) if reasons[agent].sentence}
    why = "Their keys were revoked"
    if said:
        first = next(iter(said))
        also = f" (and {len(said) - 1} more, beside the job)" if len(said) > 1 else ""
        why = f"{first} says: {printable(said[first])}{also}"
    end = f"the quorum of {job.task.quorum} cannot be reached; nobody was asked, and nothing is charged"
    if is_theirs:
        return RefusedByPerson(f"{why}. Without {len(people)} of {len(job.participants)} agents {end}")
    return QuorumNotReached(
        f"{len(standing.declined)} of {len(job.participants)} agents will not take part, so {end}. {why}"
    )


MAX_REASON_CHARACTERS = 300
"""Longest reason that is kept of a party: a sentence, not a document."""


def printable(sentence: str) -> str:
    """Return another party's words fit for display: one line, bounded, nothing that moves a terminal's cursor."""
    start = " ".join(sentence[: 4 * MAX_REASON_CHARACTERS].split())
    shown = "".join(letter if letter.isprintable() else "?" for letter in start)
    return shown if len(shown) <= MAX_REASON_CHARACTERS else shown[: MAX_REASON_CHARACTERS - 3] + "..."
