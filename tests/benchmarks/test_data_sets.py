"""Data sets of benches: read as they are published, found by option or variable, named when they are missing."""

from __future__ import annotations

import gzip
from pathlib import Path

import numpy as np
import pytest

from benchmarks.data import data_root as find_root
from benchmarks.data import mnist, usps
from labeler.errors import BadData, InvalidSetting


def test_digits_are_read_from_idx_files(tmp_path: Path) -> None:
    images = np.random.default_rng(0).integers(0, 256, size=(5, 28, 28)).astype(np.uint8)
    (tmp_path / "mnist").mkdir()
    for name in ("train", "t10k"):
        with gzip.open(tmp_path / "mnist" / f"{name}-images-idx3-ubyte.gz", "wb") as file:
            file.write(bytes(16) + images.tobytes())
        with gzip.open(tmp_path / "mnist" / f"{name}-labels-idx1-ubyte.gz", "wb") as file:
            file.write(bytes(8) + bytes([3, 1, 4, 1, 5]))
    found = mnist(tmp_path)
    assert np.array_equal(found.train.inputs, images)
    assert found.test.labels.tolist() == [3, 1, 4, 1, 5]
    (tmp_path / "mnist" / "t10k-labels-idx1-ubyte.gz").write_bytes(b"no gzip")
    with pytest.raises(BadData, match="no readable idx file"):
        mnist(tmp_path)


def test_usps_digits_are_framed_like_those_of_mnist(tmp_path: Path) -> None:
    (tmp_path / "usps").mkdir()
    for name in ("train", "test"):
        rows = np.hstack([[[7.0]], np.full((1, 256), 1.0)])
        with gzip.open(tmp_path / "usps" / f"zip.{name}.gz", "wt") as file:
            np.savetxt(file, rows)
    (digit,) = usps(tmp_path).train.inputs
    assert digit.shape == (28, 28)
    assert digit[4:24, 4:24].min() == 255
    digit = digit.copy()
    digit[4:24, 4:24] = 0
    assert not digit.any()
    assert usps(tmp_path).test.labels.tolist() == [7]


def test_a_set_that_is_not_there_is_looked_for_through_torchvision_and_never_fetched(tmp_path: Path) -> None:
    with pytest.raises(InvalidSetting, match="torchvision's MNIST is not in the folder named; add download=1"):
        mnist(tmp_path)
    with pytest.raises(InvalidSetting, match="torchvision's USPS is not in the folder named"):
        usps(tmp_path)


def test_the_folder_is_the_option_s_else_the_variable_s(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LABELER_DATA", str(tmp_path))
    assert find_root(None) == tmp_path
    (tmp_path / "other").mkdir()
    assert find_root(tmp_path / "other") == tmp_path / "other"
    with pytest.raises(InvalidSetting, match="--data or LABELER_DATA"):
        find_root(tmp_path / "missing")


def test_the_real_sets_have_their_published_sizes(data_root: Path) -> None:
    assert (len(mnist(data_root).train), len(mnist(data_root).test)) == (60_000, 10_000)
    assert (len(usps(data_root).train), len(usps(data_root).test)) == (7_291, 2_007)
