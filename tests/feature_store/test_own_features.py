"""Features that a party computed itself: every file gives the same shard, bad ones a sentence, and a probe tells."""

from __future__ import annotations

import json
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from numpy.typing import NDArray

import labeler
from feature_store.own_features import FeatureSource, read_features, refuse_private_probe
from feature_store.rows import PROBE_SLACK, probe_rows, probe_text, quantize, refuse_other_probe
from feature_store.shard import OF_OTHER_RECORDS, Shard, check_compatible, check_served
from feature_store.sources import PersonColumn
from labeler.errors import BadData, InvalidSetting, LabelerError, MixedShards
from labeler.untrusted import MOST_PROBE_NUMBERS
from tests.command_line import labeler as command

__all__ = ["command"]

CLASSES = ("cold", "flu")
WIDTH = 12
DECLARED: dict[str, Any] = {"backbone_name": "our-net", "fitted_on": "public"}


def rows(count: int, seed: int = 0) -> NDArray[np.float64]:
    """Two classes far apart, one after the other."""
    rng = np.random.default_rng(seed)
    centers = np.random.default_rng(7).normal(size=(2, WIDTH))
    return centers[np.arange(count) % 2] + 0.3 * rng.normal(size=(count, WIDTH))


PROBE = np.random.default_rng(99).normal(size=(5, WIDTH))
NAMES = [CLASSES[row % 2] for row in range(20)]
IDS = [f"scan {row}" for row in range(20)]
PERSONS = [f"patient {row // 2}" for row in range(20)]


def as_npz(folder: Path, x: NDArray[np.float64]) -> dict[str, Any]:
    np.savez(folder / "x.npz", features=x, labels=np.array(NAMES), ids=np.array(IDS), persons=np.array(PERSONS))
    return {"features": folder / "x.npz"}


def as_npy(folder: Path, x: NDArray[np.float64]) -> dict[str, Any]:
    np.save(folder / "x.npy", x)
    np.save(folder / "labels.npy", np.array([row % 2 for row in range(20)]))
    (folder / "ids.txt").write_text("\n".join(IDS))
    (folder / "persons.csv").write_text(
        "file,person\n" + "".join(f"{one},{who}\n" for one, who in zip(IDS, PERSONS, strict=True))
    )
    return {
        "features": folder / "x.npy",
        "labels": folder / "labels.npy",
        "ids": str(folder / "ids.txt"),
        "persons": PersonColumn(table=folder / "persons.csv"),
    }


def as_parquet(folder: Path, x: NDArray[np.float64]) -> dict[str, Any]:
    pq.write_table(
        pa.table({"features": x.tolist(), "diagnosis": NAMES, "id": IDS, "person": PERSONS}), folder / "x.parquet"
    )
    return {"features": folder / "x.parquet", "labels": "diagnosis"}


def as_hdf5(folder: Path, x: NDArray[np.float64]) -> dict[str, Any]:
    with h5py.File(folder / "x.h5", "w") as file:
        for name, values in (("features", x), ("labels", NAMES), ("ids", IDS), ("persons", PERSONS)):
            file[name] = values
    return {"features": folder / "x.h5"}


def in_memory(_: Path, x: NDArray[np.float64]) -> dict[str, Any]:
    return {"features": x, "labels": NAMES, "ids": IDS, "persons": PERSONS}


