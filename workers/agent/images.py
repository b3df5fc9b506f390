"""The folder of images that an agent answers from: it is embedded into the shard in the agent's home.

    agent run     embeds the folder if that was never finished, goes on where it was killed, and polls afterwards.
    agent embed   brings the shard up to date with a folder that has changed since; so does a click on the site's page.

The desk and `--check` tell of a folder that has changed. No image is taken in or left out silently: until a person
asks, the agent answers from the records that it has. A record of a file that is gone is deleted first (`labeler delete`
does the same), so that it soon votes no more, however long the new images take. Every other record keeps its id.

**A look** at the folder compares names, sizes and times of its files with those of the last embedding, and reads none.
They are kept in `images.npy` under the site's key, so that the file names nobody: one row per file of
[digest of its name (2 words), size, times, digest of its image (2 words; 0 if it became no record)]. The times of the
last change of content and of the last change of status are one sum: a program can put back the first, but not both.

A deleted record must not come back with the next embedding because its file still lies in the folder. So a file that
was a record and is none any more stops the embedding, with a sentence; and so does its image under any other name.

**The coordinator** must not learn how many images there are. While they are embedded, the agent is silent. Its first
poll is at 5, 10, 20, 40 ... seconds after its start: an observer who knows the start reads off a power of two, as with
answers that are late (docs/public-clock.md). The running agent never looks at the folder, and logs hold no count.
"""

from __future__ import annotations

import fcntl
import io
import logging
import math
import shlex
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from feature_store.embedding import EmbedReport, Listed, list_source, while_there_is_room
from feature_store.shard import MANIFEST_NAME, Shard
from feature_store.shard_writer import check_classes, written_so_far
from feature_store.sources import ImageSource, PersonColumn, image_blocks, open_source
from labeler.errors import Interrupted, InvalidSetting, LabelerError, OutputInUse, UnreadableFile
from labeler.system.files import PRIVATE_FILE, exclusive, replace_file
from labeler.system.process_pool import least_priority
from labeler.system.site_key import SITE_KEY_FILE, SiteKey, as_digests, site_key
from workers.embedder.shards import backbone_recipe, delete_records, embed_images, source_of, told_of
from workers.party.home import AgentConfig, EmbedSettings, path_in_home, read_agent_config
from workers.party.link import cause
from workers.progress import ProgressCallback, silent

IMAGES_FILE: Final = "images.npy"
LOCK_FILE: Final = ".images.lock"

FIRST_POLL_S: Final = 5.0
"""Earliest first poll of an agent that embeds, in seconds after its start; then twice as late, and so on."""

_LOCK_TRIES: Final = 20
_LOG_STEP: Final = 10
"""Percent between two lines of the log."""

log = logging.getLogger("labeler.agent")


@dataclass(frozen=True, eq=False)
class Look:
    """A folder as it is now, against what was embedded. Private: only the site's own people see its counts.

    Attributes:
        names: of all files that may be images, in the source's order.
        stamps: int64, shape (files, 4): digest of the name, size and times; tables of labels and people come last.
        new, changed: places in `names` of files that were not there, or were other files. A changed table counts too.
        removed: how many files are gone.
        deleted: how many files are there whose records were deleted since.
    """

    names: Sequence[str] = field(repr=False)
    stamps: NDArray[np.int64] = field(repr=False)
    new: frozenset[int] = field(repr=False)
    changed: frozenset[int] = field(repr=False)
    removed: int = field(repr=False)
    deleted: int = field(repr=False)

    @property
    def has_changed(self) -> bool:
        return bool(self.new or self.changed or self.removed or self.deleted)

    def counts(self) -> dict[str, int]:
        """Return the counts, for the site's own people."""
        return {
            "files": len(self.names),
            "new": len(self.new),
            "changed": len(self.changed),
            "removed": self.removed,
            "deleted": self.deleted,
        }


