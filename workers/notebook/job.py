"""A finished job and its student, for use in a notebook.

It gives labels as a data frame, shows the report, and sorts images into folders.
"""

from __future__ import annotations

import html
import json
from collections.abc import Callable, Iterator, Sequence
from os import PathLike, fspath
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from feature_store.results.exports import picture
from labeler.errors import InvalidSetting, NotReady
from labeler.methods.evaluate import DEFAULT_EPSILON
from labeler.setting import DEFAULT_DELTA
from labeler.system.files import named_path

if TYPE_CHECKING:
    from feature_store.results import ExportFormat
    from feature_store.results.models import StoredModel
    from feature_store.students import Student

Frame = Literal["pandas", "polars", "arrow"]


class LabeledJob:
    """The folder of a finished job. A notebook displays it as its report.

    Args:
        path: the folder.

    Raises:
        NotReady: the folder holds no job, or the job is not finished.
    """

    def __init__(self, path: str | PathLike[str]) -> None:
        self.path = named_path(path, "a job's folder")
        if not (self.path / "report.json").exists():
            raise NotReady(
                f"{self.path} holds no finished job; run it there, or go on with `labeler.run` and the same arguments"
            )

    def __repr__(self) -> str:
        labels = self.report["labels"]
        return f"LabeledJob({str(self.path)!r}: {labels['answered']} of {labels['asked']} questions answered)"

    def _repr_html_(self) -> str:
        page = html.escape((self.path / "report.html").read_text(encoding="utf-8"), quote=True)
        return f'<iframe srcdoc="{page}" sandbox style="width:100%;height:640px;border:0" title="Report"></iframe>'

    @property
    def report(self) -> dict[str, Any]:
        """Return the content of report.json: labels, student, privacy, versions."""
        document: dict[str, Any] = json.loads((self.path / "report.json").read_bytes())
        return document

    @property
    def classes(self) -> tuple[str, ...]:
        """The class names in label order."""
        return tuple(self.report["task"]["classes"])

    @property
    def scores(self) -> dict[str, dict[str, Any]]:
        """Return the quality of the labels, as far as the true labels are known.

        `images` is about the public images, `student` about the student on unseen images. Each has `accuracy`,
        `balanced_accuracy` and the `recall` of each class; with two classes also `auroc`.
        """
        names = ("accuracy", "balanced_accuracy", "recall", "auroc")
        parts = {part: self.report.get(part, {}) for part in ("images", "student")}
        return {
            part: {name: said[name] for name in names if name in said}
            for part, said in parts.items()
            if "accuracy" in said
        }

    @property
    def privacy_card(self) -> str:
        """The most that the labels reveal, in words."""
        return (self.path / "privacy_card.md").read_text(encoding="utf-8")

    @property
    def student(self) -> Student:
        """Return the student that labeled the images; it can label other images, too.

        Raises:
            InvalidSetting: the job is about attributes, any number per image; see `labeler.load_student`.
            NotReady: nothing was answered, so there is no student.
        """
        from feature_store.results.models import read_model
        from feature_store.students import Student

        self._check_one_class()
        self._check_answered()
        model = read_model(self.path / "student.safetensors")
        return Student.of_arrays(model.kind, model.arrays)

    def labels(self, frame: Frame = "pandas") -> Any:
        """Return the label of every public image: source, label, its name, and how sure the student is.

        Args:
            frame: "pandas", "polars" or "arrow"; the first two have to be installed.

        Returns:
            A pandas.DataFrame, a polars.DataFrame or a pyarrow.Table.

        Raises:
            InvalidSetting: the library of the frame is not installed.
            NotReady: nothing was answered, so no image has a label.
        """
        self._check_answered()
        return self._table("student_labels.parquet", frame)

    def questions(self, frame: Frame = "pandas") -> Any:
        """Return the questions and their released answers (docs/labels.md); arguments as for `labels`."""
        return self._table("pseudo_labels.parquet", frame)

    def predict(self, images: PathLike[str] | str | NDArray[np.generic]) -> NDArray[np.int64]:
        """Label other images: features of shape (n, dimension), or whatever `TrainedStudent.label` takes.

        Raises:
            MixedShards: the images have features of another backbone.
        """
        if isinstance(images, np.ndarray):
            return self.student.predict(images)
        self._check_one_class()
        labels = load_student(self.path / "student.safetensors").label(images, "arrow", quiet=True)["label"]
        return np.asarray(labels.to_numpy(), dtype=np.int64)

    def evaluate(
        self,
        shards: Sequence[PathLike[str] | str],
        out: str | PathLike[str] = "evaluation",
        *,
        epsilon: float = DEFAULT_EPSILON,
        delta: float = DEFAULT_DELTA,
        seed: int | None = None,
        **task: Any,
    ) -> dict[str, Any]:
        """Measure the student on private records, in this process; see `labeler evaluate`.

        Args:
            shards: private shards, one for each agent.
            out: a new folder. Its file measured.safetensors is the student with a measured confidence.
            epsilon, delta: the price per private image.
            seed: only for simulations; the noise is reproducible and protects nobody.
            **task: other fields of the task file's `[task]` and `[evaluation]`.

        Returns:
            The content of evaluation.json.
        """
        from workers.run.labeling import run_job
        from workers.run.preparation import evaluation_job
        from workers.run.task_file import EvaluationTable

        counted = {name: task.pop(name) for name in EvaluationTable.model_fields if name in task}
        price = {"epsilon": epsilon, "delta": delta} | task
        where = [named_path(one, "a shard") for one in shards]
        student = self.path / "student.safetensors"
        return run_job(
            evaluation_job(student, where, named_path(out, "out"), task=price, evaluation=counted, seed=seed)
        )

    def dataset(self, images: str | PathLike[str]) -> ImageDataset:
        """Return the labeled images as a torch data set of (image, label); `images` is the embedded folder."""

        return ImageDataset(named_path(images, "images"), tuple(self._pairs()), self.classes)

    def save_folder(self, out: str | PathLike[str], images: str | PathLike[str], *, copy: bool = False) -> Path:
        """Sort the images into one folder for each class; see `export` for the arguments."""
        return self.export("image-folder", out, images=images, copy=copy)

    def export(
        self,
        format: ExportFormat,
        out: str | PathLike[str],
        *,
        images: str | PathLike[str] | None = None,
        image_root: str = "",
        copy: bool = False,
    ) -> Path:
        """Write the labels as another tool wants them (feature_store.results.exports).

        Args:
            format: "hf", "croissant", "image-folder", "parquet", "jsonl", "csv", "label-studio" or
                "label-studio-config".
            out: the folder or file to write; it must not hold anything yet.
            images: the folder that was embedded; needed for formats that include the pictures.
            image_root: prefix of each name, for tools that fetch images themselves.
            copy: copy pictures into class folders; otherwise they are linked.

        Returns:
            What was written.
        """
        from feature_store.results.exports import ExportOrder, export_images

        where = None if images is None else named_path(images, "images")
        return export_images(format, ExportOrder(self.labels("arrow"), named_path(out, "out"), where, image_root, copy))

    def _table(self, name: str, frame: Frame) -> Any:
        import pyarrow.parquet as pq

        return framed(pq.read_table(self.path / name), frame)

    def _check_answered(self) -> None:
        from feature_store.students.answers import NOTHING_ANSWERED

        if not self.report["labels"]["answered"]:
            raise NotReady(NOTHING_ANSWERED)

    def _check_one_class(self) -> None:
        if self.report["task"].get("attributes_per_record") is not None:
            raise InvalidSetting(
                "these images have attributes, any number each, and this is for one class per image; use labels(), and "
                f"labeler.load_student({str(self.path / 'student.safetensors')!r}) for other images"
            )

    def _pairs(self) -> Iterator[tuple[str, int]]:
        self._check_one_class()
        table = self.labels("arrow")
        return zip(table["source"].to_pylist(), table["label"].to_pylist(), strict=True)


