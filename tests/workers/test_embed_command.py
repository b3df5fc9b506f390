"""`labeler embed` and `labeler duplicates`: what the site's own people see on their terminal, and nobody else."""

from __future__ import annotations

import io
import os
import resource
import shutil
import signal
import sys
from collections.abc import Callable
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from feature_store.shard import MARK_NAME, Shard, claim
from feature_store.sources import PersonColumn
from labeler.errors import BadData, InvalidSetting, LabelerError, StorageFull
from labeler.system.faults import listening
from tests.command_line import Labeler
from workers.commands.shards import names_of
from workers.embedder.shards import delete_records, embed_images, lines_of


@pytest.fixture
def scans(tmp_path: Path) -> Path:
    """CLASS/PATIENT/scan, one scan under two classes."""
    rng = np.random.default_rng(8)
    for label, patient in (("ill", "P-17"), ("ill", "P-23"), ("well", "P-17")):
        (tmp_path / "scans" / label / patient).mkdir(parents=True)
        for number in range(2):
            pixels = rng.integers(0, 256, (8, 8, 3), dtype=np.uint8)
            Image.fromarray(pixels).save(tmp_path / "scans" / label / patient / f"{number}.png")
    shutil.copy(tmp_path / "scans/ill/P-23/0.png", tmp_path / "scans/well/P-17/copy.png")
    return tmp_path / "scans"


def test_embed_says_what_it_left_out_and_where_the_list_is(labeler: Labeler, scans: Path, tmp_path: Path) -> None:
    shutil.copy(scans / "ill/P-17/0.png", scans / "ill/P-17/again.png")
    for name in ("Thumbs.db", "well/.DS_Store", "well/P-17/notes.txt"):
        (scans / name).write_text("no image")
    options = ("--backbone", "pixels:4", "--classes", "ill,well")
    done = labeler("embed", scans, *options, "--out", tmp_path / "a.shard")
    assert done.code == 0, done.err
    shard = Shard.open(tmp_path / "a.shard")
    assert done.out.splitlines()[:4] == [
        f"5 images are in {tmp_path / 'a.shard'} (backbone pixels:4, {shard.fingerprint[:12]})",
        "Left out as copies of other images: 1",
        "Left out because identical images have different labels: 2",
        f"Identical images are listed in {tmp_path / 'a.shard.duplicates.csv'}; delete it once you have looked at it",
    ]
    assert "ill/P-23" not in done.out + done.err
    assert done.err.strip().endswith(
        "Warning: passed over 3 files of no image: Thumbs.db (Windows keeps it), well/.DS_Store (macOS keeps it), "
        "well/P-17/notes.txt (a text)."
    )
    (scans / "ill/P-17/cut.png").write_bytes((scans / "ill/P-17/1.png").read_bytes()[:40])
    done = labeler("embed", scans, *options, "--out", tmp_path / "b.shard", "--json")
    assert done.code == 1
    document = done.document
    assert [one["source"] for one in document["skipped"]] == ["ill/P-17/cut.png"]
    assert (document["records"], document["copies"], document["contradictions"]) == (5, 1, 2)


def test_embed_refuses_what_is_there_twice_where_it_is_told_to(labeler: Labeler, scans: Path, tmp_path: Path) -> None:
    options = ("--backbone", "pixels:4", "--out", tmp_path / "a.shard", "--classes", "ill,well", "--person-level", 2)
    refused = labeler("embed", scans, *options, "--duplicates", "refuse")
    assert refused.code == 1
    assert "the same image (under different labels and different people): ill/P-23/0.png, well/P-17/copy.png" in (
        refused.err
    )
    assert "--duplicates keep-first" in refused.err

    as_json = labeler("embed", scans, *options, "--duplicates", "refuse", "--json")
    assert as_json.code == 1
    assert as_json.document["duplicates"] == [
        {
            "sources": ["ill/P-23/0.png", "well/P-17/copy.png"],
            "contradiction": "under different labels and different people",
        }
    ]

    done = labeler("embed", scans, *options, "--duplicates", "keep-all", "--json")
    assert done.code == 0, done.err
    assert done.document["records"] == 7
    shard = Shard.open(tmp_path / "a.shard")
    assert shard.knows_persons
    assert len(np.unique(np.asarray(shard.persons), axis=0)) == 2

    looked = labeler("duplicates", tmp_path / "a.shard", "--json")
    assert looked.code == 1
    assert looked.document["compared"] == ["bytes", "features"]
    assert looked.document["duplicates"][0]["contradiction"] == "under different labels and different people"


