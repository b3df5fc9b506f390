"""The mailbox between processes, as Redis streams. No other module accesses Redis.

    key                            type     what                                         kept
    mail:RECIPIENT                 stream   messages on their way to one party           the last 10,000; 7 days unused
    mail-seen:LENGTH:RECIPIENT:ID  string   this message was put into the mail           1 day
    progress:JOB                   stream   changes of a job, for people who watch       the last 1,000; 1 day unused
    alive:ROLE                     string   a process of a role was running lately       seconds

`labeler.driver.mail` specifies a mailbox; positions are ids of streams. Redis 6.2 is enough, and so is any Valkey. Only
the coordinator and its embedders may reach it. Anybody who can read it sees the sealed shares, and learns which agents
answer. Anybody who can write to it can delay the service.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import redis
import redis.asyncio
from redis.asyncio.retry import Retry as AsyncRetry
from redis.backoff import ExponentialBackoff
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import NoScriptError, RedisError, ResponseError
from redis.exceptions import TimeoutError as RedisTimeoutError
from redis.retry import Retry

from labeler.driver.mail import (
    CHANGED,
    ENDED,
    EVENTS_AT_ONCE,
    MAIL_SEEN_S,
    MAIL_UNUSED_S,
    MAX_EVENTS,
    MAX_MAIL,
    MAX_MAIL_BYTES,
    MAX_WAIT_S,
    PROGRESS_UNUSED_S,
    Letter,
    check_mail,
    check_wait,
    format_position,
    parse_position,
)
from labeler.errors import InvalidSetting, Unavailable, UnsafeStorage
from labeler.untrusted import check_party_id, check_text

MAIL_KEY = "mail:{recipient}"
MAIL_SEEN_KEY = "mail-seen:{length}:{recipient}:{message_id}"
PROGRESS_KEY = "progress:{job_id}"
ALIVE_KEY = "alive:{role}"

MAX_WAITING = 9_000
"""The most parties and people that may wait at once, with one connection each; Redis accepts 10,000 by default."""

_OLDEST_REDIS = (6, 2)
_REPLY_GRACE_S = 5.0
_ERROR_CODE = re.compile(r"\b[A-Z]{3,20}\b")

# Each script is atomic for other clients: no crash can leave a mark without its message.
_SEND = """
if not redis.call('SET', KEYS[2], '1', 'NX', 'EX', ARGV[3]) then return 0 end
redis.call('XADD', KEYS[1], 'MAXLEN', '~', ARGV[2], '*', 'data', ARGV[1])
redis.call('EXPIRE', KEYS[1], ARGV[4])
return 1
"""
_MAIL = """
local found, start, size, last = {}, ARGV[1], 0, '0-0'
local about = redis.pcall('XINFO', 'STREAM', KEYS[1])
if about.err then
  if not string.find(about.err, 'no such key') then return about end
else
  for place = 1, #about, 2 do
    if about[place] == 'last-generated-id' then last = about[place + 1] end
  end
end
local function is_more(one, other)
  if #one ~= #other then return #one > #other end
  return one > other
end
local time, number = string.match(start, '(%d+)-(%d+)')
local last_time, last_number = string.match(last, '(%d+)-(%d+)')
if is_more(time, last_time) or (time == last_time and is_more(number, last_number)) then
  start = '0-0'
elseif ARGV[5] ~= '' and start ~= '0-0' then
  redis.call('XTRIM', KEYS[1], 'MINID', ARGV[5])
