"""The real data sets that benches measure on: digits as arrays, photographs as frozen features.

They lie in a folder of the user's (`--data`, or LABELER_DATA), laid out as BENCHMARKS.md says. A missing set is read
through torchvision from `torchvision/` in that folder. Nothing is downloaded and nothing is bundled. Features are
computed once and kept in the user's cache folder.
"""

from __future__ import annotations

import gzip
import hashlib
import json
import os
import tarfile
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from feature_store.shard import Shard
from labeler.errors import BadData, InvalidSetting
from labeler.randomness import seeded_source
from labeler.system.site_key import KEY_BYTES, SiteKey
from workers.progress import ProgressCallback, silent

if TYPE_CHECKING:
    from feature_store.backbones.backbone import Backbone

CIFAR10_CLASSES = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")


def mobilenet(resize: int, crop: int) -> dict[str, Any]:
    """Return MobileNetV2 1.0 trained on ImageNet, on squares of `crop` pixels: 1,280 features. Weights are left out."""
    return {
        "kind": "timm",
        "architecture": "mobilenetv2_100",
        "options": {"pad_type": "same", "bn_eps": 1e-3},
        "transform": {"resize": resize, "crop": crop, "mean": [0.5] * 3, "std": [0.5] * 3, "interpolation": "bicubic"},
    }


CIFAR10_BACKBONE: dict[str, Any] = mobilenet(128, 128)
"""CIFAR-10 images are enlarged."""


@dataclass(frozen=True, eq=False)
class Split:
    """One half of a data set.

    Attributes:
        inputs: images, uint8 of shape (n, height, width), or features, float32 of shape (n, dimension), each of
            L2 norm 1 up to rounding.
        labels: int64, shape (n,), from 0.
    """

    inputs: NDArray[Any]
    labels: NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, rows: NDArray[np.int64] | slice) -> Split:
        return Split(self.inputs[rows], self.labels[rows])


@dataclass(frozen=True, eq=False)
class DataSet:
    """A data set with its own division into training and test."""

    train: Split
    test: Split
    num_classes: int = 10

    @property
    def whole(self) -> Split:
        """Both halves as one."""
        inputs, labels = ((self.train.inputs, self.test.inputs), (self.train.labels, self.test.labels))
        return Split(np.concatenate(inputs), np.concatenate(labels))


def data_root(data: Path | None) -> Path:
    """Return the folder of real data sets: the option, else LABELER_DATA, else ../shared/data."""
    root = data or Path(os.environ.get("LABELER_DATA", "../shared/data"))
    if not root.is_dir():
        raise InvalidSetting(f"there is no folder {root}; name the folder of data sets with --data or LABELER_DATA")
    return root


def mnist(root: Path) -> DataSet:
    """MNIST (LeCun et al. 1998): 60,000 and 10,000 digits of 28 x 28, from its idx files, else through torchvision."""
    folder = root / "mnist"
    if not folder.is_dir():
        return DataSet(_torchvision(root, "MNIST", "train"), _torchvision(root, "MNIST", "test"))
    return DataSet(_mnist(folder, "train"), _mnist(folder, "t10k"))


def usps(root: Path) -> DataSet:
    """USPS (Hull 1994): 7,291 and 2,007 digits of 16 x 16, made to look like MNIST's: 20 x 20 in a border of 4."""
    folder = root / "usps"
    if not folder.is_dir():
        return DataSet(_torchvision(root, "USPS", "train"), _torchvision(root, "USPS", "test"))
    return DataSet(_usps(folder / "zip.train.gz"), _usps(folder / "zip.test.gz"))


def cifar10_features(root: Path, *, progress: ProgressCallback = silent) -> DataSet:
    """CIFAR-10 (Krizhevsky 2009) as features of a frozen network, computed once (in ten to twenty minutes)."""
    folder = _cifar10_folder(root, ("train", "test"), progress)
    train, test = (split_of(Shard.open(folder / f"cifar10-{one}", verify=False)) for one in ("train", "test"))
    return DataSet(train, test)


def cifar10_test_features(
    root: Path, *, progress: ProgressCallback = silent
) -> tuple[NDArray[np.int16], NDArray[np.int64]]:
    """The 10,000 test images of CIFAR-10, as quantized features of the same MobileNetV2, and their classes."""
    return ordered(Shard.open(_cifar10_folder(root, ("test",), progress) / "cifar10-test", verify=False))


def cifar10_few(root: Path, *, train: float, progress: ProgressCallback = silent) -> DataSet:
    """The test images alone, for a first look: a share of them trains, and the others score."""
    features, labels = cifar10_test_features(root, progress=progress)
    own, others = np.split(np.random.default_rng(0).permutation(len(labels)), [int(train * len(labels))])
    rows = features.astype(np.float32) / np.float32(2048)
    return DataSet(Split(rows[own], labels[own]), Split(rows[others], labels[others]))