class ImageFolder:
    """The folder of images of a home, and the shard that is made of it.

    Raises:
        InvalidSetting: the home has a shard that was embedded elsewhere, and no folder.
    """

    def __init__(self, home: Path, config: AgentConfig) -> None:
        if config.images is None or config.embedding is None:
            raise InvalidSetting(
                f"the agent of {home} answers from a shard that `labeler embed` made; name a folder with --images when "
                "it joins, and it embeds by itself"
            )
        self._home = home
        self._settings: EmbedSettings = config.embedding
        self.path = Path(path_in_home(home, config.images))
        self.shard = home / config.shard

    @property
    def is_embedded(self) -> bool:
        """True if it was embedded to the end at least once."""
        return (self.shard / MANIFEST_NAME).is_file() and (self._home / IMAGES_FILE).is_file()

    @property
    def is_being_embedded(self) -> bool:
        """True while a process embeds it."""
        try:
            with (self._home / LOCK_FILE).open("rb") as file:
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except FileNotFoundError:
            return False
        except BlockingIOError:
            return True
        return False

    def progress(self) -> int | None:
        """Return how many files a running or interrupted embedding has behind it; None where there is none."""
        return written_so_far(self.shard)

    def listed(self) -> Listed:
        """List its images with their labels and people; raises where they cannot be embedded so."""
        settings = self._settings
        found = list_source(self._source(), classes=settings.classes, public=False, persons=self._persons())
        check_classes(found.classes, public=False)
        return found

    def fingerprint(self) -> str:
        """Load the backbone, and return its fingerprint."""
        return backbone_recipe(self._backbone(), architecture=self._settings.architecture)().fingerprint

    def look(self) -> Look:
        """Compare the folder with what was embedded; reads names and times only."""
        key_file = self._home / SITE_KEY_FILE
        images = self._source()
        names = list(images.names)
        # Without a key nothing was embedded, so every file is new.
        stamps = self._stamps(names, site_key(key_file)) if key_file.exists() else np.zeros((0, 4), dtype=np.int64)
        if not self.is_embedded:
            return Look(names, stamps, frozenset(range(len(names))), frozenset(), 0, 0)
        seen = {row[:2].tobytes(): row[2:] for row in np.load(self._home / IMAGES_FILE, allow_pickle=False)}
        records = self._records()
        new, changed, deleted = set(), set(), 0
        for place, stamp in enumerate(stamps):
            before = seen.pop(stamp[:2].tobytes(), None)
            if before is None:
                new.add(place)
            elif not np.array_equal(before[:2], stamp[2:]):
                changed.add(place)
            elif place < len(names) and before[2:].any() and names[place] not in records:
                deleted += 1
        return Look(names, stamps, frozenset(new), frozenset(changed), len(seen), deleted)

    def embed(self, *, progress: ProgressCallback = silent) -> dict[str, Any]:
        """Embed what is new, and delete the records of files that are gone or are other images now.

        After an interruption, the same call goes on and embeds no image a second time.

        Returns:
            As `embed_images`, with "new", "changed" and "removed" files, and "added" and "dropped" records.

        Raises:
            OutputInUse: another process embeds the images of this home.
            InvalidSetting: the folder is not there or cannot be read; it was embedded with other settings; or files are
                there whose records were deleted.
            BadData: it holds no image, or images without label or person.
            StorageFull: there is no room; what was embedded stays.
        """
        with self._held():
            site_key(self._home / SITE_KEY_FILE)  # made where there is none
            look = self.look()
            _refuse_deleted(look.deleted)
            before = self._record_ids()
            shard = Shard.open(self.shard, verify=False) if self.is_embedded else None
            images = self._source()
            # What was left out may be readable by now, and what else lies there may have come since.
            if shard is None or look.has_changed or shard.skipped or images.left_out:
                report = self._bring_up_to_date(look, progress)
            else:
                counted = EmbedReport(self.shard, len(shard), (), len(shard), shard.classes, shard.fingerprint, ())
                report = told_of(replace(counted, passed_over=images.passed_over))
            after = self._record_ids()
        counts = look.counts()
        return report | {
            **{name: counts[name] for name in ("new", "changed", "removed")},
            "added": len(np.setdiff1d(after, before)),
            "dropped": len(np.setdiff1d(before, after)),
        }

    def _bring_up_to_date(self, look: Look, progress: ProgressCallback) -> dict[str, Any]:
        listed, settings = self.listed(), self._settings  # before anything is deleted
        deleted = False
        try:
            deleted = self._delete_gone(look, listed.images)
            report = embed_images(
                self.path,
                self._backbone(),
                self.shard,
                architecture=settings.architecture,
                classes=settings.classes,
                device=settings.device,
                threads=settings.threads,
                persons=self._persons(),
                duplicates=settings.duplicates,
                max_records=settings.max_records,
                attributes=self._attributes(),
                split=settings.split,
                update=True,
                progress=progress,
            )
        except UnreadableFile:  # it names a file, and a log may hold this sentence
            done = "Records of files that are gone were deleted; nothing else was" if deleted else "Nothing was"
            raise InvalidSetting(
                "a file in the folder of images cannot be read now: no permission, a damaged disk, or one that is not "
                f"mounted. {done} changed. `find -L {shlex.quote(str(self.path))} ! -readable` names files without "
                "permission; let the user that runs this agent read them, or take them out, and embed again"
            ) from None
        self._remember(look)
        return report

    @contextmanager
    def _held(self) -> Iterator[None]:
        with ExitStack() as lock:
            lock.enter_context(while_there_is_room(self.shard))
            for tries_left in reversed(range(_LOCK_TRIES)):
                try:
                    lock.enter_context(exclusive(self._home / LOCK_FILE, "the images of this home"))
                    break
                except OutputInUse:
                    if not tries_left:
                        raise
                    time.sleep(0.01)  # a page that looks at the lock holds it for a moment
            yield

    def _source(self) -> ImageSource:
        if not self.path.is_dir():
            raise InvalidSetting(
                f"there is no folder of images {self.path}: check the path, and whether its disk is mounted; if it has "
                "moved, correct its line in agent.toml"
            )
        try:
            source = source_of(self.path, self._attributes(), self._settings.split)
            return open_source(source) if isinstance(source, str | Path) else source
        except UnreadableFile:  # it names folders, and a log may hold this sentence
            raise InvalidSetting(
                f"the folder of images {self.path}, or a folder or a link in it, cannot be read; `find FOLDER -xtype l "
                "-o ! -readable` names it. Mount what is missing, and let the user that runs this agent read all of it"
            ) from None

    def _stamps(self, names: Sequence[str], key: SiteKey) -> NDArray[np.int64]:
        tables = {"\0attributes": self._settings.attributes, "\0persons": self._settings.persons}
        named = [(name, self.path / name) for name in names]
        named += [(name, Path(path_in_home(self._home, path))) for name, path in tables.items() if path is not None]
        stamps = np.zeros((len(named), 4), dtype=np.int64)
        stamps[:, :2] = key.digests("file", [name.encode("utf-8", "surrogateescape") for name, _ in named])
        for row, (_, path) in zip(stamps, named, strict=True):
            try:
                status = path.stat()
            except OSError:
                continue
            row[2:] = status.st_size, (status.st_mtime_ns + status.st_ctime_ns) % 2**63
        return stamps

    def _delete_gone(self, look: Look, images: ImageSource) -> bool:
        """Delete records whose image is not in the folder any more, under any name; return whether there were any."""
        if not (self.shard / MANIFEST_NAME).is_file():
            return False
        records, lost = self._records(), set()
        if self.is_embedded:
            seen = np.load(self._home / IMAGES_FILE, allow_pickle=False)[:, 4:]
            lost = {row.tobytes() for row in seen[seen.any(axis=1)]} - set(records.values())
        stays = set(look.names) - {look.names[place] for place in look.changed if place < len(look.names)}
        left = records.keys() - stays
        if not left and not lost:
            return False
        key = site_key(self._home / SITE_KEY_FILE)
        others = [place for place, name in enumerate(look.names) if place in look.changed or name not in records]
        found = {key.digest("image", image_blocks(images, place)) for place in others}
        _refuse_deleted(len(found & lost))
        gone = [name for name in left if records[name] not in found]
        if not 0 < len(gone) < len(records):  # a shard keeps a record; if all go, the new take their place in one step
            return False
        delete_records(self.shard, images=gone)
        return True

    def _remember(self, look: Look) -> None:
        records, none = self._records(), bytes(16)
        digests = b"".join(records.get(name, none) for name in look.names).ljust(16 * len(look.stamps), b"\0")
        file = io.BytesIO()
        np.save(file, np.hstack([look.stamps, as_digests(digests)]))
        replace_file(self._home / IMAGES_FILE, file.getvalue(), mode=PRIVATE_FILE)

    def _record_ids(self) -> NDArray[np.int64]:
        if not (self.shard / MANIFEST_NAME).is_file():
            return np.empty(0, dtype=np.int64)
        shard = Shard.open(self.shard, verify=False)
        return np.asarray(shard.record_ids[shard.rows])

    def _records(self) -> dict[str, bytes]:
        """Return the digest of each record's image by the name of its file."""
        shard = Shard.open(self.shard, verify=False)
        if shard.image_digests is None:
            raise InvalidSetting(f"{self.shard} was not embedded from a folder of images; move it away")
        digests = shard.image_digests.astype("<i8")
        return {shard.sources[row]: digests[row].tobytes() for row in shard.rows.tolist()}

    def _backbone(self) -> str:
        return path_in_home(self._home, self._settings.backbone)

    def _attributes(self) -> Path | None:
        table = path_in_home(self._home, self._settings.attributes)
        return None if table is None else Path(table)

    def _persons(self) -> PersonColumn | None:
        table, level = path_in_home(self._home, self._settings.persons), self._settings.person_level
        return None if table is None and level is None else PersonColumn(level, None if table is None else Path(table))


