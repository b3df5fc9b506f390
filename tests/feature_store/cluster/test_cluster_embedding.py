"""Images that are embedded by the workers of a cluster: the very shard that one process writes."""

from __future__ import annotations

import os
import pickle
import signal
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image

from feature_store.backbones import load_backbone
from feature_store.cluster.driver import Driver
from feature_store.cluster.embedding import Recipe, cluster_embedder
from feature_store.embedding import EmbedReport, embed_source
from feature_store.shard import Shard
from feature_store.sources import open_source
from labeler.errors import LabelerError
from labeler.system.site_key import KEY_BYTES, SiteKey
from tests.feature_store.cluster.conftest import processes_below

pytestmark = pytest.mark.process

CLASSES = ("left", "right")
IMAGES = 150
KEY = SiteKey(bytes(range(KEY_BYTES)))


def images_at(folder: Path) -> Path:
    rng = np.random.default_rng(4)
    for name in CLASSES:
        (folder / name).mkdir(parents=True)
    for number in range(IMAGES):
        pixels = rng.integers(0, 256, (40 + number % 7, 50, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(folder / CLASSES[number % 2] / f"private-name-{number}.png")
    (folder / "left" / "private-name-damaged.png").write_bytes(b"no image")
    (folder / "right" / "private-name-5-cut.png").write_bytes(
        (folder / "right" / "private-name-5.png").read_bytes()[:200]
    )
    return folder


def embed(folder: Path, out: Path, recipe: Recipe, *, driver: Driver | None = None, **settings: Any) -> EmbedReport:
    backbone = recipe()
    embedder = None if driver is None else cluster_embedder(recipe, driver)
    return embed_source(
        folder,
        backbone,
        out,
        **{"classes": CLASSES, "key": KEY, "random_bytes": np.random.default_rng(9).bytes, "embedder": embedder}
        | settings,
    )


def bytes_of(shard: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in shard.iterdir()}


@pytest.mark.long
@pytest.mark.parametrize("backbone", ["pixels", "efficientnet-lite0"])
def test_two_workers_write_the_shard_of_one_process_and_list_what_nobody_can_read(
    two_workers: Driver, tmp_path: Path, backbone: str
) -> None:
    folder, recipe = images_at(tmp_path / "images"), partial(load_backbone, backbone, device="cpu")
    alone = embed(folder, tmp_path / "alone", recipe)
    done: list[tuple[int, int]] = []
    together = embed(folder, tmp_path / "together", recipe, driver=two_workers, progress=lambda *now: done.append(now))
    assert bytes_of(tmp_path / "alone") == bytes_of(tmp_path / "together")
    assert together.skipped == alone.skipped
    assert [one.source for one in together.skipped] == ["left/private-name-damaged.png", "right/private-name-5-cut.png"]
    assert together.records == IMAGES
    assert done == sorted(done)
    assert done[-1] == (IMAGES + 2, IMAGES + 2)
    # Nothing of an image is left in the cluster's folder.
    shard = Shard.open(tmp_path / "together")
    assert shard.image_digests is not None
    private = [bytes(range(KEY_BYTES)), b"private-name", shard.image_digests[3].tobytes(), b"right"]
    private += [np.asarray(shard.features[row]).tobytes()[:64] for row in (0, 70)]
    for path in two_workers.cluster.folders[0].rglob("*"):
        if path.is_file() and not path.is_symlink():
            content = path.read_bytes()
            assert not [word for word in private if word in content], path.name


@pytest.mark.long
def test_it_goes_on_where_it_stopped_in_one_process_or_in_two(two_workers: Driver, tmp_path: Path) -> None:
    folder, recipe = images_at(tmp_path / "images"), partial(load_backbone, "pixels")
    embed(folder, tmp_path / "alone", recipe, public=True, key=None)

    def stop(done: int, _: int) -> None:
        if done >= IMAGES // 3:
            raise KeyboardInterrupt

    out = tmp_path / "together"
    with pytest.raises(KeyboardInterrupt):
        embed(folder, out, recipe, driver=two_workers, public=True, key=None, progress=stop)
    report = embed(folder, out, recipe, driver=two_workers, public=True, key=None)
    assert IMAGES // 3 <= report.resumed_from < IMAGES
    assert bytes_of(tmp_path / "alone") == bytes_of(out)


def _kill_workers(parent: int) -> set[int]:
    """Every process of Ray that embeds now."""
    found = {one for one, words in processes_below(parent).items() if "ray::_Worker" in words}
    for process in found:
        os.kill(process, signal.SIGKILL)
    return found


@pytest.mark.long
def test_workers_that_are_killed_in_the_middle_change_nothing_in_the_bytes(two_workers: Driver, tmp_path: Path) -> None:
    folder, recipe = images_at(tmp_path / "images"), partial(load_backbone, "efficientnet-lite0", device="cpu")
    embed(folder, tmp_path / "alone", recipe)
    killed: set[int] = set()

    def kill_once(done: int, total: int) -> None:
        if not killed and done < total // 2:
            killed.update(_kill_workers(os.getpid()))

    embed(folder, tmp_path / "together", recipe, driver=two_workers, progress=kill_once)
    assert killed
    assert bytes_of(tmp_path / "alone") == bytes_of(tmp_path / "together")


@pytest.mark.long
def test_workers_with_another_backbone_are_refused(two_workers: Driver, tmp_path: Path) -> None:
    folder, recipe = images_at(tmp_path / "images"), partial(load_backbone, "pixels")
    backbone = recipe()
    elsewhere = cluster_embedder(partial(load_backbone, "pixels:8"), two_workers)
    with pytest.raises(LabelerError):
        embed_source(folder, backbone, tmp_path / "out", classes=CLASSES, key=KEY, embedder=elsewhere)
    assert not (tmp_path / "out").exists()


def _folder(path: Path) -> Path:
    return images_at(path / "images")


def _parquet(path: Path) -> Path:
    files = sorted(images_at(path / "images").rglob("private-name-?.png"))
    table = pa.table({"image": [file.read_bytes() for file in files], "id": [file.name for file in files]})
    pq.write_table(table, path / "images.parquet")
    return path / "images.parquet"


@pytest.mark.parametrize("make", [_folder, _parquet])
def test_another_process_reads_the_same_images(tmp_path: Path, make: Callable[[Path], Path]) -> None:
    source = open_source(make(tmp_path))
    copy = pickle.loads(pickle.dumps(source))
    assert list(copy.names) == list(source.names)
    assert list(copy.labels) == list(source.labels)
    assert copy.file(3) == source.file(3)
    assert copy.max_pixels == source.max_pixels
