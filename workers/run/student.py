"""Models of a finished job: `labeler student` trains and scores one, `labeler predict` labels new images with one.

Both are post-processing of what was released, ask nobody, and cost no privacy. A model reads features of one backbone.
Images are embedded with the backbone that its file names, and with no other: the fingerprint decides, before an image
is read.

A model of own features has a backbone that only its owner runs. It labels rows that the owner computed, from a file
(feature_store.own_features) or an array. They have no fingerprint, so their width is all that is checked; a shard of
them, made with the published probe, is checked by that too.
"""

from __future__ import annotations

import math
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from feature_store.array_reader import SUFFIXES
from feature_store.backbones.spec import is_plain_name
from feature_store.decode import Skipped
from feature_store.own_features import FeatureSource, read_features
from feature_store.results.image_labels import ON, ImageStamp, image_label_table
from feature_store.results.models import ATTRIBUTES, StoredModel, read_for_students, read_model
from feature_store.results.pseudo_labels import answers_of, task_of
from feature_store.results.scores import Preference, Scores, prefer, score, score_probabilities
from feature_store.rows import quantize, refuse_other_probe
from feature_store.shard import Shard, check_compatible
from feature_store.students import NoisyAnswers, fit_student
from labeler.errors import BadData, InvalidSetting, MixedShards
from labeler.planning import price
from labeler.privacy_card import guarantee_of, privacy_card
from labeler.rounds.effects import STUDENT_KINDS
from labeler.system.files import replace_file
from labeler.task import Task
from workers.progress import ProgressCallback, say_seconds, silent
from workers.run.folder import JobFolder
from workers.run.preparation import PublicImages

if TYPE_CHECKING:
    from feature_store.backbones import ImageLike
    from feature_store.sources import ImageSource

FINETUNE = "finetune"
LEAST_STEPS = 200
"""Least gradient steps of fine-tuning a network, even for few public images."""

KINDS = (*STUDENT_KINDS, FINETUNE)


@dataclass(frozen=True, eq=False)
class FinishedJob:
    """The parts of a job's output folder that a student needs: public features and released answers.

    Attributes:
        public: the public images.
        is_seeded: whether any noise came from a known seed.
    """

    task: Task
    answers: NoisyAnswers
    public: PublicImages
    is_seeded: bool


def read_job(folder: Path) -> FinishedJob:
    """Read the output folder of a finished job.

    Raises:
        BadData: it is none, or the public shard has moved or changed.
    """
    try:
        table = pq.read_table(folder / "pseudo_labels.parquet")
        task, is_seeded = task_of(table)
    except (OSError, BadData):
        raise BadData(f"{folder} holds no finished job; run `labeler run ... --out {folder}` first") from None
    if task.attributes_per_record is not None:
        raise InvalidSetting(
            f"{folder} is a job about attributes; its one kind of student, a head for each, is student.safetensors in "
            "the folder"
        )
    left = read_for_students(folder)
    shard = Shard.open(left.public_shard)
    public = PublicImages.of(shard, task.classes)
    if shard.fingerprint != task.backbone_fingerprint or len(public) != len(left.assignment):
        raise BadData(f"public shard {shard.path.name!r} has changed since the job; run the job again")
    answers = answers_of(table, features=left.features, assignment=left.assignment)
    return FinishedJob(task, answers, public, is_seeded)


