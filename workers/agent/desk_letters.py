"""What an agent says: sealed shares, refusals, answers to proposals; in words from public things alone."""

from __future__ import annotations

import logging
from collections.abc import Callable

from labeler.errors import PrivacyRefusal
from labeler.ledger.agent_rounds import JournalRounds
from labeler.ledger.chain import Head
from labeler.messages import COORDINATOR
from labeler.messages.bodies import AnswerSent, Ask, Declined, Proposal, Refusal, Willing
from labeler.rounds import agent as machine
from labeler.rounds import agent_proposal as proposing
from labeler.rounds.agent import NOT_KEPT
from labeler.system.keys import seal_body
from workers.agent.desk_turn import DeskTurn, OutgoingLetter
from workers.agent.words import PUBLIC_ERRORS, cause, silent, told
from workers.party.mail import Draft

log = logging.getLogger("labeler.agent")


class DeskLetters:
    """Writes the letters of a turn."""

    def __init__(self, party_id: str, rounds: JournalRounds, head: Callable[[], Head]) -> None:
        self._party_id = party_id
        self._rounds = rounds
        self._head = head

    def send(self, turn: DeskTurn) -> None:
        """Everything that a turn says, in letters: what belongs together is taken together."""
        for digest, effect in turn.rounds:
            match effect:
                case machine.SendStored():
                    self._answer(turn, digest)
                case machine.Refuse(refusal):
                    self._refuse(turn, digest, refusal)
        for proposal, said_to in turn.proposals:
            about = {"task_digest": proposal.task.digest, "job_id": proposal.job_id}
            match said_to:
                case proposing.SayWilling(until):
                    body = Willing(proposal.job_id, until).encode()
                    draft = Draft("willing", COORDINATOR, body, task_digest=proposal.task.digest)
                    turn.letters.append(OutgoingLetter((draft,), "willing", about))
                case proposing.Decline(refusal):
                    body = Declined(proposal.job_id, refusal).encode()
                    draft = Draft("declined", COORDINATOR, body, task_digest=proposal.task.digest)
                    turn.letters.append(OutgoingLetter((draft,), "", about))

    def _refuse(self, turn: DeskTurn, digest: str, refusal: Refusal) -> None:
        header = turn.headers.get(digest)
        if header is not None and header.round_digest:
            about = {"task_digest": header.task_digest, "round_digest": digest}
            draft = Draft("refused", COORDINATOR, refusal.encode(), header.task_digest, digest)
            turn.letters.append(OutgoingLetter((draft,), "", about))

    def _answer(self, turn: DeskTurn, digest: str) -> None:
        ask = turn.asks[digest]
        bodies = turn.stored.get(digest)
        if bodies is None:
            kept = self._rounds.kept(digest)
            bodies = None if kept is None else kept.bodies
            if kept is not None:
                turn.not_before = max(turn.not_before, kept.leaves_at)
                turn.most_left_s = max(turn.most_left_s, kept.held_s)
        if bodies is None:
            # Its key was removed by hand: as if it were settled.
            self._refuse(turn, digest, Refusal.of(PrivacyRefusal(NOT_KEPT)))
            return
        task_digest = ask.task.digest
        shares = [
            Draft("input-share", one.tallier_id, body, task_digest=task_digest, round_digest=digest, is_sealed=True)
            for one, body in zip(ask.talliers, bodies, strict=True)
        ]
        head = self._head()
        said = AnswerSent(head.seq, head.hash).encode()
        receipt = Draft("answered", COORDINATOR, said, task_digest=task_digest, round_digest=digest)
        about = {"task_digest": task_digest, "round_digest": digest}
        turn.letters.append(OutgoingLetter((*shares, receipt), "answered", about))

    def seal(self, ask: Ask, number: int, body: bytes) -> bytes:
        """One share, for the tallier of this number of the ask alone."""
        tallier = ask.talliers[number]
        return seal_body(
            "input-share",
            sender=self._party_id,
            recipient=tallier.tallier_id,
            task_digest=ask.task.digest,
            round_digest=ask.round.digest,
            body=body,
            seal_to=tallier.seal_key,
        )


def no_to(task_digest: str, round_digest: str, error: Exception) -> Refusal:
    """A refusal in the words that leave the site; what happened goes to its own log."""
    about = {"task_digest": task_digest, "round_digest": round_digest}
    log.warning("refused", extra=about | cause(error))
    return Refusal.of(told(error if isinstance(error, PUBLIC_ERRORS) else silent(error)))


def no_to_ask(ask: Ask, error: Exception) -> Refusal:
    """Likewise, of an ask that could be read."""
    return no_to(ask.task.digest, ask.round.digest, error)


def not_willing(proposal: Proposal, error: Exception) -> Refusal:
    """Likewise, of a proposal."""
    refusal = Refusal.of(told(error if isinstance(error, PUBLIC_ERRORS) else silent(error)))
    about = {"task_digest": proposal.task.digest, "job_id": proposal.job_id}
    log.warning("declined" if refusal.is_final else "not yet", extra=about | cause(error))
    return refusal
