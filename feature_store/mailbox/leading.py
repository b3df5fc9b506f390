"""The mailbox of the one process that both sends and serves mail: out of its memory, with another mailbox beside it.

    memory   mail of a party that asks for it; it is handed out and confirmed without leaving this process
    beside   mail of a party that has not asked for `THERE_S`, and whatever does not fit into `MOST_BYTES`. It survives
             this process, and holds what one before it has left: every party begins here

A party's mail keeps its order: once some of it lies beside, all that comes for it goes there too, until the party has
read it to its end. What is read from there is handed out by way of memory, so that positions are of one kind, and it
is dropped there once its reader has confirmed it. What of its mail lies in memory when a party goes is put there
before the next message for it, and everything when this process ends. Killed, it loses the mail of those who were
there, which a mailbox may do: whoever goes on asks for all that is missing at once.

Whoever watches a job is told from memory. Work and signs of life are other processes', and lie beside.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from feature_store.mailbox.memory import MemoryMailbox
from feature_store.mailbox.protocol import MAX_MAIL_BYTES, Letter, Mailbox, Work, check_mail
from labeler.errors import LabelerError

log = logging.getLogger("labeler.mailbox")

THERE_S: Final = 5.0
"""After the end of its last poll a party is taken to be there, at work on what it was handed."""

MOST_BYTES: Final = 64 * 1024 * 1024
"""Of all mail in memory; only who waits at that moment is given more, and takes it at once."""

_AGAIN_S: Final = 0.005


@dataclass
class _Box:
    """Where one party's mail is.

    Attributes:
        is_beside: its newest mail is put beside, because older mail may lie there.
        cursor: of what lies there, how far it was taken into memory.
        taken: how many messages of it are in memory, and not dropped there.
        puts: beginnings and ends of what was put there; odd while something is on its way.
        is_known: it has asked this process before.
        polls: how many are open.
        asked_s: when the last one ended.
    """

    is_beside: bool = True
    cursor: str = ""
    taken: int = 0
    puts: int = 0
    is_known: bool = False
    polls: int = 0
    asked_s: float = float("-inf")


class LeadingMailbox:
    """See the module and `feature_store.mailbox.protocol.Mailbox`. One process has it at a time.

    Args:
        beside: what survives; its mail is nobody else's to read.
        is_followed: other processes watch jobs through `beside`, and are told there too.
        steady: seconds that never run backwards.
    """

    def __init__(
        self, beside: Mailbox, *, is_followed: bool = False, steady: Callable[[], float] = time.monotonic
    ) -> None:
        self._memory = MemoryMailbox()
        self._beside = beside
        self._is_followed = is_followed
        self._steady = steady
        self._sending = threading.Lock()
        self._lock = threading.Lock()
        self._boxes: dict[str, _Box] = {}

    def check(self) -> None:
        """See the protocol."""
        self._beside.check()

    # Mail

    def send(self, recipient: str, data: bytes, *, message_id: str) -> None:
        """See the protocol."""
        self.send_all([Letter(recipient, data, message_id)])

    def send_all(self, letters: Sequence[Letter], *, tell: Collection[str] = (), ended: Collection[str] = ()) -> None:
        """See the protocol. Unavailable where what goes beside could not; the rest has been sent."""
        for letter in letters:
            check_mail(letter.recipient, letter.data, letter.message_id)
        with self._sending:
            letters = self._memory.unseen(letters)
            away = self._go_beside(letters)
            self._memory.send_all([one for one in letters if one.recipient not in away], tell=tell, ended=ended)
            told = tell if self._is_followed else ()
            if away:
                self._put_beside(away, [one for one in letters if one.recipient in away], tell=told, ended=ended)
            elif told:
                try:
                    self._beside.send_all([], tell=told, ended=ended)
                except LabelerError as error:
                    # Who watches there looks at the journal by itself; the mail has been sent.
                    log.warning("followers could not be told", extra={"problem": error.problem_type})

    def _go_beside(self, letters: Sequence[Letter]) -> dict[str, dict[str, Letter] | None]:
        """Whose mail of these is put beside; of who goes there only now, what is to go before it, else None."""
        sizes: dict[str, int] = {}
        for letter in letters:
            sizes[letter.recipient] = sizes.get(letter.recipient, 0) + len(letter.data)
        room, there_s = MOST_BYTES - self._memory.mail_bytes(), self._steady() - THERE_S
        away: dict[str, dict[str, Letter] | None] = {}
        with self._lock:
            for recipient, size in sizes.items():
                box = self._boxes.setdefault(recipient, _Box())
                if box.is_beside:
                    away[recipient] = None
                elif not box.polls and (box.asked_s < there_s or size > room):
                    away[recipient] = self._memory.lying(recipient)
                else:
                    room -= size
                    continue
                box.is_beside = True
                box.puts += 1
        return away

    def _put_beside(
        self,
        away: Mapping[str, Mapping[str, Letter] | None],
        letters: Sequence[Letter],
        *,
        tell: Collection[str],
        ended: Collection[str],
    ) -> None:
        before = [letter for lying in away.values() if lying for letter in lying.values()]
        is_put = False
        try:
            self._beside.send_all([*before, *letters], tell=tell, ended=ended)
            is_put = True
            self._memory.note_seen(letters)
        finally:
            with self._lock:
                for recipient, lying in away.items():
                    box = self._boxes[recipient]
                    box.puts += 1
                    # Who goes there only now stays where it was, with all its mail, while nobody answers there.
                    box.is_beside = is_put or (box.is_beside and lying is None)
        for recipient, lying in away.items():
            self._memory.take_out(recipient, lying or ())

    async def receive(
        self,
        recipient: str,
        after: str,
        wait_s: float,
        max_messages: int = 16,
        *,
        max_bytes: int = MAX_MAIL_BYTES,
    ) -> list[tuple[str, bytes]]:
        """See the protocol."""
        with self._lock:
            box = self._boxes.setdefault(recipient, _Box())
            if not box.is_known:
                # Before anything of its mail lies in memory.
                self._memory.go_on_behind(recipient, after)
                box.is_known = True
            box.polls += 1
        try:
            if box.is_beside:
                found = await self._memory.receive(recipient, after, 0.0, max_messages, max_bytes=max_bytes)
                if found:
                    return found
                await self._take_back(recipient, box, max_messages, max_bytes)
            return await self._memory.receive(recipient, after, wait_s, max_messages, max_bytes=max_bytes)
        finally:
            with self._lock:
                box.polls -= 1
                box.asked_s = self._steady()

    async def _take_back(self, recipient: str, box: _Box, max_messages: int, max_bytes: int) -> None:
        """Take what lies beside into memory; all of it that was taken before has been confirmed."""
        while True:
            with self._lock:
                cursor, puts = box.cursor, box.puts
            mail = await self._beside.receive(recipient, cursor, 0.0, max_messages, max_bytes=max_bytes)
            with self._lock:
                if box.cursor != cursor:  # another poll of this party was quicker
                    return
                if mail:
                    box.taken, box.cursor = len(mail), mail[-1][0]
                    self._memory.send_all([Letter(recipient, data, f"beside:{position}") for position, data in mail])
                    return
                box.taken = 0
                if box.puts == puts and not puts % 2:  # nothing is on its way there, nor came while it was looked
                    box.is_beside = False
                    return
            await asyncio.sleep(_AGAIN_S)

    def pending(self, recipient: str) -> int:
        """See the protocol."""
        return self.all_pending([recipient])[recipient]

    def all_pending(self, recipients: Collection[str]) -> dict[str, int]:
        """See the protocol."""
        found = self._memory.all_pending(recipients)
        with self._lock:
            boxes = {one: box for one in recipients if (box := self._boxes.get(one, _Box())).is_beside}
        lying = self._beside.all_pending(list(boxes)) if boxes else {}
        return {
            one: count + (max(0, lying[one] - boxes[one].taken) if one in boxes else 0) for one, count in found.items()
        }

    # Work and signs of life

    def add_work(self, queue: str, work_id: str) -> None:
        """See the protocol."""
        self._beside.add_work(queue, work_id)

    def claim(self, queue: str, consumer: str, *, lease_s: float, wait_s: float) -> Work | None:
        """See the protocol."""
        return self._beside.claim(queue, consumer, lease_s=lease_s, wait_s=wait_s)

    def heartbeat(self, work: Work) -> None:
        """See the protocol."""
        self._beside.heartbeat(work)

    def done(self, work: Work) -> None:
        """See the protocol."""
        self._beside.done(work)

    def show_life(self, role: str, *, for_s: float) -> None:
        """See the protocol."""
        self._beside.show_life(role, for_s=for_s)

    def is_alive(self, role: str) -> bool:
        """See the protocol."""
        return self._beside.is_alive(role)

    # Progress

    def publish(self, job_id: str, event: Mapping[str, Any]) -> None:
        """See the protocol."""
        self._memory.publish(job_id, event)
        if self._is_followed:
            self._beside.publish(job_id, event)

    async def watch(
        self, job_id: str, after: str, wait_s: float, max_events: int = 100
    ) -> list[tuple[str, dict[str, Any]]]:
        """See the protocol: what this process has said; what others say beside changes nothing that is shown."""
        return await self._memory.watch(job_id, after, wait_s, max_events)

    # Ends

    def close(self) -> None:
        """See the protocol; mail that still lies in memory survives beside."""
        self._leave()
        self._beside.close()

    async def aclose(self) -> None:
        """See the protocol."""
        await self._beside.aclose()

    def _leave(self) -> None:
        with self._sending:
            with self._lock:
                here = [recipient for recipient, box in self._boxes.items() if not box.is_beside]
                away = {recipient: lying for recipient in here if (lying := self._memory.lying(recipient))}
                for recipient in away:
                    self._boxes[recipient].is_beside = True
                    self._boxes[recipient].puts += 1
            try:
                if away:
                    self._put_beside(away, [], tell=(), ended=())
            except LabelerError as error:
                log.warning("mail in memory is lost", extra={"problem": error.problem_type})

    def __repr__(self) -> str:
        return "LeadingMailbox(<redacted>)"