@pytest.mark.parametrize("written", [as_npz, as_npy, as_parquet, as_hdf5, in_memory])
def test_every_kind_of_file_gives_the_same_records(written: Callable[..., dict[str, Any]], tmp_path: Path) -> None:
    x = rows(20)
    given = written(tmp_path, x)
    made = labeler.embed(**given, **DECLARED, probe=PROBE, out=tmp_path / "a.shard", classes=CLASSES)
    shard = Shard.open(made.path)
    assert (made.records, made.classes, shard.knows_persons) == (20, CLASSES, True)
    found = {
        source: (row.tobytes(), int(label))
        for source, row, label in zip(shard.sources, np.asarray(shard.features), np.asarray(shard.labels), strict=True)
    }
    expected = zip(IDS, quantize(x.astype(np.float32)), range(20), strict=True)
    assert found == {one: (row.tobytes(), number % 2) for one, row, number in expected}
    assert len(np.unique(np.asarray(shard.persons), axis=0)) == 10
    manifest = (made.path / "manifest.json").read_text()
    assert "patient" not in manifest
    assert "scan" not in manifest
    np.testing.assert_array_equal(probe_rows(shard.probe or "", WIDTH), quantize(PROBE.astype(np.float32)))
    # The same call again changes nothing; changed features under the same ids are another source.
    assert labeler.embed(**given, **DECLARED, probe=PROBE, out=tmp_path / "a.shard", classes=CLASSES).records == 20
    changed = written(tmp_path, rows(20, seed=1))
    with pytest.raises(InvalidSetting, match="made from another source"):
        labeler.embed(**changed, **DECLARED, probe=PROBE, out=tmp_path / "a.shard", classes=CLASSES)


def _with(row: int, value: float) -> NDArray[np.float64]:
    x = rows(20)
    x[row] = value
    return x


