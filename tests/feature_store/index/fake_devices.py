"""Devices for machines without one: one with little memory and faults, and torch in parts on the processor."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import numpy as np
import pytest
from numpy.typing import NDArray

from feature_store.index import build
from feature_store.index.engine_torch import TorchEngine
from feature_store.index.exact_index import Block, DeviceFault, Engine, NumpyBlock, NumpyEngine
from feature_store.rows import GatheredRows


@dataclass(eq=False)
class FakeDevice(Engine):
    """A device that computes as numpy does. Attributes: what it has room for, and what was asked of it."""

    room: int = 1 << 30
    promised: int | None = None
    loses_best: bool = False
    made: int = 0
    most_alive: int = 0
    alive: set[int] = field(default_factory=set)
    events: list[str] = field(default_factory=list)

    def bytes_per_query(self, block_rows: int) -> int:
        return NumpyEngine().bytes_per_query(block_rows)

    def room_rows(self, dimension: int) -> int:  # noqa: ARG002, of the protocol
        return self.promised or self.room

    def load(self, rows: GatheredRows, most_rows: int) -> NumpyBlock:
        if len(rows) > self.room:
            raise DeviceFault("no room")
        plain = NumpyEngine().load(rows, most_rows)
        block = _Losing(plain._rows) if self.loses_best else plain
        self.made += 1
        self.events.append("index")
        self.alive.add(id(block))
        weakref.finalize(block, self.alive.discard, id(block))
        self.most_alive = max(self.most_alive, len(self.alive))
        return block

    def free(self, block: Block) -> None:
        self.alive.discard(id(block))


class _Losing(NumpyBlock):
    """Never returns the nearest record."""

    def first_keys(self, queries: NDArray[np.int16], count: int) -> NDArray[np.int64]:
        return super().first_keys(queries, count + 1)[:, 1:]


FAKES: dict[str, Callable[[], Engine]] = {
    "torch in parts": lambda: TorchEngine(devices=("cpu", "cpu", "cpu"), tile_rows=64),
}
"""Engines beside those that can be named, for the suites of equal neighbors."""

ENGINES = ["numpy", "int16", "faiss", "torch", *FAKES, pytest.param("torch-gpu", marks=pytest.mark.gpu)]


@contextmanager
def fakes_have_names() -> Iterator[None]:
    """`build_index` knows the names in FAKES."""
    known = build.load_engine
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(build, "load_engine", lambda name: FAKES[name]() if name in FAKES else known(name))
        yield