def open_job(path: str | PathLike[str]) -> LabeledJob:
    """Open the job in a folder that `labeler run`, `labeler demo` or `labeler.run` has written.

    Raises:
        NotReady: the folder holds no job, or the job is not finished.
    """
    return LabeledJob(path)


def framed(table: Any, frame: Frame) -> Any:
    """Return an Arrow table as the frame that was asked for."""
    if frame == "arrow":
        return table
    try:
        if frame == "pandas":
            return table.to_pandas()
        if frame == "polars":
            import polars  # type: ignore[import-not-found, unused-ignore]  # an option

            return polars.from_arrow(table)
    except ModuleNotFoundError:
        raise InvalidSetting(f"{frame} is not installed: pip install {frame}, or ask for an arrow table") from None
    raise InvalidSetting(f"a frame is pandas, polars or arrow, found {frame!r}")


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
        """The class names in label order."""
        return self.stored.classes

    @property
    def privacy_card(self) -> dict[str, Any]:
        """The most that the model may have learned about one private image."""
        return dict(self.stored.card)

    def predict_proba(self, features: NDArray[np.int16]) -> NDArray[np.float64]:
        """Return the probability of each class, shape (n, num_classes).

        Args:
            features: features of the student's backbone, quantized as in a shard.
        """
        return self.stored.predict_proba(features)

    def label(
        self,
        images: PathLike[str] | str | NDArray[Any],
        frame: Frame = "pandas",
        *,
        backbone: str | None = None,
        prefer: str | None = None,
        like: PathLike[str] | str | None = None,
        quiet: bool = False,
    ) -> Any:
        """Label images: source, label, its name, and a confidence (docs/labels.md).

        Args:
            images: a shard, or a folder of images or another source, which is embedded first. For a student of own
                features a file of them (.npz, .npy, .h5, .parquet) or an array of shape (n, dimension).
            frame: "pandas", "polars" or "arrow".
            backbone: name or file of the backbone; needed if the student's file names none.
            prefer: a recall of one class, such as "ill:recall=0.9" (feature_store.results.scores).
            like: a shard of labeled public images, on which the threshold for `prefer` is found.
            quiet: show no progress bar.

        Raises:
            MixedShards: the images have features of another backbone than the student's.
        """
        from feature_store.results.scores import Preference
        from workers.progress import progress_bars
        from workers.run.student import predict_images

        if not isinstance(images, np.ndarray):
            named_path(images, "images")
            images = fspath(images)
        with progress_bars(quiet=quiet) as progress:
            found = predict_images(
                self.stored,
                images,
                backbone=backbone,
                preference=None if prefer is None else Preference.parse(prefer),
                like=None if like is None else named_path(like, "like"),
                progress=progress,
            )
        return framed(found.table, frame)

    def scores(self, images: PathLike[str] | str, *, quiet: bool = True) -> dict[str, Any]:
        """Measure how well each class is found among images whose true labels are known.

        Args:
            images: a labeled shard, class folders, or for a student of own features a file of them with labels.
            quiet: show no progress bar.

        Raises:
            InvalidSetting: no image has a known class, or the model labels attributes.
        """
        from workers.progress import progress_bars
        from workers.run.student import predict_images

        with progress_bars(quiet=quiet) as progress:
            found = predict_images(self.stored, fspath(images), progress=progress).scores
        if found is None:
            raise InvalidSetting(f"no image of {str(images)!r} has a known class of this student; name labeled ones")
        return found.to_json()