def _refuse_deleted(count: int) -> None:
    if count:
        raise InvalidSetting(
            f"the folder holds images whose records were deleted ({count}): they would come back. Take those files, "
            "and copies of them, out of the folder; then embed again"
        )


def public_facts(home: Path, config: AgentConfig) -> tuple[str, tuple[str, ...]]:
    """Return the fingerprint of the backbone and the class list of an agent, also before its images are embedded.

    Raises:
        InvalidSetting, BadData: the shard, the folder or the backbone cannot be used.
    """
    if config.images is None or (home / config.shard / MANIFEST_NAME).is_file():
        shard = Shard.open(path_in_home(home, config.shard), verify=False)
        return shard.fingerprint, shard.classes
    folder = ImageFolder(home, config)
    classes = folder.listed().classes  # first: to load a backbone takes longer
    return folder.fingerprint(), classes


def embed_before_answering(home: Path, *, stop: threading.Event) -> bool:
    """Embed the images of a home if that was never finished; log a folder that has changed since.

    Args:
        stop: interrupts it after a batch; nothing is lost.

    Returns:
        True if the home names a folder of images.

    Raises:
        LabelerError: see `ImageFolder.embed`.
    """
    config = read_agent_config(home)
    if config.images is None:
        return False
    folder = ImageFolder(home, config)
    if folder.is_embedded:
        try:
            if folder.look().has_changed:
                log.warning(
                    "the folder of images has changed; the agent answers from what is embedded. labeler agent embed "
                    "--check, or the site's page, says how much; embed it there"
                )
        except (LabelerError, OSError) as error:
            log.warning("the folder of images cannot be compared; the agent answers without", extra=cause(error))
        return True
    log.info("embedding the images; the coordinator hears of this agent once they are done")
    try:
        if folder.embed(progress=_logged(stop))["skipped"]:
            log.warning("some files could not be read as images and are no records; labeler agent embed names them")
    except Interrupted:
        return True
    log.info("the images are embedded")
    return True


