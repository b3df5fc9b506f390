"""Fixtures that every test may use: the data folder, a GPU, a seeded source of randomness."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from tests.postgres_server import PostgresServer, postgres_running

# A shell starts what runs in its background with Ctrl-C ignored, and every process started here would inherit that.
signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session")
def data_root() -> Path:
    """The folder of real images and the real backbone; skips where it is absent."""
    default = Path(__file__).parent.parent.parent / "shared" / "data"
    root = Path(os.environ.get("LABELER_DATA", default))
    if not root.is_dir():
        pytest.skip(f"no data folder: set LABELER_DATA (looked in {root.name!r})")
    return root


@pytest.fixture(scope="session")
def postgres_server() -> Iterator[PostgresServer]:
    """A PostgreSQL server with its own data, at full durability; started where a test asks for it."""
    with postgres_running() as server:
        yield server


@pytest.fixture
def rng() -> np.random.Generator:
    """Random data for tests (never noise: noise comes from labeler.randomness)."""
    return np.random.default_rng(20261120)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip what needs a GPU on a machine without one."""
    marked = [item for item in items if item.get_closest_marker("gpu")]
    if not marked:
        return
    import torch

    if not torch.cuda.is_available():
        for item in marked:
            item.add_marker(pytest.mark.skip(reason="no CUDA device on this machine"))