def train_student(
    folder: Path,
    *,
    kind: str = "planned",
    test: Path | None = None,
    images: str | None = None,
    backbone: str | None = None,
    seed: int = 0,
    progress: ProgressCallback = silent,
    tell: Callable[[str], None] = lambda _: None,
) -> dict[str, Any]:
    """Train and score a student; save it with the job's other files.

    Args:
        folder: output folder of a finished job.
        test: labeled public shard to score on; for finetune a source of labeled images.
        images: finetune only: the source of public images the job asked about.
        backbone: finetune only: the network to start from.
        seed: public.
        progress: called with steps when fine-tuning.
        tell: called with sentences when fine-tuning: how long it will take, then each epoch and the time that is left.

    Returns:
        {"kind", "path", "public_images"} and, with truth, {"accuracy", "test_images"}.

    Raises:
        InvalidSetting: unknown kind, or finetune without images and backbone.
        BadData: the job or the test images cannot be used.
    """
    if kind not in KINDS:
        raise InvalidSetting(f"--kind must be one of {', '.join(KINDS)}; found {kind!r}")
    job = read_job(folder)
    if kind == FINETUNE:
        if images is None or backbone is None:
            raise InvalidSetting(
                "finetune needs --images, the public images, and --backbone, the network to start from"
            )
        return _fine_tune(
            job, folder, images=images, backbone=backbone, test=test, seed=seed, progress=progress, tell=tell
        )
    scored = None
    if test is not None:
        shard = Shard.open(test)
        check_compatible([job.public.shard, shard])
        scored = _truth(shard, test, job.task.classes)
    student = fit_student(kind, job.answers, job.public.features, num_classes=job.task.num_classes, seed=seed)
    path = folder / f"student-{kind}.safetensors"
    not_covered = job.public.shard.not_covered
    card = privacy_card(job.task, price(job.task), is_seeded=job.is_seeded, not_covered=not_covered)
    file = job.public.model_file(student.arrays, kind=student.kind, task=job.task, card=card)
    replace_file(path, file)
    JobFolder(folder).released.add(file)
    result = {"kind": student.kind, "path": str(path), "public_images": len(job.public)}
    if scored is None:
        return result
    return result | _scored(scored.labels, student.predict_proba(scored.features), job.task.classes)


def score_student(path: Path, *, test: Path | None) -> dict[str, Any]:
    """Score a student of a file where truth is known.

    Returns:
        {"kind", "path"} and, with truth, {"accuracy", "test_images"}.

    Raises:
        BadData, InvalidSetting, MixedShards: the file or the test images cannot be used.
    """
    model = read_model(path)
    result: dict[str, Any] = {"kind": model.kind, "path": str(path)}
    if test is None:
        return result
    shard = Shard.open(test)
    _check_shard(model, shard)
    scored = _truth(shard, test, model.classes)
    said = model.own_probabilities(scored.features)
    if (model.kind == ATTRIBUTES) != shard.has_attributes:
        raise MixedShards(f"one of the student and {test} is of attributes, any number per image; the other of classes")
    if model.kind == ATTRIBUTES:
        return result | {"accuracy": float(((said >= ON) == scored.labels).mean()), "test_images": len(scored)}
    return result | _scored(scored.labels, said, model.classes)


def _scored(truth: NDArray[np.integer], probabilities: NDArray[np.float64], classes: tuple[str, ...]) -> dict[str, Any]:
    """Return the accuracy, and how well each class is found, of images whose truth is known."""
    scores = score_probabilities(truth, probabilities, classes)
    assert scores is not None  # noqa: S101  # only images of known truth are scored on
    return scores.to_json() | {"test_images": scores.checked}


def _truth(shard: Shard, path: Path, classes: Sequence[str]) -> PublicImages:
    if not shard.is_public:
        raise InvalidSetting(f"{path} cannot be scored on: truth that may be read off an accuracy must be public")
    scored = PublicImages.labelled(shard, classes)
    if not len(scored):
        raise BadData(f"no image of {path} has a label of the classes, so no student can be scored on it")
    return scored


