"""An agent that embeds its folder of images: once and resumed, silent until then; later changes only when asked."""

from __future__ import annotations

import logging
import os
import shutil
import signal
import subprocess
import sys
import textwrap
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from feature_store import sources
from feature_store.backbones.backbone import PixelBackbone
from feature_store.shard import Shard
from labeler.errors import InvalidSetting, LabelerError, OutputInUse, StorageFull
from labeler.system.files import exclusive
from labeler.tally import QueryBatch
from tests.command_line import Labeler
from tests.feature_store.conftest import write_pictures
from tests.processes import wait_until
from tests.workers.agent_site import Site
from tests.workers.builders import policy_of
from workers.agent.images import LOCK_FILE, ImageFolder, embed_before_answering, first_poll_s
from workers.agent.service import run_agent
from workers.agent.site import SiteConsole
from workers.embedder.shards import delete_records
from workers.homes.journals import backup_home
from workers.party.home import AgentConfig, EmbedSettings, create_agent_home, read_agent_config

SETTINGS = EmbedSettings(max_records=100, backbone="pixels:4", classes=("ill", "well"))
WITHHELD = Path("/proc/self/mem")
"""A regular file of which nobody can read the first byte."""
FILES = [f"{label}/P-{number}/scan.png" for label in ("ill", "well") for number in range(20)]


class Killed(BaseException):
    """The process is gone."""


@pytest.fixture
def scans(tmp_path: Path) -> Path:
    """CLASS/PATIENT/scan: forty images."""
    return write_pictures(tmp_path / "scans", FILES)


@pytest.fixture
def home(tmp_path: Path, scans: Path) -> Path:
    return made(tmp_path / "home", scans)


def made(home: Path, scans: Path, **changes: Any) -> Path:
    fields = {"images": str(scans), "embedding": SETTINGS.model_copy(update=changes)}
    config = AgentConfig(agent_id="a", coordinator_url="http://127.0.0.1:1", shard="records.shard", **fields)
    create_agent_home(home, config, policy_of())
    return home