def test_words_that_are_no_choice_are_refused(labeler: Labeler, scans: Path, tmp_path: Path) -> None:
    options = ("--backbone", "pixels:4", "--out", tmp_path / "a.shard", "--classes", "ill,well")
    refused = labeler("embed", scans, *options, "--duplicates", "whatever")
    assert refused.code == 2
    assert "must be one of refuse, keep-first, keep-all" in refused.err
    refused = labeler("embed", scans, *options, "--person-level", 2, "--person-column", "patient")
    assert refused.code == 2
    assert "in one way" in refused.err


# `labeler delete`: people and images go from a shard and its bytes, all that is named or nothing; nobody is named


PEOPLE = ("P-1", "Jos\u00e9", "P-3")


@pytest.fixture
def shard(tmp_path: Path) -> Path:
    """CLASS/PATIENT/scan: three people of two scans each."""
    rng = np.random.default_rng(5)
    for person in PEOPLE:
        for label in ("ill", "well"):
            path = tmp_path / "scans" / label / person / "0.png"
            path.parent.mkdir(parents=True)
            Image.fromarray(rng.integers(0, 256, (8, 8, 3), dtype=np.uint8)).save(path)
    return _embedded(tmp_path, "a.shard", persons=PersonColumn(level=2))


def _embedded(folder: Path, name: str, *, backbone: str = "pixels:4", **more: Any) -> Path:
    embed_images(folder / "scans", backbone, folder / name, classes=("ill", "well"), public=False, **more)
    return folder / name


def _left(shard: Path) -> set[str]:
    opened = Shard.open(shard)
    return {opened.sources[row] for row in opened.rows}


def test_all_records_of_a_person_go_whichever_way_the_name_is_spelt_and_the_others_keep_their_ids(shard: Path) -> None:
    before = Shard.open(shard)
    kept = {before.sources[row]: int(before.record_ids[row]) for row in before.rows}
    done = delete_records(shard, persons=[" Jose\u0301 "])
    assert (done["deleted"], done["erased"], done["left"]) == (2, 2, 4)
    after = Shard.open(shard)
    assert {after.sources[row].split("/")[1] for row in after.rows} == {"P-1", "P-3"}
    assert {after.sources[row]: int(after.record_ids[row]) for row in after.rows}.items() <= kept.items()
    assert after.version != before.version, "an agent that holds an index of it looks anew"
    with pytest.raises(BadData, match="or it was deleted before"):
        delete_records(shard, persons=["Jos\u00e9"])


def test_the_table_of_identical_images_goes_because_it_may_name_what_was_deleted(tmp_path: Path, shard: Path) -> None:
    shutil.copy(tmp_path / "scans/ill/P-1/0.png", tmp_path / "scans/ill/P-1/again.png")
    made = _embedded(tmp_path, "b.shard", persons=PersonColumn(level=2))
    listed = tmp_path / "b.shard.duplicates.csv"
    assert "again.png" in listed.read_text()
    with pytest.raises(BadData, match="Instead of a copy that was left out, name the file"):
        delete_records(made, images=["ill/P-1/again.png"])
    assert listed.exists()
    assert delete_records(made, persons=["P-3"])["deleted"] == 2
    assert not listed.exists()


def test_all_that_is_named_goes_or_nothing(shard: Path) -> None:
    whole = _left(shard)
    with pytest.raises(BadData, match="1 of 2 people have no image in shard") as refused:
        delete_records(shard, persons=["P-1", "P-9"])
    assert "P-9" not in str(refused.value)
    with pytest.raises(BadData, match=r"1 of 2 images are not in shard 'a\.shard', .* at place 2; ") as refused:
        delete_records(shard, images=["ill/P-1/0.png", "ill/P-1/7.png"])
    assert "P-1" not in str(refused.value), "a folder may be named after a person"
    with pytest.raises(InvalidSetting, match="without a record"):
        delete_records(shard, persons=PEOPLE)
    with pytest.raises(InvalidSetting, match="name people"):
        delete_records(shard)
    assert _left(shard) == whole
    delete_records(shard, persons=["P-1"], images=["ill/P-3/0.png"])
    assert _left(shard) == whole - {"ill/P-1/0.png", "well/P-1/0.png", "ill/P-3/0.png"}


def traces_of(person: str, shard: Path) -> list[bytes]:
    """All that a shard holds of a person: rows of every array, and names."""
    opened = Shard.open(shard)
    rows = [row for row, name in enumerate(opened.sources) if name.split("/")[1] == person]
    assert opened.persons is not None
    assert opened.image_digests is not None
    arrays = (opened.features, opened.record_ids[:, None], opened.persons, opened.image_digests)
    texts = [person.encode(), *(str(opened.record_ids[row]).encode() for row in rows)]
    return [np.ascontiguousarray(array[row]).tobytes() for array in arrays for row in rows] + texts


