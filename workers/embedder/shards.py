"""Images to shards, and public images to a backbone: what `labeler embed` and `labeler pretrain` do.

Records of a shard are deleted by what their owner knows of them: their person, or the names of their images.

They are marked first, in one step, and vote no more; then the shard is rewritten without them. A running agent switches
to it by itself, and then closes the old files. Rounds charged before are answered with the stored bytes, and the price
of earlier releases still covers them. Spends of votes for life stay with the image, should it come back.
"""

from __future__ import annotations

import io
import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from feature_store.backbones import Backbone, load_backbone
from feature_store.cluster.driver import Driver
from feature_store.cluster.embedding import cluster_embedder
from feature_store.embedding import Duplicates, EmbedReport, embed_source, same_images_list
from feature_store.image_files import Skipped, in_words
from feature_store.own_features import (
    Column,
    DeclaredBackbone,
    FeatureSource,
    FittedOn,
    as_rows,
    read_features,
    read_probe,
    refuse_private_probe,
)
from feature_store.same_images import Twice, find_same_images, named
from feature_store.shard import OF_OTHER_RECORDS, Shard
from feature_store.shard_writer import erase_deleted, half_written, remove_leftovers, set_aside
from feature_store.sources import (
    CELEBA_TABLE,
    AttributeSource,
    ImageSource,
    PersonColumn,
    celeba_source,
    image_finder,
    is_celeba,
    one_name,
    open_source,
)
from labeler.errors import BadData, InvalidSetting, StorageFull, UnreadableImage
from labeler.system.files import check_folder, is_full, read_named
from labeler.system.site_key import SITE_KEY_FILE, site_key
from workers.progress import ProgressCallback, silent


def embed_images(
    source: str | Path,
    backbone: str | Path,
    out: Path,
    *,
    architecture: str | None = None,
    classes: tuple[str, ...] | None = None,
    public: bool = False,
    batch_size: int | None = None,
    threads: int | None = None,
    device: str = "auto",
    persons: PersonColumn | None = None,
    duplicates: Duplicates | None = None,
    key: Path | None = None,
    max_records: int | None = None,
    attributes: Path | None = None,
    split: str | None = None,
    update: bool = False,
    ray: str | None = None,
    progress: ProgressCallback = silent,
) -> dict[str, Any]:
    """Embed a source into a shard; see feature_store.embedding.embed_source.

    Args:
        batch_size: images in a forward pass; what the device likes when None.
        threads: that read and prepare images; as many as there are cores when None.
        device: see feature_store.backbones.load_backbone.
        attributes, split: a table of the attributes of a folder's images, and which images (feature_store.sources).
        ray: embed by the workers of a Ray cluster: host:port of one that this party runs, or "" for one of our own.

    Returns:
        {"out", "records", "resumed_from", "classes", "fingerprint", "skipped": [{"source", "reason"}],
        "passed_over": the same, "notes", "duplicates": [{"sources", "contradiction"}], "copies", "contradictions",
        "shared", "listed"}; see feature_store.embedding.EmbedReport.
    """
    recipe = backbone_recipe(backbone, architecture=architecture, device=device, batch_size=batch_size)
    check_folder(out)
    images = source_of(source, attributes, split)
    with ExitStack() as owned:
        embedder = None
        if ray is not None:
            driver = Driver(beside=out, address=ray or None, cpus=threads)
            owned.callback(driver.end)
            embedder = cluster_embedder(recipe, driver)
        report = embed_source(
            images,
            recipe,
            out,
            classes=classes,
            public=public,
            threads=threads,
            persons=persons,
            duplicates=duplicates,
            key=key,
            max_records=max_records,
            update=update,
            scanned=lambda done, total: progress(f"Comparing {out.name}", done, total),
            progress=lambda done, total: progress(f"Embedding {out.name}", done, total),
            embedder=embedder,
        )
    return told_of(report)


def backbone_recipe(
    backbone: str | Path, *, architecture: str | None = None, device: str = "auto", batch_size: int | None = None
) -> Callable[[], Backbone]:
    """Return what loads a backbone that a person named, as a path or otherwise; see `embed_images`."""
    return partial(
        load_backbone,
        backbone if (isinstance(backbone, str) and not Path(backbone).exists()) else Path(backbone).resolve(),
        architecture=architecture,
        device=device,
        batch_size=batch_size,
    )


