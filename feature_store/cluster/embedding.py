"""Images embedded by the workers of a cluster; the features are those of one process.

The result for an image depends on that image alone (`feature_store.embedding`). So it does not matter which worker
computes it, and how often after a worker was lost: Ray restarts a lost worker and asks it again. Blocks come back in
the source's order, and the process that asked writes them: it alone has the shard's folder, and goes on where it
stopped.

Workers read the images and the backbone's files under the same paths. Features travel between the processes of one
party, and nothing of them is written but the shard; the site's key stays where it is, which takes the digests.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator
from dataclasses import replace
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from feature_store.backbones import Backbone
from feature_store.cluster.driver import Driver, cluster_here, ray_module
from feature_store.embedding import Embedded, Embedder, LoadedImage, loaded_batches
from labeler.errors import MixedShards

_SEEN: Final = np.empty(0, dtype=np.uint8)
"""Stands for the pixels of an image that was embedded, which nobody needs any more."""

Load = Callable[[int], LoadedImage]


Recipe = Callable[[], Backbone]
"""Loads a backbone, in every worker: a function of ours with its arguments (functools.partial), which can be sent."""


def cluster_embedder(recipe: Recipe, driver: Driver) -> Embedder:
    """Return what embeds images of a source in a cluster, for feature_store.embedding.embed_source.

    Args:
        recipe: of the backbone; workers whose own differs from the one here are refused.
    """

    def embedded(backbone: Backbone, load: Load, indices: range) -> Generator[Embedded]:
        return driver.stream(_stream, load, indices, recipe, (backbone.fingerprint, backbone.batch_size))

    return embedded


# The side of the process that drives Ray.


def _stream(load: Load, indices: range, recipe: Recipe, expected: tuple[str, int]) -> Generator[Embedded]:
    ray, found = ray_module(), cluster_here()
    size = max(_LEAST_BLOCK, expected[1])
    blocks = [indices[start : start + size] for start in range(0, len(indices), size)]
    # Others may be at work in a cluster at an address: what they hold is not waited for.
    free = ray.available_resources()
    workers = max(1, min(int(free.get("GPU" if found.gpus else "CPU", 1)), len(blocks)))
    threads = max(1, found.cpus // found.gpus) if found.gpus else 1
    worker = ray.remote(_Worker).options(
        num_cpus=threads, num_gpus=1 if found.gpus else 0, max_restarts=_RESTARTS, max_task_retries=_RESTARTS
    )
    shared = ray.put(load)
    actors = [worker.remote([shared], recipe, expected[0], threads) for _ in range(workers)]
    waiting: deque[Any] = deque()
    try:
        for number, block in enumerate(blocks):
            waiting.append(actors[number % workers].embedded.remote(block))
            if len(waiting) > _WAITING * workers:
                yield ray.get(waiting.popleft())
        for asked in waiting:
            yield ray.get(asked)
    finally:
        for actor in actors:
            ray.kill(actor)


_LEAST_BLOCK: Final = 32
"""Images: of a backbone that takes one at a time, handing over so few would cost more than embedding them."""

_RESTARTS: Final = 3
"""Of each worker; one that is lost more often is lost for a reason."""

_WAITING: Final = 3
"""Blocks of each worker that are on the way; whoever writes them then holds up the workers."""


class _Worker:
    """An actor that reads, decodes and embeds; with a GPU on several threads, without one on its processor.

    Raises:
        MixedShards: its backbone is another one.
    """

    def __init__(self, shared: list[Any], recipe: Recipe, fingerprint: str, threads: int) -> None:
        self._load: Load = ray_module().get(shared[0])
        self._threads = threads
        self._backbone = recipe()
        if self._backbone.fingerprint != fingerprint:
            raise MixedShards(
                f"a worker's backbone has fingerprint {self._backbone.fingerprint[:12]}, here it is "
                f"{fingerprint[:12]}; every machine of a cluster needs the same weights and the same major versions"
            )

    def embedded(self, indices: range) -> Embedded:
        """A block of images."""
        loaded = loaded_batches(self._load, indices, batch_size=len(indices), threads=self._threads)
        items = [item for batch in loaded for item in batch]
        pixels = [item.pixels for item in items if item.pixels is not None]
        features: NDArray[np.float32] = np.empty((0, self._backbone.dimension), dtype=np.float32)
        if pixels:
            features = self._backbone.embed_prepared(np.stack(pixels))
        return Embedded([item if item.pixels is None else replace(item, pixels=_SEEN) for item in items], features)
