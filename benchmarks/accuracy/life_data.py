"""Ten topics in one feature space: photographs, small photographs and digits, as one federation may hold them.

Every image is seen by the same frozen MobileNetV2 (ImageNet), small ones enlarged to 128 x 128: 1,280 features.
Features are computed once and kept in the user's cache folder.
"""

from __future__ import annotations

import tempfile
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from benchmarks.accuracy.office_caltech import data_folder, embed_domains
from benchmarks.data import CIFAR10_BACKBONE, CIFAR10_CLASSES, Split, cifar10_features, data_root, mnist
from feature_store.shard import Shard
from labeler.randomness import seeded_source
from labeler.system.site_key import KEY_BYTES, SiteKey
from workers.progress import ProgressCallback, silent

AGENTS = 3
TUNING = "amazon"
"""The requesters' domain where settings are chosen."""

CIFAR_EACH = 5000
CIFAR_PUBLIC = 2000
"""Small photographs of each agent, of all ten classes, from the training half; the requesters' are of the test half."""

DIGITS_EACH = 600
DIGITS_PUBLIC = 600


@dataclass(frozen=True, eq=False)
class Images:
    """Features and labels in the federation's class list.

    Attributes:
        features: int16, shape (n, 1280).
        labels: int64, shape (n,).
    """

    features: NDArray[np.int16]
    labels: NDArray[np.int64]

    def of(self, labels: tuple[int, ...]) -> Images:
        """Those of some classes."""
        mine = np.isin(self.labels, labels)
        return Images(self.features[mine], self.labels[mine])


@dataclass(frozen=True, eq=False)
class Federation:
    """What three agents hold, and what requesters of ten topics have.

    Attributes:
        classes: of all sets, thirty.
        private: of each agent.
        public: of all requesters together.
        topics: two or more classes each, by place in the list.
    """

    classes: tuple[str, ...]
    private: tuple[Images, ...]
    public: Images
    topics: tuple[tuple[int, ...], ...]


def federation(server: str, data: Path | None, progress: ProgressCallback = silent) -> Federation:
    """Three agents and the requesters of ten topics.

    Five topics are pairs of classes of Office-Caltech10 in their order, of which one domain is the requesters' and the
    others are one agent's each; three are the first pairs of CIFAR-10, two of MNIST. Where settings are chosen, they
    are the other pairs: two of CIFAR-10, three of MNIST.

    Args:
        server: the requesters' domain of Office-Caltech10.
        data: folder of the real data sets.
        progress: told how far it is.
    """
    domains = embed_domains(data_folder(data), progress)
    photographs = tuple(domains[server].classes)
    small = cifar10_features(data_root(data), progress=progress)
    digits = _digits(data_root(data), progress)
    # By number, which is the file's own name within the folder of its digit.
    by_name = np.argsort(np.array([Path(source).name for source in digits.sources]), kind="stable")
    classes = (*photographs, *CIFAR10_CLASSES, *(f"digit {number}" for number in range(10)))
    order = np.random.default_rng(7).permutation(len(small.train))
    parts: list[list[Images]] = [[] for _ in range(AGENTS + 1)]
    others = [domain for domain in domains if domain != server]
    for part, domain in zip(parts, [*others, server], strict=True):
        # By source name: rows of a shard are in random order, which differs from one cache to the next.
        rows = np.argsort(np.array(domains[domain].sources), kind="stable")
        labels = np.asarray(domains[domain].labels)[rows].astype(np.int64)
        part.append(Images(np.asarray(domains[domain].features)[rows], labels))
    for number, part in enumerate(parts):
        if number < AGENTS:
            part.append(_small(small.train, order[number * CIFAR_EACH :][:CIFAR_EACH]))
        else:
            part.append(_small(small.test, np.random.default_rng(8).permutation(len(small.test))[:CIFAR_PUBLIC]))
        rows = by_name[number * DIGITS_EACH :][:DIGITS_EACH]
        part.append(Images(np.asarray(digits.features)[rows], np.asarray(digits.labels)[rows].astype(np.int64) + 20))
    joined = [
        Images(np.concatenate([one.features for one in part]), np.concatenate([one.labels for one in part]))
        for part in parts
    ]
    others_of = (*range(16, 20, 2), *range(24, 30, 2)) if server == TUNING else (*range(10, 16, 2), *range(20, 24, 2))
    first = (*range(0, 10, 2), *others_of)
    return Federation(classes, tuple(joined[:AGENTS]), joined[AGENTS], tuple((one, one + 1) for one in first))


def _small(split: Split, rows: NDArray[np.int64]) -> Images:
    return Images(np.rint(split.inputs[rows] * 2048).astype(np.int16), split.labels[rows] + 10)


def _digits(root: Path, progress: ProgressCallback) -> Shard:
    """The first digits of MNIST's test half, in their order: each agent's, then the requesters'."""
    from benchmarks.data import cache_folder
    from feature_store.backbones import load_backbone, parse_spec
    from feature_store.embedding import embed_source

    weights = root / "backbones" / "mobilenetv2_100.safetensors"
    backbone = load_backbone(parse_spec(CIFAR10_BACKBONE | {"weights": weights, "decoder": "pillow"}))
    count = AGENTS * DIGITS_EACH + DIGITS_PUBLIC
    out = cache_folder() / backbone.fingerprint[:16] / f"mnist-{count}"
    if not out.exists():
        split = mnist(root).test
        with tempfile.TemporaryDirectory() as temporary:
            for number in range(count):
                folder = Path(temporary) / str(split.labels[number])
                folder.mkdir(exist_ok=True)
                Image.fromarray(split.inputs[number]).convert("RGB").save(folder / f"{number:05}.png")
            embed_source(
                Path(temporary),
                backbone,
                out,
                classes=tuple(str(number) for number in range(10)),
                duplicates="keep-all",
                key=SiteKey(seeded_source(b"site key mnist").bytes(KEY_BYTES)),
                random_bytes=seeded_source(b"record ids mnist").bytes,
                progress=lambda done, total: progress("Embedding digits", done, total),
            )
    return Shard.open(out, verify=False)