def embed_features(
    features: Path | NDArray[Any],
    out: Path,
    *,
    backbone_name: str | None,
    fitted_on: FittedOn | None,
    probe: Path | NDArray[Any] | None,
    ids: Column | None = None,
    labels: Column | None = None,
    persons: PersonColumn | Column | None = None,
    classes: tuple[str, ...] | None = None,
    public: bool = False,
    duplicates: Duplicates | None = None,
    key: Path | None = None,
    max_records: int | None = None,
) -> dict[str, Any]:
    """Make a shard of features that their owner computed; see feature_store.own_features.

    Args:
        features: a file, or rows of shape (n, d).
        backbone_name, fitted_on, probe: what the owner declares of the backbone, and the published probe's features.
        ids, labels, persons: their location in the file, or the values.
        classes, public, duplicates, key, max_records: as for `embed_images`, which says what comes back.

    Raises:
        InvalidSetting, BadData: a declaration is missing, or the features, or what belongs to them, cannot be used.
    """
    if backbone_name is None or fitted_on is None or probe is None:
        raise InvalidSetting(
            "own features need three words about their backbone: its name (--backbone-name), what it was fitted on "
            "(--fitted-on public, other-records or voting-records), and the features of the published probe (--probe)"
        )
    check_folder(out)
    column, people = (None, persons) if isinstance(persons, PersonColumn) else (persons, None)
    if isinstance(features, Path):
        source = read_features(features, ids=ids, labels=labels, persons=column)
    else:
        source = FeatureSource(features, ids=_values(ids), labels=_values(labels), persons=_values(column))
    rows = read_probe(probe) if isinstance(probe, Path) else as_rows(probe, "probe")
    backbone = DeclaredBackbone(backbone_name, fitted_on, source.rows.shape[1], rows)
    if public and source.has_persons:
        raise InvalidSetting("public features hold no persons to protect; leave persons out")
    if not public:
        if not source.label_names:
            raise BadData("private features need labels: an array labels in their file, or --labels")
        refuse_private_probe(source, rows)
    report = embed_source(
        source,
        backbone,
        out,
        classes=classes,
        public=public,
        thumbnails=False,
        persons=PersonColumn(column="persons") if people is None and source.has_persons else people,
        duplicates=duplicates,
        key=key,
        max_records=max_records,
        embedder=source.embedded,
    )
    not_covered = (OF_OTHER_RECORDS,) if fitted_on == "other-records" else ()
    return told_of(replace(report, notes=report.notes + not_covered))


def _values(column: Column | None) -> Sequence[Any] | None:
    if isinstance(column, str | Path):
        raise InvalidSetting(f"{str(column)!r} names an array of a file, and the features are no file; give the values")
    return None if column is None else list(column)


def told_of(report: EmbedReport) -> dict[str, Any]:
    """Return a report as JSON types; see `embed_images`."""
    return {
        "out": str(report.path),
        "records": report.records,
        "resumed_from": report.resumed_from,
        "classes": list(report.classes),
        "fingerprint": report.fingerprint,
        **{
            what: [{"source": one.source, "reason": one.reason} for one in files]
            for what, files in (("skipped", report.skipped), ("passed_over", report.passed_over))
        },
        "notes": list(report.notes),
        "duplicates": told(report.same_images),
        "copies": report.copies,
        "contradictions": report.contradictions,
        "shared": report.shared,
        "listed": None if report.listed is None else str(report.listed),
    }


def source_of(source: str | Path, attributes: Path | None, split: str | None) -> ImageSource | str | Path:
    """Return the source to embed; a table of attributes is next to a folder, or in it if it is in CelebA's layout."""
    folder = Path(source)
    if attributes is None and split is None:
        return source
    if not folder.is_dir():
        raise InvalidSetting("a table of attributes, or a split of one, goes with a folder of images")
    if attributes is None:
        if not is_celeba(folder):
            raise InvalidSetting(
                f"--split goes with a table of attributes (--attributes), or {CELEBA_TABLE} in the folder"
            )
        return celeba_source(folder, split=split)
    return AttributeSource(folder, attributes, split=split)


