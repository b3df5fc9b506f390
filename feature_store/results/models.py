"""A model as a file that travels alone: safetensors, with its privacy card in the metadata.

Of two kinds: a student, which learnt from released answers and public images, and the linear model that a blind-average
job released. Either labels new images of the same backbone:

    import labeler
    student = labeler.load_student("student.safetensors")
    labels = student.predict("new-images.shard")

Every number of a student follows from public features and a release (post-processing), so that the card of the release
is the student's as well.

The folder of a finished run also holds what `labeler student` needs (`ForStudents`): questions, and the public shard.
"""

from __future__ import annotations

import hashlib
import json
import os
import zipfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, cast

import numpy as np
from numpy.typing import NDArray
from pydantic import ValidationError

from labeler.errors import BadData, LabelerError, MixedShards, NotThere
from labeler.methods.blind_average import Learner, LinearTerms, MeanTerms
from labeler.methods.federated import StepTerms
from labeler.privacy_card import dearer_card
from labeler.release import arrays_from_bytes, arrays_to_bytes
from labeler.setting import LEAST, Training
from labeler.settings import is_deep, same_names
from labeler.steady import MOST, is_steady, steady_arrays
from labeler.system.files import read_named, replace_file, replacing

if TYPE_CHECKING:
    from feature_store.students.answers import Forms

_MOST_BYTES: Final = 2**30
"""Of a model: twice what 32,000 classes of 2,048 features take."""

_MOST_DIVISIONS: Final = 100
"""Of a student `matched`, which walks over them for each record; its jobs make four."""

LINEAR: Final = "linear"
"""Kind of the model of a blind average; every other kind is a student's."""

ATTRIBUTES: Final = "attributes"
"""Kind of a student that says of each class whether an image has it (feature_store.students.attributes)."""


def model_file(
    arrays: Mapping[str, NDArray[np.generic]],
    *,
    kind: str,
    classes: tuple[str, ...],
    card: Mapping[str, Any],
    backbone: str | None = None,
    job_id: str | None = None,
    measured: Measured | None = None,
    probe: str | None = None,
) -> bytes:
    """The bytes of a safetensors file.

    Args:
        arrays: what the model consists of, by name.
        kind: what reads it: "linear" for the model of a blind average, else the kind of a student.
        classes: names of the classes, in the order of labels.
        card: see `labeler.privacy_card`; it names the backbone's fingerprint.
        backbone: the name that loads the backbone, where one does.
        job_id: whose answers it learnt from.
        measured: what an evaluation found that its confidence is worth.
        probe: where a backbone was declared: what it makes of the published probe (feature_store.rows).
    """
    about: dict[str, Any] = {"kind": kind, "classes": list(classes), "privacy_card": dict(card)}
    about |= {key: value for key, value in (("backbone", backbone), ("job_id", job_id), ("probe", probe)) if value}
    if measured is not None:
        about["measured"] = {"edges": list(measured.edges), "stated": [list(row) for row in measured.stated]}
    return arrays_to_bytes(arrays, {"labeler": json.dumps(about, sort_keys=True, allow_nan=False)})


@dataclass(frozen=True)
class Measured:
    """The share that a model is right on by what it states, as an evaluation at the sites found (`labeler.evaluation`).

    Attributes:
        edges: between bands of what the model states of its predicted class, ascending.
        stated: what is stated instead in each band: one row for whatever class is predicted, or a row for each.

    Raises:
        ValueError: they do not belong together.
    """

    edges: tuple[float, ...]
    stated: tuple[tuple[float, ...], ...]

    def __post_init__(self) -> None:
        numbers = [*self.edges, *(one for row in self.stated for one in row)]
        if {len(row) for row in self.stated} != {len(self.edges) + 1} or not all(0 <= one <= 1 for one in numbers):
            raise ValueError("each band of confidence has one share that is right")
        if not is_steady(np.array(numbers)):
            raise ValueError("a share of a band is 0, or a number that a model may hold (labeler.steady)")

    def __call__(self, probabilities: NDArray[np.float64]) -> NDArray[np.float64]:
        """Probabilities whose largest, at the class it was, is what the band deserves: at least as much as all alike.

        Args:
            probabilities: shape (n, num_classes), rows sum to one.
        """
        rows = np.arange(len(probabilities))
        top, least = probabilities.argmax(axis=1), 1 / probabilities.shape[1]
        bands = (probabilities[rows, top][:, None] >= np.array(self.edges)[None, :]).sum(axis=1)
        stated = np.array(self.stated)
        deserved = np.maximum(stated[top if len(stated) > 1 else 0, bands], least)
        others = probabilities.copy()
        others[rows, top] = 0.0
        sums = others.sum(axis=1, keepdims=True)
        even = np.ones_like(others) / (others.shape[1] - 1)
        even[rows, top] = 0.0
        others = np.where(sums > 0, others / np.where(sums > 0, sums, 1.0), even) * (1 - deserved)[:, None]
        # Every other class gets less than the one that was predicted: as evenly as that takes.
        even *= (1 - deserved)[:, None]
        over = others.max(axis=1) - deserved
        room = others.max(axis=1) - even.max(axis=1)
        mixed = np.where(over > 0, over / np.where(room > 0, room, 1.0), 0.0)[:, None]
        # The mixture meets what was predicted exactly, so rounding could pass it by: the last place decides.
        others = np.minimum((1 - mixed) * others + mixed * even, np.nextafter(deserved, 0.0)[:, None])
        others[rows, top] = deserved
        return np.asarray(others)


