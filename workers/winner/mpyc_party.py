"""The secure computation of the winners with MPyC, and the only module that imports it.

The parties hold Shamir shares of degree 1 in the prime field of the job. For a tournament over the
classes, log2(C) rounds of comparisons of neighbours, all queries at once:

    c = 1 where left < right, else 0         (Toft 2007; MPyC np_sgn)
    the larger   = left  + c (right - left)
    its number   = its numbers' left + c (right's - left's)

Left stays on ties, so the lowest class wins. With a threshold T, one more comparison gives
a = 1 where best < T, and (1 - a)(number + 1) - 1 is opened; without, the number. Nothing else is.

**Sums outside their range.** Nobody can see whether an agent's noise is in range, nor whether a tallier put
in what it had added up. Where two sums differ by more than their range allows, c need not be 0 or 1, and what
is opened would be the difference divided by 2^l, or worse. So before that, one random combination of all
c^2 - c is opened: zero where all are 0 or 1; else zero with probability 1/p, and otherwise uniform. Then
nothing more is opened.

**What of MPyC is replaced, and why** (0.11):

* *Pickle.* Arrays travel pickled, and `pickle.loads` runs what a peer sends. The name `pickle` in its
  runtime now is a codec of 64-bit words, and connections pass on nothing else (workers.winner.link).
* *Connections.* Its own listen on every interface and believe the number a peer states. Ours do not.
* *The public zero test* opens the product of the shares of e and of a random r. That product, a
  polynomial of degree 2, is f_e f_r, and it is opened whole: who holds one share of each solves for e
  up to two candidates, and from e, a product of small numbers made of the bits of the mask, follows the
  difference that was compared. We add a sharing of zero of degree 2, so that the opened polynomial is
  uniform but for e r at 0 (as in Ben-Or, Goldwasser and Wigderson 1988).
* *The mask's length.* A bounded random number is a sum of three parts, of which one party knows two; MPyC
  shortens the parts so that the sum keeps the bound. Ours keep all 41 bits (labeler.field says why).
* *Randomness.* Coefficients and pseudo-random shares come from AES-CTR by exact rejection, in arrays.

Everything else, the comparison, products, resharing and opening, is MPyC's.
"""

from __future__ import annotations

import asyncio
from argparse import Namespace
from typing import Any, Final

import mpyc
import mpyc.asyncoro
import mpyc.finfields
import mpyc.mpctools
import mpyc.random
import mpyc.runtime
import mpyc.secgroups
import mpyc.seclists
import mpyc.secpols
import mpyc.sectypes
import mpyc.statistics
import mpyc.thresha
import numpy as np
from numpy.typing import NDArray

from labeler.errors import LabelerError, ProtocolViolation, Unavailable
from labeler.field import MASK_BITS, PrimeField, uniform_below
from labeler.randomness import derive_key, keyed_source, os_source
from workers.winner.engine import ABSTAINED, NUM_PARTIES, WinnerJob
from workers.winner.link import KEY_BYTES
from workers.winner.links import CLOSE_LIMIT_S, Links, Record
from workers.winner.row_check import check_rows

THRESHOLD: Final = 1
"""Talliers that may be dishonest without learning more."""

CHUNK_COMPARISONS: Final = 1 << 14
"""Comparisons of the first round of a chunk: what bounds memory. About 0.2 GB, and one second."""

Words = NDArray[np.uint64]


def versions() -> dict[str, Any]:
    """What else must be equal at all parties: the code that labels messages and draws shared randomness."""
    return {"mpyc": mpyc.__version__, "chunk_comparisons": CHUNK_COMPARISONS, "mask_bits": MASK_BITS}


