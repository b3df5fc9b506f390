from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from labeler.errors import InvalidSetting
from labeler.methods.aux_distill import FEATURE_ROUNDING
from workers.learning.private_heads import CONSTANT_SHARE, fit_public_map, plain_map


def stored(rng: np.random.Generator, count: int, dimension: int = 24) -> np.ndarray:
    """Positive features of norm about one on the int16 grid, as a shard holds them."""
    rows = np.abs(rng.normal(size=(count, dimension)))
    rows /= np.linalg.norm(rows, axis=1, keepdims=True)
    return (np.rint(2048 * rows) / 2048).astype(np.float32)


@given(
    seed=st.integers(0, 2**31), size=st.sampled_from([0.0, 1e-9, 1e-3, 1.0, 1e6]), norm=st.sampled_from([0.5, 1.0, 3.0])
)
@settings(max_examples=60, deadline=None)
def test_no_row_is_longer_than_the_public_norm(seed: int, size: float, norm: float) -> None:
    rng = np.random.default_rng(seed)
    public = stored(rng, 40)
    private = (size * rng.normal(size=(15, 24))).astype(np.float32)
    for made in (plain_map(24, clip_norm=norm), fit_public_map(public, dimensions=6, clip_norm=norm)):
        rows = made(private)
        assert rows.dtype == np.float64
        assert rows.shape == (15, made.dimension)
        assert np.linalg.norm(rows, axis=1).max() <= norm
        assert rows[:, -1] == pytest.approx(CONSTANT_SHARE * norm)


def test_a_plain_map_keeps_directions_and_brings_rows_to_one_length(rng: np.random.Generator) -> None:
    private = stored(rng, 20)
    rows = plain_map(24)(3 * private)
    assert np.linalg.norm(rows, axis=1) == pytest.approx(1.0)
    units = private / np.linalg.norm(private, axis=1, keepdims=True)
    assert rows[:, :-1] == pytest.approx(np.sqrt(1 - CONSTANT_SHARE**2) * units, abs=1e-6)


def test_the_centre_and_the_axes_are_those_of_the_public_rows(rng: np.random.Generator) -> None:
    public = stored(rng, 300)
    made = fit_public_map(public, dimensions=5)
    assert made.mean == pytest.approx(public.astype(np.float64).mean(axis=0))
    assert made.basis is not None
    projected = (public - made.mean) @ made.basis
    # Whitened by half: uncorrelated, and each variance is the root of that of its principal axis.
    largest = np.linalg.eigvalsh(np.cov(public.T, bias=True))[-5:]
    assert projected.T @ projected / 300 == pytest.approx(np.diag(np.sqrt(largest[::-1])), rel=1e-4, abs=1e-6)


def test_a_row_at_the_mean_is_not_blown_up(rng: np.random.Generator) -> None:
    public = stored(rng, 60)
    made = fit_public_map(public, dimensions=6)
    nearly = (made.mean + 1e-9 * rng.normal(size=24))[None]
    assert np.linalg.norm(made(nearly)[:, :-1]) < 1e-6


def test_a_row_does_not_depend_on_the_rows_beside_it_beyond_the_margin(rng: np.random.Generator) -> None:
    public = stored(rng, 400, 300)
    made = fit_public_map(public, dimensions=40)
    private = stored(rng, 50, 300)
    together = made(private)
    alone = np.vstack([made(private[row : row + 1]) for row in range(50)])
    assert np.linalg.norm(together - alone, axis=1).max() <= made.rounding <= FEATURE_ROUNDING


def test_settings_out_of_bounds_are_refused(rng: np.random.Generator) -> None:
    public = stored(rng, 10)
    for change in ({"dimensions": 11}, {"dimensions": 0}):
        with pytest.raises(InvalidSetting):
            fit_public_map(public, **change)  # type: ignore[arg-type]
    with pytest.raises(InvalidSetting, match="all the same"):
        fit_public_map(np.ones((10, 4)), dimensions=2)
    with pytest.raises(InvalidSetting):
        plain_map(4, clip_norm=0.0)
    with pytest.raises(InvalidSetting):
        plain_map(4)(np.ones((3, 5)))