@dataclass(frozen=True, eq=False)
class StoredModel:
    """A model of a file, ready to label features of its backbone.

    Attributes:
        kind: see `model_file`.
        classes: names in label order.
        card: what it may have learnt of one private record, at most.
        backbone: the name that loads its backbone; empty where the file has to be named.
        job_id: whose answers it learnt from; empty in older files.
        measured: what an evaluation found its confidence to be worth; None where there was none.
        probe: what a declared backbone makes of the published probe; empty where there is none.
    """

    kind: str
    classes: tuple[str, ...]
    card: Mapping[str, Any]
    backbone: str
    job_id: str
    arrays: Mapping[str, NDArray[Any]]
    measured: Measured | None = None
    probe: str = ""

    @property
    def fingerprint(self) -> str:
        """Of the backbone whose features it reads."""
        return str(self.card.get("backbone_fingerprint", ""))

    @property
    def reads_own_features(self) -> bool:
        """Return whether its backbone is a declared one, which only its owner runs."""
        return bool(self.probe)

    @property
    def dimension(self) -> int:
        """Numbers of the features that it reads."""
        if self.kind == LINEAR:
            axes = self.arrays.get("axes")
            return len(self.arrays["weights"]) - 1 if axes is None else int(axes.shape[1])
        return next(len(one) for name, one in self.arrays.items() if name.split(".")[-1] == "mean")

    @property
    def task_digest(self) -> str:
        """Of the task whose releases it learnt from."""
        return str(self.card.get("task_digest", ""))

    def predict_proba(self, features: NDArray[np.int16]) -> NDArray[np.float64]:
        """Return its confidence in each class, shape (n, num_classes), rows sum to one, but of attributes.

        For a student as sure as its labels are stated (feature_store.students.labeling); for a linear model the softmax
        of its scores, which nothing corrects. Where an evaluation measured it, what that found.

        Args:
            features: int16, shape (n, dimension), quantized as in shards, of its backbone.

        Raises:
            BadData: features of another dimension, or no features.
        """
        return self.stated(self.own_probabilities(features))

    def own_probabilities(self, features: NDArray[np.int16]) -> NDArray[np.float64]:
        """Return the model's own probabilities, which order images more finely than an evaluation's bands."""
        return self._scorer(features)

    def stated(self, own: NDArray[np.float64]) -> NDArray[np.float64]:
        """Return the stated probabilities: the same class, as sure as an evaluation found."""
        return own if self.measured is None else self.measured(own)

    def check_fits(self, classes: Sequence[str], *, fingerprint: str, dimension: int) -> None:
        """Refuse a model that does not label features of such a task in a time that no record changes.

        A stranger may have made it. Nothing here depends on a record.

        Raises:
            MixedShards: it is of other classes, another backbone or dimension, or of attributes; or it holds a number
                that is not steady (`labeler.steady`).
        """
        if not same_names(self.classes, classes):
            its, ours = (", ".join(names[:8]) + ", ..." * (len(names) > 8) for names in (self.classes, classes))
            raise MixedShards(
                f"the model that is evaluated has other classes ({its}) than are asked for here ({ours}); name those "
                "of its file, in its order"
            )
        if self.fingerprint != fingerprint:
            raise MixedShards(
                f"the model that is evaluated reads features of backbone {self.fingerprint[:12]}, the task's are of "
                f"{fingerprint[:12]}"
            )
        if self.kind == ATTRIBUTES or self.dimension != dimension or _sizes(self)["classes"] != len(classes):
            raise MixedShards(
                f"the model does not give each of {len(classes)} classes a probability from features of {dimension} "
                "numbers; evaluate a student or a released model of classes"
            )
        numbers = dict(self.arrays)
        if self.kind == LINEAR:
            try:
                terms = self._terms()
            except LabelerError as error:
                raise MixedShards(f"the terms by which the model was trained are none: {error}") from None
            numbers["terms"] = np.array([terms.feature_norm, terms.bias_feature])
        if wrong := sorted(name for name, one in numbers.items() if not is_steady(one)):
            raise MixedShards(
                f"the model does not give each of {len(classes)} classes a probability in a time that no record "
                f"changes: its {wrong[0][:60]} hold a number that is neither 0 nor between {LEAST:g} and {MOST:g} in "
                "absolute value; evaluate a model as its job gave it, and train an older student again (labeler "
                "student)"
            )

    @property
    def digest(self) -> str:
        """SHA-256 of all that a release tells in it: the arrays, and what an evaluation measured.

        Its other metadata, like the card and the job's id, are claims of the writer of the file.
        """
        told = model_file(self.arrays, kind="", classes=(), card={}, measured=self.measured)
        return hashlib.sha256(told).hexdigest()

    @cached_property
    def _scorer(self) -> Callable[[NDArray[np.int16]], NDArray[np.float64]]:
        """The function that scores features, made of the arrays once; steady, whatever they hold (labeler.steady).

        Raises:
            BadData: they hold NaN, or a linear model does not say how it was trained.
        """
        arrays = steady_arrays(self.arrays)
        if any(np.isnan(one).any() for one in arrays.values()):
            raise BadData("the model holds numbers that are none (NaN); download it again")
        if self.kind == ATTRIBUTES:
            from feature_store.students.attributes import AttributeHeads

            return AttributeHeads.of_arrays(arrays).predict_proba
        if self.kind != LINEAR:
            from feature_store.students import Student

            return Student.of_arrays(self.kind, arrays).predict_proba
        from feature_store.students.answers import softmax
        from labeler.linear_model import LinearModel

        linear = LinearModel.of(arrays, self._terms())
        return lambda features: softmax(linear.scores(features))

    def _terms(self) -> LinearTerms | MeanTerms | StepTerms:
        try:
            training = Training.model_validate(self.card["training"])
        except (KeyError, ValidationError):
            raise BadData("the model's card does not say how it was trained; download it again") from None
        if training.sampled is not None:
            radius = max(1.0, training.radius)
            rows, rate = len(self.arrays["weights"]), Fraction(training.sampled.rate)
            return StepTerms(len(self.classes), rows, training.clip_norm, training.sampled.unit, radius, rate)
        if training.learner == "means":
            return MeanTerms(len(self.classes), len(self.arrays["weights"]) - 1, training.radius)
        return LinearTerms(
            learner=cast(Learner, training.learner),
            num_classes=len(self.classes),
            regularisation=training.regularisation,
            clip_norm=training.clip_norm,
            radius=training.radius,
            iterations=training.iterations,
            min_records=training.min_records,
        )


