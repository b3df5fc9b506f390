"""Every bound on what a client may send, hold or repeat, on one page.

============================== ======================================= ==================================
bound                          value                                   beyond it
============================== ======================================= ==================================
requests at once, one client   `max_connections_per_address` (settings) 429
size of a body                 `most_bytes`, by route                  413, before anything is read
time of a body                 `BODY_S` + 1 s per `LEAST_BYTES_PER_S`  503
time of an answer              `ANSWER_S` + 1 s per that number        the connection is cut
uploads of one token           `max_token_bytes` (settings)            429, before anything is read
uploads of all that arrive     the free disk less `SPARE_BYTES`        507, before anything is read
bodies under way, one sender   `BODIES_EACH`                           503
bodies under way, in all       `BODIES_TOTAL`, by kind of sender       503
requests a minute, one token   `max_requests_per_minute` (settings)    429
failures a minute, one client  600                                     429
enrolments a minute, one client 30                                     429
what lasts (streams, exports)  `Slots`, beside each route              429
lists and sums, one token      `LISTS_EACH` at once                    429; `LISTS_AT_ONCE` are read, others in turn
idle connections               `api.server`                            the longest idle ones are closed
============================== ======================================= ==================================

A client is an address: the peer's, or the one a trusted proxy reports. Strangers' bodies have a separate allowance, so
that slow strangers cannot shut out a client with a token. The edge (`workers.serve`) bounds what an application cannot:
slow heads and the total of connections. None of these limits is part of the privacy bound, so a restart may reset them.
"""

from __future__ import annotations

import asyncio
import ipaddress
import math
import threading
import time
from collections import Counter, deque
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from functools import lru_cache
from typing import TYPE_CHECKING, Final, Literal

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from labeler.errors import InvalidSetting, LabelerError, QuotaUsedUp, RateLimited, TooLarge, Unavailable
from labeler.messages import MAX_MESSAGE_BYTES
from labeler.system.files import storage_full

if TYPE_CHECKING:
    from api.coordinator.config import LimitsTable

HEALTH: Final = ("/healthz", "/readyz")

MAX_JSON_BYTES: Final = 1024 * 1024
"""Largest ordinary request."""
MAX_STRANGERS_BYTES: Final = 16 * 1024
"""Largest enrolment, which usually has some 600 bytes: parsed JSON takes a hundred times its text in memory."""
MAX_FEATURES_JSON_BYTES: Final = 16 * 1024 * 1024
"""Largest job with feature vectors as JSON; more vectors come in Parquet, which takes a fraction of the memory."""
MAX_LABELS_BYTES: Final = 32 * 1024 * 1024
"""64 vectors of 16,384 numbers as JSON text, or 24 MiB of images in base64."""
MAX_LABELS_FORM_BYTES: Final = 256 * 1024 * 1024
"""64 photographs of 4 MiB as files of a form, which lie on the disk while they arrive."""
MAX_POLL_BYTES: Final = 1024 * 1024
FORM_OVERHEAD_BYTES: Final = 64 * 1024 * 1024
"""Allowance for a form's part heads and the request itself, besides its images."""
SPOOL_BYTES: Final = 256 * 1024
"""Bytes of a form's current part that are held in memory; the rest goes to disk."""

BODY_S: Final = 30.0
LEAST_BYTES_PER_S: Final = 16 * 1024
"""A body must arrive in `BODY_S`, plus a second for each such number of bytes received."""
ANSWER_S: Final = 60.0
"""A client may take nothing of what is sent to it for so long; see `api.server.HttpConnection`."""

SMALL_BYTES: Final = 64 * 1024
"""Largest cheap body: parsed at once, and of a token not counted."""

UPLOADS: Final = ("/v1/jobs", "/v1/labels")
"""Paths whose bodies become uploads."""
SPARE_BYTES: Final = 256 * 1024 * 1024
"""Bytes of the disk that arriving uploads leave to the journal and to jobs."""
QUOTA_WAIT_S: Final = 60
"""A client of ours is patient for so long, so it does not send again what only the end of a job makes room for."""