def ordered(shard: Shard) -> tuple[NDArray[np.int16], NDArray[np.int64]]:
    """Return features and labels by source name: rows of a shard are in random order, which differs between caches."""
    by_name = np.argsort(np.array(shard.sources), kind="stable")
    return np.ascontiguousarray(shard.features[by_name]), np.asarray(shard.labels)[by_name].astype(np.int64)


def split_of(shard: Shard) -> Split:
    """Return features of norm 1 and labels, by source name."""
    features, labels = ordered(shard)
    return Split(features.astype(np.float32) / np.float32(2048), labels)


def embedded(
    source: Path | str, backbone: Backbone, out: Path, *, classes: Sequence[str], seed: str, progress: ProgressCallback
) -> Shard:
    """Return the shard of a public set, embedded if it is missing; as published, with its duplicates."""
    if not out.exists():
        from feature_store.embedding import embed_source

        embed_source(
            source,
            backbone,
            out,
            classes=classes,
            duplicates="keep-all",
            key=SiteKey(seeded_source(f"site key {seed}".encode()).bytes(KEY_BYTES)),
            random_bytes=seeded_source(f"record ids {seed}".encode()).bytes,
            progress=lambda done, total: progress(f"Embedding {seed}", done, total),
        )
    return Shard.open(out, verify=False)


def _cifar10_folder(root: Path, splits: Sequence[str], progress: ProgressCallback) -> Path:
    """Return the folder of the features of these splits, embedded now if they are missing."""
    weights = root / "backbones" / "mobilenetv2_100.safetensors"
    if not weights.is_file():
        raise InvalidSetting(f"{root} holds no backbones/mobilenetv2_100.safetensors; name the folder with --data")
    made_by = hashlib.sha256(json.dumps(CIFAR10_BACKBONE, sort_keys=True).encode() + weights.read_bytes()).hexdigest()
    folder = cache_folder() / made_by[:16]
    missing = [split for split in splits if not (folder / f"cifar10-{split}").exists()]
    if missing:
        # Imported on use: where all features are kept, nothing needs the network.
        from feature_store.backbones import load_backbone, parse_spec

        backbone = load_backbone(parse_spec(CIFAR10_BACKBONE | {"weights": weights, "decoder": "pillow"}))
        with tempfile.TemporaryDirectory() as temporary:
            for split in missing:
                images, out = _cifar10_images(root, split, Path(temporary)), folder / f"cifar10-{split}"
                embedded(images, backbone, out, classes=CIFAR10_CLASSES, seed=f"cifar10 {split}", progress=progress)
    return folder


def cache_folder() -> Path:
    """Return the folder that keeps features of benches between runs: `labeler` in the user's cache folder."""
    return Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "labeler"


def _cifar10_images(root: Path, split: str, temporary: Path) -> Path | str:
    archive = root / "cifar10-jpeg" / "cifar10_jpg.tar.xz"
    if not archive.is_file():
        return f"torchvision:CIFAR10?root={root / 'torchvision'}&split={split}"
    with tarfile.open(archive) as tar:
        tar.extractall(temporary, filter="data", members=(m for m in tar if m.name.startswith(f"{split}/")))
    return temporary / split


def _torchvision(root: Path, name: str, split: str) -> Split:
    from feature_store.sources import open_source

    source = open_source(f"torchvision:{name}?root={root / 'torchvision'}&split={split}")
    images = [np.asarray(source.read(row).convert("L").resize((28, 28))) for row in range(len(source.names))]
    return Split(np.stack(images), np.array(source.labels, dtype=np.int64))


def _mnist(folder: Path, name: str) -> Split:
    images = _idx(folder / f"{name}-images-idx3-ubyte.gz", 16).reshape(-1, 28, 28)
    return Split(images, _idx(folder / f"{name}-labels-idx1-ubyte.gz", 8).astype(np.int64))


def _idx(path: Path, header: int) -> NDArray[np.uint8]:
    try:
        with gzip.open(path) as file:
            return np.frombuffer(file.read(), dtype=np.uint8, offset=header)
    except (OSError, ValueError) as error:
        raise BadData(f"{path.name} is no readable idx file: {error}") from None


def _usps(path: Path) -> Split:
    table = np.loadtxt(path, ndmin=2)
    pixels = np.rint((table[:, 1:].reshape(-1, 16, 16) + 1) * 127.5).astype(np.uint8)
    digits = np.zeros((len(table), 28, 28), dtype=np.uint8)
    for digit, small in zip(digits, pixels, strict=True):
        digit[4:24, 4:24] = np.asarray(Image.fromarray(small).resize((20, 20), Image.Resampling.BILINEAR))
    return Split(digits, table[:, 0].astype(np.int64))