@pytest.mark.parametrize(
    ("wrong", "sentence"),
    [
        ({"features": _with(3, np.nan)}, "1 of 20 rows of 'features' are zero or not finite, the first of them row 3"),
        ({"features": _with(4, 0.0)}, "the first of them row 4"),
        ({"features": rows(20)[0]}, r"numbers of shape \(n, width\); found float64 of \(12,\)"),
        ({"features": np.ones((2, MOST_PROBE_NUMBERS + 1))}, "reduce them first"),
        ({"labels": None}, "private features need labels"),
        ({"labels": ["cold"] * 19 + [""]}, "1 of 20 private images have no label in the class list"),
        ({"labels": NAMES[1:]}, "20 rows of features and 19 labels"),
        ({"labels": [0.5] * 20}, "whole numbers; found a fraction"),
        ({"labels": np.eye(20, 2)}, "20 rows of features and 20 labels; give one for each"),
        ({"labels": np.array([row % 2 - (row == 7) * 2 for row in range(20)])}, "1 of 20 private images have no label"),
        ({"ids": [*IDS[:19], IDS[2]]}, "row 19 has the id of row 2"),
        ({"persons": [*PERSONS[:19], ""]}, "names nobody for 1 of 20"),
        ({"probe": None}, r"the features of the published probe \(--probe\)"),
        ({"probe": PROBE[:, 1:]}, r"the probe has features of shape \(5, 11\), and the features have 12 entries"),
        ({"probe": rows(20)[2:4]}, "2 rows of the probe are private records"),
        ({"probe": np.ones((MOST_PROBE_NUMBERS // WIDTH + 1, WIDTH))}, "publish fewer"),
        ({"fitted_on": None}, "--fitted-on"),
        ({"fitted_on": "voting-records"}, "fitted on records that vote void the guarantee"),
        ({"backbone_name": "a\nb"}, "name the backbone"),
        ({"classes": None}, "name the public class list"),
        ({"features": "x.npz"}, "there is no file 'x.npz'"),
        ({"features": "x.txt"}, "features come as .npz"),
    ],
)
def test_bad_input_gets_one_sentence_and_leaves_no_shard(wrong: dict[str, Any], sentence: str, tmp_path: Path) -> None:
    given = in_memory(tmp_path, rows(20)) | DECLARED | {"probe": PROBE, "classes": CLASSES} | wrong
    with pytest.raises(LabelerError, match=sentence) as refused:
        labeler.embed(**given, out=tmp_path / "a.shard")
    assert "patient" not in str(refused.value)
    assert not (tmp_path / "a.shard").exists()


@pytest.mark.parametrize("name", ["x.npz", "x.npy", "x.parquet", "x.h5"])
def test_a_damaged_file_gets_a_sentence(name: str, tmp_path: Path) -> None:
    given = {"x.npz": as_npz, "x.npy": as_npy, "x.parquet": as_parquet, "x.h5": as_hdf5}[name](tmp_path, rows(20))
    whole = (tmp_path / name).read_bytes()
    for damaged in (whole[: len(whole) // 2], whole[:10], b"", b"no such thing" * 10):
        (tmp_path / name).write_bytes(damaged)
        with pytest.raises(LabelerError, match=rf"'{name}'"):
            labeler.embed(**given, **DECLARED, probe=PROBE, out=tmp_path / "a.shard", classes=CLASSES)


def test_features_that_are_there_twice_are_left_out_or_refused_like_images(tmp_path: Path) -> None:
    x = rows(20)
    x[5], x[7] = 3 * x[4], 2 * x[9]  # of two classes, and of one
    options: dict[str, Any] = (
        in_memory(tmp_path, x) | {"persons": None} | DECLARED | {"probe": PROBE, "classes": CLASSES}
    )
    with pytest.raises(LabelerError, match="2 private images are there more than once") as refused:
        labeler.embed(**options, out=tmp_path / "a.shard", duplicates="refuse")
    assert refused.value.groups == ((("scan 4", "scan 5"), "under different labels"), (("scan 7", "scan 9"), ""))
    made = labeler.embed(**options, out=tmp_path / "b.shard")
    assert (made.records, made.copies, made.contradictions) == (17, 1, 2)
    assert made.listed == tmp_path / "b.shard.duplicates.csv"


def federation(
    tmp_path: Path, probes: tuple[NDArray[np.float64], ...], **declared: Any
) -> list[labeler.EmbeddedImages]:
    """Two sites and the public texts, in this order, each with its own features of the probe."""
    said = DECLARED | declared
    return [
        labeler.embed(
            features=rows(60, seed=seed),
            labels=[CLASSES[row % 2] for row in range(60)],
            classes=CLASSES,
            out=tmp_path / f"{name}.shard",
            probe=probe,
            public=name == "public",
            **said,
        )
        for seed, (name, probe) in enumerate(zip(("site-a", "site-b", "public"), probes, strict=True))
    ]


def turned(units: int) -> NDArray[np.float64]:
    """The probe as a backbone gives it that is so many grid units away in one number."""
    moved = quantize(PROBE).astype(np.float64)
    moved[3, 2] += units
    return moved


@pytest.mark.process
def test_the_same_backbone_on_another_computer_runs_and_its_student_labels_no_other_features(tmp_path: Path) -> None:
    base = quantize(PROBE).astype(np.float64)
    a, b, public = federation(tmp_path, (turned(PROBE_SLACK), base, base))
    job = labeler.run([a, b], public, tmp_path / "job", epsilon=5, colluding_agents=0, quiet=True)
    assert job.labels("arrow")["label"].to_pylist()[:2] == [0, 1]
    odd = labeler.embed(
        features=rows(30, seed=9), out=tmp_path / "odd.shard", probe=PROBE[:, ::-1], public=True, **DECLARED
    )
    student = labeler.load_student(job.path / "student.safetensors")
    assert len(student.label(public, "arrow", quiet=True)) == 60
    with pytest.raises(MixedShards, match=r"'odd\.shard' embedded the probe otherwise than the model's job"):
        student.label(odd, quiet=True)


@pytest.mark.process
def test_a_student_of_own_features_labels_arrays_and_files_of_them_and_says_by_which_command(
    command: Callable[..., Any], tmp_path: Path
) -> None:
    a, b, public = federation(tmp_path, (PROBE, PROBE, PROBE))
    job = labeler.run([a, b], public, tmp_path / "job", epsilon=5, colluding_agents=0, quiet=True)
    model = job.path / "student.safetensors"
    student, new = labeler.load_student(model), rows(20, seed=5)
    labels = student.label(new, "arrow", quiet=True)
    assert labels["label"].to_pylist() == [0, 1] * 10
    assert labels["source"].to_pylist()[:2] == ["row#0", "row#1"]
    assert job.predict(new).tolist() == [0, 1] * 10
    for write in (as_npz, as_npy, as_parquet, as_hdf5):
        (tmp_path / write.__name__).mkdir()
        file = write(tmp_path / write.__name__, new)["features"]
        assert student.label(file, "arrow", quiet=True)["label"].to_pylist() == [0, 1] * 10
        assert job.predict(file).tolist() == [0, 1] * 10
        told = command("predict", model, file, "--out", tmp_path / f"{write.__name__}.csv")
        assert told.code == 0, told.err
        assert "20 images labeled" in told.out
    np.savez(tmp_path / "true.npz", features=new, labels=np.array(NAMES))
    assert student.scores(tmp_path / "true.npz")["accuracy"] == 1.0
    use = "labeler predict student.safetensors new.npz --out new-labels.parquet"
    assert use in (job.path / "report.html").read_text()
    assert (
        f"labeler predict {job.path}/student-pooled.safetensors new.npz"
        in command("student", job.path, "--kind", "pooled").out
    )


@pytest.mark.process
def test_features_that_a_student_cannot_read_are_refused_with_what_it_reads(tmp_path: Path) -> None:
    a, b, public = federation(tmp_path, (PROBE, PROBE, PROBE))
    job = labeler.run([a, b], public, tmp_path / "job", epsilon=5, colluding_agents=0, quiet=True)
    student = labeler.load_student(job.path / "student.safetensors")
    with pytest.raises(MixedShards, match="features of 12 numbers, and these have 7"):
        student.label(rows(4)[:, :7], quiet=True)
    with pytest.raises(BadData, match="numbers of shape"):
        student.label(np.zeros((2, 4, 4, 3)), quiet=True)
    with pytest.raises(BadData, match="zero or not finite"):
        student.label(np.full((2, WIDTH), np.nan), quiet=True)
    (tmp_path / "pictures").mkdir()
    with pytest.raises(InvalidSetting, match=r"name a file of them \(\.npz, \.npy"):
        student.label(tmp_path / "pictures", quiet=True)
    np.savez(tmp_path / "x.npz", features=rows(4))
    with pytest.raises(InvalidSetting, match="leave the backbone"):
        student.label(tmp_path / "x.npz", backbone="pixels:8", quiet=True)


@pytest.mark.parametrize("place", [0, 1, 2])
def test_a_job_with_another_backbone_of_the_same_name_is_refused_before_anything_is_paid_for(
    place: int, tmp_path: Path
) -> None:
    far = [PROBE[:, ::-1] if number == place else PROBE for number in range(3)]
    a, b, public = federation(tmp_path, tuple(far))
    with pytest.raises(MixedShards, match=r"embedded the probe otherwise than shard 'site-a\.shard'") as refused:
        labeler.run([a, b], public, tmp_path / "job", epsilon=5, colluding_agents=0, quiet=True)
    apart = np.abs(quantize(PROBE).astype(int) - quantize(PROBE[:, ::-1].copy())).max()
    assert str(apart) not in str(refused.value)
    assert ("site-b" if place < 2 else "public") in str(refused.value)
    assert not (tmp_path / "job").exists() or not list((tmp_path / "job").glob("*.parquet"))


@pytest.mark.process
def test_an_evaluation_at_sites_with_another_backbone_of_the_same_name_is_refused_before_its_folder_is_begun(
    tmp_path: Path,
) -> None:
    a, b, public = federation(tmp_path, (PROBE, PROBE, PROBE))
    job = labeler.run([a, b], public, tmp_path / "job", epsilon=5, colluding_agents=0, quiet=True)
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    far = federation(elsewhere, (PROBE[:, ::-1],) * 3)[:2]
    with pytest.raises(MixedShards, match="this site embedded the probe"):
        job.evaluate([one.path for one in far], tmp_path / "measured", epsilon=1.0)
    assert not (tmp_path / "measured" / ".job" / "journal.db").exists()


def test_two_sites_that_are_near_a_third_are_compared_with_each_other(tmp_path: Path) -> None:
    probes = (PROBE, turned(PROBE_SLACK), turned(-PROBE_SLACK))
    shards = [Shard.open(one.path) for one in federation(tmp_path, probes)]
    check_compatible(shards[:2])
    check_compatible(shards[::2])
    with pytest.raises(MixedShards, match=r"'public\.shard' embedded the probe otherwise than shard 'site-b"):
        check_compatible(shards)


def test_a_refusal_over_two_probes_says_that_they_differ_and_nothing_about_how() -> None:
    """The same sentence for every probe that differs: by one number or all, by three units or thousands."""
    ours, said = probe_text(PROBE), set()
    for other in (turned(40), turned(-700), PROBE[:, ::-1], -PROBE):
        with pytest.raises(BadData) as refused:
            refuse_other_probe(ours, probe_text(other), PROBE.shape[1], first_name="one", other_name="the other")
        said.add(str(refused.value))
    assert len(said) == 1


def test_rounding_of_another_computer_stays_within_the_slack() -> None:
    """Matrix products in float32 and in float64, over 200 columns: what two machines make of one backbone."""
    rng = np.random.default_rng(3)
    x, weights = rng.normal(size=(40, 200)), rng.normal(size=(200, 64))
    exact, short = x @ weights, x.astype(np.float32) @ weights.astype(np.float32)
    refuse_other_probe(probe_text(exact), probe_text(short), 64, first_name="a", other_name="b")
    with pytest.raises(BadData, match="b embedded no probe"):
        refuse_other_probe(probe_text(exact), "", 64, first_name="a", other_name="b")
    with pytest.raises(BadData, match="a probe of 40 rows and b one of 39"):
        refuse_other_probe(probe_text(exact), probe_text(short[1:]), 64, first_name="a", other_name="b")
    with pytest.raises(BadData, match="no probe of features of 64"):
        refuse_other_probe(probe_text(exact), "AAAA", 64, first_name="a", other_name="b")


@pytest.mark.process
def test_a_backbone_fitted_on_other_private_records_is_flagged_where_the_guarantee_is_stated(tmp_path: Path) -> None:
    a, b, public = federation(tmp_path, (PROBE, PROBE, PROBE), fitted_on="other-records")
    job = labeler.run([a, b], public, tmp_path / "job", epsilon=5, colluding_agents=0, quiet=True)
    assert OF_OTHER_RECORDS in job.privacy_card
    assert OF_OTHER_RECORDS in json.loads((tmp_path / "job" / "report.json").read_text())["warnings"]
    with pytest.raises(InvalidSetting, match="declares no public bound"):
        check_served(Shard.open(a.path))
    bounded = labeler.embed(
        **in_memory(tmp_path, rows(20)),
        **DECLARED | {"fitted_on": "other-records"},
        probe=PROBE,
        out=tmp_path / "served.shard",
        classes=CLASSES,
        max_records=100,
    )
    with pytest.raises(InvalidSetting, match="fitted on other private records"):
        check_served(Shard.open(bounded.path))
    # One who declares something else has another backbone.
    (tmp_path / "public").mkdir()
    c, _, _ = federation(tmp_path / "public", (PROBE, PROBE, PROBE))
    with pytest.raises(MixedShards, match="one word for what it was fitted on"):
        labeler.run([a, c], public, tmp_path / "other", epsilon=5, colluding_agents=0, quiet=True)


@pytest.mark.process
def test_the_command_embeds_features_and_refuses_options_of_images(command, tmp_path: Path) -> None:
    np.savez(tmp_path / "probe.npz", PROBE)
    given = as_npz(tmp_path, rows(20))
    options = ["--features", str(given["features"]), "--out", str(tmp_path / "a.shard"), "--classes", "cold,flu"]
    declared = ["--backbone-name", "our-net", "--fitted-on", "public", "--probe", str(tmp_path / "probe.npz")]
    assert "own features need three words" in command("embed", *options).err
    assert "--backbone goes with images" in command("embed", *options, *declared, "--backbone", "pixels").err
    assert "name one source" in command("embed", "folder", *options, *declared).err
    assert (
        "must be one of public, other-records, voting-records"
        in command("embed", *options, *declared[:3], "secrets", *declared[4:]).err
    )
    done = command("embed", *options, *declared, "--json")
    assert done.code == 0, done.err
    assert json.loads(done.out)["records"] == 20
    assert Shard.open(tmp_path / "a.shard").knows_persons


@pytest.mark.parametrize(("wrong", "has"), [([1.0], "row 3 has 1 numbers"), (None, "row 3 has none")])
def test_a_table_whose_rows_differ_in_width_names_the_row(tmp_path: Path, wrong: Any, has: str) -> None:
    features = rows(20).tolist()
    features[3] = wrong
    pq.write_table(pa.table({"features": features, "labels": NAMES}), tmp_path / "x.parquet")
    with pytest.raises(BadData, match=f"'x.parquet', features: row 0 has 12 numbers, {has}"):
        labeler.embed(features=tmp_path / "x.parquet", probe=PROBE, classes=CLASSES, **DECLARED)


@pytest.mark.parametrize("suffix", [".parquet", ".npz"])
@pytest.mark.process
def test_a_file_of_features_is_held_once_while_it_is_read_and_digested(tmp_path: Path, suffix: str) -> None:
    x = np.random.default_rng(5).standard_normal((20_000, 256), dtype=np.float32)
    path = tmp_path / f"x{suffix}"
    if suffix == ".npz":
        np.savez(path, features=x)
    else:
        cells = pa.FixedSizeListArray.from_arrays(pa.array(x.reshape(-1)), x.shape[1])
        pq.write_table(pa.table({"features": cells.cast(pa.list_(pa.float32()))}), path)
    tracemalloc.start()
    try:
        source = read_features(path)
        _, read_bytes = tracemalloc.get_traced_memory()
        assert source.rows_digest
        refuse_private_probe(source, np.eye(4, x.shape[1]))
        _, peak_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert np.array_equal(source.rows, x)
    # The rows once, a mask of a byte for each number, a block in transit and names; then 4,096 rows in float64.
    assert read_bytes < 1.5 * x.nbytes + 150 * len(x), read_bytes / x.nbytes
    assert peak_bytes < read_bytes + 4 * 8 * x.shape[1] * 4096, peak_bytes / x.nbytes


def test_text_that_is_not_utf_8_is_refused_and_two_labels_never_become_one(tmp_path: Path) -> None:
    """Both were read with a question mark in a diamond for their only letter, and so were one class."""
    labels = np.array(["\xe9".encode("latin-1"), "\xe8".encode("latin-1")] * 2)
    np.savez(tmp_path / "x.npz", features=rows(4), labels=labels)
    with pytest.raises(BadData, match="labels: a text that is not UTF-8"):
        read_features(tmp_path / "x.npz")
    with pytest.raises(BadData, match="labels is no text in UTF-8"):
        FeatureSource(rows(4), labels=labels.tolist())


def test_numbers_that_the_table_itself_names_are_those_classes_in_whatever_order_the_list_is(tmp_path: Path) -> None:
    """They were taken for places in the class list, so that another order of the list turned every label round."""
    names = {"info": {"features": {"label": {"names": ["cold", "hot"], "_type": "ClassLabel"}}}}
    table = pa.table({"features": rows(4).tolist(), "label": [0, 1, -1, 1]})
    pq.write_table(table.replace_schema_metadata({"huggingface": json.dumps(names)}), tmp_path / "x.parquet")
    source = read_features(tmp_path / "x.parquet")
    assert [None if one is None else source.label_names[one] for one in source.labels] == ["cold", "hot", None, "hot"]
    assert not source.labels_are_places
    wrong = table.set_column(1, "label", pa.array([0, 1, 2, 1]))
    pq.write_table(wrong.replace_schema_metadata({"huggingface": json.dumps(names)}), tmp_path / "x.parquet")
    with pytest.raises(BadData, match="label: a number outside the 2 names in its own metadata"):
        read_features(tmp_path / "x.parquet")


def test_a_file_of_ids_has_one_a_line_and_only_the_end_of_a_line_ends_one(tmp_path: Path) -> None:
    ids = ["a\u2028b", "c\x85d", "e\x0cf", "g h"]
    (tmp_path / "ids.txt").write_bytes("\r\n".join(ids).encode() + b"\r\n")
    np.save(tmp_path / "x.npy", rows(4))
    (tmp_path / "x.npy").rename(tmp_path / "X.NPY")
    assert read_features(tmp_path / "X.NPY", ids=tmp_path / "ids.txt").names == ids