def _fine_tune(
    job: FinishedJob,
    folder: Path,
    *,
    images: str,
    backbone: str,
    test: Path | None,
    seed: int,
    progress: ProgressCallback,
    tell: Callable[[str], None],
) -> dict[str, Any]:
    """Train a network on what the best simple student says of every public image."""
    from feature_store.backbones import load_network
    from feature_store.embedding import image_for
    from feature_store.sources import open_source
    from workers.run.finetune import FineTuning, estimate_seconds, fine_tune

    network = load_network(backbone)
    source = open_source(images, public=True)
    number_of = {name: number for number, name in enumerate(source.names)}
    missing = [name for name in job.public.sources if name not in number_of]
    if missing:
        raise BadData(f"{len(missing)} public images of the job are not in {images}, first {missing[0]!r}")
    simple = fit_student("planned", job.answers, job.public.features, num_classes=job.task.num_classes, seed=seed)
    soft = simple.predict_proba(job.public.features)
    labelled = None
    if test is not None:
        labelled = open_source(test, public=True)
        place = {name: number for number, name in enumerate(job.task.classes)}
        names = (None if one is None else labelled.label_names[one] for one in labelled.labels)
        truth = np.array([place.get(name or "", -1) for name in names], dtype=np.int64)
        known = np.flatnonzero(truth >= 0)
        if not len(known):
            raise BadData(f"no image of {test} has a label among the task's classes")
    settings = FineTuning(epochs=max(10, math.ceil(LEAST_STEPS * FineTuning.batch_size / len(job.public))))
    count = len(job.public)

    def read(numbers: Sequence[int], of: ImageSource, stage: str) -> Iterator[ImageLike]:
        for done, number in enumerate(numbers):
            progress(stage, done, len(numbers))
            yield image_for(of, number, network.transform)
        progress(stage, len(numbers), len(numbers))

    tell(f"Fine-tuning reads {count:,} images, then takes {settings.all_epochs} epochs over them")
    prepared = network.tensors(read([number_of[name] for name in job.public.sources], source, "Reading images"))
    body = network.training_copy()
    num_classes = job.task.num_classes
    whole = estimate_seconds(body, prepared, num_classes=num_classes, settings=settings)
    all_steps = settings.all_epochs * settings.steps(count)
    tell(
        f"{settings.all_epochs} epochs of {settings.steps(count)} steps over {count:,} images will take about "
        f"{say_seconds(whole)}; nothing is asked of anybody, and Ctrl-C ends it at no cost"
    )
    started = time.monotonic()

    def on_epoch(epoch: int, loss: float) -> None:
        done, spent = epoch + 1, time.monotonic() - started
        # The epochs of warm-up are quicker, so the estimate stands until they are over.
        late = settings.all_epochs - done
        left = spent / done * late if done > 2 * settings.warmup_epochs else max(0.0, whole - spent)
        tell(f"Epoch {done} of {settings.all_epochs}: loss {loss:.3f}, about {say_seconds(left)} left")

    tuned = fine_tune(
        body,
        prepared,
        soft,
        settings=settings,
        seed=seed,
        on_epoch=on_epoch,
        on_step=lambda steps: progress("Fine-tuning", steps, all_steps),
    )
    progress("Fine-tuning", all_steps, all_steps)
    path = folder / "student-finetune.safetensors"
    tuned.save(path)
    result = {"kind": FINETUNE, "path": str(path), "public_images": count}
    if labelled is None:
        return result
    predicted = tuned.predict(network.tensors(read(known.tolist(), labelled, "Reading test images")))
    return result | {"accuracy": float((predicted == truth[known]).mean()), "test_images": len(known)}


@dataclass(frozen=True, eq=False)
class Prediction:
    """New images with their labels.

    Attributes:
        table: in the schema of image labels; every image is inferred.
        counts: how many images got each class, in label order; of attributes an image may get several.
        skipped: images that could not be read, and files that are no images.
        scores: how well each class is found, where the images came with their truth.
        threshold: of the class that was preferred, its name and from which probability on an image gets it.
    """

    table: pa.Table
    counts: dict[str, int]
    skipped: tuple[Skipped, ...]
    scores: Scores | None = None
    threshold: tuple[str, float] | None = None


def say_use(model: StoredModel, path: Path) -> str:
    """Return the command that labels further images, or features, with a model in a file."""
    new = "new.npz" if model.reads_own_features else "new-images"
    return f"labeler predict {path} {new} --out new-labels.parquet"


def predict_images(
    model: StoredModel,
    images: Path | str | NDArray[Any],
    *,
    backbone: str | None = None,
    architecture: str | None = None,
    preference: Preference | None = None,
    like: Path | None = None,
    progress: ProgressCallback = silent,
) -> Prediction:
    """Label images.

    Args:
        images: a shard, or a source of images to embed: a folder, Parquet, or torchvision:NAME?root=DIR. For a model of
            own features a file of them (.npz, .npy, .h5, .parquet) or an array of shape (n, dimension).
        backbone, architecture: what loads the backbone, where the model's file names none.
        preference: a recall that is wanted of one class (feature_store.results.scores).
        like: labeled public images, as a shard, that its threshold is measured on; the images' own probabilities
            without.

    Raises:
        MixedShards: the shard, or the backbone, is not the model's.
        InvalidSetting: the model's file names no backbone, and none was given.
        BadData: images or features cannot be used.
    """
    with tempfile.TemporaryDirectory(prefix="labeler-predict-") as folder:
        new, skipped = new_images(
            model, images, backbone=backbone, architecture=architecture, folder=Path(folder), progress=progress
        )
    return _predict(model, new, skipped, preference, like)


