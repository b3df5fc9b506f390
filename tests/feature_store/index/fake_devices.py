"""Devices for machines without one: one with little memory and faults, and the engines of devices on the processor."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from feature_store.index import build
from feature_store.index.engine_gpu import FaissGpuEngine, FaissPart, TorchEngine, TorchPart
from feature_store.index.exact_index import Block, Engine, EngineFault, NumpyBlock, NumpyEngine
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
    name: str = "fake"

    def room_rows(self, dimension: int) -> int:  # noqa: ARG002, of the protocol
        return self.promised or self.room

    def load(self, rows: GatheredRows) -> NumpyBlock:
        if len(rows) > self.room:
            raise EngineFault("no room")
        plain = NumpyEngine().load(rows)
        block = _Losing(plain._rows, plain._ranks) if self.loses_best else plain
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


class SmallTorch(TorchEngine):
    """Of small tiles."""

    def part(self, rows: GatheredRows, device: torch.device) -> TorchPart:
        part = super().part(rows, device)
        part.tile_rows = 64
        return part


class SmallFaiss(FaissGpuEngine):
    """Of small tiles and few places."""

    def part(self, rows: GatheredRows, device: torch.device) -> FaissPart:
        part = super().part(rows, device)
        part.tile_rows, part.most_places = 64, 100
        return part


FAKES: dict[str, Callable[[], Engine]] = {
    "torch in parts": lambda: SmallTorch(devices=("cpu", "cpu", "cpu")),
    "faiss in parts": lambda: SmallFaiss(devices=("cpu", "cpu", "cpu")),
}
"""Engines beside those that can be named, for the suites of equal neighbors."""

GPU_ENGINES = [pytest.param(name, marks=pytest.mark.gpu) for name in ("faiss-gpu", "torch-gpu")]
ENGINES = ["numpy", "faiss", *FAKES, *GPU_ENGINES]


@contextmanager
def fakes_have_names() -> Iterator[None]:
    """`build_index` knows the names in FAKES."""
    known = build.load_engine
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(build, "load_engine", lambda name: FAKES[name]() if name in FAKES else known(name))
        yield