def found_in(shard: Path, traces: list[bytes]) -> list[tuple[str, int]]:
    files = {file.name: file.read_bytes() for file in shard.iterdir()}
    return [(name, number) for name, data in files.items() for number, trace in enumerate(traces) if trace in data]


def test_no_byte_of_whoever_left_stays_in_the_files_of_the_shard(tmp_path: Path, shard: Path) -> None:
    (tmp_path / "scans" / "ill" / "P-1" / "1.png").write_bytes(b"no image, and named after a person")
    whole = _embedded(tmp_path, "b.shard", persons=PersonColumn(level=2))
    claim(whole, agent_id="a", journal="1" * 64)
    mark, digest = (whole / MARK_NAME).read_bytes(), Shard.open(whole).job
    traces = [*traces_of("P-1", whole), digest.encode()]
    assert {name for name, _ in found_in(whole, traces)} == {
        "features.npy", "persons.npy", "image_digests.npy", "record_ids.npy", "sources.jsonl", "skipped.jsonl",
        "manifest.json",
    }  # fmt: skip
    modes = {file.stat().st_mode for file in whole.iterdir() if file.name != ".lock"}
    done = delete_records(whole, persons=["P-1"])
    assert not found_in(whole, traces)
    assert any("backups" in sentence for sentence in done["remains"])
    assert (whole / MARK_NAME).read_bytes() == mark, "it still answers for one journal, and looks fresh to no other"
    assert {file.stat().st_mode for file in whole.iterdir() if file.name != ".lock"} == modes
    assert delete_records(whole, images=["ill/P-3/0.png"])["left"] == 3
    assert {file.name for file in whole.iterdir()} >= {"features.2.npy", "sources.2.jsonl"}
    assert _left(whole) == {"well/P-3/0.png", "ill/Jos\u00e9/0.png", "well/Jos\u00e9/0.png"}


def test_records_that_were_only_marked_are_erased_when_nobody_is_named(shard: Path) -> None:
    traces = traces_of("P-3", shard)
    opened = Shard.open(shard)
    opened.delete([int(opened.record_ids[row]) for row, name in enumerate(opened.sources) if "P-3" in name])
    done = delete_records(shard)
    assert (done["deleted"], done["erased"], done["left"]) == (0, 2, 4)
    assert not found_in(shard, traces)
    with pytest.raises(InvalidSetting, match="nothing waits to be erased"):
        delete_records(shard)
    assert opened.labels.shape == (6,), "who has it open goes on with the rows of before"
    with pytest.raises(LabelerError, match="try again"):
        opened.delete(opened.record_ids[:1])


def _forked(work: Callable[[], object]) -> int:
    """Do something in a fork, which ends with 0 unless it fails. Return its process id."""
    if not (child := os.fork()):
        status = 1
        try:
            work()
            status = 0
        finally:
            os._exit(status)
    return child


def _killed_before(step: int, shard: Path) -> bool:
    """Delete P-1 in a process that dies before its so-manieth change to a file of the shard; False if it did not."""
    seen = count(1)

    def die(event: str, arguments: tuple[Any, ...]) -> None:
        changes = event in ("os.rename", "os.remove") or (event == "open" and arguments[2] & os.O_ACCMODE)
        if changes and str(shard) in str(arguments[0]) and next(seen) == step:
            os.kill(os.getpid(), signal.SIGKILL)

    def delete() -> None:
        sys.addaudithook(die)
        delete_records(shard, persons=["P-1"])

    _, ended = os.waitpid(_forked(delete), 0)
    assert os.waitstatus_to_exitcode(ended) in (0, -signal.SIGKILL)
    return ended != 0


@pytest.mark.long
@pytest.mark.process
def test_whoever_kills_it_anywhere_leaves_the_old_shard_or_the_new_one_whole(shard: Path) -> None:
    traces, kept = traces_of("P-1", shard), shard.with_name("kept")
    shutil.copytree(shard, kept)
    whole, step, left = _left(shard), 0, []
    while _killed_before(step := step + 1, shard):
        left.append(_left(shard))
        assert left[-1] in (whole, {name for name in whole if "P-1" not in name}), step
        try:
            delete_records(shard, persons=["P-1"])
        except BadData as error:
            assert "deleted before" in str(error)  # noqa: PT017
        assert not found_in(shard, traces), step
        assert len(_left(shard)) == 4
        shutil.rmtree(shard)
        shutil.copytree(kept, shard)
    assert step > 25
    assert [len(one) for one in left] == sorted((len(one) for one in left), reverse=True)