def first_poll_s(elapsed_s: float) -> float:
    """Return when an agent that was ready after `elapsed_s` polls first, in seconds after its start; see the module."""
    return FIRST_POLL_S * 2.0 ** max(0, math.ceil(math.log2(max(elapsed_s, 1e-9) / FIRST_POLL_S)))


def stopping(stop: threading.Event, progress: ProgressCallback) -> ProgressCallback:
    """Return a callback that ends the work once `stop` is set."""

    def step(stage: str, done: int, total: int) -> None:
        if stop.is_set():
            raise Interrupted("stopped while embedding; the same command goes on from here")
        progress(stage, done, total)

    return step


def _logged(stop: threading.Event) -> ProgressCallback:
    last = -1

    def step(stage: str, done: int, total: int) -> None:  # noqa: ARG001
        nonlocal last
        percent = 100 * done // max(total, 1) // _LOG_STEP * _LOG_STEP
        if percent > last:
            log.info("embedding the images", extra={"percent": percent})
            last = percent

    return stopping(stop, step)


class SiteImages:
    """The images of a home for the page of its site: their state, and a click that embeds them in this process.

    The folder is looked at again only after twenty times as long as a look took, so that an open page costs little.
    """

    def __init__(self, home: Path) -> None:
        self._home = home
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        self._problem = ""
        self._counts: Mapping[str, int] = {}
        self._look_at = 0.0

    def overview(self) -> dict[str, Any] | None:
        """Return the folder, its state, counts of files, and how far an embedding is; None where there is no folder."""
        config = read_agent_config(self._home)
        if config.images is None:
            return None
        folder = ImageFolder(self._home, config)
        is_running, done = folder.is_being_embedded, folder.progress()
        state = "embedding" if is_running else "idle" if done is None else "interrupted"
        found: dict[str, Any] = {"folder": str(folder.path), "state": state, "done": done or 0}
        found |= {"is_embedded": folder.is_embedded, "problem": self._problem}
        began = time.monotonic()
        try:
            if began >= self._look_at:
                self._counts = folder.look().counts()
                self._look_at = time.monotonic() + 20 * (time.monotonic() - began)
        except (LabelerError, OSError) as error:
            self._counts = {}
            unreadable = "the folder of images cannot be read"
            found["problem"] = found["problem"] or (str(error) if isinstance(error, LabelerError) else unreadable)
        found.update(dict.fromkeys(("files", "new", "changed", "removed", "deleted"), 0))
        found.update(self._counts)
        return found

    def embed(self) -> None:
        """Begin to embed in a thread of lowest priority; nothing happens if it runs already.

        Raises:
            InvalidSetting: the home has no folder of images.
            OutputInUse: another process embeds them.
        """
        if self._thread is not None and self._thread.is_alive():
            return
        folder = ImageFolder(self._home, read_agent_config(self._home))
        if folder.is_being_embedded:
            raise OutputInUse("another process embeds the images of this home; this page shows how far it is")
        self._problem = ""
        self._thread = threading.Thread(target=partial(self._run, folder), name="images", daemon=True)
        self._thread.start()
        while self._thread.is_alive() and not folder.is_being_embedded:
            time.sleep(0.01)

    def close(self) -> None:
        """End an embedding that this page began; the next one goes on from there."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join()

    def _run(self, folder: ImageFolder) -> None:
        try:
            with least_priority():
                result = folder.embed(progress=stopping(self._stop, silent))
            if skipped := len(result["skipped"]):
                self._problem = (
                    f"{skipped} files could not be read as images and are no records; labeler agent embed names them"
                )
        except Interrupted:
            pass
        except LabelerError as error:
            self._problem = str(error)
        except Exception as error:  # a defect of a library must not end the page
            log.error("the images could not be embedded", extra=cause(error))
            self._problem = f"the images could not be embedded ({type(error).__name__}); see this page's terminal"
        finally:
            self._look_at = 0.0
