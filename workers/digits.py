"""Real handwritten digits without any download, dealt to agents: the demo and a local federation run on them.

They are the 1,797 scanned ones that come with scikit-learn (UCI Optical Recognition of Handwritten Digits, 8x8 pixels).
Two fifths go to the agents with their labels, two fifths are public without labels, one fifth is kept to score a
student on.
"""

from __future__ import annotations

import importlib.util
import io
import zipfile
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray
from PIL import Image

from feature_store.results.questions import write_parquet
from labeler.errors import InvalidSetting, Unavailable
from labeler.system.files import replacing

AGENTS = 5
DIGITS = 1797
PRIVATE_SHARE = 0.4
PUBLIC_SHARE = 0.4
MIN_DIGITS = 10
"""Fewest digits that an agent may be dealt."""

CLASSES = tuple(str(digit) for digit in range(10))


def check_agents(agents: int) -> None:
    """Refuse a number of agents to whom the digits cannot be dealt.

    Raises:
        InvalidSetting: one would hold fewer than ten digits.
    """
    most = int(PRIVATE_SHARE * DIGITS) // MIN_DIGITS
    if not 1 <= agents <= most:
        raise InvalidSetting(
            f"the digits can be dealt to 1 to {most} agents, found {agents}; bring shards of your own for more"
        )


def write_digits(folder: Path, *, seed: int, agents: int = AGENTS) -> dict[str, Path]:
    """Deal the digits: one Parquet file of images per agent, one public, one to test on.

    Public and test files carry their labels as well, which only scoring reads.

    Raises:
        InvalidSetting: with this number of agents, one would hold fewer than ten digits.
    """
    check_agents(agents)
    images, targets = load_digits()
    order = np.random.default_rng(seed).permutation(len(targets))
    private, public = (int(share * len(order)) for share in (PRIVATE_SHARE, PUBLIC_SHARE))
    parts = {f"agent-{number + 1}": order[number:private:agents] for number in range(agents)}
    parts |= {"public": order[private : private + public], "test": order[private + public :]}
    paths = {name: folder / f"{name}.parquet" for name in parts}
    for name, rows in parts.items():
        if not paths[name].exists():
            _write_images(paths[name], images[rows], targets[rows], rows)
    return paths


def load_digits() -> tuple[NDArray[np.float64], NDArray[np.int64]]:
    """Return all digits, images of shape (1797, 8, 8) with values from 0 to 16, and their labels.

    They are read from the file that scikit-learn reads; loading that library takes longer than all the rest of making a
    federation.

    Raises:
        Unavailable: scikit-learn is not installed, or keeps them elsewhere.
    """
    package = importlib.util.find_spec("sklearn")
    for folder in (package.submodule_search_locations or []) if package else []:
        path = Path(folder) / "datasets" / "data" / "digits.csv.gz"
        if path.is_file():
            rows = np.loadtxt(path, delimiter=",", dtype=np.int64)
            return rows[:, :-1].reshape(-1, 8, 8).astype(np.float64), rows[:, -1]
    raise Unavailable("the handwritten digits of scikit-learn are not on this machine; install scikit-learn")


def zip_images(source: Path, out: Path, *, count: int) -> None:
    """Put the first images of a Parquet file into a zip of PNG files, without their labels."""
    table = pq.read_table(source, columns=["id", "image"]).slice(0, count)
    with replacing(out) as temporary, zipfile.ZipFile(temporary, "w") as archive:
        for name, image in zip(table["id"].to_pylist(), table["image"].to_pylist(), strict=True):
            archive.writestr(f"{name}.png", image)


def _write_images(path: Path, images: NDArray[np.float64], labels: NDArray[np.int64], rows: NDArray[np.int64]) -> None:
    pictures = []
    for image in images:
        buffer = io.BytesIO()
        Image.fromarray((image * (255 / 16)).round().astype(np.uint8)).save(buffer, format="PNG")
        pictures.append(buffer.getvalue())
    names = [f"digit-{row:04d}" for row in rows.tolist()]
    columns = {"id": names, "image": pa.array(pictures, pa.binary()), "label": [CLASSES[one] for one in labels]}
    write_parquet(pa.table(columns), path)