Sender = Literal["token", "party", "stranger"]
BODIES_EACH: Final[dict[Sender, int]] = {"token": 16, "party": 64, "stranger": 4}
"""Most bodies in progress of one token, or of one client without a token. For tokens only those above `SMALL_BYTES`
count: smaller ones mostly come with their head, and the limits on requests bound them. A party's count whatever their
size: nobody has shown a key before the first bytes are there."""
BODIES_TOTAL: Final[dict[Sender, int]] = {"token": 128, "party": 512, "stranger": 64}

LISTS_EACH: Final = 8
LISTS_AT_ONCE: Final = 2
"""Lists and sums that are read at once. Each takes a processor, and whoever waits for a job needs the others."""

RETRY_S: Final = 2
SLOT_WAIT_S: Final = 5
WINDOW_S: Final = 60.0
ENROLMENTS_PER_MINUTE: Final = 30
"""Attempts of one client to use an invitation; a site needs one ever."""

BODY_KEY: Final = "labeler.body"
"""Key of a request's scope, under which the gate finds its `RequestBody`."""


class TooManyRequests(RateLimited):
    """Too many requests came; `retry_after_s` says when the next is taken."""

    def __init__(self, message: str, *, retry_after_s: int) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class Full(QuotaUsedUp):
    """One token's uploads take too many bytes; `retry_after_s` says when a job may have ended."""

    retry_after_s = QUOTA_WAIT_S


class Crowded(Unavailable):
    """Too much is in progress; `retry_after_s` says when to send again."""

    retry_after_s = RETRY_S


def most_bytes(path: str, *, is_form: bool, limits: LimitsTable) -> int:
    """Return the size of the largest body that a path takes."""
    if path == "/v1/jobs":
        return limits.max_upload_bytes + FORM_OVERHEAD_BYTES if is_form else MAX_FEATURES_JSON_BYTES
    return {
        "/v1/enrolments": MAX_STRANGERS_BYTES,
        "/v1/labels": MAX_LABELS_FORM_BYTES if is_form else MAX_LABELS_BYTES,
        "/v1/messages": MAX_MESSAGE_BYTES,
        "/v1/messages:poll": MAX_POLL_BYTES,
    }.get(path, MAX_JSON_BYTES)


@lru_cache(maxsize=4096)
def address_group(host: str) -> str:
    """Return the identity of a client: its IPv4 address, or its IPv6 /64, because one host may use all of that."""
    try:
        address = ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        return host[:64]
    if isinstance(address, ipaddress.IPv4Address):
        return str(address)
    if address.ipv4_mapped is not None:
        return str(address.ipv4_mapped)
    return str(ipaddress.ip_network((address, 64), strict=False))


class Slots:
    """A bound on lasting operations in progress, per name and in all.

    Args:
        what: the operation in words, singular.
        each: most per name.
        total: most in all.
        refused: makes the refusal.
    """

    def __init__(
        self,
        what: str,
        *,
        each: int,
        total: int,
        refused: Callable[[str], Exception] = lambda said: TooManyRequests(said, retry_after_s=SLOT_WAIT_S),
    ) -> None:
        if each < 1 or total < 1:
            raise InvalidSetting("a bound on what may be under way at once must be at least one")
        self._what, self._each, self._total, self._refused = what, each, total, refused
        self._lock = threading.Lock()
        self._held: Counter[str] = Counter()

    def take(self, name: str) -> None:
        """Take one slot.

        Raises:
            TooManyRequests, or what `refused` makes: none is free for this name, or for anybody.
        """
        with self._lock:
            if self._held[name] >= self._each:
                raise self._refused(
                    f"one client may have {self._each} {self._what} in progress, and this is one more; send it again "
                    "when one of them has ended"
                )
            if self._held.total() >= self._total:
                raise self._refused(
                    f"{self._total} {self._what} of all clients are in progress, the most that are served; send it "
                    f"again in {SLOT_WAIT_S} s"
                )
            self._held[name] += 1

    def give_back(self, name: str) -> None:
        """Give a slot back."""
        with self._lock:
            self._held[name] -= 1
            if not self._held[name]:
                del self._held[name]

    @contextmanager
    def hold(self, name: str) -> Iterator[None]:
        """Hold one slot until the block ends; see `take`."""
        self.take(name)
        try:
            yield
        finally:
            self.give_back(name)