@dataclass(frozen=True)
class ReleasedModels:
    """A folder's records of the models that were released here: by a service, or by the job of a folder.

        FOLDER/DIGEST.json       the job that released the model, and its privacy card, from the ledger's own price

    A record is found by what the model tells (`StoredModel.digest`). A card and a job's id in a file prove nothing:
    anybody may write them. Two jobs may release equal models: the record then states the higher price of the two, so
    that neither job lowers the other's.
    """

    folder: Path

    def add(self, model: bytes) -> None:
        """Record a model that was made here, with the card that it was made with."""
        stored = model_of_bytes(model, name="the released model")
        path, job_id, card = self._path(stored), stored.job_id, dict(stored.card)
        if (known := self._read(path)) is not None:
            card = dearer_card(known[1], card)
            job_id = known[0] if card["task_digest"] == known[1]["task_digest"] else job_id
            if (job_id, card) == known:
                return
        self.folder.mkdir(mode=0o700, exist_ok=True)
        record = {"job_id": job_id, "card": card}
        replace_file(path, json.dumps(record, allow_nan=False).encode(), mode=0o600)

    def find(self, model: StoredModel) -> tuple[str, dict[str, Any]] | None:
        """Return the job and the card of a model that was released here; None of any other.

        Bands that nobody here measured change nothing about what the arrays tell.

        Raises:
            BadData: the record is damaged.
        """
        return self._read(self._path(model)) or self._read(self._path(replace(model, measured=None)))

    @staticmethod
    def _read(path: Path) -> tuple[str, dict[str, Any]] | None:
        try:
            record = json.loads(path.read_bytes())
            return str(record["job_id"]), dict(record["card"])
        except FileNotFoundError:
            return None
        except (ValueError, KeyError, TypeError):
            raise BadData(f"the record {path.name} of a released model is damaged; restore it") from None

    def _path(self, model: StoredModel) -> Path:
        return self.folder / f"{model.digest}.json"


