"""Secret sharing and its fields: shares add up, and any incomplete set says nothing.

Statistical tests use fixed seeds; each would reject right shares for one seed in a million.
"""

from __future__ import annotations

import numpy as np
import pytest
import sympy  # type: ignore[import-untyped]  # sympy has no types
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from numpy.typing import NDArray
from scipy import stats

from labeler.errors import InvalidSetting, ProtocolViolation
from labeler.noise import MAX_COMPARISON_BITS, ROOM_BITS
from labeler.randomness import os_source, seeded_source
from labeler.sharing import (
    BLUM_PRIME_OFFSETS,
    PrimeField,
    ShareVector,
    add_shares,
    comparison_bits,
    field_for,
    split,
    uniform_below,
    unshard,
)

ALARM = 1e-6
INT64 = np.iinfo(np.int64)
FIELD = PrimeField(2**61 - 1)
SMALL = PrimeField(2**44 - 17)
FIELDS = [None, FIELD, SMALL]

vectors = hnp.arrays(np.int64, hnp.array_shapes(max_dims=3, max_side=6), elements=st.integers(INT64.min, INT64.max))
talliers = st.sampled_from([2, 3])


def counts_of(words: NDArray[np.uint64], field: PrimeField | None) -> list[NDArray[np.int64]]:
    """How often each value occurs at each of the eight byte places.

    In a field: how often each of 1000 equal stretches of it is hit, and each remainder modulo 251.
    """
    if field is None:
        places = words.ravel().view(np.uint8).reshape(-1, 8)
        return [np.bincount(places[:, place], minlength=256) for place in range(8)]
    stretches = np.minimum((words.ravel().astype(np.float64) / field.modulus * 1000).astype(np.int64), 999)
    remainders = (words.ravel() % np.uint64(251)).astype(np.int64)
    return [np.bincount(stretches, minlength=1000), np.bincount(remainders, minlength=251)]


@given(vectors, talliers)
def test_all_shares_together_are_the_vector(values: NDArray[np.int64], num_talliers: int) -> None:
    shares = split(values, num_talliers=num_talliers, source=os_source())
    assert len(shares) == num_talliers
    np.testing.assert_array_equal(unshard([share.expand() for share in shares]), values)


def test_all_shares_but_the_last_are_32_byte_seeds() -> None:
    *seeds, last = split(np.arange(12).reshape(3, 4), num_talliers=3, source=os_source())
    assert [len(share.seed or b"") for share in seeds] == [32, 32]
    assert all(share.words is None for share in seeds)
    assert last.seed is None
    assert last.expand().shape == seeds[0].expand().shape == (3, 4)


def test_other_values_from_a_replayed_source_get_other_masks() -> None:
    """With equal masks, two last shares would differ by the values' difference in clear."""
    first = split(np.zeros(1000, dtype=np.int64), num_talliers=2, source=seeded_source(6))
    second = split(np.ones(1000, dtype=np.int64), num_talliers=2, source=seeded_source(6))
    assert first[0].seed != second[0].seed
    assert first[0].sharing_id != second[0].sharing_id
    difference = first[1].expand() - second[1].expand()
    assert len(np.unique(difference)) == 1000


def test_one_split_has_one_sharing_id_and_other_splits_have_others() -> None:
    splits = [split(np.zeros(1, dtype=np.int64), num_talliers=3, source=os_source()) for _ in range(5)]
    assert [len({share.sharing_id for share in shares}) for shares in splits] == [1] * 5
    assert len({shares[0].sharing_id for shares in splits}) == 5


def test_a_seeded_origin_travels_with_every_share() -> None:
    values = np.zeros(1, dtype=np.int64)
    assert all(share.is_seeded for share in split(values, num_talliers=3, source=seeded_source(1)))
    assert all(share.is_seeded for share in split(values, num_talliers=3, source=os_source(), is_seeded=True))
    assert not any(share.is_seeded for share in split(values, num_talliers=3, source=os_source()))


