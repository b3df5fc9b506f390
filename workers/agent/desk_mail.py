"""An agent's mail, opened: what the coordinator says becomes events of rounds and proposals, all else is skipped."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Final

from labeler.errors import Forged, LabelerError, ProtocolViolation, Replayed, WrongDigest
from labeler.messages import COORDINATOR, Header, Message, bodies
from labeler.messages.bodies import Ask, Proposal
from labeler.messages.bodies import Settled as SettledBody
from labeler.rounds import agent as machine
from labeler.rounds import agent_proposal as proposing
from workers.agent.desk_letters import no_to
from workers.agent.desk_memory import DeskMemory
from workers.agent.desk_turn import DeskTurn
from workers.agent.words import said
from workers.party.mail import PartyMail

log = logging.getLogger("labeler.agent")

_TAKEN: Final = ("ask", "answered", "proposal", "withdrawn")


class DeskMail:
    """Reads the mail of a poll.

    Args:
        coordinator_key: with which the coordinator's signatures are checked.
    """

    def __init__(self, mail: PartyMail, coordinator_key: str, memory: DeskMemory) -> None:
        self._mail = mail
        self._coordinator_key = coordinator_key
        self._memory = memory

    def read(self, turn: DeskTurn, mail: Sequence[Message]) -> None:
        """Every message that is one of the coordinator's is an event; of asks for one round the last counts."""
        taken: list[tuple[Header, bytes]] = []
        for message in mail:
            try:
                body = self._mail.open(message, self._coordinator_key)
                if message.header.sender != COORDINATOR or message.header.kind not in _TAKEN:
                    raise ProtocolViolation(f"an agent takes no message of kind {message.header.kind!r}")
                taken.append((message.header, body))
            except Replayed:
                continue
            except (Forged, ProtocolViolation) as error:
                log.warning("message skipped", extra={"message_id": message.message_id} | said(error))
        # Asked and settled in one mail: nobody misses anything, so it is as if it had not been asked.
        last = {header.round_digest: header for header, _ in taken if header.kind in ("ask", "answered")}
        for header, body in taken:
            try:
                if header.kind == "ask" and last[header.round_digest] is header:
                    self._asked(turn, header, body)
                elif header.kind == "answered":
                    SettledBody.decode(body)
                    about = {"task_digest": header.task_digest, "round_digest": header.round_digest}
                    self._memory.round_event(turn, header.round_digest, machine.Settled())
                    turn.over.append(("round is settled, nothing is kept of it", about))
                elif header.kind == "proposal":
                    proposal = Proposal.decode(body)
                    if header.task_digest != proposal.task.digest:
                        raise WrongDigest("a proposal names another task than it holds")
                    self._memory.proposal_event(turn, proposal, proposing.Proposed(proposal))
                elif header.kind == "withdrawn":
                    turn.withdrawn.append(bodies.Withdrawn.decode(body).job_id)
            except LabelerError as error:
                # It was none, so there is nobody to say anything to.
                about = {"task_digest": header.task_digest, "kind": header.kind}
                log.warning("message skipped", extra=about | said(error))

    def _asked(self, turn: DeskTurn, header: Header, body: bytes) -> None:
        turn.headers[header.round_digest] = header
        try:
            ask = Ask.decode(body)
            if (header.task_digest, header.round_digest) != (ask.task.digest, ask.round.digest):
                raise WrongDigest("an ask names another task or round than it holds")
        except LabelerError as error:
            refusal = no_to(header.task_digest, header.round_digest, error)
            self._memory.round_event(turn, header.round_digest, machine.Refused(refusal))
        else:
            self._memory.round_event(turn, header.round_digest, machine.Asked(ask))