def same_images_of(path: Path) -> dict[str, Any]:
    """Return images that a finished shard holds more than once: by their bytes where it keeps digests, and by features.

    Returns:
        {"shard", "compared": ["bytes", "features"] or ["features"], "duplicates": [{"sources", "contradiction"}]}.
    """
    shard = Shard.open(path)
    same = find_same_images(shard, rows=shard.rows)
    return {
        "shard": str(path),
        "compared": ["features"] if shard.image_digests is None else ["bytes", "features"],
        "duplicates": told(named(same, shard.sources if same else ())),
    }


def told(same: Twice) -> list[dict[str, Any]]:
    """Return equal images, for the site's own terminal: names of files, never a label or a person."""
    return [{"sources": list(names), "contradiction": contradiction} for names, contradiction in same]


def embed_queries(
    source: Path,
    backbone: str,
    out: Path,
    *,
    classes: tuple[str, ...],
    progress: ProgressCallback = silent,
    warn: Callable[[str], None],
) -> Shard:
    """Embed public images to ask about, once; warn of files that are no images.

    Folder names outside the task's classes say nothing about the truth.

    Raises:
        UnreadableImage: some are no images. A question must not vanish silently, so nothing is asked.
    """
    result = embed_images(source, backbone, out, classes=classes, public=True, progress=progress)
    if result["skipped"]:
        first = result["skipped"][0]
        raise UnreadableImage(
            f"{len(result['skipped'])} of the public images cannot be asked about, first {first['source']!r}: "
            f"{first['reason']}. Take them out, or embed the rest first with `labeler embed --public`"
        )
    if passed := [Skipped(**one) for one in result["passed_over"]]:
        warn(f"{len(passed)} files are no images, and are not asked about: {in_words(passed)}")
    return Shard.open(out)


def _read_all(images: ImageSource) -> list[Image.Image]:
    pictures = []
    for number, name in enumerate(images.names):
        try:
            pictures.append(images.read(number))
        except UnreadableImage as error:
            raise UnreadableImage(f"public image {name!r} cannot be read: {error}. Take it out and try again") from None
    return pictures


def pretrain_backbone(
    source: str | Path,
    out: Path,
    *,
    architecture: str = "small-conv",
    epochs: int = 100,
    seed: int = 0,
    progress: ProgressCallback = silent,
) -> dict[str, Any]:
    """Pretrain a SimCLR backbone on public images; see feature_store.backbones.simclr.pretrain.

    Returns:
        {"out", "fingerprint", "dimension", "images"}.

    Raises:
        UnreadableImage: some are no images.
    """
    images = open_source(source, public=True)
    if images.left_out:
        raise UnreadableImage(
            f"{len(images.left_out)} of the public images cannot be trained on: {in_words(images.left_out)}. Take them "
            "out and try again"
        )
    check_folder(out.parent)
    from feature_store.backbones.simclr import SimCLRConfig, pretrain

    out.parent.mkdir(parents=True, exist_ok=True)
    backbone = pretrain(
        _read_all(images),
        config=SimCLRConfig(architecture=architecture, epochs=epochs),
        seed=seed,
        checkpoint=out,
        progress=lambda done, total, _: progress("Pretraining", done, total),
    )
    return {
        "out": str(out),
        "fingerprint": backbone.fingerprint,
        "dimension": backbone.dimension,
        "images": len(images.names),
    }