def read_model(path: Path | str) -> StoredModel:
    """Read a file that `model_file` made: of `labeler run`, `labeler student`, or a service.

    Raises:
        BadData: no such file, damaged, or no model of ours.
    """
    return model_of_bytes(read_model_bytes(path), name=Path(path).name)


def read_model_bytes(path: Path | str) -> bytes:
    """Read the bytes of such a file.

    Raises:
        BadData: there is no such file, or it is too large.
    """
    try:
        return read_named(Path(path), most_bytes=_MOST_BYTES)
    except OSError as error:
        kind = NotThere if isinstance(error, FileNotFoundError) else BadData
        raise kind(
            f"the model {path} cannot be read: {error.strerror}; name the student.safetensors or model.safetensors "
            "that a job gave"
        ) from None


def model_of_bytes(data: bytes, *, name: str) -> StoredModel:
    """Read a model from the bytes of its file.

    Raises:
        BadData: damaged, or no model of ours.
    """
    try:
        arrays, metadata = arrays_from_bytes(data)
        about = json.loads(metadata["labeler"])
        if is_deep(about):  # another thread, deeper in its own calls, could not read it again
            raise ValueError
        json.dumps(about, ensure_ascii=False).encode()  # no half of a character, which no table could hold
        measured = about.get("measured")
        model = StoredModel(
            kind=str(about["kind"]),
            classes=tuple(map(str, about["classes"])),
            card=dict(about["privacy_card"]),
            backbone=str(about.get("backbone", "")),
            job_id=str(about.get("job_id", "")),
            arrays=arrays,
            measured=None
            if measured is None
            else Measured(tuple(measured["edges"]), tuple(map(tuple, measured["stated"]))),
            probe=str(about.get("probe", "")),
        )
        _check(model)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise BadData(
            f"{name} is no model of a job; name the student.safetensors or model.safetensors that a job gave"
        ) from None
    return model


def _check(model: StoredModel) -> None:
    """Raise KeyError, TypeError or ValueError where arrays do not make a model."""
    if model.measured is not None and (
        len(model.classes) < 2 or len(model.measured.stated) not in (1, len(model.classes))
    ):
        raise ValueError
    sizes = _sizes(model)
    if sizes["classes"] != len(model.classes) or sizes.get("matched divisions", 0) > _MOST_DIVISIONS:
        raise ValueError
    if model.dimension < 1 or ("temperature" in model.arrays and not model.arrays["temperature"][0] >= LEAST):
        raise ValueError


def _sizes(model: StoredModel) -> dict[str, int]:
    """The sizes of a model's arrays, by name (`Forms`); ValueError or KeyError where they are not those of its kind."""
    forms, sizes = _forms(model), {"one": 1}
    if forms.keys() != model.arrays.keys():
        raise ValueError
    for name, (dtype, shape) in forms.items():
        array = model.arrays[name]
        if array.dtype != dtype or array.ndim != len(shape) or not array.size:
            raise ValueError
        if any(sizes.setdefault(size, found) != found for size, found in zip(shape, array.shape, strict=True)):
            raise ValueError
    return sizes


def _forms(model: StoredModel) -> Forms:
    """The type and the shape of each array of a kind of model; KeyError where there is no such kind."""
    if model.kind == LINEAR:
        axes = {"axes": (np.int16, ("rows", "dimension"))} if "axes" in model.arrays else {}
        return {"weights": (np.float64, ("rows", "classes"))} | axes
    # Imported on use: a linear model needs no student.
    if model.kind == ATTRIBUTES:
        from feature_store.students.attributes import AttributeHeads

        return AttributeHeads.FORMS
    from feature_store.students.student import forms_of

    return forms_of(model.kind)


RELEASED: Final = "released"
"""Name of the folder of `ReleasedModels`."""

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
    """Read the public facts that a finished run left.

    Raises:
        BadData: a file is missing or damaged.
    """
    try:
        place = json.loads((folder / PLACE).read_text())["public_shard"]
        with np.load(folder / QUERIES, allow_pickle=False) as stored:
            return ForStudents(stored["features"], stored["assignment"], folder / place)
    except (OSError, ValueError, KeyError, TypeError, zipfile.BadZipFile):
        raise BadData(f"{folder} holds no finished job; run `labeler run ... --out {folder}` first") from None
