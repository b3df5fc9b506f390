"""Whose images are whose, and images that are there twice: what is kept, what is refused, what is shown to whom."""

from __future__ import annotations

import csv
import json
import shutil
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from feature_store.backbones.backbone import PixelBackbone
from feature_store.embedding import EmbedReport, embed_source
from feature_store.same_images import find_same_images, keep_first
from feature_store.shard import Shard
from feature_store.shard_writer import Gathered
from feature_store.sources import PersonColumn, open_source
from labeler.errors import BadData, IdenticalImages, InvalidSetting, UnsafeStorage
from labeler.system.site_key import PUBLIC_KEY, SITE_KEY_FILE, SiteKey, site_key
from tests.feature_store.conftest import write_pictures

CLASSES = ("cat", "dog")
PEOPLE = ("Ada Ambrose", "Bo Berg", "Cy Crane")


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    """CLASS/PERSON/file: 3 people with 4 images each, 2 of either class."""
    names = [f"{label}/{person}/{number}.png" for label in CLASSES for person in PEOPLE for number in range(2)]
    return write_pictures(tmp_path / "photos", names)


def _embed(photos: Path, out: Path, **changes: Any) -> EmbedReport:
    return embed_source(photos, PixelBackbone(size=4), out, classes=CLASSES, **changes)


def _people(shard: Shard) -> dict[str, tuple[int, ...]]:
    assert shard.persons is not None
    return {name: tuple(row) for name, row in zip(shard.sources, shard.persons.tolist(), strict=True)}


def _write_parquet(photos: Path, path: Path, *, people: list[str | None] | None = None) -> None:
    files = sorted(photos.rglob("*.png"))
    columns: dict[str, Any] = {
        "image": [file.read_bytes() for file in files],
        "label": [file.parts[-3] for file in files],
        "id": [file.relative_to(photos).as_posix() for file in files],
        "patient": people or [file.parts[-2] for file in files],
    }
    pq.write_table(pa.table(columns), path)


# Whose images are whose.


def test_folder_table_and_column_say_the_same_people(photos: Path, tmp_path: Path) -> None:
    names = sorted(path.relative_to(photos).as_posix() for path in photos.rglob("*.png"))
    rows = "".join(f"{name},{name.split('/')[1]}\n" for name in names)
    (tmp_path / "people.csv").write_text(f"file,person\n{rows}somewhere/else.png,Nobody\n")
    _write_parquet(photos, tmp_path / "all.parquet")
    ways: list[tuple[Path, PersonColumn]] = [
        (photos, PersonColumn(level=2)),
        (photos, PersonColumn(table=tmp_path / "people.csv")),
        (tmp_path / "all.parquet", PersonColumn(column="patient")),
    ]
    found = []
    for number, (source, column) in enumerate(ways):
        _embed(source, tmp_path / f"{number}.shard", persons=column)
        found.append(_people(Shard.open(tmp_path / f"{number}.shard")))
    assert found[0] == found[1] == found[2]
    assert len(set(found[0].values())) == 3
    for name, person in found[0].items():
        assert [other for other in found[0] if found[0][other] == person] == [
            other for other in found[0] if other.split("/")[1] == name.split("/")[1]
        ]


@pytest.mark.parametrize("way", ["folder", "table", "column"])
def test_one_name_is_one_person_however_systems_write_it_and_two_names_are_two(
    photos: Path, tmp_path: Path, way: str
) -> None:
    """A letter of one sign or of two, and blanks: one name, or its person would have a second m. Case tells apart."""
    composed, other = "Zo\u00eb", "zo\u00eb"
    written = [composed, "Zoe\u0308", f" {composed}\t", other]
    source = open_source(photos)
    if way == "folder":
        for number, name in enumerate(written):
            shutil.copytree(photos / "cat" / PEOPLE[0], tmp_path / "named" / f"{number}" / name)
        found = PersonColumn(level=2).of(open_source(tmp_path / "named"))
        assert found == [composed] * 6 + [other] * 2
        return
    if way == "table":
        rows = "".join(f'{name},"{written[number % 4]}"\n' for number, name in enumerate(source.names))
        (tmp_path / "people.csv").write_text(f"file,person\n{rows}", encoding="utf-8")
        column = PersonColumn(table=tmp_path / "people.csv")
    else:
        _write_parquet(photos, tmp_path / "all.parquet", people=[written[number % 4] for number in range(12)])
        source, column = open_source(tmp_path / "all.parquet"), PersonColumn(column="patient")
    assert column.of(source) == [composed, composed, composed, other] * 3