async def compute_winners(
    job: WinnerJob, share: Words, rows: Words | None = None, *, record: Record | None = None
) -> NDArray[np.int16]:
    """Connect, check the rows where the job says so, compute all winners chunk by chunk, and close.

    Args:
        job: the job.
        share: this party's share of the sums.
        rows: what its shares of each contributor's rows sum to, where the job checks rows.
        record: told everything that arrives; tests only.

    Raises:
        Unavailable, ProtocolViolation: see `WinnerEngine.winners`.
    """
    runtime = start_runtime(job.party, job.field, bits=job.comparison_bits)
    links = Links(
        job,
        extra=versions(),
        max_payload_bytes=8 * max(share.size, len(job.contributors), 4 * CHUNK_COMPARISONS * (job.comparison_bits + 2)),
        key_for=lambda peer: b"".join(runtime._prss_keys_to_peer(peer)),
        take_key=runtime._prss_keys_from_peer,
        record=record,
    )
    work = asyncio.ensure_future(_run(runtime, links, job, share, rows))
    asyncio.get_running_loop().set_exception_handler(lambda _, context: _broke_off(links, context))
    ends: set[asyncio.Future[Any]] = {work, links.failed}
    await asyncio.wait(ends, timeout=job.time_limit_s, return_when=asyncio.FIRST_COMPLETED)
    if work.done():
        return work.result()
    links.fail(Unavailable(f"the winner job ran out of time ({links.waiting_for()}); try again with the same shares"))
    work.cancel()
    will_repeat = isinstance(links.problem, Unavailable)
    await links.abandon(CLOSE_LIMIT_S, late_limit_s=0.0 if will_repeat else CLOSE_LIMIT_S)
    await links.failed
    raise links.problem or Unavailable("the winner job ended without an answer")


def _broke_off(links: Links, context: dict[str, Any]) -> None:
    """Where a computation of MPyC fails, its error reaches the loop and nobody else."""
    error = context.get("exception")
    if "handle" not in context or error is None:
        return
    if isinstance(error, LabelerError):
        links.fail(error)
    elif isinstance(error, MemoryError):
        links.fail(Unavailable("the job ran out of its memory limit; give it more, or ask in smaller batches"))
    else:
        # Its words could quote a share.
        links.fail(
            ProtocolViolation(f"the computation broke off ({type(error).__name__}); a message was not as expected")
        )