def new_images(
    model: StoredModel,
    images: Path | str | NDArray[Any],
    *,
    backbone: str | None,
    architecture: str | None,
    folder: Path,
    progress: ProgressCallback,
) -> tuple[NewImages, tuple[Skipped, ...]]:
    """Return images as the model reads them, and what was left out.

    Args:
        model, images, backbone, architecture: as for `predict_images`, which says what is raised.
        folder: a new folder, for the features of images that are embedded; not needed afterwards.
    """
    source = _own_features(model, images)
    if source is not None:
        if backbone is not None or architecture is not None:
            raise InvalidSetting("own features are computed already; leave the backbone and its architecture out")
        return NewImages.of_features(model, source), ()
    assert not isinstance(images, np.ndarray)  # noqa: S101  # it would be own features
    path = Path(images)
    if (path / "manifest.json").exists():
        if backbone is not None:
            raise InvalidSetting(f"{path} is a shard, whose images are embedded already; leave the backbone out")
        return NewImages.of_shard(model, Shard.open(path)), ()
    if model.reads_own_features and not backbone:
        raise InvalidSetting(
            f"the model reads features that its owner computed, and {str(images)!r} is none: name a file of them "
            f"({', '.join(SUFFIXES)}) or a shard that `labeler embed --features` made of them"
        )
    # Imported on use: a shard needs no network.
    from feature_store.backbones import load_backbone
    from feature_store.embedding import embed_source

    name = backbone or (model.backbone if is_plain_name(model.backbone) else "")
    if not name:
        raise InvalidSetting(
            "the model's file does not name a backbone that can be loaded by a name; give it with --backbone (the file "
            f"of weights or the backbone file that made fingerprint {model.fingerprint[:16]})"
        )
    loaded = load_backbone(name, architecture=architecture)
    _check_fingerprint(model, loaded.fingerprint, f"backbone {name!r}")
    out = folder / "images"
    report = embed_source(
        str(images),
        loaded,
        out,
        classes=model.classes,
        public=True,
        thumbnails=False,
        progress=lambda done, total: progress("Embedding", done, total),
    )
    return NewImages.of_shard(model, Shard.open(out, verify=False)), report.skipped + report.passed_over


def _own_features(model: StoredModel, images: Path | str | NDArray[Any]) -> FeatureSource | None:
    """Return the rows of an array or of a file of features; None for a shard or images.

    A Parquet file holds features for a model of own features, and images for every other.

    Raises:
        InvalidSetting: the model reads features of a backbone that this program runs, so images are wanted.
    """
    is_array = isinstance(images, np.ndarray)
    path = Path("rows") if is_array else Path(str(images))
    if not is_array and (
        path.suffix.lower() not in SUFFIXES
        or path.is_dir()
        or (path.suffix.lower() == ".parquet" and not model.reads_own_features)
    ):
        return None
    if not model.reads_own_features:
        raise InvalidSetting(
            "the model reads features of a backbone that this program runs, which embeds images itself; name a folder "
            "of images, a Parquet file of them, or a shard"
        )
    return FeatureSource(np.asarray(images), name="row") if is_array else read_features(path)