class Turns:
    """Turns at what many ask for: a few at once, the others in the order in which they came, each name a few of them.

    Args:
        what: one of them in words, plural.
        each: most per name, waiting or in progress.
        at_once: most in progress.
    """

    def __init__(self, what: str, *, each: int, at_once: int) -> None:
        self._slots = Slots(what, each=each, total=2**62)
        self._places = asyncio.Semaphore(at_once)

    @asynccontextmanager
    async def hold(self, name: str) -> AsyncIterator[None]:
        """Wait for a turn, and hold it until the block ends.

        Raises:
            TooManyRequests: this name waits for too many already.
        """
        with self._slots.hold(name):
            async with self._places:
                yield


class RateLimits:
    """Counts of requests by token, of failures and enrolments by address, within any minute.

    A failure never locks out another client at the address that shows a valid token.

    Args:
        requests_per_minute: of one token.
        failures_per_minute: requests of one client without a good token or signature.
        steady: seconds that never run backwards.
    """

    def __init__(
        self,
        *,
        requests_per_minute: int,
        failures_per_minute: int = 600,
        steady: Callable[[], float] = time.monotonic,
    ) -> None:
        self.requests = Window(requests_per_minute, steady, "one token may send")
        self.enrolments = Window(ENROLMENTS_PER_MINUTE, steady, "one address may try to enrol with")
        self.failures = Window(
            failures_per_minute, steady, "one address may fail to show a good token or signature for"
        )


class Window:
    """A limit on requests per name within any minute; a refused one is not counted."""

    def __init__(self, most: int, steady: Callable[[], float], words: str) -> None:
        if most < 1:
            raise InvalidSetting("a rate limit must be at least one request a minute")
        self._most, self._steady, self._words = most, steady, words
        self._lock = threading.Lock()
        self._times: dict[str, deque[float]] = {}
        self._swept_s = steady()

    def hit(self, name: str) -> None:
        """Count one request; raises TooManyRequests."""
        now_s = self._steady()
        with self._lock:
            if now_s - self._swept_s >= WINDOW_S:
                self._swept_s = now_s
                self._times = {other: times for other, times in self._times.items() if now_s - times[-1] < WINDOW_S}
            times = self._times.setdefault(name, deque(maxlen=self._most))
            if len(times) == self._most and now_s < times[0] + WINDOW_S:
                wait_s = max(1, math.ceil(times[0] + WINDOW_S - now_s))
                raise TooManyRequests(
                    f"{self._words} {self._most} requests a minute; send the next in {wait_s} s", retry_after_s=wait_s
                )
            times.append(now_s)


