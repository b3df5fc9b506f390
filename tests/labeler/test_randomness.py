"""Random sources: known answers, replay, and no second use of a stream.

The one statistical test draws from a fixed key, so it never flakes; a right source would fail it
for one key in a million.
"""

from __future__ import annotations

import copy
import hashlib
import hmac
import os
import pickle
import threading

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from labeler.errors import InvalidSetting, PrivacyRefusal
from labeler.randomness import AesCtrSource, derive_key, keyed_source, os_source, seeded_source

KEY = bytes(range(32))


def test_the_stream_is_aes_256_counter_mode_from_block_zero() -> None:
    """FIPS 197, appendix C.3, gives the encryption of one block under the key 00..1f; here the counter block is it."""
    from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes

    ecb = Cipher(algorithms.AES(KEY), modes.ECB()).encryptor()
    assert ecb.update(bytes.fromhex("00112233445566778899aabbccddeeff")).hex() == "8ea2b7ca516745bfeafc49904b496089"
    blocks = b"".join(ecb.update(counter.to_bytes(16, "big")) for counter in range(5))
    assert keyed_source(KEY, is_seeded=True).bytes(80) == blocks


def test_words_are_little_endian_bytes_of_the_stream() -> None:
    raw = keyed_source(KEY, is_seeded=True).bytes(8 * 100)
    words = keyed_source(KEY, is_seeded=True).uint64(100)
    assert words.dtype == np.uint64
    assert words.tolist() == np.frombuffer(raw, dtype="<u8").tolist()


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 40)), max_size=12))
def test_the_stream_does_not_depend_on_how_it_is_cut_into_calls(calls: list[tuple[bool, int]]) -> None:
    source = seeded_source(1)
    parts = [source.uint64(count).tobytes() if words else source.bytes(count) for words, count in calls]
    joined = b"".join(parts)
    assert joined == seeded_source(1).bytes(len(joined))


def test_two_operating_system_sources_differ_and_are_not_seeded() -> None:
    first, second = os_source(), os_source()
    assert not first.is_seeded
    assert first.bytes(32) != second.bytes(32)


def test_seeds_of_different_kind_or_value_give_different_streams() -> None:
    streams = {seeded_source(seed).bytes(16) for seed in (0, 1, 256, 10**40, b"", b"0", b"\x01", b"int:1")}
    assert len(streams) == 8
    assert seeded_source(7).is_seeded
    assert seeded_source(b"x").bytes(16) == seeded_source(b"x").bytes(16)


@pytest.mark.parametrize("seed", [-1, True, 1.0, "1", None])
def test_a_seed_that_is_no_non_negative_integer_or_bytes_is_refused(seed: object) -> None:
    with pytest.raises(InvalidSetting, match="seed"):
        seeded_source(seed)  # type: ignore[arg-type]  # the point of the test


def test_a_keyed_source_says_what_it_was_told_about_its_key() -> None:
    assert keyed_source(KEY, is_seeded=True).is_seeded
    assert not keyed_source(KEY, is_seeded=False).is_seeded


@pytest.mark.parametrize("key", [b"", bytes(16), bytes(31), bytes(33)])
def test_a_key_of_another_length_is_refused(key: bytes) -> None:
    with pytest.raises(InvalidSetting, match="32 bytes"):
        keyed_source(key, is_seeded=False)


@pytest.mark.parametrize("draw", ["uint64", "bytes"])
def test_a_negative_count_is_refused_and_zero_is_empty(draw: str) -> None:
    assert len(getattr(seeded_source(0), draw)(0)) == 0
    with pytest.raises(InvalidSetting, match="at least 0"):
        getattr(seeded_source(0), draw)(-1)


def test_derive_key_is_hmac_sha256_over_framed_context() -> None:
    message = b"labeler-key/1\n" + (2).to_bytes(8, "big") + b"ab" + (0).to_bytes(8, "big")
    assert derive_key(KEY, b"ab", b"") == hmac.new(KEY, message, hashlib.sha256).digest()


def test_derived_keys_tell_contexts_apart() -> None:
    contexts = [(), (b"",), (b"ab", b"c"), (b"a", b"bc"), (b"abc",), (b"abc", b"")]
    assert len({derive_key(KEY, *context) for context in contexts}) == len(contexts)
    with pytest.raises(InvalidSetting, match="16 bytes"):
        derive_key(b"short", b"x")


@pytest.mark.parametrize("duplicate", [copy.copy, copy.deepcopy, pickle.dumps])
def test_a_source_cannot_be_copied(duplicate: object) -> None:
    with pytest.raises(PrivacyRefusal, match="repeat the noise"):
        duplicate(os_source())  # type: ignore[operator]  # three functions of different type


def test_a_source_does_not_print_its_key() -> None:
    shown = repr(keyed_source(KEY, is_seeded=False))
    assert "redacted" in shown
    assert KEY.hex() not in shown
    assert not hasattr(keyed_source(KEY, is_seeded=False), "__dict__")


def test_a_forked_process_may_not_go_on_with_the_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    source = os_source()
    source.bytes(8)
    monkeypatch.setattr(os, "getpid", lambda: -1)
    with pytest.raises(PrivacyRefusal, match="fork"):
        source.uint64(1)


def test_threads_never_get_the_same_stretch() -> None:
    source, drawn = seeded_source(5), []

    def draw(source: AesCtrSource) -> None:
        drawn.extend(source.uint64(1000) for _ in range(20))

    threads = [threading.Thread(target=draw, args=(source,)) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    together = np.sort(np.concatenate(drawn))
    np.testing.assert_array_equal(together, np.sort(seeded_source(5).uint64(80_000)))
