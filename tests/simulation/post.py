"""The connections of a simulated federation: a mailbox and a network that lose, double and delay.

Nothing is ever made up or changed: that is for the tests of forgeries. What a party sends is seen by the witness at the
moment it leaves, whatever happens to it later.
"""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable, Collection, Sequence

from labeler.driver.mail import MAX_MAIL_BYTES, Letter
from labeler.driver.mail_memory import MemoryMailbox
from labeler.errors import (
    Forged,
    JournalBehind,
    LabelerError,
    NotEnrolled,
    ProtocolViolation,
    Replayed,
    TooLarge,
    TryAgain,
    Unavailable,
)
from labeler.messages import read_frames
from tests.simulation.case import Rates
from tests.simulation.subject import StepwiseCoordinator
from tests.simulation.witness import Witness
from workers.party.coordinator import Unreachable

MAX_MESSAGES = 258
KEPT_OLD = 30


class Killed(BaseException):
    """A simulated process dies here. No `except Exception` of the product may outlive it."""


class LossyMailbox:
    """The mailbox in memory, with what may go wrong on the way to it; a `labeler.driver.mail.Mailbox`.

    Args:
        draw: decides what happens to each message.
        now: unix time in seconds.
        overheard: sees every message that is put into it.
        moment: called before and after each message.
    """

    def __init__(
        self,
        draw: random.Random,
        *,
        now: Callable[[], float],
        overheard: Witness,
        moment: Callable[[str], None],
    ) -> None:
        self._draw = draw
        self._memory = MemoryMailbox(now=now)
        self._overheard = overheard
        self._moment = moment
        self._held: list[tuple[str, bytes, str]] = []
        self._copies = 0
        self.rates = Rates()
        self.leaves = self.away = ""
        """Who goes away when it is first asked, and who is away: nobody is there, and mail is lost."""
        self.lost = self.doubled = self.held = 0

    def send(self, recipient: str, data: bytes, *, message_id: str) -> None:
        """Put a message in, or lose, double or hold it."""
        self._moment("mail")
        messages = read_frames(data, max_messages=MAX_MESSAGES)
        self._overheard.mailed(recipient, messages)
        if recipient == self.leaves and any(message.header.kind == "ask" for message in messages):
            self.leaves, self.away = "", recipient
        rates, draw = self.rates, self._draw
        if draw.random() < rates.outage:
            raise Unavailable("the mailbox does not answer")
        if draw.random() < rates.lose or recipient == self.away:
            self.lost += 1
        elif draw.random() < rates.hold:
            self.held += 1
            self._held.append((recipient, data, message_id))
        else:
            self._put(recipient, data, message_id)
            if draw.random() < rates.double:
                self.doubled += 1
                self._copies += 1
                self._put(recipient, data, f"{message_id}#{self._copies}")
        self._moment("mailed")

    def send_all(
        self,
        letters: Sequence[Letter],
        *,
        tell: Collection[str] = (),  # noqa: ARG002
        ended: Collection[str] = (),  # noqa: ARG002
    ) -> None:
        """See Mailbox; nobody watches."""
        for letter in letters:
            self.send(letter.recipient, letter.data, message_id=letter.message_id)

    def release(self, *, all_of_them: bool = False) -> None:
        """Deliver what was held, in any order."""
        self._draw.shuffle(self._held)
        while self._held and (all_of_them or self._draw.random() < 0.5):
            recipient, data, message_id = self._held.pop()
            self._put(recipient, data, f"{message_id}#held")

    def _put(self, recipient: str, data: bytes, message_id: str) -> None:
        self._memory.send_all([Letter(recipient, data, message_id)])

    def empty(self) -> None:
        """Lose everything, also what is held."""
        self._memory.empty()
        self._held.clear()

    async def receive(
        self,
        recipient: str,
        after: str,
        wait_s: float,  # noqa: ARG002  # nobody waits in virtual time
        max_messages: int = 16,
        *,
        max_bytes: int = MAX_MAIL_BYTES,
    ) -> list[tuple[str, bytes]]:
        """See Mailbox; never waits."""
        if self._draw.random() < self.rates.outage:
            raise Unavailable("the mailbox does not answer")
        return await self._memory.receive(recipient, after, 0.0, max_messages, max_bytes=max_bytes)

    def all_pending(self, recipients: Collection[str]) -> dict[str, int]:
        """See Mailbox."""
        return self._memory.all_pending(recipients)

    def check(self) -> None:
        """See Mailbox."""

    def show_life(self, role: str, *, for_s: float) -> None:
        """See Mailbox."""
        self._memory.show_life(role, for_s=for_s)

    def is_alive(self, role: str) -> bool:
        """See Mailbox."""
        return self._memory.is_alive(role)

    async def watch(self, job_id: str, after: str, wait_s: float) -> list[tuple[str, bool]]:  # noqa: ARG002
        """See Mailbox; never waits."""
        return await self._memory.watch(job_id, after, 0.0)

    def close(self) -> None:
        """See Mailbox."""

    async def aclose(self) -> None:
        """See Mailbox."""