def test_fingerprints_tell_different_shares_apart() -> None:
    words = np.arange(4, dtype=np.uint64)
    base = ShareVector((4,), bytes(16), False, words=words)
    others = [
        ShareVector((4,), bytes(16), False, words=words + np.uint64(1)),
        ShareVector((4,), b"\x01" * 16, False, words=words),
        ShareVector((4,), bytes(16), True, words=words),
        ShareVector((2, 2), bytes(16), False, words=words.reshape(2, 2)),
        ShareVector((4,), bytes(16), False, seed=words.tobytes()),
    ]
    assert len({share.fingerprint() for share in [base, *others]}) == 6
    assert base.fingerprint() == ShareVector((4,), bytes(16), False, words=words.copy()).fingerprint()


def test_shares_do_not_print_and_do_not_change() -> None:
    shares = split(np.array([1234567]), num_talliers=2, source=os_source())
    for share in shares:
        assert repr(share) == "ShareVector(shape=(1,), <redacted>)"
    words = np.arange(3, dtype=np.uint64)
    share = ShareVector((3,), bytes(16), False, words=words)
    words[0] = 99
    assert share.expand()[0] == 0
    with pytest.raises(ValueError, match="read-only"):
        share.expand()[0] = 1


def test_splitting_leaves_the_vector_as_it_was() -> None:
    values = np.arange(6).reshape(2, 3)[:, ::-1]
    shares = split(values, num_talliers=2, source=os_source())
    assert values.tolist() == [[2, 1, 0], [5, 4, 3]]
    assert unshard([share.expand() for share in shares]).tolist() == values.tolist()


@pytest.mark.parametrize(
    ("values", "num_talliers"),
    [
        (np.zeros(3, dtype=np.int64), 1),
        (np.zeros(3, dtype=np.int64), 4),
        (np.zeros(3), 2),
        (np.zeros(3, dtype=np.int32), 2),
        (np.zeros(3, dtype=np.uint64), 2),
        (np.zeros((0, 3), dtype=np.int64), 2),
    ],
)
def test_what_cannot_be_shared_is_refused(values: NDArray[np.int64], num_talliers: int) -> None:
    with pytest.raises(InvalidSetting, match="shared"):
        split(values, num_talliers=num_talliers, source=os_source())


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"seed": bytes(32), "words": np.zeros(2, dtype=np.uint64)},
        {"seed": bytes(31)},
        {"words": np.zeros(3, dtype=np.uint64)},
        {"words": np.zeros(2, dtype=np.int64)},
        {"seed": bytes(32), "sharing_id": b"short"},
    ],
)
def test_a_malformed_share_is_refused(fields: dict[str, object]) -> None:
    with pytest.raises(ProtocolViolation, match=r"share|sharing_id"):
        ShareVector(**({"shape": (2,), "sharing_id": bytes(16), "is_seeded": False} | fields))  # type: ignore[arg-type]


def test_shares_that_do_not_fit_together_are_not_added() -> None:
    words = np.zeros(3, dtype=np.uint64)
    for wrong in ([words], [words, words[:2]], [words, words.astype(np.int64)], [words.view(np.int64)] * 2):
        with pytest.raises(ProtocolViolation, match="shares"):
            unshard(wrong)