def load_student(path: PathLike[str] | str) -> TrainedStudent:
    """Load the student or released model in a safetensors file of `labeler run`, `labeler student` or a service.

    Raises:
        BadData: the file is not such a model.
    """
    from feature_store.results.models import read_model

    return TrainedStudent(read_model(named_path(path, "a student's file")))


class ImageDataset:
    """Images with their labels, as a torch data set.

    It has the methods of one (`__len__`, `__getitem__`) and does not need torch.

    Args:
        root: the folder that was embedded.
        pairs: (name within it, label).
        classes: names in label order, as torchvision's data sets have them.

    Attributes:
        samples: (file, label) of each image.
        classes: see above.
        transform: a function applied to each image, as on torchvision's data sets. None at first; set it yourself.

    Raises:
        BadData: a file is missing.
    """

    def __init__(self, root: Path, pairs: Sequence[tuple[str, int]], classes: Sequence[str]) -> None:
        self.samples = [(picture(root, name), label) for name, label in pairs]
        self.classes = tuple(classes)
        self.transform: Callable[[Image.Image], Any] | None = None

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, number: int) -> tuple[Any, int]:
        path, label = self.samples[number]
        with Image.open(path) as image:
            picture = image.convert("RGB")
        return (picture if self.transform is None else self.transform(picture)), label
