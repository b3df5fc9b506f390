"""A stage on which schedules run."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest

from workers.studies.simulation.campaign import Stage, memory_folder
from workers.studies.simulation.subject import service


@pytest.fixture(scope="session")
def stage() -> Iterator[Stage]:
    """One for all tests of a process: making the homes of a federation takes longer than a schedule."""
    logging.disable(logging.CRITICAL)
    try:
        with memory_folder() as folder:
            yield Stage(folder, service())
    finally:
        logging.disable(logging.NOTSET)