def test_every_new_file_is_on_the_disk_before_the_manifest_names_it(
    shard: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A power cut keeps of what was written only what was synced."""
    synced: set[str] = set()
    real, before = os.fsync, []

    def noted(handle: int) -> None:
        synced.add(str(Path(f"/proc/self/fd/{handle}").readlink()))
        real(handle)

    def renaming(moment: str) -> None:
        if moment == "rename":
            before.append(set(synced))
            synced.clear()

    monkeypatch.setattr(os, "fsync", noted)
    with listening(renaming):
        delete_records(shard, persons=["P-1"])
    assert before[-1] >= {str(shard), *map(str, shard.glob("*.1.*"))}
    assert len(list(shard.glob("*.1.*"))) == 7
    assert str(shard) in synced, "that the old files are gone is synced too"


@pytest.mark.process
def test_a_reader_never_meets_half_of_an_erasure(tmp_path: Path, shard: Path) -> None:
    names = sorted(_left(shard))[:5]
    child = _forked(lambda: [delete_records(shard, images=[name]) for name in names])
    counts = [6]
    while counts[-1] > 1:
        counts.append(len(Shard.open(shard)))
    assert counts == sorted(counts, reverse=True)
    assert os.waitpid(child, 0)[1] == 0


@pytest.mark.process
def test_a_full_disk_leaves_the_records_deleted_and_says_how_to_erase_them(tmp_path: Path, shard: Path) -> None:
    shard = _embedded(tmp_path, "b.shard", backbone="pixels:32", persons=PersonColumn(level=2))

    def delete() -> None:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (8192, 8192))
        with pytest.raises(StorageFull, match=r"run labeler delete b\.shard without a name"):
            delete_records(shard, persons=["P-1"])

    assert os.waitpid(_forked(delete), 0)[1] == 0
    assert len(_left(shard)) == 4
    assert not list(shard.glob("*.1.*"))
    assert delete_records(shard)["erased"] == 2


def test_people_are_found_with_the_key_of_the_shard_alone(shard: Path, tmp_path: Path) -> None:
    other = tmp_path / "elsewhere" / "site.key"
    with pytest.raises(InvalidSetting, match=r"there is no site's key"):
        delete_records(shard, persons=["P-1"], key=other)
    assert not other.exists(), "looking makes none"
    other.parent.mkdir()
    other.write_bytes(bytes(32))
    other.chmod(0o600)
    with pytest.raises(BadData, match=r"not the key that shard 'a\.shard' was made with"):
        delete_records(shard, persons=["P-1"], key=other)
    nobody = _embedded(tmp_path, "b.shard")
    with pytest.raises(InvalidSetting, match="does not know whose records it holds"):
        delete_records(nobody, persons=["P-1"])
    assert len(_left(shard)) == 6


def test_a_deletion_without_names_that_found_no_mark_says_that_names_are_needed(labeler: Labeler, shard: Path) -> None:
    """An interruption before the first mark leaves a file and deletes nobody."""
    (shard / "features.1.npy").touch()
    told = labeler("delete", shard)
    assert told.code == 0
    assert "give it again with its names" in told.out
    assert len(_left(shard)) == 6


def test_names_come_from_a_file_or_the_standard_input_and_from_no_argument(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Arguments are seen by every user of the machine, and kept by shells."""
    (tmp_path / "names.txt").write_bytes(b"\xef\xbb\xbfP-1\r\n\r\nP 2\n")
    assert lines_of(tmp_path / "names.txt") == ["P-1", "P 2"]
    monkeypatch.setattr(sys, "stdin", io.StringIO("P-3\n"))
    assert lines_of(Path("-")) == ["P-3"]
    for content in (None, b"\xff"):
        if content is not None:
            (tmp_path / "odd.txt").write_bytes(content)
        with pytest.raises(InvalidSetting, match="cannot be read as names"):
            lines_of(tmp_path / "odd.txt")


def test_a_class_name_with_a_comma_stands_in_quotes() -> None:
    assert names_of('"Adenocarcinoma, NOS", normal,5" nail') == ("Adenocarcinoma, NOS", "normal", '5" nail')
    assert names_of(None) is None
    for wrong in ('"Adenocarcinoma, NOS', '"a"b,c', "a\nb", ""):
        with pytest.raises(InvalidSetting, match="double quotes"):
            names_of(wrong)
