"""Images embedded by the workers of a cluster, with Ray Data; the features are those of one process.

    one block of images -> read, decode, prepare (processors) -> forward pass (GPUs, where there are any) -> in order

What becomes of an image depends on that image alone (`feature_store.embed_steps`), so who computes it, and how often
after a worker was lost, changes nothing. Blocks come back in the source's order, and the process that asked writes
them: it alone has the shard's folder, and goes on where it stopped. Without a GPU one worker does both steps, and no
pixels travel.

Workers read the images and the backbone's files under the same paths. Pixels and features travel between the processes
of one party, and nothing of them is written but the shard; the site's key stays where it is, which takes the digests.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Generator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from feature_store.backbones import Backbone, Decoder, load_backbone
from feature_store.cluster.door import Cluster, ray_module
from feature_store.cluster.driver import Driver
from feature_store.embed_steps import Embedded, Loaded
from labeler.errors import MixedShards, Unavailable

_BLOCKS_AT_ONCE: Final = 4096
"""Blocks of one data set of Ray's, which keeps a list of them; then comes the next data set."""

_SEEN: Final = np.empty(0, dtype=np.uint8)
"""Stands for the pixels of an image that was embedded, which nobody needs any more."""

Load = Callable[[int], Loaded]


@dataclass(frozen=True)
class Recipe:
    """A backbone as every worker loads it; see feature_store.backbones.load_backbone."""

    source: str | Path
    architecture: str | None = None
    device: str = "auto"
    batch_size: int | None = None
    decoder: Decoder | None = None
    fingerprint: str = ""

    def load(self) -> Backbone:
        """The backbone.

        Raises:
            LabelerError: see load_backbone.
        """
        return load_backbone(
            self.source,
            architecture=self.architecture,
            device=self.device,
            batch_size=self.batch_size,
            decoder=self.decoder,
            fingerprint=self.fingerprint,
        )


def cluster_embedder(
    recipe: Recipe, backbone: Backbone, driver: Driver
) -> Callable[[Load, range], Generator[Embedded]]:
    """What embeds images of a source in a cluster, for feature_store.embedding.embed_source.

    Args:
        recipe: of the backbone.
        backbone: the same, here; workers whose own differs are refused.
    """

    def embedded(load: Load, indices: range) -> Generator[Embedded]:
        return driver.stream(
            _stream, load, indices, recipe, (backbone.fingerprint, backbone.batch_size), driver.cluster
        )

    return embedded


# The side of the process that drives Ray.


def _stream(
    load: Load, indices: range, recipe: Recipe, expected: tuple[str, int], found: Cluster
) -> Generator[Embedded]:
    ray = ray_module()
    shared = ray.put(load)
    size = max(_LEAST_BLOCK, expected[1])
    for first in range(0, len(indices), _BLOCKS_AT_ONCE * size):
        window = indices[first : first + _BLOCKS_AT_ONCE * size]
        blocks = [window[start : start + size] for start in range(0, len(window), size)]
        for number, row in enumerate(_rows(blocks, shared, recipe, expected, found)):
            if row["number"] != number:
                raise Unavailable("blocks of images came back in another order; embed them without --ray")
            yield pickle.loads(row["block"])


_LEAST_BLOCK: Final = 32
"""Images: of a backbone that takes one at a time, handing over so few would cost more than embedding them."""


def _rows(blocks: list[range], shared: Any, recipe: Recipe, expected: tuple[str, int], found: Cluster) -> Any:
    import ray.data

    context = ray.data.DataContext.get_current()
    context.execution_options.preserve_order = True
    context.enable_progress_bars = False
    items = [{"number": number, "start": block.start, "stop": block.stop} for number, block in enumerate(blocks)]
    rows: Any = ray.data.from_items(items, override_num_blocks=len(items))

    def pool(most: int) -> Any:
        most = min(most, len(items))
        # Others may be at work in a cluster at an address: there it begins with one worker, and grows.
        return ray.data.ActorPoolStrategy(min_size=most if found.folders else 1, max_size=most)

    if found.gpus:
        rows = rows.map(_Loads, fn_constructor_args=([shared],), num_cpus=1, compute=pool(found.cpus))
        last: dict[str, Any] = {"num_gpus": 1, "compute": pool(found.gpus)}
        rows = rows.map(_Embeds, fn_constructor_args=(recipe, expected), **last)
    else:
        last = {"num_cpus": 1, "compute": pool(found.cpus)}
        rows = rows.map(_LoadsAndEmbeds, fn_constructor_args=([shared], recipe, expected), **last)
    return rows.iter_rows()


class _Loads:
    """A worker that reads, decodes and prepares."""

    def __init__(self, shared: list[Any]) -> None:
        self._load: Load = ray_module().get(shared[0])

    def __call__(self, row: dict[str, Any]) -> dict[str, Any]:
        return {"number": row["number"], "block": pickle.dumps(self.loaded(row))}

    def loaded(self, row: dict[str, Any]) -> list[Loaded]:
        return [self._load(index) for index in range(int(row["start"]), int(row["stop"]))]


class _Embeds:
    """A worker that has the network."""

    def __init__(self, recipe: Recipe, expected: tuple[str, int]) -> None:
        self._backbone = recipe.load()
        if self._backbone.fingerprint != expected[0]:
            raise MixedShards(
                f"a worker's backbone has fingerprint {self._backbone.fingerprint[:12]}, here it is "
                f"{expected[0][:12]}; every machine of a cluster needs the same weights and the same major versions"
            )

    def __call__(self, row: dict[str, Any]) -> dict[str, Any]:
        return {"number": row["number"], "block": pickle.dumps(self.embedded(pickle.loads(row["block"])))}

    def embedded(self, items: list[Loaded]) -> Embedded:
        pixels = [item.pixels for item in items if item.pixels is not None]
        features: NDArray[np.float32] = np.empty((0, self._backbone.dimension), dtype=np.float32)
        if pixels:
            features = self._backbone.embed_prepared(np.stack(pixels))
        return Embedded([item if item.pixels is None else replace(item, pixels=_SEEN) for item in items], features)


class _LoadsAndEmbeds:
    """A worker that does both."""

    def __init__(self, shared: list[Any], recipe: Recipe, expected: tuple[str, int]) -> None:
        self._loads, self._embeds = _Loads(shared), _Embeds(recipe, expected)

    def __call__(self, row: dict[str, Any]) -> dict[str, Any]:
        return {"number": row["number"], "block": pickle.dumps(self._embeds.embedded(self._loads.loaded(row)))}
