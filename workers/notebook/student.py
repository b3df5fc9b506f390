"""A student, or a model that a job released, from a notebook: a file that labels new images."""

from __future__ import annotations

from os import PathLike
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from workers.notebook.job import Frame, framed

if TYPE_CHECKING:
    from feature_store.job_files.models import StoredModel


class TrainedStudent:
    """A model that labels images of its backbone; see `load_student`.

    Attributes:
        stored: everything in its file.
    """

    def __init__(self, stored: StoredModel) -> None:
        self.stored = stored

    def __repr__(self) -> str:
        return f"TrainedStudent({self.stored.kind}, {len(self.classes)} classes, job {self.stored.job_id or 'unknown'})"

    @property
    def classes(self) -> tuple[str, ...]:
        """Class names in label order."""
        return self.stored.classes

    @property
    def privacy_card(self) -> dict[str, Any]:
        """What it may have learnt of one private image, at most."""
        return dict(self.stored.card)

    def predict_proba(self, features: NDArray[np.int16]) -> NDArray[np.float64]:
        """How sure it is of each class, shape (n, num_classes), for features of its backbone as shards have them."""
        return self.stored.predict_proba(features)

    def label(
        self,
        images: PathLike[str] | str,
        frame: Frame = "pandas",
        *,
        backbone: str | None = None,
        quiet: bool = False,
    ) -> Any:
        """Label images: source, label, its name, and a confidence (docs/labels.md).

        Args:
            images: a folder of images or another source (then they are embedded), or a shard.
            frame: "pandas", "polars" or "arrow".
            backbone: what loads the backbone, where the file names none.
            quiet: no progress bar.

        Raises:
            MixedShards: another backbone than the student's.
        """
        from feature_store.named_files import named_path
        from workers.jobs.predicting import predict_images
        from workers.progress import progress_bars

        named_path(images, "images")
        with progress_bars(quiet=quiet) as progress:
            found = predict_images(self.stored, str(images), backbone=backbone, progress=progress)
        return framed(found.table, frame)


def load_student(path: PathLike[str] | str) -> TrainedStudent:
    """The student or released model in a safetensors file of `labeler run`, `labeler student` or a service.

    Raises:
        BadData: it is no such file.
    """
    from feature_store.job_files.models import read_model
    from feature_store.named_files import named_path

    return TrainedStudent(read_model(named_path(path, "a student's file")))
