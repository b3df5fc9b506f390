"""What leaves after a turn's commit: every message of every job at once, and the places where a test may kill.

A message that is lost is asked for again; a job whose messages cannot be written harms itself alone.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

from feature_store.driving.post_office import letter_of
from feature_store.driving.sending import Writer
from feature_store.driving.turn_plan import Plan
from feature_store.faults import fault_point
from feature_store.journal.chain import EMPTY
from feature_store.journal.ledger import Ledger
from feature_store.mailbox import Letter, Mailbox
from labeler.errors import LabelerError
from labeler.rounds.effects import (
    UNFINISHED,
    AskForSums,
    Failed,
    FixContributors,
    OpenAt,
    Post,
    Send,
    SendAsks,
    SendProposals,
    StoreRelease,
    Tell,
    TellSettled,
)
from labeler.rounds.job_state import JobRun

log = logging.getLogger("labeler.conductor")


def note_stored(plan: Plan) -> None:
    """Everything of a turn that is stored is durable, and nothing has left."""
    for kind, name in (
        (FixContributors, "coordinator.agreed"),
        (Post, "coordinator.posted"),
        (StoreRelease, "coordinator.released"),
    ):
        if any(isinstance(one, kind) for stores in plan.stores.values() for one in stores):
            fault_point(name)


def _is_no_opening(send: tuple[str, Send]) -> bool:
    """A tallier learns of a round before it is given a share of it."""
    return not isinstance(send[1], OpenAt)


def send_off(
    plan: Plan, settled: Sequence[tuple[JobRun, TellSettled]], sender: Writer, ledger: Ledger, mailbox: Mailbox
) -> LabelerError | None:
    """Everything that leaves, at once; why it could not, where it could not: it is asked for again.

    Args:
        settled: of this turn and of turns before, with their jobs as they were then.
    """
    letters: list[Letter] = []
    tell: dict[str, None] = {}
    head = EMPTY
    if any(isinstance(send, AskForSums) for _, send in plan.sends):
        head = ledger.known_head()
    try:
        for run, told in settled:
            letters += sender.letters(run, told, head)
    except LabelerError as error:
        log.warning("agents are not told that a round is settled", extra={"problem": error.problem_type})
    relayed = [letter_of(incoming.message) for incoming in plan.relays]
    for job_id, send in sorted(plan.sends, key=_is_no_opening):
        if isinstance(send, Tell):
            tell[job_id] = None
            continue
        if not isinstance(send, OpenAt):
            letters, relayed = letters + relayed, []
        try:
            letters += sender.letters(plan.runs[job_id], send, head)
        except LabelerError as error:
            # Of this job alone; the others' messages leave. What the round to be opened sends comes before the next's.
            plan.broken.setdefault(job_id, Failed(error, getattr(send, "number", None)))
    letters += relayed
    try:
        if letters or tell:
            ended = [job_id for job_id in tell if plan.runs[job_id].state not in UNFINISHED]
            mailbox.send_all(letters, tell=tell, ended=ended)
    except LabelerError as error:
        log.warning("messages could not be sent", extra={"problem": error.problem_type, "letters": len(letters)})
        return error
    for kind, name in (
        (SendProposals, "coordinator.proposed"),
        (SendAsks, "coordinator.asked"),
        (AskForSums, "coordinator.sum-asked"),
    ):
        if any(isinstance(send, kind) for _, send in plan.sends):
            fault_point(name)
    for job_id in {one for one, stores in plan.stores.items() if any(isinstance(s, StoreRelease) for s in stores)}:
        log.info("round opened", extra={"job_id": job_id})
    return None