def test_people_are_kept_as_digests_under_a_key_of_the_sites_own(photos: Path, tmp_path: Path) -> None:
    table = tmp_path / "people.csv"
    files = sorted(path.relative_to(photos).as_posix() for path in photos.rglob("*.png"))
    numbers = {name: f"MRN-{4711 + place}" for place, name in enumerate(PEOPLE)}
    table.write_text("file,person\n" + "".join(f"{name},{numbers[name.split('/')[1]]}\n" for name in files))
    _embed(photos, tmp_path / "one.shard", persons=PersonColumn(table=table))
    _embed(photos, tmp_path / "two.shard", persons=PersonColumn(table=table))
    _embed(photos, tmp_path / "other" / "three.shard", persons=PersonColumn(table=table))
    one, two, three = (Shard.open(tmp_path / name) for name in ("one.shard", "two.shard", "other/three.shard"))
    # One key beside both shards: the same people. Another site, another key: nobody can compare.
    assert _people(one) == _people(two)
    assert one.site_key == two.site_key != three.site_key
    assert not set(_people(one).values()) & set(_people(three).values())
    assert (tmp_path / SITE_KEY_FILE).stat().st_mode & 0o777 == 0o600
    for file in sorted((tmp_path / "one.shard").iterdir()):
        assert b"MRN-" not in file.read_bytes()
        assert file.stat().st_mode & 0o077 == 0
    secret = (tmp_path / SITE_KEY_FILE).read_bytes()
    assert secret not in b"".join(file.read_bytes() for file in (tmp_path / "one.shard").iterdir())


@pytest.mark.parametrize(
    ("column", "error", "said"),
    [
        ({"level": 1}, InvalidSetting, "is the folder of the class"),
        ({"level": 3}, BadData, "lie less deep"),
        ({"level": 0}, InvalidSetting, "counted from 1"),
        ({"column": "patient"}, InvalidSetting, "names a column of a Parquet file"),
        ({}, InvalidSetting, "in one way"),
        ({"level": 2, "column": "patient"}, InvalidSetting, "in one way"),
        ({"table": Path("missing.csv")}, InvalidSetting, "cannot be read"),
    ],
)
def test_a_way_that_does_not_fit_is_refused(
    photos: Path, tmp_path: Path, column: dict[str, Any], error: type[Exception], said: str
) -> None:
    with pytest.raises(error, match=said):
        _embed(photos, tmp_path / "s", persons=PersonColumn(**column))
    assert not (tmp_path / "s").exists()


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("name,who\n", "needs the headings 'file' and 'person'"),
        ("file,person\ncat/Bo Berg/0.png,secret-one\n", "names nobody for 11 of 12 images"),
        ("file,person\ncat/Bo Berg/0.png,secret-one\ncat/Bo Berg/0.png,secret-two\n", "to two people"),
        ("file,person\ncat/Bo Berg/0.png,\n", "names nobody for 12"),
    ],
)
def test_a_table_that_leaves_an_image_without_a_person_is_refused_and_repeats_no_person(
    photos: Path, tmp_path: Path, text: str, said: str
) -> None:
    (tmp_path / "people.csv").write_text(text)
    with pytest.raises(BadData, match=said) as refused:
        _embed(photos, tmp_path / "s", persons=PersonColumn(table=tmp_path / "people.csv"))
    assert "secret" not in str(refused.value)