@dataclass(frozen=True, eq=False)
class NewImages:
    """Images to label. Attributes: features; names; labels, -1 where unknown, None where no truth came along."""

    features: NDArray[np.int16]
    names: list[str]
    labels: NDArray[np.int16] | None

    @classmethod
    def of_shard(cls, model: StoredModel, shard: Shard) -> NewImages:
        """Return the images of a shard.

        Raises:
            MixedShards: it has features of another backbone.
            BadData: it is empty.
        """
        _check_shard(model, shard)
        images = PublicImages.of(shard, model.classes)
        if not len(images):
            raise BadData("there is no image that can be read, so there is nothing to label")
        has_truth = not shard.has_attributes and bool((images.labels >= 0).any())
        return cls(images.features, images.sources, images.labels if has_truth else None)

    @classmethod
    def of_features(cls, model: StoredModel, source: FeatureSource) -> NewImages:
        """Return rows of own features.

        Raises:
            MixedShards: they have another width than the model's.
        """
        if source.rows.shape[1] != model.dimension:
            raise MixedShards(
                f"the model reads features of {model.dimension} numbers, and these have {source.rows.shape[1]}; "
                "compute them with the backbone of the model's job"
            )
        place = {name: number for number, name in enumerate(model.classes)}
        found = [None if one is None else source.label_names[one] for one in source.labels]
        labels = np.array([-1 if one is None else place.get(one, -1) for one in found], dtype=np.int16)
        return cls(quantize(source.rows), source.names, labels if (labels >= 0).any() else None)


def _predict(
    model: StoredModel,
    images: NewImages,
    skipped: tuple[Skipped, ...],
    preference: Preference | None,
    like: Path | None,
) -> Prediction:
    own = model.own_probabilities(images.features)
    probabilities = model.stated(own)
    try:
        privacy = guarantee_of(model.card)
    except (KeyError, TypeError, AttributeError):
        raise BadData("the model's file holds no privacy card of this version; download it again") from None
    stamp = ImageStamp(
        task_digest=model.task_digest,
        job_id=model.job_id,
        classes=model.classes,
        privacy=privacy,
        is_seeded=not model.card.get("holds", True),
        created_at=datetime.now(UTC).isoformat(),
    )
    asked = np.zeros(len(images.names), dtype=np.bool_)
    if model.kind == ATTRIBUTES:
        if preference is not None:
            raise InvalidSetting("--prefer is about one class per image, and this model is of attributes; leave it out")
        table = image_label_table(stamp, sources=images.names, probabilities=probabilities, asked=asked, several=True)
        counts = (probabilities >= ON).sum(axis=0).tolist()
        return Prediction(table, dict(zip(model.classes, counts, strict=True)), skipped)
    labels, threshold = probabilities.argmax(axis=1), None
    if preference is not None:
        place = preference.place(probabilities, model.classes)
        least = (
            preference.stated_threshold(own[:, place], probabilities[:, place])
            if like is None
            else preference.threshold(_of_class(model, like, place))
        )
        labels, threshold = prefer(own, place, least), (model.classes[place], least)
    table = image_label_table(stamp, sources=images.names, probabilities=probabilities, asked=asked, labels=labels)
    counts = np.bincount(labels, minlength=len(model.classes)).tolist()
    scores = None if images.labels is None else score(images.labels, labels, own[:, -1], model.classes)
    return Prediction(table, dict(zip(model.classes, counts, strict=True)), skipped, scores, threshold)


def _of_class(model: StoredModel, like: Path, place: int) -> NDArray[np.float64]:
    """The model's own probability of a class, of labeled public images of it."""
    shard = Shard.open(like)
    _check_shard(model, shard)
    labeled = _truth(shard, like, model.classes)
    return model.own_probabilities(labeled.features[labeled.labels == place])[:, place]


def _check_shard(model: StoredModel, shard: Shard) -> None:
    """Refuse features of another backbone; of a declared one by its probe, too, where the model knows it."""
    name = f"shard {shard.path.name!r}"
    _check_fingerprint(model, shard.fingerprint, name)
    if model.probe:
        try:
            refuse_other_probe(
                model.probe, shard.probe or "", shard.dimension, first_name="the model's job", other_name=name
            )
        except BadData as error:
            raise MixedShards(str(error)) from None


def _check_fingerprint(model: StoredModel, found: str, what: str) -> None:
    if found != model.fingerprint:
        raise MixedShards(
            f"the model reads features of the backbone with fingerprint {model.fingerprint[:16]}, and {what} has "
            f"{found[:16]}: its labels would mean nothing. Use the backbone of the model's task"
        )