class Network:
    """Requests of the parties to the coordinator, which is there or not.

    Args:
        draw: decides what happens to each request.
        overheard: sees every message that is posted.
        reach: the coordinator while it lives, else None.
        enter: runs something in the coordinator's name; raises `Killed` where it dies of it.
    """

    def __init__(
        self,
        draw: random.Random,
        *,
        overheard: Witness,
        reach: Callable[[], StepwiseCoordinator | None],
        enter: Callable[[Callable[[], bytes]], bytes],
    ) -> None:
        self._draw = draw
        self._overheard = overheard
        self._reach = reach
        self._enter = enter
        self._old: list[tuple[str, bytes]] = []
        self.rates = Rates()
        self.lost = self.doubled = self.replayed = 0

    def post(self, sender: str, path: str, data: bytes) -> bytes:
        """One request of a party.

        Raises:
            Unreachable: it was lost, its answer was, or the coordinator is not there.
            LabelerError: what the coordinator says to it, as its client hears it.
        """
        if path == "/v1/messages":
            self._overheard.posted(sender, read_frames(data, max_messages=MAX_MESSAGES))
            self._keep(path, data)
        if self._draw.random() < self.rates.lose:
            self.lost += 1
            raise Unreachable("the request was lost")
        answer = self._deliver(path, data)
        if self._draw.random() < self.rates.double:
            self.doubled += 1
            with contextlib.suppress(LabelerError):
                self._deliver(path, data)
        if self._draw.random() < self.rates.lose_answer:
            self.lost += 1
            raise Unreachable("the answer was lost")
        return answer

    def replay(self) -> None:
        """An old request comes again, from somebody who recorded it."""
        if self._old:
            self.replayed += 1
            path, data = self._draw.choice(self._old)
            with contextlib.suppress(LabelerError):
                self._deliver(path, data)

    def _keep(self, path: str, data: bytes) -> None:
        self._old.append((path, data))
        if len(self._old) > KEPT_OLD:
            del self._old[self._draw.randrange(KEPT_OLD)]

    def _deliver(self, path: str, data: bytes) -> bytes:
        receiver = self._reach()
        if receiver is None:
            raise Unreachable("nobody answers")

        def answer() -> bytes:
            if path == "/v1/messages:poll":
                return receiver.poll(data)
            return receiver.take(data)

        try:
            return self._enter(answer)
        except Killed:
            raise Unreachable("the connection broke off") from None
        except (JournalBehind, NotEnrolled, Forged, Replayed, TooLarge) as error:
            raise type(error)(str(error)) from None
        except TryAgain as error:
            raise Unreachable(str(error)) from None
        except LabelerError as error:
            raise ProtocolViolation(str(error)) from None


class Door:
    """One party's way to the coordinator; a `workers.party.coordinator.CoordinatorDoor`."""

    def __init__(self, network: Network, party_id: str, moment: Callable[[str], None]) -> None:
        self._network = network
        self._party_id = party_id
        self._moment = moment

    def post(self, path: str, data: bytes) -> bytes:
        """See CoordinatorDoor."""
        self._moment("post")
        answer = self._network.post(self._party_id, path, data)
        self._moment("posted")
        return answer

    def close(self) -> None:
        """See CoordinatorDoor."""