async def _run(runtime: Any, links: Links, job: WinnerJob, share: Words, rows: Words | None) -> NDArray[np.int16]:
    try:
        await asyncio.wait_for(links.connect(), job.meeting_limit_s)
    except TimeoutError:
        raise Unavailable(
            f"not all talliers came to the winner job ({links.waiting_for()}); try again with the same shares"
        ) from None
    if rows is not None:
        await check_rows(links, job, rows)
    for peer, link in links.peers.items():
        runtime.parties[peer].protocol = link
    height = max(1, CHUNK_COMPARISONS // (job.num_classes // 2))
    chunks = []
    for first in range(0, job.num_queries, height):
        opened = await _open_winners(runtime, job, share[first : first + height])
        if opened is None:
            # All three find it; who left at once could take from the others what they need to see it too.
            await links.finish()
            raise ProtocolViolation(
                "the noisy sums of this round lie outside the range that its task allows, so they were not opened and "
                "the round is void: an agent has sent noise or votes that its task does not allow, or a share of a "
                "tallier was damaged. Find out which, and submit the task again without it"
            )
        if min(opened) < ABSTAINED or max(opened) >= job.num_classes:
            raise ProtocolViolation("what was opened is no class of the job, so a share was damaged or of another job")
        chunks.append(np.array(opened, dtype=np.int16))
    await links.finish()
    return np.concatenate(chunks)


def start_runtime(party: int, field: PrimeField, *, bits: int) -> Any:
    """A runtime of three parties, made known to the modules of MPyC, with its unsafe parts replaced.

    Args:
        party: which one this process is.
        field: of the job; MPyC in this process computes in no other from now on.
        bits: differences compared lie in [-2^bits, 2^bits).
    """
    options = Namespace(
        threshold=THRESHOLD,
        no_log=True,
        no_prss=False,
        no_async=False,
        no_barrier=True,
        mix32_64bit=False,
        ssl=False,
        sec_param=MASK_BITS,
        bit_length=bits,
    )
    mpyc.runtime.pickle = WordCodec(field)
    mpyc.thresha.PRF = _Prf
    mpyc.thresha.np_random_split = _random_split(field)
    parties = [mpyc.runtime.Party(number) for number in range(NUM_PARTIES)]
    runtime = PinnedRuntime(party, parties, options)
    # What mpyc.runtime.setup does with the runtime it makes.
    for module in (
        mpyc.sectypes,
        mpyc.asyncoro,
        mpyc.mpctools,
        mpyc.seclists,
        mpyc.secpols,
        mpyc.secgroups,
        mpyc.random,
        mpyc.statistics,
    ):
        module.runtime = runtime
    return runtime


async def _open_winners(runtime: Any, job: WinnerJob, share: Words) -> Any:
    """Winners of some queries: this party's additive shares in, opened numbers out; None outside the range."""
    bits = job.comparison_bits
    secure = runtime.SecInt(bits, p=job.field.modulus).array
    summand = secure(secure.sectype.field.array(share.astype(object), check=False))
    parts = runtime.input(summand)
    best = parts[0] + parts[1] + parts[2]
    number: Any = np.broadcast_to(np.arange(job.num_classes), share.shape)
    threshold = job.clipped_threshold
    residuals = []
    while best.shape[1] > 1:
        width = best.shape[1] // 2 * 2
        left, right, rest = best[:, 0:width:2], best[:, 1:width:2], best[:, width:]
        number_left, number_right = number[:, 0:width:2], number[:, 1:width:2]
        is_right = runtime.np_sgn(left - right, l=bits, LT=True)
        residuals.append((is_right * is_right - is_right).reshape(-1))
        if isinstance(number, np.ndarray):
            winning = is_right * (right - left) + left
            winning_number = is_right * (number_right - number_left).astype(object) + number_left.astype(object)
        else:
            # One product for both, so that a round of the tournament costs one exchange of messages less.
            gains = runtime.np_stack((right - left, number_right - number_left))
            chosen = is_right * gains
            winning, winning_number = chosen[0] + left, chosen[1] + number_left
        if rest.shape[1]:
            last = number[:, width:]
            if isinstance(last, np.ndarray):
                last = secure(last.astype(object))
            winning = runtime.np_hstack((winning, rest))
            winning_number = runtime.np_hstack((winning_number, last))
        best, number = winning, winning_number
    answer = number[:, 0]
    if threshold is not None:
        is_below = runtime.np_sgn(best[:, 0] - threshold, l=bits, LT=True)
        residuals.append(is_below * is_below - is_below)
        answer = (1 - is_below) * (answer + 1) - 1
    if not await runtime.are_all_zero_public(runtime.np_hstack(tuple(residuals))):
        return None
    return await runtime.output(answer)


class WordCodec:
    """Takes the place of `pickle` in MPyC: arrays of residues as 64-bit words, least significant byte first."""

    def __init__(self, field: PrimeField) -> None:
        self._field = field

    def dumps(self, residues: Any) -> bytes:
        """Residues as bytes; anything else is not sent."""
        if not isinstance(residues, np.ndarray):
            raise ProtocolViolation("only arrays of residues are sent to other talliers")
        return residues.astype("<u8").tobytes()

    def loads(self, data: bytes) -> NDArray[np.object_]:
        """Bytes as residues; whatever they are, they are read as words."""
        if len(data) % 8:
            raise ProtocolViolation("a message of another tallier is not made of words of 8 bytes")
        words = np.frombuffer(data, dtype="<u8")
        self._field.check(words.astype(np.uint64), "a message of another tallier")
        return words.astype(object)


class PinnedRuntime(mpyc.runtime.Runtime):  # type: ignore[misc]  # MPyC has no types
    """MPyC's runtime over connections of our own, with the replacements the module lists."""

    async def start(self) -> None:
        """Refused: connections are made by workers.winner.links."""
        raise ProtocolViolation("connections of a winner job are made by workers.winner.links")

    async def shutdown(self) -> None:
        """Refused, as `start` is."""
        raise ProtocolViolation("connections of a winner job are closed by workers.winner.links")

    def transfer(self, *_arguments: Any, **_options: Any) -> None:
        """Refused: it would send any object."""
        raise ProtocolViolation("a winner job transfers no objects")

    def _np_randoms(self, sftype: Any, n: int, bound: int | None = None) -> Any:
        """Shares of n random numbers; of a bounded one each part keeps all its bits."""
        is_secure = issubclass(sftype, self.SecureObject)
        field = sftype.field if is_secure else sftype
        prfs = self.prfs(field.order if bound is None else bound)
        numbers = mpyc.thresha.np_pseudorandom_share(field, NUM_PARTIES, self.pid, prfs, self._prss_uci(), n)
        return sftype.array(numbers) if is_secure else numbers

    @mpyc.asyncoro.mpc_coro  # type: ignore[untyped-decorator]  # MPyC has no types
    # MPyC reads the annotation: it is what a caller holds until the value is there.
    async def np_is_zero_public(self, a: Any) -> asyncio.Future:  # type: ignore[type-arg]
        """Where a is zero, opened; of other entries nothing but that they are not (see the module)."""
        field = type(a).sectype.field
        e = (await self.gather(a)).reshape(-1)
        prfs = self.prfs(field.order)
        r = mpyc.thresha.np_pseudorandom_share(field, NUM_PARTIES, self.pid, prfs, self._prss_uci(), e.size)
        zero = mpyc.thresha.np_pseudorandom_share_0(field, NUM_PARTIES, self.pid, prfs, self._prss_uci(), e.size)
        opened = await self.output(e * r + zero, threshold=2 * self.threshold)
        return (opened == 0).reshape(a.shape)  # type: ignore[no-any-return]  # MPyC wraps it in the future

    @mpyc.asyncoro.mpc_coro  # type: ignore[untyped-decorator]  # MPyC has no types
    async def are_all_zero_public(self, a: Any) -> asyncio.Future:  # type: ignore[type-arg]
        """Whether all of a is zero; where it is not, a uniform number is opened (or zero, with probability 1/p)."""
        field = type(a).sectype.field
        e = (await self.gather(a)).reshape(-1)
        prfs = self.prfs(field.order)
        # The factors are secret as well: with public ones, the combination would say something of a.
        r = mpyc.thresha.np_pseudorandom_share(field, NUM_PARTIES, self.pid, prfs, self._prss_uci(), e.size)
        zero = mpyc.thresha.np_pseudorandom_share_0(field, NUM_PARTIES, self.pid, prfs, self._prss_uci(), 1)
        combination = field.array([sum((e.value * r.value).tolist())]) + zero
        opened = await self.output(combination, threshold=2 * self.threshold)
        return bool(opened[0] == 0)  # type: ignore[return-value]  # MPyC wraps it in the future


class _Prf:
    """A pseudo-random function of a key two parties share: the AES-CTR stream of (key, label), below a bound."""

    def __init__(self, key: bytes, bound: int) -> None:
        if len(key) != KEY_BYTES:
            raise ProtocolViolation(f"a key between two talliers has {KEY_BYTES} bytes, found {len(key)}")
        self._key = key
        self._bound = bound

    def __call__(self, label: bytes, shape: tuple[int, ...]) -> NDArray[np.object_]:
        source = keyed_source(derive_key(self._key, b"winner-prf", label), is_seeded=False)
        count = int(np.prod(shape, dtype=np.int64))
        return uniform_below(self._bound, source, count).astype(object).reshape(shape)


def _random_split(field: PrimeField) -> Any:
    """MPyC's np_random_split for degree 1 and three parties, on words."""

    def split(secret_field: Any, secrets: Any, degree: int, parties: int) -> list[Words]:
        if (secret_field.order, degree, parties) != (field.modulus, THRESHOLD, NUM_PARTIES):
            raise ProtocolViolation("shares of a winner job have degree 1, three parties and its own field")
        values = getattr(secrets, "value", secrets).astype(np.uint64)
        slope = field.uniform(os_source(), len(values))
        shares = [field.add(values, slope)]
        for _ in range(parties - 1):
            shares.append(field.add(shares[-1], slope))
        return shares

    return split