end
local from = start
while #found < tonumber(ARGV[2]) do
  local entry = redis.call('XRANGE', KEYS[1], '(' .. from, '+', 'COUNT', 1)[1]
  if not entry then break end
  for place = 2, #entry[2], 2 do size = size + #entry[2][place] end
  if size > tonumber(ARGV[3]) and (#found > 0 or ARGV[4] == '0') then break end
  found[#found + 1], from = entry, entry[1]
end
return {start, found}
"""


class RedisMailbox:
    """A `labeler.driver.mail.Mailbox` that many processes share; see the module.

    Args:
        url: redis://, rediss:// or unix://, with its password.

    Attributes:
        is_guarded: True if reaching the address is not enough to be let in. It is a file, whose mode decides, or the
            URL has a password or a certificate of ours.

    Raises:
        InvalidSetting: the URL has another form.
    """

    def __init__(self, url: str) -> None:
        # RESP2: replies have one shape in every version since 6.2.
        options: dict[str, Any] = {"protocol": 2, "socket_connect_timeout": 2.0}
        backoff = ExponentialBackoff(cap=0.2, base=0.02)
        try:
            # Any: the library types each reply as a union. `decode_responses` is off, so replies are bytes.
            self._redis: Any = redis.Redis.from_url(url, socket_timeout=10.0, retry=Retry(backoff, 3), **options)
            self._waiting: Any = redis.asyncio.Redis.from_url(
                url,
                socket_timeout=MAX_WAIT_S + 2 * _REPLY_GRACE_S,
                max_connections=MAX_WAITING,
                retry=AsyncRetry(backoff, 3),
                **options,
            )
        except (ValueError, TypeError):
            raise InvalidSetting(
                "the redis URL must be redis://, rediss:// or unix://, with a host or a path"
            ) from None
        understood = self._redis.get_connection_kwargs()
        self.is_guarded = any(understood.get(name) for name in ("path", "password", "ssl_certfile"))
        self._send = self._redis.register_script(_SEND)
        self._mail = self._waiting.register_script(_MAIL)

    def check(self) -> None:
        """Make sure that Redis answers, is recent enough and never drops entries on its own.

        Raises:
            Unavailable: it does not answer.
            UnsafeStorage: it evicts keys when memory runs low, or is older than 6.2.
        """
        with _reaching():
            version = str(self._redis.info("server").get("redis_version", "0"))
            try:
                policy = _text(self._redis.config_get("maxmemory-policy").get("maxmemory-policy", b""))
            except ResponseError:
                policy = ""
            # Hosted services forbid CONFIG; INFO says the same.
            policy = policy or str(self._redis.info("memory").get("maxmemory_policy", ""))
        if tuple(int(part) for part in version.split(".")[:2] if part.isdigit()) < _OLDEST_REDIS:
            raise UnsafeStorage(f"redis is version {version}, at least 6.2 is needed")
        if policy != "noeviction":
            raise UnsafeStorage(
                f"redis has maxmemory-policy {policy or 'unknown'!r}, so it may throw away mail and work "
                "without a word; set maxmemory-policy to noeviction"
            )

    # Mail

    def send_all(self, letters: Sequence[Letter], *, tell: Collection[str] = (), ended: Collection[str] = ()) -> None:
        """See the protocol. In one transaction, so that a waiting reader gets all its messages, not only the first."""
        for letter in letters:
            check_mail(letter.recipient, letter.data, letter.message_id)
        if not letters and not tell:
            return
        with _reaching():
            try:
                self._pipe(letters, tell, ended)
            except NoScriptError:
                # A restarted server has lost its scripts. Messages that it took before the error are not sent twice.
                self._redis.script_load(_SEND)
                self._pipe(letters, tell, ended)

    def _pipe(self, letters: Sequence[Letter], tell: Collection[str], ended: Collection[str]) -> None:
        with self._redis.pipeline(transaction=True) as steps:
            for letter in letters:
                who = letter.recipient
                # The length distinguishes party "a:b" with message "c" from party "a" with message "b:c".
                seen = MAIL_SEEN_KEY.format(length=len(who), recipient=who, message_id=letter.message_id)
                args: list[bytes | int] = [letter.data, MAX_MAIL, MAIL_SEEN_S, MAIL_UNUSED_S]
                # Calling the script object would ask the server each time whether it knows the script.
                steps.evalsha(self._send.sha, 2, MAIL_KEY.format(recipient=who), seen, *args)
            for job_id in tell:
                key = PROGRESS_KEY.format(job_id=check_text(job_id, "job_id", most=200))
                event = {"event": ENDED if job_id in ended else CHANGED}
                steps.xadd(key, event, maxlen=MAX_EVENTS, approximate=True)
                steps.expire(key, PROGRESS_UNUSED_S)
            steps.execute()

    async def receive(
        self,
        recipient: str,
        after: str,
        wait_s: float,
        max_messages: int = 16,
        *,
        max_bytes: int = MAX_MAIL_BYTES,
    ) -> list[tuple[str, bytes]]:
        """See the protocol. Redis counts the bytes, so this process never holds more than `max_bytes`."""
        key = MAIL_KEY.format(recipient=check_party_id(recipient, "recipient of mail"))
        entries = await self._read(key, after, wait_s, max_messages, max_bytes=max_bytes, drop=True)
        return [(position, fields[b"data"]) for position, fields in entries if b"data" in fields]

    def all_pending(self, recipients: Collection[str]) -> dict[str, int]:
        """See the protocol."""
        asked = list(recipients)
        with _reaching(), self._redis.pipeline(transaction=False) as steps:
            for recipient in asked:
                steps.xlen(MAIL_KEY.format(recipient=check_party_id(recipient, "recipient of mail")))
            return {recipient: int(count) for recipient, count in zip(asked, steps.execute(), strict=True)}

    # Signs of life

    def show_life(self, role: str, *, for_s: float) -> None:
        """Report that a process of a role is running; the report is valid for `for_s` seconds."""
        with _reaching():
            self._redis.set(ALIVE_KEY.format(role=check_text(role, "role", most=100)), b"1", px=round(for_s * 1000))

    def is_alive(self, role: str) -> bool:
        """Return whether any process of a role was running lately."""
        with _reaching():
            return bool(self._redis.exists(ALIVE_KEY.format(role=check_text(role, "role", most=100))))

    # Progress

    async def watch(self, job_id: str, after: str, wait_s: float) -> list[tuple[str, bool]]:
        """See the protocol."""
        key = PROGRESS_KEY.format(job_id=check_text(job_id, "job_id", most=200))
        entries = await self._read(key, after, wait_s, EVENTS_AT_ONCE, max_bytes=MAX_MAIL_BYTES, drop=False)
        return [(position, fields.get(b"event") == ENDED) for position, fields in entries]

    # Closing

    def close(self) -> None:
        """Close what the non-waiting calls have opened."""
        self._redis.close()

    async def aclose(self) -> None:
        """Close everything. Await this in the event loop that received mail."""
        await self._waiting.aclose()
        self.close()

    def __repr__(self) -> str:
        return "RedisMailbox(<redacted>)"

    async def _read(
        self, key: str, after: str, wait_s: float, count: int, *, max_bytes: int, drop: bool
    ) -> list[tuple[str, dict[bytes, bytes]]]:
        check_wait(wait_s)
        position = parse_position(after)
        with _reaching():
            async with asyncio.timeout(wait_s + 2 * _REPLY_GRACE_S):
                start, found = await self._mail_after(key, position, count, max_bytes, is_first=True, drop=drop)
                if found or wait_s <= 0:
                    return found
                # One entry ends the wait. Then read whatever came with it. `block=0` would wait forever.
                reply = await self._waiting.xread({key: start}, count=1, block=max(1, round(wait_s * 1000)))
                found = [(_text(entry), fields) for _, entries in reply or [] for entry, fields in entries]
                if found and count > 1:
                    left = max_bytes - sum(map(len, found[0][1].values()))
                    first = parse_position(found[0][0])
                    found += (await self._mail_after(key, first, count - 1, left, is_first=False, drop=False))[1]
        return found

    async def _mail_after(
        self, key: str, after: tuple[int, int], count: int, max_bytes: int, *, is_first: bool, drop: bool
    ) -> tuple[str, list[tuple[str, dict[bytes, bytes]]]]:
        """Return the position that was read from, and the entries after it, in one step.

        That position is `after`, or the start of the stream if the stream ends before `after`.

        Args:
            key: the key of the stream.
            after: the position.
            count, max_bytes: the most entries, and their most bytes.
            is_first: return the first entry however large it is.
            drop: delete entries up to the position.
        """
        start, following = format_position(after), f"{after[0]}-{after[1] + 1}" if drop else ""
        found_from, reply = await self._mail(keys=[key], args=[start, count, max_bytes, int(is_first), following])
        entries = [(_text(entry), dict(zip(flat[::2], flat[1::2], strict=True))) for entry, flat in reply]
        return _text(found_from), entries


@contextmanager
def _reaching() -> Iterator[None]:
    try:
        yield
    except (RedisConnectionError, RedisTimeoutError, TimeoutError, OSError) as error:
        raise Unavailable(
            f"redis cannot be reached ({type(error).__name__}); nothing is lost, it is tried again once redis answers"
        ) from None
    except RedisError as error:
        # Tell only the error's code (OOM, MISCONF) or class (OutOfMemoryError): the rest may quote keys.
        # In a pipeline the library puts the name of the failed command first.
        said = str(error).rpartition("caused error: ")[2]
        code = _ERROR_CODE.search(said) if type(error) is ResponseError else None
        name = code[0] if code else type(error).__name__
        raise Unavailable(
            f"redis refused a command ({name}); if it is out of memory give it more, if it is read-only name the "
            "primary, if it allows too little check the user in its URL"
        ) from None


def _text(value: bytes | str) -> str:
    return value.decode() if isinstance(value, bytes) else value
