"""A party's conversation with its coordinator: mail comes, has its effect, is answered, and the next is asked for."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from typing import Protocol

from labeler.errors import (
    Forged,
    Interrupted,
    JournalBehind,
    LabelerError,
    NotEnrolled,
    ProtocolViolation,
    TooLarge,
    Unavailable,
    WrongVersion,
)
from labeler.messages import Message
from workers.party.link import Letter, PartyLink

log = logging.getLogger("labeler.party")

_REFUSED_PAUSE_S = 10.0
_PASSING_PAUSE_S = 2.0


class Handler(Protocol):
    """What a party does with its mail; without network or threads."""

    def tidy(self) -> None:
        """Do what is due by the clock, such as erasing; send nothing.

        Called whether or not the coordinator answers, since it could otherwise keep alive what it wants by being away,
        or by turning this party away.
        """
        ...

    @property
    def due_in_s(self) -> float | None:
        """After how many seconds `handle` wants to be called also without mail; None where it need not be."""
        ...

    def handle(self, mail: Sequence[Message]) -> Sequence[Letter]:
        """Have the effect of every message, durably; what is to be sent. Raises only what concerns them all."""
        ...

    def sent(self, errors: Sequence[LabelerError | None]) -> None:
        """The letters were taken, each unless it has an error: what was opened need not come again."""
        ...


def converse(
    link: PartyLink, handler: Handler, stop: threading.Event, *, held_s: Callable[[], float] | None = None
) -> None:
    """Poll, handle and send until told to stop; what passes by itself is waited for, what does not is said in the log.

    Args:
        held_s: after how many seconds what `handle` has come to may leave, and the next poll with it, also where it
            raised (`workers.agent.public_clock`); at once where absent. Told to stop meanwhile nothing leaves: what
            was answered is stored, and its mail comes again.

    Raises:
        LabelerError: this party's own journal or files cannot be used any more.
    """
    link.while_waiting = handler.tidy
    longest_s = link.wait_s
    while not stop.is_set():
        try:
            handler.tidy()
            link.wait_s = _wait_s(handler, longest_s)
            mail = link.poll()
            if not mail:
                link.mail.settle()
            try:
                letters = handler.handle(mail)
            finally:
                left_s = 0.0 if held_s is None else held_s()
                is_over = left_s > 0 and stop.wait(left_s)
            if is_over:
                return
            link.wait_s = _wait_s(handler, longest_s)  # the next poll may travel with the letters
            handler.sent(link.answer(letters))
        except Interrupted:
            return
        except (NotEnrolled, Forged) as error:
            _pause(
                error, "the coordinator does not accept this party; an administrator has to enrol its keys", link, stop
            )
        except JournalBehind as error:
            _pause(error, "a journal is behind; this party takes no part", link, stop)
        except WrongVersion as error:
            _pause(
                error, "the coordinator's program is of another version; one of the two has to be upgraded", link, stop
            )
        except (ProtocolViolation, TooLarge, Unavailable) as error:
            _pause(error, "mail could not be handled; trying again", link, stop, pause_s=_PASSING_PAUSE_S)


def _wait_s(handler: Handler, longest_s: float) -> float:
    due_in_s = handler.due_in_s
    return longest_s if due_in_s is None else min(longest_s, due_in_s)


def _pause(
    error: LabelerError, what: str, link: PartyLink, stop: threading.Event, *, pause_s: float = _REFUSED_PAUSE_S
) -> None:
    log.error(what, extra={"party": link.party_id, "problem": error.problem_type, "sentence": str(error)})
    stop.wait(pause_s)