class Uploads:
    """The bytes of each token's uploads: those of its jobs that have not ended, and those that arrive now.

    The former are counted from files and rows at a start, so a restart forgets none.

    Args:
        most: bytes of one token.
        free: returns the free bytes of the disk that takes them.
    """

    def __init__(self, most: int, *, free: Callable[[], int]) -> None:
        self._most, self._free = most, free
        self._lock = threading.Lock()
        self._kept: dict[str, tuple[str, int]] = {}
        self._used: Counter[str] = Counter()
        self._arriving = 0

    def keep(self, job_id: str, token_id: str, size: int) -> None:
        """Count the upload of a job until `release`."""
        with self._lock:
            self._kept[job_id] = (token_id, size)
            self._used[token_id] += size

    def release(self, job_id: str) -> None:
        """Count the upload of a job that has ended no longer; a repeated call changes nothing."""
        with self._lock:
            token_id, size = self._kept.pop(job_id, ("", 0))
            self._take(token_id, -size)

    def add(self, token_id: str, size: int, *, so_far: int = 0) -> None:
        """Count bytes of an upload that arrives; subtract them when the request ends.

        Args:
            so_far: bytes of this upload that were counted before. Only a small upload may take the disk's spare bytes.

        Raises:
            QuotaUsedUp: the token's quota is smaller.
            StorageFull: the disk has no room for them.
        """
        with self._lock:
            used = self._used[token_id]
            if used + size > self._most:
                raise Full(
                    f"the uploads of one token may take {self._most} bytes together; this token's take {used} already, "
                    f"kept for its jobs or arriving now, and this request brings {size} more. Wait until a job ends "
                    "or cancel one, and send it again; the operator can raise limits.max_token_bytes"
                )
            if so_far + size > SMALL_BYTES and self._arriving + size > self._free() - SPARE_BYTES:
                raise storage_full("the upload")
            self._take(token_id, size)
            self._arriving += size

    def subtract(self, token_id: str, size: int) -> None:
        """Count bytes no longer that `add` counted."""
        with self._lock:
            self._take(token_id, -size)
            self._arriving -= size

    def _take(self, token_id: str, size: int) -> None:
        self._used[token_id] += size
        if not self._used[token_id]:
            del self._used[token_id]


_SHORTER: Final = "Send less in one request"
_AS_A_JOB: Final = "Send images as files of a form, and more of them as a job (POST /v1/jobs)"
_INSTEAD: Final = {
    ("/v1/jobs", False): "Make several jobs of it, or send the vectors as Parquet in a form",
    ("/v1/jobs", True): "Make several jobs of it; the operator can raise limits.max_upload_bytes",
    ("/v1/labels", False): _AS_A_JOB,
    ("/v1/labels", True): _AS_A_JOB,
    ("/v1/enrolments", False): "An enrolment has some 600 bytes: send the file that `labeler agent join` made",
}


def instead_of(path: str, *, is_form: bool) -> str:
    """Return what to do about a body that is too large."""
    return _INSTEAD.get((path, is_form), _SHORTER)


class RequestBody:
    """An arriving request body: bounded in size and time, and counted until it is read.

    The bytes of an upload are counted until the request ends.

    Args:
        most: largest size in bytes.
        stated: size in bytes from the head; None if it comes in chunks.
        uploads: counts its bytes; None if it becomes no upload.
        instead: advises who sends more than that.
    """

    def __init__(
        self,
        receive: Receive,
        bodies: dict[Sender, Slots],
        *,
        most: int,
        stated: int | None,
        uploads: Uploads | None = None,
        instead: str = _SHORTER,
    ) -> None:
        self._receive, self._bodies, self._most, self._stated = receive, bodies, most, stated
        self._instead = instead
        self._uploads, self._owner, self._counted = uploads, "", 0
        self.is_read = stated == 0
        self._size = 0
        self._waited_s = 0.0
        self._held: tuple[Slots, str] | None = None

    def admit(self, sender: Sender, name: str) -> None:
        """Count it as a sender's until it is read; the gate calls this before the first byte is read.

        Raises:
            TooLarge: the stated size is above the limit.
            Crowded: too many bodies are in progress.
            QuotaUsedUp, StorageFull: see `Uploads.add`.
        """
        if self._stated is not None and self._stated > self._most:
            raise too_large(self._most, self._stated, instead=self._instead)
        if sender == "token":
            self._owner = name
            self.count(self._stated or 0)
        is_small = sender == "token" and self._stated is not None and self._stated <= SMALL_BYTES
        if not self.is_read and not is_small:
            slots = self._bodies[sender]
            slots.take(name)
            self._held = (slots, name)

    async def receive(self) -> Message:
        """Return the next part.

        Raises:
            TooLarge: more bytes came than the limit.
            QuotaUsedUp, StorageFull: more came than the token or the disk may have.
            Unavailable: they come too slowly.
        """
        if self.is_read:
            return await self._receive()  # the end of the connection, which may take long
        # Our own work between two parts does not count against the sender's time.
        left_s = BODY_S + self._size / LEAST_BYTES_PER_S - self._waited_s
        asked_s = time.monotonic()
        try:
            async with asyncio.timeout(max(0.0, left_s)):
                message = await self._receive()
        except TimeoutError:
            raise Unavailable(
                f"the body came too slowly: {self._size} bytes in {self._waited_s + max(0.0, left_s):.0f} s, and "
                f"{LEAST_BYTES_PER_S} bytes a second are the least after the first {BODY_S:.0f} s; send it again over "
                "a faster connection, or in several smaller requests"
            ) from None
        self._waited_s += time.monotonic() - asked_s
        self._size += len(message.get("body", b""))
        if not message.get("more_body", False):
            self.end()
        if self._size > self._most:
            raise too_large(self._most, instead=self._instead)
        self.count(self._size)
        return message

    def count(self, size: int) -> None:
        """Count an upload as having at least `size` bytes, as they arrive or as they are unpacked.

        Raises:
            QuotaUsedUp, StorageFull: see `Uploads.add`.
        """
        if self._uploads is not None and size > self._counted:
            self._uploads.add(self._owner, size - self._counted, so_far=self._counted)
            self._counted = size

    def close(self) -> None:
        """Stop counting anything of it: the request has ended."""
        self.end()
        if self._uploads is not None:
            self._uploads.subtract(self._owner, self._counted)
            self._counted = 0

    def end(self) -> None:
        """Stop counting it as being under way."""
        self.is_read = True
        if self._held is not None:
            slots, name = self._held
            self._held = None
            slots.give_back(name)


