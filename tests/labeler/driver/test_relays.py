"""Limits on what one agent may put into a tallier's mail."""

from __future__ import annotations

import secrets

import pytest

from labeler.driver.sending import MAX_SHARES_WAITING, SHARE_OVERHEAD_BYTES, Relays
from labeler.errors import ProtocolViolation, TooLarge
from labeler.messages import Message
from labeler.messages.bodies import share_to_bytes
from labeler.sharing import ShareVector
from labeler.system.keys import PartyKeys

KEYS = PartyKeys.generate()
QUERIES = 2


def share(size: int, *, sender: str = "east", recipient: str = "t0", round_digest: str = "1" * 64) -> Message:
    return KEYS.message(
        "input-share",
        sender=sender,
        recipient=recipient,
        task_digest="2" * 64,
        round_digest=round_digest,
        sequence=1,
        body=bytes(size),
        seal_to=PartyKeys.generate().public.seal_key,
    )


def test_a_share_is_as_large_as_its_round_asks_for_and_no_larger() -> None:
    relays = Relays()
    sealing = len(share(0).body)
    relays.check(share(8 * 2 * 3 + SHARE_OVERHEAD_BYTES - sealing), QUERIES, 3)
    with pytest.raises(TooLarge, match="2 queries and 3 classes"):
        relays.check(share(8 * 2 * 3 + SHARE_OVERHEAD_BYTES - sealing + 1), QUERIES, 3)


@pytest.mark.parametrize("queries", [1, 4096])
def test_every_real_share_fits(queries: int) -> None:
    words = ShareVector((queries, 3), secrets.token_bytes(16), False, seed=secrets.token_bytes(32)).expand()
    real = ShareVector((queries, 3), secrets.token_bytes(16), False, words=words)
    Relays().check(share(len(share_to_bytes(real))), queries, 3)


def test_a_few_shares_wait_and_more_are_taken_once_the_mail_has_run_empty() -> None:
    relays = Relays()
    for _ in range(MAX_SHARES_WAITING):
        relays.check(share(10), QUERIES, 3)
        relays.sent(share(10))
    with pytest.raises(ProtocolViolation, match="already"):
        relays.check(share(10), QUERIES, 3)
    relays.check(share(10, sender="west"), QUERIES, 3)
    relays.check(share(10, recipient="t1"), QUERIES, 3)
    relays.check(share(10, round_digest="3" * 64), QUERIES, 3)
    relays.emptied("t1")
    with pytest.raises(ProtocolViolation):
        relays.check(share(10), QUERIES, 3)
    relays.emptied("t0")
    relays.check(share(10), QUERIES, 3)
