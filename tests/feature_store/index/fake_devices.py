"""Devices for machines without one: FAISS's GPU classes as cruel as they may be, and torch in parts on the processor.

The FAISS fake is in the place of the library's own classes, so what is tested is our engine for it. Among tied
records it returns those that come last by our order, in no order; it takes k up to 2048, has only so much memory, and
counts what is made, what is alive, and what was never given back.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cached_property
from typing import Any

import faiss
import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from feature_store.index import build, engine_faiss
from feature_store.index.engine import DeviceEngine, Engine
from feature_store.index.engine_faiss import FaissDeviceBlock, FaissDeviceEngine
from feature_store.index.engine_torch import TorchEngine
from feature_store.index.gathered import GatheredRows


class FakeCuda:
    """One device. Attributes: what FAISS was asked to make, and what is alive on it."""

    def __init__(self, *, free_bytes: int = 8 << 30, devices: int = 1) -> None:
        self.total_bytes = free_bytes
        self.devices = devices
        self.resources = 0
        self.kept: dict[int, Any] = {}
        self.temporary_bytes: list[int] = []
        self.pinned_bytes: list[int] = []
        self.made = 0
        self.alive: set[int] = set()
        self.most_alive = 0
        self.used_bytes = 0
        self.searches = 0
        self.loses_best = False
        self.events: list[str] = []

    def mem_get_info(self, _: object = None) -> tuple[int, int]:
        return self.total_bytes - self.used_bytes, self.total_bytes

    @cached_property
    def library(self) -> Any:
        """The module `faiss`, with this device."""
        cuda = self

        class Resources:
            def __init__(self) -> None:
                cuda.resources += 1

            def setTempMemory(self, count: int) -> None:  # FAISS's name
                cuda.temporary_bytes.append(count)

            def setPinnedMemory(self, count: int) -> None:  # FAISS's name
                cuda.pinned_bytes.append(count)

        class Config:
            use_cuvs = True
            useFloat16 = True
            device = 0

        class Index:
            def __init__(self, resources: Resources, dimension: int, config: Config) -> None:
                assert isinstance(resources, Resources)
                assert not config.use_cuvs
                assert not config.useFloat16
                cuda.events.append("index")
                cuda.made += 1
                self._number = cuda.made
                self._rows = np.empty((0, dimension), dtype=np.float32)
                cuda.alive.add(self._number)
                cuda.most_alive = max(cuda.most_alive, len(cuda.alive))

            def add(self, rows: NDArray[np.float32]) -> None:
                if cuda.used_bytes + rows.nbytes > cuda.total_bytes:
                    raise RuntimeError("StandardGpuResources: alloc fail")
                cuda.used_bytes += rows.nbytes
                self._rows = np.concatenate([self._rows, rows])

            def search(self, queries: NDArray[np.float32], k: int) -> tuple[Any, Any]:
                assert k <= 2048, "FAISS would abort here"
                cuda.searches += 1
                scores = queries @ self._rows.T
                places = np.broadcast_to(np.arange(len(self._rows)), scores.shape)
                hidden = scores.copy()
                if cuda.loses_best:
                    hidden[np.arange(len(hidden)), hidden.argmax(axis=1)] = -np.inf
                order = np.lexsort((-places, -hidden), axis=1)[:, :k]
                order = np.random.default_rng(cuda.searches).permuted(order, axis=1)
                return np.take_along_axis(scores, order, axis=1), order.astype(np.int64)

            def reset(self) -> None:
                cuda.used_bytes -= self._rows.nbytes
                self._rows = self._rows[:0]
                cuda.alive.discard(self._number)

            __del__ = reset

        class Library:
            StandardGpuResources = Resources
            GpuIndexFlatConfig = Config
            GpuIndexFlatIP = Index

            def __getattr__(self, name: str) -> Any:
                return getattr(faiss, name)

            def get_num_gpus(self) -> int:
                return cuda.devices

        return Library()


@contextmanager
def cuda_of(cuda: FakeCuda) -> Iterator[FakeCuda]:
    """FAISS sees this device, and no other, for as long as it lasts."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engine_faiss, "faiss", cuda.library)
        patch.setattr(engine_faiss, "_RESOURCES", cuda.kept)
        patch.setattr(torch.cuda, "mem_get_info", cuda.mem_get_info)
        yield cuda


class FakeFaissEngine(FaissDeviceEngine):
    """Our engine on a fake device, where others may be on a real one."""

    def __init__(self) -> None:
        self.cuda = FakeCuda()
        with cuda_of(self.cuda):
            super().__init__()

    def room_rows(self, dimension: int) -> int:
        with cuda_of(self.cuda):
            return super().room_rows(dimension)

    def load_gathered(self, rows: GatheredRows, ranks: NDArray[np.int64]) -> FaissDeviceBlock:
        with cuda_of(self.cuda):
            return super().load_gathered(rows, ranks)


FAKES: dict[str, Callable[[], Engine | DeviceEngine]] = {
    "fake faiss-gpu": FakeFaissEngine,
    "torch in parts": lambda: TorchEngine(devices=("cpu", "cpu", "cpu"), tile_rows=64),
}
"""Engines beside those that can be named, for the suites of equal neighbours."""


@contextmanager
def fakes_have_names() -> Iterator[None]:
    """`build_index` knows the names in FAKES."""
    known = build.load_engine
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(build, "load_engine", lambda name: FAKES[name]() if name in FAKES else known(name))
        yield