def too_large(most: int, found: int | None = None, *, instead: str = _SHORTER) -> TooLarge:
    """Return the refusal of a body above `most` bytes."""
    said = f"more than {most} bytes" if found is None else f"{found} bytes"
    return TooLarge(f"the body has {said}; at most {most} are taken. {instead}")


class Limits:
    """ASGI middleware that bounds each client's requests and all bodies; see the module.

    Args:
        uploads: counts the bytes of those bodies that become uploads.
        refuse: makes the response of a refusal.
    """

    def __init__(
        self,
        app: ASGIApp,
        *,
        limits: LimitsTable,
        uploads: Uploads,
        refuse: Callable[[LabelerError, str], ASGIApp],
    ) -> None:
        self._app, self._limits, self._uploads, self._refuse = app, limits, uploads, refuse
        most = limits.max_connections_per_address
        self._clients = Slots("requests", each=most, total=2**62)
        self._bodies: dict[Sender, Slots] = {
            sender: Slots("bodies", each=each, total=BODIES_TOTAL[sender], refused=Crowded)
            for sender, each in BODIES_EACH.items()
        }

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = dict(scope["headers"])
        is_form = headers.get(b"content-type", b"").lower().startswith(b"multipart/")
        most = most_bytes(scope["path"], is_form=is_form, limits=self._limits)
        # The server has checked that a length is a number, and that only one of the two headers is present.
        stated = None if b"transfer-encoding" in headers else int(headers.get(b"content-length", b"0"))
        # Health checks are never limited, however many requests are in progress.
        client = "" if scope["path"] in HEALTH else address_group((scope.get("client") or ("unknown", 0))[0])
        uploads = self._uploads if scope["path"] in UPLOADS else None
        instead = instead_of(scope["path"], is_form=is_form)
        body = scope[BODY_KEY] = RequestBody(
            receive, self._bodies, most=most, stated=stated, uploads=uploads, instead=instead
        )
        try:
            if client:
                self._clients.take(client)
        except TooManyRequests as error:
            await self._refuse(error, scope["path"])(scope, receive, send)
            return
        try:
            await self._app(scope, body.receive, send)
        finally:
            body.close()
            if client:
                self._clients.give_back(client)
