"""`labeler delete`: people and images go from a shard and its bytes, all that is named or nothing; nobody is named."""

from __future__ import annotations

import io
import os
import resource
import shutil
import signal
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from feature_store.shard import MARK_NAME, Shard, claim
from feature_store.sources import PersonColumn
from labeler.errors import BadData, InvalidSetting, LabelerError, StorageFull
from labeler.system.faults import listening
from workers.embedder.shards import delete_records, embed_images, lines_of

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


def _killed_before(step: int, shard: Path) -> bool:
    """Delete P-1 in a process that dies before its so-manieth change to a file of the shard; False if it did not."""
    if not (child := os.fork()):
        seen = 0

        def die(event: str, arguments: tuple[Any, ...]) -> None:
            nonlocal seen
            changes = event in ("os.rename", "os.remove") or (event == "open" and arguments[2] & os.O_ACCMODE)
            if changes and str(shard) in str(arguments[0]):
                seen += 1
                if seen == step:
                    os.kill(os.getpid(), signal.SIGKILL)

        sys.addaudithook(die)
        status = 1
        try:
            delete_records(shard, persons=["P-1"])
            status = 0
        finally:
            os._exit(status)
    _, ended = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(ended) in (0, -signal.SIGKILL)
    return ended != 0


@pytest.mark.long
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


def test_a_reader_never_meets_half_of_an_erasure(tmp_path: Path, shard: Path) -> None:
    names = sorted(_left(shard))[:5]
    if not (child := os.fork()):
        status = 1
        try:
            for name in names:
                delete_records(shard, images=[name])
            status = 0
        finally:
            os._exit(status)
    counts = [6]
    while counts[-1] > 1:
        counts.append(len(Shard.open(shard)))
    assert counts == sorted(counts, reverse=True)
    assert os.waitpid(child, 0)[1] == 0


def test_a_full_disk_leaves_the_records_deleted_and_says_how_to_erase_them(tmp_path: Path, shard: Path) -> None:
    shard = _embedded(tmp_path, "b.shard", backbone="pixels:32", persons=PersonColumn(level=2))
    if not (child := os.fork()):
        status = 1
        try:
            signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
            resource.setrlimit(resource.RLIMIT_FSIZE, (8192, 8192))
            delete_records(shard, persons=["P-1"])
        except StorageFull as error:
            status = 0 if "run labeler delete b.shard without a name" in str(error) else 1
        finally:
            os._exit(status)
    assert os.waitpid(child, 0)[1] == 0
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