@pytest.fixture
def passed(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The number of images in each forward pass."""
    counts: list[int] = []
    embed = PixelBackbone.embed_prepared

    def counted(self: PixelBackbone, prepared: NDArray[np.uint8]) -> NDArray[np.float32]:
        counts.append(len(prepared))
        return embed(self, prepared)

    monkeypatch.setattr(PixelBackbone, "embed_prepared", counted)
    return counts


def folder_of(home: Path) -> ImageFolder:
    return ImageFolder(home, read_agent_config(home))


def ids_of(home: Path) -> dict[str, int]:
    shard = Shard.open(home / "records.shard")
    return {shard.sources[row]: int(shard.record_ids[row]) for row in shard.rows}


def die_at(count: int) -> Callable[[str, int, int], None]:
    def progress(stage: str, done: int, total: int) -> None:
        if done >= count:
            raise Killed

    return progress


def test_a_start_embeds_resumes_after_a_kill_and_embeds_each_image_once(
    home: Path, scans: Path, passed: list[int], caplog: pytest.LogCaptureFixture
) -> None:
    desk = SiteConsole(home)
    shown = desk.overview()["images"]
    assert (shown["state"], shown["is_embedded"], shown["files"]) == ("idle", False, 40)
    with pytest.raises(Killed):
        folder_of(home).embed(progress=die_at(32))
    shown = desk.overview()["images"]
    assert (shown["state"], shown["done"]) == ("interrupted", 32)
    write_pictures(scans, ["ill/P-99/came-meanwhile.png"], size=(5, 5))
    (scans / "well/P-7/damaged.png").write_bytes(b"\x89PNG\r\n\x1a\n")
    with caplog.at_level(logging.INFO, logger="labeler.agent"):
        assert embed_before_answering(home, stop=threading.Event())
    assert sum(passed) == 41
    assert [one.__dict__["percent"] for one in caplog.records if hasattr(one, "percent")] == [100]
    assert "some files could not be read as images" in caplog.text
    assert not any(character.isdigit() for one in caplog.records for character in one.getMessage())
    shard = Shard.open(home / "records.shard")
    assert (len(shard), shard.max_records, shard.classes) == (41, 100, ("ill", "well"))
    # It is done once and for all: another start embeds nothing, and a stop in the middle loses nothing.
    assert embed_before_answering(home, stop=threading.Event())
    assert sum(passed) == 41
    names = b"".join(file.read_bytes() for file in home.iterdir() if file.is_file())
    assert b"P-99" not in names
    assert b"scan.png" not in names


def test_a_stop_while_it_embeds_ends_the_start_and_the_next_one_goes_on(home: Path, passed: list[int]) -> None:
    stopped = threading.Event()
    stopped.set()
    run_agent(home, stop=stopped)
    assert not (home / "records.shard").exists()
    assert not (home / "journal.db").exists(), "nothing was begun that anybody could hear of"
    assert folder_of(home).progress() == 32
    folder_of(home).embed()
    assert sum(passed) == 40


def test_a_policy_that_allows_nothing_is_told_before_anything_is_embedded(home: Path, passed: list[int]) -> None:
    (home / "policy.toml").write_text("")
    with pytest.raises(LabelerError, match="allows nothing as it is"):
        run_agent(home, stop=threading.Event())
    assert not passed


def test_an_extra_that_was_installed_since_is_enough_for_what_was_left_out(
    home: Path, scans: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pydicom = pytest.importorskip("pydicom")
    scan = Path(pydicom.__file__).parent / "data" / "test_files" / "CT_small.dcm"
    shutil.copy(scan, scans / "ill/P-1/slice.dcm")
    with monkeypatch.context() as absent:
        absent.setitem(sys.modules, "pydicom", None)
        assert [one["source"] for one in folder_of(home).embed()["skipped"]] == ["ill/P-1/slice.dcm"]
    before = ids_of(home)
    result = folder_of(home).embed()
    assert (result["added"], result["dropped"], result["skipped"]) == (1, 0, [])
    version = Shard.open(home / "records.shard").version
    folder_of(home).embed()
    assert len(ids_of(home)) == len(before) + 1
    assert Shard.open(home / "records.shard").version == version


def test_a_changed_folder_is_told_and_not_used_until_a_person_asks(
    home: Path, scans: Path, passed: list[int], caplog: pytest.LogCaptureFixture
) -> None:
    folder_of(home).embed()
    before, version = ids_of(home), Shard.open(home / "records.shard").version
    write_pictures(scans, ["well/P-7/new.png", "ill/P-3/scan.png"], size=(5, 5))
    (scans / "ill/P-1/scan.png").unlink()
    (scans / "ill/P-2/scan.png").rename(scans / "ill/P-2/moved.png")
    os.utime(scans / "ill/P-4/scan.png")
    passed.clear()
    embed_before_answering(home, stop=threading.Event())
    assert "the folder of images has changed" in caplog.text
    assert not any(character.isdigit() for one in caplog.records for character in one.getMessage())
    shown = SiteConsole(home).overview()["images"]
    wanted = {"files": 40, "new": 2, "changed": 2, "removed": 2, "deleted": 0}
    assert {name: shown[name] for name in wanted} == wanted
    assert Shard.open(home / "records.shard").version == version
    result = folder_of(home).embed()
    assert (result["added"], result["dropped"], sum(passed)) == (2, 2, 2)
    after = ids_of(home)
    gone = {"ill/P-1/scan.png", "ill/P-2/scan.png", "ill/P-3/scan.png"}
    assert after.items() >= {name: one for name, one in before.items() if name not in gone}.items()
    assert after["ill/P-2/moved.png"] == before["ill/P-2/scan.png"]
    assert after["ill/P-3/scan.png"] != before["ill/P-3/scan.png"], "another image is another record"
    assert not folder_of(home).look().has_changed
    assert folder_of(home).embed()["records"] == 40


def test_records_of_removed_files_go_before_new_ones_are_embedded(home: Path, scans: Path) -> None:
    folder_of(home).embed()
    (scans / "ill/P-1/scan.png").unlink()
    write_pictures(scans, [f"well/P-{number}/new.png" for number in range(3)], size=(5, 5))
    with pytest.raises(Killed):
        folder_of(home).embed(progress=die_at(1))
    assert ids_of(home).keys() == set(FILES) - {"ill/P-1/scan.png"}
    folder_of(home).embed()
    assert len(ids_of(home)) == 42


@pytest.mark.parametrize("now", ["as it was", "touched", "moved", "copied"])
def test_a_deleted_record_does_not_come_back_with_the_next_embedding(home: Path, scans: Path, now: str) -> None:
    file = scans / "ill/P-1/scan.png"
    if now == "copied":
        shutil.copy(file, scans / "ill/P-2/copy.png")
    folder_of(home).embed()
    delete_records(home / "records.shard", images=["ill/P-1/scan.png"])
    write_pictures(scans, ["well/P-7/new.png"], size=(5, 5))
    assert SiteConsole(home).overview()["images"]["deleted"] == 1
    if now == "touched":
        os.utime(file)
    elif now == "moved":
        file.rename(scans / "ill/P-2/copy.png")
    elif now == "copied":
        file.unlink()
    with pytest.raises(InvalidSetting, match="they would come back"):
        folder_of(home).embed()
    assert len(ids_of(home)) == 39
    for one in (file, scans / "ill/P-2/copy.png"):
        one.unlink(missing_ok=True)
    folder_of(home).embed()
    assert ids_of(home).keys() == {*FILES, "well/P-7/new.png"} - {"ill/P-1/scan.png"}


def test_a_record_keeps_its_id_while_a_copy_of_its_file_comes_and_goes(home: Path, scans: Path) -> None:
    folder_of(home).embed()
    before = ids_of(home)
    copy = scans / "ill/P-0/a-first.png"
    shutil.copy(scans / "ill/P-1/scan.png", copy)
    folder_of(home).embed()
    assert ids_of(home)["ill/P-0/a-first.png"] == before["ill/P-1/scan.png"]
    copy.unlink()
    folder_of(home).embed()
    assert ids_of(home) == before


def test_a_change_in_place_is_found_though_size_and_time_are_put_back(home: Path, scans: Path) -> None:
    folder_of(home).embed()
    before, file = ids_of(home), scans / "ill/P-1/scan.png"
    status, data = file.stat(), file.read_bytes()
    write_pictures(scans, ["ill/P-1/scan.png"], size=(11, 9))
    file.write_bytes(file.read_bytes()[: len(data)].ljust(len(data), b"\0"))
    os.utime(file, ns=(status.st_atime_ns, status.st_mtime_ns))
    assert (file.stat().st_size, file.stat().st_mtime_ns) == (status.st_size, status.st_mtime_ns)
    assert folder_of(home).look().counts()["changed"] == 1
    folder_of(home).embed()
    after = ids_of(home)
    assert after["ill/P-1/scan.png"] != before["ill/P-1/scan.png"]
    assert not folder_of(home).look().has_changed


@pytest.mark.skipif(not WITHHELD.exists(), reason="needs a file that cannot be read, which Linux has")
@pytest.mark.parametrize("is_one_gone", [False, True])
def test_a_file_that_became_unreadable_changes_nothing_and_a_sentence_says_what_to_do(
    home: Path, scans: Path, is_one_gone: bool
) -> None:
    folder_of(home).embed()
    before, file = ids_of(home), scans / "ill/P-1/scan.png"
    file.rename(scans.parent / "kept.png")
    file.symlink_to(WITHHELD)
    if is_one_gone:
        (scans / "ill/P-2/scan.png").unlink()
    with pytest.raises(InvalidSetting, match=r"Nothing was changed.*! -readable` names.*embed again") as refused:
        folder_of(home).embed()
    assert "P-1" not in str(refused.value)
    assert ids_of(home) == before
    file.unlink()
    (scans.parent / "kept.png").rename(file)
    folder_of(home).embed()
    assert ids_of(home).keys() == before.keys() - ({"ill/P-2/scan.png"} if is_one_gone else set())


def test_a_file_that_cannot_be_read_is_no_image_left_out(
    home: Path, scans: Path, passed: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    opened = sources.open_regular

    def withheld(path: Path) -> Any:
        if path.match("ill/P-1/*"):
            raise OSError(5, "Input/output error")
        return opened(path)

    def embed_with_trouble(words: str = "Nothing was changed") -> None:
        with monkeypatch.context() as trouble:
            trouble.setattr(sources, "open_regular", withheld)
            with pytest.raises(InvalidSetting, match=f"cannot be read now.*{words}") as refused:
                folder_of(home).embed()
        assert "P-1" not in str(refused.value)
        folder_of(home).embed()

    embed_with_trouble()
    assert len(ids_of(home)) == sum(passed) == 40
    before = ids_of(home)
    (scans / "ill/P-1/scan.png").rename(scans / "ill/P-1/moved.png")
    write_pictures(scans, ["well/P-7/new.png"], size=(5, 5))
    embed_with_trouble()
    assert sum(passed) == 41
    assert ids_of(home)["ill/P-1/moved.png"] == before["ill/P-1/scan.png"]
    (scans / "well/P-7/new.png").unlink()
    embed_with_trouble("Records of files that are gone were deleted; nothing else was changed")


def test_a_kill_while_the_working_folder_is_removed_loses_nothing(
    home: Path, passed: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    def killed(folder: Path) -> None:
        (folder / "features").unlink()
        raise Killed

    with monkeypatch.context() as trouble:
        trouble.setattr(shutil, "rmtree", killed)
        with pytest.raises(Killed):
            folder_of(home).embed()
    before = ids_of(home)
    folder_of(home).embed()
    assert (ids_of(home), sum(passed)) == (before, 40)
    assert not list(home.glob("*.writing*"))


def test_a_folder_that_names_a_person_needs_no_utf8(tmp_path: Path, scans: Path) -> None:
    (scans / "ill/P-1").rename(scans / os.fsdecode(b"ill/M\xfcller"))
    home = made(tmp_path / "agent", scans, person_level=2)
    folder_of(home).embed()
    delete_records(home / "records.shard", persons=[os.fsdecode(b"M\xfcller")])
    assert len(ids_of(home)) == 39


def test_what_came_beside_the_images_and_is_none_is_named_though_no_image_changed(home: Path, scans: Path) -> None:
    folder_of(home).embed()
    (scans / "ill/P-1/camera.nef").write_bytes(b"II*\0")
    (scans / "ill/notes.txt").write_text("notes")
    result = folder_of(home).embed()
    assert [one["source"] for one in result["skipped"]] == ["ill/P-1/camera.nef"]
    (scans / "ill/P-1/camera.nef").unlink()
    result = folder_of(home).embed()
    assert (result["skipped"], [one["source"] for one in result["passed_over"]]) == ([], ["ill/notes.txt"])
    assert folder_of(home).embed()["passed_over"] == result["passed_over"]


def test_the_shell_says_what_has_changed_and_embeds_it(home: Path, scans: Path, labeler: Labeler) -> None:
    folder_of(home).embed()
    write_pictures(scans, ["well/P-7/new.png"], size=(5, 5))
    (scans / "ill/P-1/scan.png").unlink()
    (scans / "ill/P-2/broken.png").write_bytes(b"\x89PNG\r\n\x1a\n")
    checked = labeler("agent", "embed", "--home", home, "--check")
    assert checked.out.endswith("scans: 41 files; 2 new, 1 removed.\n")
    done = labeler("agent", "embed", "--home", home)
    assert done.code == 1, "as labeler embed: an image that is skipped is told"
    assert "1 added, 1 removed" in done.out
    assert "skipped ill/P-2/broken.png" in done.err
    again = labeler("agent", "embed", "--home", home, "--json")
    assert (again.code, again.document["added"], len(again.document["skipped"])) == (1, 0, 1)
    assert "nothing has changed" in labeler("agent", "embed", "--home", home, "--check").out


def test_a_click_embeds_in_the_background_and_the_page_shows_how_far_it_is(home: Path, scans: Path) -> None:
    desk = SiteConsole(home)
    desk.embed()
    wait_until(lambda: desk.overview()["images"]["is_embedded"], what="the click")
    wait_until(lambda: desk.overview()["images"]["state"] == "idle", what="its end")
    with exclusive(home / LOCK_FILE, "it"):
        assert desk.overview()["images"]["state"] == "embedding"
        with pytest.raises(OutputInUse, match="another process"):
            desk.embed()
        with pytest.raises(OutputInUse, match="the images of this home"):
            folder_of(home).embed()
    # Trouble is shown in its own words.
    empty(scans)
    wait_until(lambda: "holds no image" in desk.overview()["images"]["problem"], what="a look")
    desk.close()


def test_a_person_and_a_table_of_people_are_kept_and_a_changed_table_is_told(tmp_path: Path, scans: Path) -> None:
    table = tmp_path / "people.csv"
    table.write_text("file,person\n" + "".join(f"{name},{name.split('/')[1]}\n" for name in FILES))
    home = made(tmp_path / "agent", scans, persons=str(table))
    folder_of(home).embed()
    shard = Shard.open(home / "records.shard")
    assert shard.persons is not None
    assert len(np.unique(np.asarray(shard.persons), axis=0)) == 20
    table.write_text(table.read_text().replace("ill/P-1/scan.png,P-1", "ill/P-1/scan.png,P-2"))
    look = folder_of(home).look()
    assert (len(look.new), len(look.changed), look.removed) == (0, 1, 0)
    folder_of(home).embed()
    assert not folder_of(home).look().has_changed


def move_away(scans: Path) -> None:
    scans.rename(scans.with_name("elsewhere"))


def empty(scans: Path) -> None:
    for file in scans.rglob("*.png"):
        file.unlink()


def rename_a_class(scans: Path) -> None:
    (scans / "ill").rename(scans / "sick")


def put_all_into_one_folder(scans: Path) -> None:
    for name in FILES:
        (scans / name).rename(scans / name.replace("/", "-"))
    for label in ("ill", "well"):
        shutil.rmtree(scans / label)


@pytest.mark.parametrize(
    ("trouble", "sentence"),
    [
        (move_away, "there is no folder of images .*whether its disk is mounted"),
        (empty, "holds no image"),
        (rename_a_class, "20 of 40 private images have no label in the class list"),
        (put_all_into_one_folder, "carry no labels"),
    ],
)
def test_a_folder_that_cannot_be_embedded_is_refused_before_anything_is_deleted(
    home: Path, scans: Path, trouble: Callable[[Path], None], sentence: str
) -> None:
    folder_of(home).embed()
    trouble(scans)
    with pytest.raises(LabelerError, match=sentence):
        folder_of(home).embed()
    assert ids_of(home).keys() == set(FILES)
    assert embed_before_answering(home, stop=threading.Event()), "it answers from what is embedded"


def test_a_folder_that_cannot_be_read_does_not_pass_for_an_empty_one(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder_of(home).embed()
    walk = os.scandir

    def denied(path: str) -> Any:
        if str(path).endswith("P-1"):
            raise PermissionError(13, "Permission denied", str(path))
        return walk(path)

    monkeypatch.setattr(os, "scandir", denied)
    with pytest.raises(InvalidSetting, match="a link in it, cannot be read") as refused:
        folder_of(home).embed()
    assert "P-1" not in str(refused.value)
    assert len(ids_of(home)) == 40


def test_a_class_folder_that_is_a_link_keeps_its_records_while_its_disk_is_not_mounted(
    home: Path, scans: Path, tmp_path: Path
) -> None:
    (scans / "well").rename(tmp_path / "disk")
    (scans / "well").symlink_to(tmp_path / "disk")
    folder_of(home).embed()
    before = ids_of(home)
    assert before.keys() == set(FILES)
    (tmp_path / "disk").rename(tmp_path / "not mounted")
    with pytest.raises(InvalidSetting, match="a link in it, cannot be read"):
        folder_of(home).embed()
    assert ids_of(home) == before


def test_other_settings_than_those_it_was_embedded_with_are_refused(home: Path, scans: Path) -> None:
    folder_of(home).embed()
    write_pictures(scans, ["well/P-7/new.png"], size=(5, 5))
    made(home, scans, backbone="pixels:8")
    with pytest.raises(InvalidSetting, match="move the shard away"):
        folder_of(home).embed()
    made(home, scans, max_records=200)
    with pytest.raises(InvalidSetting, match="bound on records"):
        folder_of(home).embed()


def test_a_full_disk_in_the_middle_loses_nothing(
    home: Path, passed: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    synced, calls = os.fsync, 0

    def full(handle: int) -> None:
        nonlocal calls
        calls += 1
        if calls > 8:
            raise OSError(28, "No space left on device")
        synced(handle)

    with monkeypatch.context() as trouble:
        trouble.setattr(os, "fsync", full)
        with pytest.raises(StorageFull, match="make room and give the same command again"):
            folder_of(home).embed()
    done = folder_of(home).progress()
    assert done == 32
    folder_of(home).embed()
    assert sum(passed) == 32 + 8 * 2, "only what was not written yet was computed again"
    assert len(ids_of(home)) == 40


@pytest.mark.parametrize(
    ("elapsed_s", "moment_s"), [(0.0, 5), (3.0, 5), (5.0, 5), (5.01, 10), (90.0, 160), (160.0, 160), (20_000.0, 20_480)]
)
def test_the_first_poll_tells_a_power_of_two_of_the_time_and_no_more(elapsed_s: float, moment_s: float) -> None:
    assert first_poll_s(elapsed_s) == moment_s


def test_nobody_hears_of_an_agent_before_its_images_are_embedded_and_the_public_moment_has_come(
    site: Site, home: Path, scans: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder_of(home).embed()  # of another agent, for what a task has to say
    site.shard = Shard.open(home / "records.shard")
    site.batch = QueryBatch(site.shard.features[:9])
    site.make(shard="records.shard", images=str(scans), embedding=SETTINGS)
    polls: list[int] = []
    embed = ImageFolder.embed

    def watched(self: ImageFolder, **more: Any) -> Any:
        done = embed(self, **more)
        polls.append(len(site.relay.polls))
        return done

    def soon(elapsed_s: float) -> float:
        polls.append(len(site.relay.polls))
        return elapsed_s + 0.01

    monkeypatch.setattr(ImageFolder, "embed", watched)
    monkeypatch.setattr("workers.agent.service.first_poll_s", soon)
    ask = site.ask(method="knn", k=5)
    with site.run():
        assert len(site.shares_of(ask)) == 3
    assert polls == [0, 0]
    facts = site.relay.polls[0].facts
    assert set(facts) == {"backbone_fingerprint", "classes", "dimension"}
    backup_home(site.home, tmp_path / "copy")
    assert (tmp_path / "copy" / "site.key").read_bytes() == (site.home / "site.key").read_bytes()


@pytest.mark.long
@pytest.mark.process
def test_a_real_agent_that_was_killed_while_it_embedded_goes_on_and_answers(
    site: Site, home: Path, scans: Path
) -> None:
    site.make(shard="records.shard", images=str(scans), embedding=SETTINGS)
    code = textwrap.dedent("""
        import os, signal, sys, threading
        from pathlib import Path
        from feature_store.shard_writer import ShardWriter
        from workers.agent.service import run_agent

        append = ShardWriter.append

        def once(writer, *arguments, **more):
            if writer.records:
                os.kill(os.getpid(), signal.SIGKILL)
            append(writer, *arguments, **more)

        ShardWriter.append = once
        run_agent(Path(sys.argv[1]), stop=threading.Event())
    """)
    died = subprocess.run([sys.executable, "-c", code, str(site.home)], timeout=200, check=False)
    assert died.returncode == -signal.SIGKILL
    assert folder_of(site.home).progress() == 32
    assert not site.relay.polls
    command = [sys.executable, "-m", "workers.cli", "agent", "run", "--home", str(site.home)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as agent:
        try:
            wait_until(lambda: site.relay.polls or agent.poll() is not None, what="its first poll")
        finally:
            agent.terminate()
        said = agent.communicate(timeout=200)[0]
    assert agent.returncode == 0, said
    assert '"percent": 100' in said
    assert len(ids_of(site.home)) == 40
