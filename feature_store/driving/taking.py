"""Messages of parties, taken in order: each is a step of its job's machine, on a draft, and its number is new."""

from __future__ import annotations

import logging
from collections.abc import Mapping

from feature_store.driving.intake import Delivery, Incoming
from feature_store.driving.live_jobs import LiveJobs
from feature_store.driving.stepping import Stepper
from feature_store.driving.turn_plan import Plan
from feature_store.journal.sequences import Sequences
from labeler.errors import LabelerError, Replayed, TryAgain, Unavailable, WrongDigest
from labeler.messages import COORDINATOR
from labeler.rounds.effects import Party

log = logging.getLogger("labeler.conductor")


class Taker:
    """See the module."""

    def __init__(self, live: LiveJobs, stepper: Stepper, sequences: Sequences) -> None:
        self._live = live
        self._stepper = stepper
        self._sequences = sequences
        self._last: dict[tuple[str, str], int] = {}
        self._relayed: dict[tuple[str, str], int] = {}

    def take(self, delivery: Delivery, plan: Plan, parties: Mapping[str, Party]) -> int | LabelerError:
        """How many messages are taken, or why the first that is not is refused."""
        for incoming in delivery.messages:
            try:
                self._take_one(incoming, plan, parties)
            except LabelerError as error:
                return error
            except Exception as error:
                log.exception("a message met a defect", extra={"message_id": incoming.message.message_id})
                return unavailable(error)
        return len(delivery.messages) if delivery.error is None else delivery.error

    def keep(self, plan: Plan) -> None:
        """What this turn took is durable."""
        self._last |= plan.taken

    def keep_relayed(self, plan: Plan) -> None:
        """What this turn passed on has left."""
        self._relayed |= plan.relayed

    def forget(self, incoming: Incoming) -> None:
        """The journal knows more of this sender's numbers than memory does."""
        self._last.pop((incoming.message.header.sender, incoming.verify_key), None)

    def _take_one(self, incoming: Incoming, plan: Plan, parties: Mapping[str, Party]) -> None:
        header = incoming.message.header
        job_id = self._live.job_of(incoming)
        if job_id is None:
            raise WrongDigest(
                "the answer is about a job that this coordinator never proposed"
                if incoming.job_id
                else "the message belongs to a round that this coordinator never opened"
            )
        party = parties.get(header.sender)
        if party is None or party.verify_key != incoming.verify_key:
            raise Unavailable(f"the keys of {header.sender!r} were changed at this moment; send again")
        # Tried on a draft, so that nothing is kept of a message that is not taken.
        draft = plan.draft(job_id, self._stepper.run_of(job_id, plan))
        refusal = self._stepper.step(job_id, incoming.event, draft, incoming)
        if refusal is not None:
            raise refusal
        self._check_new(incoming, plan)
        plan.join(draft)
        if incoming.head is not None:
            plan.heads[header.sender] = incoming.head
        if header.recipient == COORDINATOR:
            plan.taken[header.sender, incoming.verify_key] = header.sequence
        else:
            plan.relayed[header.sender, header.recipient] = header.sequence

    def _check_new(self, incoming: Incoming, plan: Plan) -> None:
        header = incoming.message.header
        if header.recipient == COORDINATOR:
            key = (header.sender, incoming.verify_key)
            if key not in self._last:
                self._last[key] = self._sequences.last(*key)
            last = plan.taken.get(key, self._last[key])
        else:
            way = (header.sender, header.recipient)
            last = plan.relayed.get(way, self._relayed.get(way, 0))
        if header.sequence <= last:
            raise Replayed(
                f"message {header.sequence} of {header.sender!r} for {header.recipient!r} is not new: message {last} "
                "was taken. If it was sent again because the answer was lost, it has arrived"
            )


def unavailable(error: Exception) -> LabelerError:
    """What whoever sent something is told where it could not be taken now."""
    return error if isinstance(error, TryAgain) else Unavailable("the journal cannot take it now; send again")