@given(st.lists(st.integers(-(2**42), 2**42), min_size=1, max_size=20), talliers, st.sampled_from(FIELDS))
def test_sums_of_shares_are_shares_of_the_sum(entries: list[int], num_talliers: int, field: PrimeField | None) -> None:
    """Negative values too; in a field, sums beyond half the modulus come back as the nearest residue."""
    held: list[list[NDArray[np.uint64]]] = [[] for _ in range(num_talliers)]
    for entry in entries:
        shares = split(np.array([entry, -entry]), num_talliers=num_talliers, source=os_source(), field=field)
        for tallier, share in zip(held, shares, strict=True):
            tallier.append(share.expand())
    modulus = 2**64 if field is None else field.modulus
    expected = (sum(entries) + modulus // 2) % modulus - modulus // 2
    assert unshard([add_shares(shares, field=field) for shares in held], field=field).tolist() == [expected, -expected]


@pytest.mark.parametrize("field", FIELDS)
def test_every_single_share_and_every_two_of_three_are_uniform(field: PrimeField | None) -> None:
    values = np.full((200, 500), -3, dtype=np.int64)
    shares = [share.expand() for share in split(values, num_talliers=3, source=seeded_source(7), field=field)]
    pairs = [add_shares([shares[one], shares[other]], field=field) for one, other in ((0, 1), (0, 2), (1, 2))]
    for words in (*shares, *pairs):
        assert all(stats.chisquare(counts).pvalue > ALARM / 48 for counts in counts_of(words, field))


@pytest.mark.parametrize("field", [None, FIELD])
def test_shares_of_two_different_ballots_cannot_be_told_apart(field: PrimeField | None) -> None:
    """Per tallier, shares of an empty ballot and of a full one have one distribution."""
    most = 2**61 if field is None else 2**19
    empty = split(np.zeros(100_000, dtype=np.int64), num_talliers=3, source=seeded_source(8), field=field)
    full = split(np.full(100_000, most), num_talliers=3, source=seeded_source(9), field=field)
    for one, other in zip(empty, full, strict=True):
        for pair in zip(*(counts_of(share.expand(), field) for share in (one, other)), strict=True):
            assert stats.chi2_contingency(np.array(pair)).pvalue > ALARM / 24


def test_a_share_of_a_field_is_another_share_than_one_modulo_2_to_the_64() -> None:
    values = np.zeros(3, dtype=np.int64)
    plain, prime = (split(values, num_talliers=2, source=seeded_source(10), field=field) for field in (None, FIELD))
    assert [share.fingerprint() for share in plain] != [share.fingerprint() for share in prime]
    assert plain[0].seed != prime[0].seed
    assert all(share.field == FIELD for share in prime)
    seed = bytes(32)
    both = [ShareVector((3,), bytes(16), False, seed=seed, field=field) for field in (None, FIELD)]
    assert both[0].fingerprint() != both[1].fingerprint()


def test_words_that_are_no_residues_are_refused() -> None:
    words = np.array([FIELD.modulus], dtype=np.uint64)
    with pytest.raises(ProtocolViolation, match="no residue"):
        ShareVector((1,), bytes(16), False, words=words, field=FIELD)
    with pytest.raises(ProtocolViolation, match="no residue"):
        unshard([np.zeros(1, dtype=np.uint64), words], field=FIELD)
    with pytest.raises(ProtocolViolation, match="shares"):
        add_shares([], field=FIELD)
    with pytest.raises(InvalidSetting, match="outside"):
        split(np.array([2**60]), num_talliers=2, source=os_source(), field=FIELD)


# Prime fields: prime indeed, exact at their ends, and drawn from uniformly.


PRIMES = [PrimeField(2**bits - offset) for bits, offset in BLUM_PRIME_OFFSETS.items()]

fields = st.sampled_from(PRIMES)


@pytest.mark.parametrize("bits", BLUM_PRIME_OFFSETS)
def test_each_modulus_is_the_largest_blum_prime_of_its_length(bits: int) -> None:
    modulus = 2**bits - BLUM_PRIME_OFFSETS[bits]
    assert modulus.bit_length() == bits
    larger = [number for number in range(modulus, 2**bits) if number % 4 == 3 and sympy.isprime(number)]
    assert larger == [modulus]


def test_another_modulus_is_refused() -> None:
    with pytest.raises(InvalidSetting, match="modulus"):
        PrimeField(2**61 - 3)


@given(fields, st.lists(st.fractions(-1, 1), min_size=1, max_size=8))
def test_integers_survive_the_way_into_the_field_and_back(field: PrimeField, parts: list[float]) -> None:
    half = field.modulus // 2
    values = np.array([int(half * part) for part in parts] + [half, -half, 0, -1, 1], dtype=np.int64)
    residues = field.encode(values)
    assert [int(word) for word in residues] == [int(value) % field.modulus for value in values]
    np.testing.assert_array_equal(field.decode(residues), values)


@given(fields, st.data())
def test_sums_and_differences_are_those_of_the_integers(field: PrimeField, data: st.DataObject) -> None:
    residues = st.integers(0, field.modulus - 1) | st.integers(field.modulus - 3, field.modulus - 1)
    one, other = (np.array(data.draw(st.lists(residues, min_size=4, max_size=4)), dtype=np.uint64) for _ in range(2))
    pairs = list(zip(one.tolist(), other.tolist(), strict=True))
    assert field.add(one, other).tolist() == [(a + b) % field.modulus for a, b in pairs]
    assert field.subtract(one, other).tolist() == [(a - b) % field.modulus for a, b in pairs]
    assert field.total([one, other, one]).tolist() == [(2 * a + b) % field.modulus for a, b in pairs]


@pytest.mark.parametrize("bound", [1, 2, 3, 5, 6, 7, 97, 128, 129])
def test_every_number_below_a_bound_is_equally_likely(bound: int) -> None:
    """With 5 of 8 and 129 of 256 words kept, a sampler that reduced instead of rejecting would show at once."""
    numbers = uniform_below(bound, seeded_source(bound), 200_000)
    counts = np.bincount(numbers.astype(np.int64), minlength=bound)
    assert len(numbers) == 200_000
    assert len(counts) == bound
    assert bound == 1 or stats.chisquare(counts).pvalue > ALARM


@pytest.mark.parametrize("field", PRIMES[::5])
def test_residues_are_uniform_over_the_whole_field(field: PrimeField) -> None:
    residues = field.uniform(seeded_source(7), 100_000)
    parts = (residues.astype(np.float64) / field.modulus * 1000).astype(np.int64)
    low = np.bincount((residues % np.uint64(1009)).astype(np.int64))
    assert int(residues.max()) < field.modulus
    assert stats.chisquare(np.bincount(np.minimum(parts, 999), minlength=1000)).pvalue > ALARM
    assert stats.chisquare(low).pvalue > ALARM


def test_numbers_do_not_depend_on_how_they_are_asked_for() -> None:
    whole, source = uniform_below(5, seeded_source(3), 100), seeded_source(3)
    parts = [uniform_below(5, source, count) for count in (0, 1, 33, 66)]
    assert np.concatenate(parts).tolist() == whole.tolist()


def test_a_bound_outside_64_bits_is_refused() -> None:
    for bound in (0, 2**64 + 1):
        with pytest.raises(InvalidSetting, match="bound"):
            uniform_below(bound, seeded_source(1), 1)
    assert len(uniform_below(2**64, seeded_source(1), 3)) == 3


@given(st.integers(0, 2**20 - 2), st.integers(0, 2**20 - 1))
def test_sums_are_few_of_the_numbers_of_their_field(below: int, above: int) -> None:
    """Fewer than one in 2^42; and the size is that of the wire."""
    field, bits = field_for(-below, above), comparison_bits(-below, above)
    widest = above + 1 + below
    assert 2 ** (bits - 1) <= widest < 2**bits
    assert widest * 2**42 < field.modulus
    assert field.bits == (64 if bits == 20 else bits + ROOM_BITS)


def test_no_wrap_of_a_field_looks_like_a_small_step_back_modulo_a_word() -> None:
    """A sum is read as it is or as less by p, a difference by up to 2 p; see the module."""
    for bits, offset in BLUM_PRIME_OFFSETS.items():
        modulus, most = 2**bits - offset, 2 ** (bits - ROOM_BITS + 1)
        for wraps in (1, 2):
            step = -wraps * modulus % 2**64
            assert step <= 2 * 189 or most < step < 2**64 - most


def test_sums_too_wide_for_a_field_are_refused() -> None:
    assert field_for(0, 2**MAX_COMPARISON_BITS - 2).bits == 64
    with pytest.raises(InvalidSetting, match="smaller grid_scale"):
        field_for(0, 2**MAX_COMPARISON_BITS - 1)
    with pytest.raises(InvalidSetting, match="contain zero"):
        field_for(5, 10)
    with pytest.raises(InvalidSetting, match="lowest"):
        comparison_bits(2, 1)


def test_what_is_no_residue_is_refused() -> None:
    field = PRIMES[0]
    with pytest.raises(ProtocolViolation, match="no residue"):
        field.check(np.array([field.modulus], dtype=np.uint64), "a share")
    with pytest.raises(ProtocolViolation, match="uint64"):
        field.check(np.array([1]), "a share")
    field.check(np.array([0, field.modulus - 1], dtype=np.uint64), "a share")
    with pytest.raises(InvalidSetting, match="outside"):
        field.encode(np.array([field.modulus // 2 + 1]))
    with pytest.raises(InvalidSetting, match="int64"):
        field.encode(np.array([1], dtype=np.int32))
    with pytest.raises(InvalidSetting, match="at least one"):
        field.total([])
