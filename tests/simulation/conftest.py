"""A stage on which schedules run."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest

from tests.simulation.campaign import Stage, memory_folder


@pytest.fixture(scope="session")
def stage() -> Iterator[Stage]:
    """One for all tests of a process: making the homes of a federation takes longer than a schedule."""
    with memory_folder() as folder:
        yield Stage(folder)


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    """Deaths of every kind are logged at length; of these tests alone nobody reads it."""
    logging.disable(logging.CRITICAL)
    try:
        yield
    finally:
        logging.disable(logging.NOTSET)
