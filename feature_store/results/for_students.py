"""What `labeler student` finds in the folder of a finished run beside the labels: questions, and the public shard."""

from __future__ import annotations

import json
import os
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np
from numpy.typing import NDArray

from labeler.errors import BadData
from labeler.system.files import replace_file, replacing

QUERIES: Final = "queries.npz"
PLACE: Final = "job.json"


@dataclass(frozen=True, eq=False)
class ForStudents:
    """Public facts of a finished job.

    Attributes:
        features: int16, what each answer is about, shape (num_answers, dimension).
        assignment: int64, the answer that stands for each public image.
        public_shard: of the images; stored relative to the folder, so that both may move together.
    """

    features: NDArray[np.int16]
    assignment: NDArray[np.int64]
    public_shard: Path

    def write(self, folder: Path) -> None:
        """Both files, each whole or not at all."""
        with replacing(folder / QUERIES) as temporary, temporary.open("wb") as file:
            np.savez(file, features=self.features, assignment=self.assignment)
        place = {"public_shard": os.path.relpath(self.public_shard.resolve(), folder.resolve())}
        replace_file(folder / PLACE, json.dumps(place, indent=1).encode())


def read_for_students(folder: Path) -> ForStudents:
    """What a finished run left.

    Raises:
        BadData: a file is missing or damaged.
    """
    try:
        place = json.loads((folder / PLACE).read_text())["public_shard"]
        with np.load(folder / QUERIES, allow_pickle=False) as stored:
            return ForStudents(stored["features"], stored["assignment"], folder / place)
    except (OSError, ValueError, KeyError, TypeError, zipfile.BadZipFile):
        raise BadData(f"{folder} holds no finished job; run `labeler run ... --out {folder}` first") from None