def delete_records(
    path: Path, *, persons: Sequence[str] = (), images: Sequence[str] = (), key: Path | None = None
) -> dict[str, Any]:
    """Delete all records of some people, and those of some images; all that was named, or nothing.

    Then erase the bytes of all deleted records from the shard's files, also of those that an earlier version or an
    interrupted deletion only marked. Without names, only this is done.

    Args:
        path: the shard.
        persons: names, as they were given when it was embedded.
        images: names within its source.
        key: the file of the site's key; None: the one next to the shard.

    Returns:
        {"shard", "deleted", "erased", "left", "remains"}: how many were newly deleted, how many were erased from the
        files, how many there are now, and sentences about what is left elsewhere.

    Raises:
        InvalidSetting: nobody and nothing is named and nothing waits to be erased, the shard does not know people, or
            nothing would be left.
        BadData: a name that the shard does not hold, or another site's key. No name is repeated.
        StorageFull: the records are deleted, and there is no room to rewrite the shard.
    """
    shard = Shard.open(path, verify=False)
    # Before names are looked up: names whose files an interrupted deletion left over are not known any more.
    had_leftovers = remove_leftovers(path)
    if not persons and not images and not had_leftovers and shard.alive.all():
        raise InvalidSetting("name people (--persons) or images (--images) to delete; nothing waits to be erased")
    rows = _of_persons(shard, persons, key) | _of_images(shard, images)
    deleted = shard.delete(shard.record_ids[rows])
    same_images_list(path).unlink(missing_ok=True)  # it may name what was deleted
    try:
        erased = erase_deleted(path)
    except OSError as error:
        if not is_full(error):
            raise
        raise StorageFull(
            f"the records vote no more, and their bytes are still in the files: there is no room to write shard "
            f"{path.name!r} anew. Make room for a second copy of it, then run labeler delete {path.name} without a name"
        ) from error
    remains = list(_REMAINS)
    remains += [
        f"{work.name} beside the shard is an interrupted embedding, which may hold them too: delete it."
        for work in (half_written(path), *set_aside(path))
        if work.exists()
    ]
    return {"shard": str(path), "deleted": deleted, "erased": erased, "left": len(shard), "remains": remains}


_REMAINS = (
    "Images, backups and copies of the shard's folder are not touched: delete them there too.",
    "The disk keeps the old bytes until it uses their place again; an encrypted disk without snapshots hides them.",
    "A running agent goes over to the new files within seconds, and closes the old ones then.",
    "What was answered before stays released and stays charged: no budget comes back.",
    "With votes for life, the agent's journal keeps a keyed digest of each image and what it has spent.",
)


_MOST_NAMES_BYTES = 2**30


def lines_of(path: Path) -> list[str]:
    """Return the names in a file, one a line; of the standard input where the file is called "-".

    Raises:
        InvalidSetting: it cannot be read, or is no text.
    """
    try:
        text = (
            sys.stdin.read() if str(path) == "-" else read_named(path, most_bytes=_MOST_NAMES_BYTES).decode("utf-8-sig")
        )
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is not UTF-8"
        raise InvalidSetting(f"{path} cannot be read as names, one a line: {why}") from None
    return [line for line in io.StringIO(text, newline=None).read().split("\n") if line.strip()]


def _of_persons(shard: Shard, persons: Sequence[str], key: Path | None) -> NDArray[np.bool_]:
    found = np.zeros(len(shard.record_ids), dtype=np.bool_)
    if not persons:
        return found
    if shard.persons is None:
        raise InvalidSetting(
            f"shard {shard.path.name!r} does not know whose records it holds; name images (--images), or embed it "
            "again with --person-level, --persons or --person-column"
        )
    file = shard.path.parent / SITE_KEY_FILE if key is None else key
    if not file.exists():
        raise InvalidSetting(f"there is no site's key {file}; name the one that the shard was made with (--site-key)")
    known = site_key(file)
    if known.name != shard.site_key:
        raise BadData(f"{file} is not the key that shard {shard.path.name!r} was made with; name that one (--site-key)")
    unknown = 0
    for digest in known.digests("person", [one_name(person).encode("utf-8", "surrogateescape") for person in persons]):
        theirs = (shard.persons == digest).all(axis=1)
        unknown += not theirs.any()
        found |= theirs
    if unknown:
        raise BadData(
            f"{unknown} of {len(persons)} people have no image in shard {shard.path.name!r}: they never had one, or it "
            "was deleted before. Nothing was deleted now. Write each name as it was when the shard was embedded, one a "
            "line"
        )
    return found


def _of_images(shard: Shard, images: Sequence[str]) -> NDArray[np.bool_]:
    held = shard.sources if images else []
    found = list(map(image_finder(held), images))
    unknown = [number for number, name in enumerate(found, 1) if name is None]
    if unknown:
        # Named by its position: a folder is often named after a person.
        raise BadData(
            f"{len(unknown)} of {len(images)} images are not in shard {shard.path.name!r}, the first of them the one "
            f"named at place {unknown[0]}; nothing was deleted. Instead of a copy that was left out, name the file "
            "that was kept"
        )
    wanted = set(found)
    return np.array([name in wanted for name in held] if images else [False] * len(shard.record_ids), dtype=np.bool_)