def test_an_interrupted_run_does_not_go_on_with_other_people(photos: Path, tmp_path: Path) -> None:
    def stop(done: int, total: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        _embed(photos, tmp_path / "s", persons=PersonColumn(level=2), batch_size=5, progress=stop)
    with pytest.raises(InvalidSetting, match="an interrupted job"):
        _embed(photos, tmp_path / "s")
    report = _embed(photos, tmp_path / "s", persons=PersonColumn(level=2), batch_size=3)
    assert (report.resumed_from, report.records) == (5, 12)
    _embed(photos, tmp_path / "whole", persons=PersonColumn(level=2))
    resumed, whole = Shard.open(tmp_path / "s"), Shard.open(tmp_path / "whole")
    assert _people(resumed) == _people(whole)
    assert _digests(resumed) == _digests(whole)


# Images that are there twice.


def _digests(shard: Shard) -> dict[str, tuple[int, ...]]:
    assert shard.image_digests is not None
    return {name: tuple(row) for name, row in zip(shard.sources, shard.image_digests.tolist(), strict=True)}


def _plant(photos: Path) -> None:
    """The same file three times under two labels and two people, and another as a re-encoded copy."""
    first = photos / "cat" / "Ada Ambrose" / "0.png"
    shutil.copy(first, photos / "dog" / "Bo Berg" / "again.png")
    shutil.copy(first, photos / "dog" / "Bo Berg" / "once more.png")
    Image.open(photos / "cat" / "Cy Crane" / "1.png").save(photos / "cat" / "Cy Crane" / "copy.bmp")


def test_equal_bytes_are_refused_before_anything_is_embedded_and_listed_by_file(photos: Path, tmp_path: Path) -> None:
    _plant(photos)
    steps: list[int] = []
    with pytest.raises(IdenticalImages, match=r"1 private image is there more than once, as 3 files, 1 of") as refused:
        _embed(
            photos,
            tmp_path / "s",
            persons=PersonColumn(level=2),
            duplicates="refuse",
            progress=lambda done, _: steps.append(done),
        )
    assert steps == []
    assert refused.value.groups == (
        (
            ("cat/Ada Ambrose/0.png", "dog/Bo Berg/again.png", "dog/Bo Berg/once more.png"),
            "under different labels and different people",
        ),
    )
    # Its words may travel further than the list: no file, no label, no person.
    assert not any(word in str(refused.value) for word in ("Ada", "png", "cat/", "dog", "Berg"))
    assert not (tmp_path / "s").exists()


def test_equal_features_are_refused_at_the_end_and_another_choice_computes_nothing_again(
    photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    Image.open(photos / "cat" / "Cy Crane" / "1.png").save(photos / "cat" / "Cy Crane" / "copy.bmp")
    with pytest.raises(IdenticalImages, match="nothing is left to be computed") as refused:
        _embed(photos, tmp_path / "s", duplicates="refuse")
    assert refused.value.groups == ((("cat/Cy Crane/1.png", "cat/Cy Crane/copy.bmp"), ""),)
    monkeypatch.setattr(PixelBackbone, "embed_prepared", None)
    report = _embed(photos, tmp_path / "s")
    assert (report.records, report.resumed_from, report.same_images) == (12, 13, refused.value.groups)
    assert "cat/Cy Crane/copy.bmp" not in Shard.open(tmp_path / "s").sources


def test_the_first_of_equal_images_is_kept_and_none_of_those_that_contradict_each_other(
    photos: Path, tmp_path: Path
) -> None:
    _plant(photos)
    # Begins before the others: only its contradiction puts the planted one first.
    shutil.copy(photos / "cat" / "Ada Ambrose" / "1.png", photos / "cat" / "Ada Ambrose" / "1 again.png")
    first = _embed(photos, tmp_path / "first")
    every = _embed(photos, tmp_path / "every", duplicates="keep-all", batch_size=2)
    assert (first.records, first.copies, first.contradictions, first.shared) == (11, 2, 3, 0)
    assert (every.records, every.copies, every.contradictions, every.listed) == (16, 0, 0, None)
    assert first.same_images == every.same_images
    assert [contradiction for _, contradiction in every.same_images] == ["under different labels", "", ""]
    kept = Shard.open(tmp_path / "first")
    assert set(Shard.open(tmp_path / "every").sources) - set(kept.sources) == {
        "cat/Ada Ambrose/0.png", "dog/Bo Berg/again.png", "dog/Bo Berg/once more.png",
        "cat/Ada Ambrose/1.png", "cat/Cy Crane/copy.bmp",
    }  # fmt: skip
    assert _digests(kept).keys() == set(kept.sources)
    assert find_same_images(kept) == ()
    # Each row kept its own label and digest.
    for name, place in zip(kept.sources, np.asarray(kept.labels), strict=True):
        assert CLASSES[place] == name.split("/")[0]
    every_digest = _digests(Shard.open(tmp_path / "every"))
    assert all(every_digest[name] == digest for name, digest in _digests(kept).items())


def test_the_table_beside_the_shard_says_what_became_of_each_and_is_its_owners_alone(
    photos: Path, tmp_path: Path
) -> None:
    _plant(photos)
    report = _embed(photos, tmp_path / "a.shard", persons=PersonColumn(level=2))
    # The image of two people stays with both, once with each.
    assert (report.records, report.copies, report.contradictions, report.shared) == (13, 2, 0, 1)
    listed = tmp_path / "a.shard.duplicates.csv"
    assert report.listed == listed
    assert listed.stat().st_mode & 0o777 == 0o600
    both = "under different labels and different people"
    assert list(csv.reader(listed.read_text().splitlines())) == [
        ["image", "file", "kept", "contradiction"],
        ["1", "cat/Ada Ambrose/0.png", "yes", both],
        ["1", "dog/Bo Berg/again.png", "yes", both],
        ["1", "dog/Bo Berg/once more.png", "no", both],
        ["2", "cat/Cy Crane/1.png", "yes", ""],
        ["2", "cat/Cy Crane/copy.bmp", "no", ""],
    ]
    again = _embed(photos, tmp_path / "a.shard", persons=PersonColumn(level=2))
    assert (again.records, again.listed) == (13, listed)
    shutil.rmtree(tmp_path / "a.shard")
    for file in (*photos.rglob("again.png"), *photos.rglob("once more.png"), *photos.rglob("copy.bmp")):
        file.unlink()
    assert _embed(photos, tmp_path / "a.shard", persons=PersonColumn(level=2)).listed is None
    assert not listed.exists()


@dataclass(frozen=True)
class File:
    """A file of a site: which picture it shows, as which bytes, under which label and whose."""

    picture: int
    encoding: int
    label: int
    person: int


def _stored(files: list[File], *, knows_persons: bool) -> Counter[tuple[int, ...]]:
    """The records of a site as a multiset of (picture, label, person); ids are random and say nothing."""
    key = SiteKey(b"k" * 32)
    records = Gathered(
        np.array([[one.picture + 1, 7] for one in files], dtype=np.int16).reshape(len(files), 2),
        np.array([one.label for one in files], dtype=np.int16),
        key.digests("person", [bytes([one.person]) for one in files]) if knows_persons else None,
        key.digests("image", [bytes([one.picture, one.encoding]) for one in files]),
    )
    kept = keep_first(records)
    found = [(one.picture, one.label, one.person) for one, keep in zip(files, kept.keep, strict=True) if keep]
    assert len(files) - len(found) == kept.copies + kept.contradictions
    return Counter(record if knows_persons else record[:2] for record in found)


files = st.builds(File, st.integers(0, 3), st.integers(0, 1), st.integers(0, 2), st.integers(0, 3))


@given(st.lists(files, max_size=12), files, st.integers(0, 12), st.booleans())
def test_worlds_that_differ_in_one_file_differ_in_one_record_at_most(
    others: list[File], one: File, place: int, knows_persons: bool
) -> None:
    without = _stored(others, knows_persons=knows_persons)
    with_it = _stored([*others[:place], one, *others[place:]], knows_persons=knows_persons)
    assert ((with_it - without) + (without - with_it)).total() <= 1


@given(st.lists(files, max_size=14), st.integers(0, 3))
def test_a_person_who_leaves_changes_no_record_of_anybody_else(world: list[File], person: int) -> None:
    """Against the definition: what of a person's files becomes records is computed from their files alone."""
    with_them = _stored(world, knows_persons=True)
    without = _stored([one for one in world if one.person != person], knows_persons=True)
    assert with_them - without == Counter({record: n for record, n in with_them.items() if record[2] == person})
    assert without - with_them == Counter()
    pictures = {(one.person, one.picture) for one in world}
    expected = Counter(
        (picture, labels.pop(), whose)
        for whose, picture in pictures
        if len(labels := {one.label for one in world if (one.person, one.picture) == (whose, picture)}) == 1
    )
    assert with_them == expected


def test_a_finished_shard_is_asked_the_same_question(photos: Path, tmp_path: Path) -> None:
    _plant(photos)
    _embed(photos, tmp_path / "s", duplicates="keep-all")
    with pytest.raises(IdenticalImages, match="exists already and holds them all"):
        _embed(photos, tmp_path / "s", duplicates="refuse")
    with pytest.raises(InvalidSetting, match="delete it first"):
        _embed(photos, tmp_path / "s")
    again = _embed(photos, tmp_path / "s", duplicates="keep-all")
    assert again.resumed_from == 15
    assert [set(names) for names, _ in again.same_images] == [
        {"cat/Ada Ambrose/0.png", "dog/Bo Berg/again.png", "dog/Bo Berg/once more.png"},
        {"cat/Cy Crane/1.png", "cat/Cy Crane/copy.bmp"},
    ]


def test_public_images_are_all_kept_and_only_reported(photos: Path, tmp_path: Path) -> None:
    _plant(photos)
    report = _embed(photos, tmp_path / "s", public=True)
    assert report.records == 15
    assert len(report.same_images) == 2
    assert not (tmp_path / SITE_KEY_FILE).exists()
    assert not (tmp_path / "s" / "persons.npy").exists()
    assert Shard.open(tmp_path / "s").site_key == PUBLIC_KEY.name
    for changes in ({"duplicates": "refuse"}, {"duplicates": "keep-first"}, {"persons": PersonColumn(level=2)}):
        with pytest.raises(InvalidSetting, match="of public images"):
            _embed(photos, tmp_path / "t", public=True, **changes)


@given(
    st.lists(st.integers(0, 5), min_size=0, max_size=30),
    st.lists(st.integers(0, 5), min_size=30, max_size=30),
    st.lists(st.integers(0, 1), min_size=30, max_size=30),
)
def test_equal_bytes_and_equal_features_make_one_image_together(
    files: list[int], pictures: list[int], labels: list[int]
) -> None:
    """Against the closure of the two relations, computed pair by pair."""
    count = len(files)
    key = SiteKey(b"k" * 32)
    records = Gathered(
        np.array([[picture + 1, 7] for picture in pictures[:count]], dtype=np.int16).reshape(count, 2),
        np.array(labels[:count], dtype=np.int16),
        None,
        key.digests("image", [bytes([file]) for file in files]),
    )
    groups = {row: {row} for row in range(count)}
    for one in range(count):
        for other in range(count):
            if files[one] == files[other] or pictures[one] == pictures[other]:
                joined = groups[one] | groups[other]
                for row in joined:
                    groups[row] = joined
    expected = {frozenset(group) for group in groups.values() if len(group) > 1}
    found = find_same_images(records)
    assert {frozenset(same.rows) for same in found} == expected
    assert [same.labels_differ for same in found] == sorted((same.labels_differ for same in found), reverse=True)
    for same in found:
        assert same.labels_differ == (len({labels[row] for row in same.rows}) > 1)


# The site's key.


def test_a_key_is_made_once_and_refused_where_others_can_read_it(tmp_path: Path) -> None:
    path = tmp_path / "home" / "site.key"
    one, again = site_key(path), site_key(path)
    assert one.name == again.name
    assert one.digests("person", [b"a"]).tolist() == again.digests("person", [b"a"]).tolist()
    assert path.stat().st_mode & 0o777 == 0o600
    assert [file.name for file in path.parent.iterdir()] == ["site.key"]
    path.chmod(0o640)
    with pytest.raises(UnsafeStorage, match="chmod 600"):
        site_key(path)
    path.chmod(0o600)
    path.write_bytes(b"short")
    with pytest.raises(BadData, match="holds no key"):
        site_key(path)


def test_a_key_does_not_print_and_kinds_of_digests_never_meet() -> None:
    key = SiteKey(b"\x07" * 32)
    assert "07" not in repr(key)
    with pytest.raises(TypeError):
        json.dumps(key)
    assert key.digests("person", [b"x"]).tolist() != key.digests("image", [b"x"]).tolist()
    whole, parts = key.digest("image", [b"abcdef"]), key.digest("image", [b"ab", b"", b"cdef"])
    assert whole == parts


def test_a_table_of_persons_finds_images_however_their_letters_are_composed(tmp_path: Path) -> None:
    composed, decomposed = "m\u00e9lanome", "me\u0301lanome"
    photos = write_pictures(tmp_path / "photos", [f"{label}/{decomposed} {n}.png" for label in CLASSES for n in (1, 2)])
    rows = "".join(f"{label}/{composed} {n}.png,{label}\n" for label in CLASSES for n in (1, 2))
    (tmp_path / "people.csv").write_text("file,person\n" + rows, encoding="utf-8")
    images = open_source(photos)
    assert PersonColumn(table=tmp_path / "people.csv").of(images) == [name.split("/")[0] for name in images.names]
    # Where only the composition tells two images apart, a row is about the one that it names letter for letter.
    write_pictures(photos, [f"{CLASSES[0]}/{composed} 1.png"])
    with pytest.raises(BadData, match="names nobody for 1 of 5 images"):
        PersonColumn(table=tmp_path / "people.csv").of(open_source(photos))


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("file,person\ncat/0.png,Doe, John\ncat/1.png,Doe, Jane\n", "line 2: 3 values for 2 headings.*quotes"),
        ("file,person,person\ncat/0.png,p,q\n", "'person' twice"),
        ("file;person\ncat/0.png;p\n", "separated by semicolons; save it with commas"),
        ("file\tperson\ncat/0.png\tp\n", "separated by tabs; save it with commas"),
    ],
)
def test_a_table_of_persons_never_takes_a_part_of_a_name_for_the_person(
    photos: Path, tmp_path: Path, text: str, said: str
) -> None:
    """Two people of one family name were one person, whom the person level then held for together."""
    (tmp_path / "people.csv").write_text(text)
    with pytest.raises(BadData, match=said) as refused:
        PersonColumn(table=tmp_path / "people.csv").of(open_source(photos))
    assert "Doe" not in str(refused.value)


def test_a_table_may_write_paths_as_windows_does(photos: Path, tmp_path: Path) -> None:
    images = open_source(photos)
    written = [name.replace("/", "\\") if number % 2 else f"./{name}" for number, name in enumerate(images.names)]
    expected = [f"p{number}" for number in range(len(images.names))]
    rows = (f"{name},{person}\n" for name, person in zip(written, expected, strict=True))
    (tmp_path / "people.csv").write_text("file,person\n" + "".join(rows))
    assert PersonColumn(table=tmp_path / "people.csv").of(images) == expected
