"""Prime fields: prime indeed, exact at their ends, and drawn from uniformly.

Statistical tests use fixed seeds; each would reject a right sampler for one seed in a million.
"""

from __future__ import annotations

import numpy as np
import pytest
import sympy  # type: ignore[import-untyped]  # sympy has no types
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from labeler.errors import InvalidSetting, ProtocolViolation
from labeler.noise import MAX_COMPARISON_BITS, ROOM_BITS
from labeler.randomness import seeded_source
from labeler.sharing import (
    BLUM_PRIME_OFFSETS,
    PrimeField,
    comparison_bits,
    field_for,
    uniform_below,
)

ALARM = 1e-6
FIELDS = [PrimeField(2**bits - offset) for bits, offset in BLUM_PRIME_OFFSETS.items()]

fields = st.sampled_from(FIELDS)


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


@pytest.mark.parametrize("field", FIELDS[::5])
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
    field = FIELDS[0]
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
