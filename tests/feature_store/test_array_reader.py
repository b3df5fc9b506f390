"""Files of own features: nothing outside of a file is read, and what is broken or too large is a sentence."""

from __future__ import annotations

import io
import os
import stat
import struct
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import labeler
from feature_store import array_reader
from feature_store.own_features import read_features, read_probe
from labeler.errors import BadData, InvalidSetting, LabelerError
from tests.feature_store.test_own_features import CLASSES, DECLARED, NAMES, PROBE, WIDTH, rows

SECRET = bytes(range(64))
"""What another file of the same machine holds."""


@pytest.fixture
def secret(tmp_path: Path) -> Path:
    path = tmp_path / "secret.bin"
    path.write_bytes(np.frombuffer(SECRET, "<u1").astype("<f8").tobytes())
    return path


def h5(path: Path) -> h5py.File:
    return h5py.File(path, "w")


def external_storage(folder: Path, secret: Path) -> Path:
    with h5(folder / "probe.h5") as file:
        file.create_dataset("features", (4, 16), "<f8", external=[(str(secret), 0, h5py.h5f.UNLIMITED)])
    return folder / "probe.h5"


def external_link(folder: Path, _: Path) -> Path:
    with h5(folder / "other.h5") as other:
        other["features"] = np.arange(1.0, 65.0).reshape(4, 16)
    with h5(folder / "probe.h5") as file:
        file["features"] = h5py.ExternalLink(str(folder / "other.h5"), "features")
    return folder / "probe.h5"


def virtual(folder: Path, _: Path) -> Path:
    with h5(folder / "other.h5") as other:
        other["features"] = np.arange(1.0, 65.0).reshape(4, 16)
    layout = h5py.VirtualLayout((4, 16), "<f8")
    layout[...] = h5py.VirtualSource(str(folder / "other.h5"), "features", shape=(4, 16))
    with h5(folder / "probe.h5") as file:
        file.create_virtual_dataset("features", layout)
    return folder / "probe.h5"


def soft_link(folder: Path, _: Path) -> Path:
    with h5(folder / "probe.h5") as file:
        file["group/x"] = rows(4)
        file["features"] = h5py.SoftLink("/group/x")
    return folder / "probe.h5"


def soft_link_beside(folder: Path, _: Path) -> Path:
    with h5(folder / "probe.h5") as file:
        file["features"] = rows(4)
        file["notes"] = h5py.SoftLink("/nowhere")
    return folder / "probe.h5"


def object_references(folder: Path, _: Path) -> Path:
    with h5(folder / "probe.h5") as file:
        file["features"] = rows(4)
        file.create_dataset("labels", (4,), h5py.ref_dtype)[:] = [file["features"].ref] * 4
    return folder / "probe.h5"


def region_references(folder: Path, _: Path) -> Path:
    with h5(folder / "probe.h5") as file:
        file["features"] = rows(4)
        kind = np.dtype([("place", h5py.regionref_dtype), ("number", "<i4")])
        file.create_dataset("beside", (4,), kind)
    return folder / "probe.h5"


def plugin(folder: Path, _: Path) -> Path:
    with h5(folder / "probe.h5") as file:
        space, settings_ = h5py.h5s.create_simple((4, WIDTH)), h5py.h5p.create(h5py.h5p.DATASET_CREATE)
        settings_.set_chunk((4, WIDTH))
        settings_.set_filter(32_015, h5py.h5z.FLAG_OPTIONAL, (1,))
        made = h5py.h5d.create(file.id, b"features", h5py.h5t.IEEE_F64LE, space, settings_)
        made.write(h5py.h5s.ALL, h5py.h5s.ALL, rows(4))
    return folder / "probe.h5"


def packed(folder: Path, *members: tuple[zipfile.ZipInfo | str, bytes]) -> Path:
    with zipfile.ZipFile(folder / "probe.npz", "w", zipfile.ZIP_DEFLATED) as archive:
        for name, data in members:
            archive.writestr(name, data)
    return folder / "probe.npz"


def npy(array: Any, *, pickled: bool = False) -> bytes:
    file = io.BytesIO()
    np.save(file, array, allow_pickle=pickled)
    return file.getvalue()


GOOD = npy(rows(4))


def npz_link(folder: Path, secret: Path) -> Path:
    link = zipfile.ZipInfo("labels.npy")
    link.external_attr = (stat.S_IFLNK | 0o777) << 16
    return packed(folder, ("features.npy", GOOD), (link, str(secret).encode()))


def npz_encrypted(folder: Path, _: Path) -> Path:
    data = bytearray(packed(folder, ("features.npy", GOOD)).read_bytes())
    for signature, offset in ((b"PK\x03\x04", 6), (b"PK\x01\x02", 8)):
        data[data.index(signature) + offset] |= 1
    (folder / "probe.npz").write_bytes(data)
    return folder / "probe.npz"


def declared(shape: tuple[int, ...], kind: str = "<f8") -> bytes:
    file = io.BytesIO()
    np.lib.format.write_array_header_2_0(file, {"descr": kind, "fortran_order": False, "shape": shape})
    return file.getvalue()


def short_member(folder: Path, _: Path) -> Path:
    """A member that declares twenty rows and unpacks to four."""
    return packed(folder, ("features.npy", declared((20, WIDTH)) + rows(4).tobytes()))


def npz_lies(folder: Path, _: Path) -> Path:
    """A member of four rows whose directory says that it has more."""
    data = bytearray(packed(folder, ("features.npy", declared((400, WIDTH)) + rows(4).tobytes())).read_bytes())
    for signature, offset in ((b"PK\x03\x04", 22), (b"PK\x01\x02", 24)):
        place = data.index(signature) + offset
        data[place : place + 4] = struct.pack("<I", len(declared((400, WIDTH))) + 400 * WIDTH * 8)
    (folder / "probe.npz").write_bytes(data)
    return folder / "probe.npz"


def bomb(folder: Path, _: Path) -> Path:
    return packed(folder, ("features.npy", npy(np.ones((400_000, 12)))))


def other_chunks(folder: Path, _: Path) -> Path:
    """A file whose column chunks are said to lie in another, as in `_metadata` of a folder."""
    collected: list[Any] = []
    table = pa.table({"features": rows(4).tolist()})
    pq.write_table(table, folder / "other.parquet", metadata_collector=collected)
    collected[0].set_file_path("other.parquet")
    collected[0].write_metadata_file(str(folder / "probe.parquet"))
    footer = (folder / "probe.parquet").read_bytes()
    whole = (folder / "other.parquet").read_bytes()
    data = whole[: -(8 + int.from_bytes(whole[-8:-4], "little"))]  # the same pages, so that they could be read here
    (folder / "probe.parquet").write_bytes(data + footer[4:])
    return folder / "probe.parquet"


def extension(folder: Path, _: Path) -> Path:
    tensor = pa.FixedShapeTensorArray.from_numpy_ndarray(np.ascontiguousarray(rows(4)))
    pq.write_table(pa.table({"features": tensor}), folder / "probe.parquet")
    return folder / "probe.parquet"


def encrypted_columns(folder: Path, _: Path) -> Path:
    import pyarrow.parquet.encryption as pe

    class Keys(pe.KmsClient):
        def wrap_key(self, key_bytes: bytes, _: str) -> bytes:
            return key_bytes.hex().encode()

        def unwrap_key(self, wrapped_key: bytes, _: str) -> bytes:
            return bytes.fromhex(wrapped_key.decode())

    factory = pe.CryptoFactory(lambda _: Keys())
    how = pe.EncryptionConfiguration(footer_key="a", column_keys={"b": ["labels"]}, plaintext_footer=True)
    properties = factory.file_encryption_properties(pe.KmsConnectionConfig(), how)
    table = pa.table({"features": rows(4).tolist(), "labels": ["x"] * 4})
    with pq.ParquetWriter(folder / "probe.parquet", table.schema, encryption_properties=properties) as writer:
        writer.write_table(table)
    return folder / "probe.parquet"


def run_lengths(folder: Path, _: Path) -> Path:
    """A row of four million equal numbers in a few kilobytes."""
    one = pa.ListArray.from_arrays([0, 2**22], pa.array(np.ones(2**22)))
    pq.write_table(pa.table({"features": one}), folder / "probe.parquet", compression="zstd")
    assert (folder / "probe.parquet").stat().st_size < 2**14
    return folder / "probe.parquet"


def huge_h5(folder: Path, _: Path) -> Path:
    with h5(folder / "probe.h5") as file:
        file.create_dataset("features", (2**60, 2), "<f4", chunks=(64, 2), fillvalue=1.0)
    return folder / "probe.h5"


def written(name: str, data: bytes) -> Callable[[Path, Path], Path]:
    def write(folder: Path, _: Path) -> Path:
        (folder / name).write_bytes(data)
        return folder / name

    return write


@pytest.mark.parametrize(
    ("attack", "said"),
    [
        (external_storage, "features: its bytes lie in other files"),
        (external_link, "features: it is a link"),
        (virtual, "features: it is virtual"),
        (soft_link, "features: it is a link"),
        (soft_link_beside, "notes: it is a link"),
        (object_references, "labels: it holds references"),
        (region_references, "beside: it holds references"),
        (plugin, "features: it needs the filter 32015, a plugin"),
        (huge_h5, r"declares the shape \(1152921504606846976, 2\)"),
        (lambda folder, _: packed(folder, ("features.npy", npy([[{}]], pickled=True))), "objects of Python"),
        (lambda folder, _: packed(folder, ("features.npy", GOOD), ("x.npy", npy([{}], pickled=True))), "x: .* objects"),
        (lambda folder, _: packed(folder, ("features.npy", GOOD), ("/etc/labels.npy", npy([1] * 4))), "leads out"),
        (lambda folder, _: packed(folder, ("features.npy", GOOD), ("../labels.npy", npy([1] * 4))), "leads out"),
        (lambda folder, _: packed(folder, ("features.npy", GOOD), ("C:labels.npy", npy([1] * 4))), "leads out"),
        (lambda folder, _: packed(folder, ("features.npy", GOOD), ("a\\..\\labels.npy", npy([1] * 4))), "leads out"),
        (lambda folder, _: packed(folder, ("features.npy", GOOD), ("labels", npy([1] * 4))), "is no array"),
        (lambda folder, _: packed(folder, ("features.npy", GOOD), ("in.npz", b"PK")), "is no array"),
        (npz_link, "labels.npy is a folder or a link"),
        (npz_encrypted, "is encrypted"),
        (short_member, r"declares the shape \(20, 12\)"),
        (npz_lies, "cannot be read"),
        (bomb, "declares the shape .* bytes or more, and"),
        (written("probe.npy", declared((2**60, 12))), r"declares the shape \(1152921504606846976, 12\)"),
        (written("probe.npy", declared((2**40, 12))), "declares the shape"),
        (written("probe.npy", declared((2**60,), "<U0")), "declares the shape"),
        (written("probe.npy", declared((2,), "<U400000000")), "declares the shape"),
        (lambda folder, _: packed(folder, ("features.npy", declared((2**40, 12)))), "declares the shape"),
        (written("probe.npy", npy([[{}]], pickled=True)), "objects of Python"),
        (written("probe.npy", GOOD + b"more"), "declares the shape"),
        (written("probe.npy", GOOD.replace(b"'shape': (4, 12)", b"'shape': (4, 1( ")), "cannot be read"),
        (other_chunks, "names other files that hold its columns"),
        (extension, "neither numbers nor text"),
        pytest.param(encrypted_columns, "is damaged, or", marks=pytest.mark.process),
        (run_lengths, r"declares the shape \(1, 4194304\)"),
    ],
)
def test_a_file_that_points_elsewhere_or_declares_what_it_does_not_hold_is_refused_with_its_name(
    attack: Callable[[Path, Path], Path], said: str, tmp_path: Path, secret: Path
) -> None:
    path = attack(tmp_path, secret)
    with pytest.raises(LabelerError, match=said) as refused:
        read_probe(path)
    assert repr(path.name) in str(refused.value)
    with pytest.raises(LabelerError, match=said):
        read_features(path)


def test_a_text_that_a_few_bytes_repeat_for_ever_is_refused(tmp_path: Path) -> None:
    """A file of 250 KB filled 2 GB of the process that had asked for it."""
    labels = pa.DictionaryArray.from_arrays(pa.array(np.zeros(70_000, np.int32)), pa.array(["x" * 1000]))
    features = pa.array(np.ones((70_000, 1)).tolist())
    pq.write_table(pa.table({"features": features, "labels": labels}), tmp_path / "x.parquet", compression="zstd")
    assert (tmp_path / "x.parquet").stat().st_size < 2**18
    with pytest.raises(BadData, match="labels: its texts have more than 67108864 characters"):
        read_features(tmp_path / "x.parquet")


@pytest.mark.filterwarnings("ignore:Duplicate name")
def test_two_members_of_one_name_are_refused(tmp_path: Path) -> None:
    path = packed(tmp_path, ("features.npy", GOOD), ("features.npy", npy(rows(4, seed=1))))
    with pytest.raises(BadData, match="is there twice"):
        read_features(path)


def test_the_published_probe_of_a_shard_holds_no_byte_of_another_file(tmp_path: Path, secret: Path) -> None:
    path = external_storage(tmp_path, secret)
    with pytest.raises(BadData, match="its bytes lie in other files"):
        labeler.embed(
            features=np.random.default_rng(0).normal(size=(20, 16)), labels=NAMES, classes=CLASSES, probe=path,
            out=tmp_path / "a.shard", **DECLARED,
        )  # fmt: skip
    assert not (tmp_path / "a.shard").exists()


def test_what_hdf5_and_numpy_and_parquet_write_by_themselves_is_read(tmp_path: Path) -> None:
    x = rows(20)
    with h5(tmp_path / "x.h5") as file:
        for number, more in enumerate(
            (
                {},
                {"compression": "gzip", "shuffle": True, "fletcher32": True},
                {"compression": "lzf"},
                {"chunks": (3, 5)},
            )
        ):
            file.create_dataset(f"x{number}", data=x, **more)
        file["again"] = file["x0"]
        file["group/features"] = x
        file["text"] = NAMES
        file["labels"] = np.array(NAMES, dtype="S4")
        file.create_dataset("features", data=x.astype(">f4"))
    found = array_reader.read_arrays(
        tmp_path / "x.h5", [[name] for name in ("x0", "x1", "x2", "x3", "again", "text", "labels", "features", "none")]
    )
    assert all(np.array_equal(np.asarray(one), x) for one in found[:5])
    assert found[5] == found[6] == NAMES
    assert found[8] is None
    np.testing.assert_array_equal(np.asarray(found[7]), x.astype(np.float32))
    np.savez_compressed(tmp_path / "x.npz", features=np.asfortranarray(x), labels=np.array(NAMES), truth=x[:, 0] > 0)
    source = read_features(tmp_path / "x.npz", labels="truth")
    np.testing.assert_array_equal(source.rows, x.astype(np.float32))
    assert source.label_names == ("False", "True")
    columns = {
        "features": pa.array(list(x.astype(np.float32)), pa.list_(pa.float32(), WIDTH)),
        "labels": pa.array(NAMES).dictionary_encode(),
        "when": pa.array([0] * 20, pa.timestamp("s")),
    }
    pq.write_table(pa.table(columns), tmp_path / "x.parquet", row_group_size=7)
    source = read_features(tmp_path / "x.parquet")
    np.testing.assert_array_equal(source.rows, x.astype(np.float32))
    assert source.label_names == CLASSES
    link = tmp_path / "link.npz"
    link.symlink_to(tmp_path / "x.npz")
    assert len(read_features(link).rows) == 20


@pytest.mark.parametrize("where", ["features", "probe", "ids", "labels"])
@pytest.mark.parametrize("kind", ["pipe", "socket", "device", "folder", "dangling link"])
def test_what_is_no_file_is_refused_and_a_pipe_holds_nobody_up(where: str, kind: str, tmp_path: Path) -> None:
    path = tmp_path / ("x.npy" if where != "ids" else "ids.txt")
    match kind:
        case "pipe":
            os.mkfifo(path)
        case "socket":
            os.mknod(path, stat.S_IFSOCK | 0o600)
        case "folder":
            path.mkdir()
        case _:
            path.symlink_to("/dev/zero" if kind == "device" else "nowhere")
    given: dict[str, Any] = {"features": rows(20), "labels": NAMES, "probe": PROBE}
    if where in ("ids", "labels"):
        np.save(tmp_path / "features.npy", rows(20))
        given["features"] = tmp_path / "features.npy"
    with pytest.raises(LabelerError):
        labeler.embed(**given | {where: path}, classes=CLASSES, out=tmp_path / "a.shard", **DECLARED)
    assert not (tmp_path / "a.shard").exists()


def whole_files(folder: Path) -> dict[str, bytes]:
    x = rows(20)
    np.savez(folder / "x.npz", features=x, labels=np.array(NAMES))
    np.save(folder / "x.npy", x)
    pq.write_table(pa.table({"features": x.tolist(), "labels": NAMES}), folder / "x.parquet")
    with h5(folder / "x.h5") as file:
        file.create_dataset("features", data=x, chunks=(5, WIDTH), compression="gzip")
        file["labels"] = NAMES
    return {name: (folder / name).read_bytes() for name in ("x.npz", "x.npy", "x.parquet", "x.h5")}


FORMATS = ["x.npz", "x.npy", "x.parquet", "x.h5"]


def read_or_refuse(folder: Path, name: str, data: bytes) -> bool:
    """Tell whether a file was read, in the full shape; anything but rows or a sentence is an error."""
    (folder / name).write_bytes(data)
    try:
        source = read_features(folder / name)
    except LabelerError as error:
        return repr(name) not in str(error)  # taken for a file that was read, so that the caller fails
    assert source.rows.ndim == 2
    return True


@pytest.mark.parametrize("name", FORMATS)
def test_no_beginning_of_a_file_is_taken_for_the_whole(name: str, tmp_path: Path) -> None:
    data = whole_files(tmp_path)[name]
    for length in (0, 1, len(data) // 3, len(data) - 9, len(data) - 1):
        assert not read_or_refuse(tmp_path, name, data[:length])


@pytest.mark.parametrize("name", FORMATS)
def test_a_file_with_changed_bytes_is_rows_or_a_sentence(name: str, tmp_path: Path) -> None:
    whole = whole_files(tmp_path)[name]
    rng = np.random.default_rng(5)
    for number in range(8):
        data = bytearray(whole)
        for place in rng.integers(0, min(len(whole), 400 + 400 * number), 1 + number):
            data[place] = rng.integers(0, 256)
        read_or_refuse(tmp_path, name, bytes(data))


@pytest.mark.long
@pytest.mark.process
def test_a_file_that_keeps_hdf5_busy_for_ever_is_a_sentence(tmp_path: Path) -> None:
    """Four bytes that a fuzzer changed: opening its data sets with HDF5 2.0 does not end."""
    with h5(tmp_path / "x.h5") as file:
        file["features"] = np.random.default_rng(0).normal(size=(20, WIDTH))
        file["labels"] = [f"c{row % 2}" for row in range(20)]
        file.create_dataset("z", data=file["features"][:], chunks=(5, WIDTH), compression="gzip")
    data = bytearray((tmp_path / "x.h5").read_bytes())
    for place, value in ((7636, 97), (5449, 70), (4624, 224), (12002, 15)):
        data[place % len(data)] = value
    (tmp_path / "x.h5").write_bytes(data)
    with pytest.raises(BadData, match=r"'x.h5'.*(reading it takes more than is given|cannot be read)"):
        read_features(tmp_path / "x.h5")


@pytest.mark.long
@pytest.mark.parametrize("name", FORMATS)
@settings(max_examples=20, deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data())
@pytest.mark.process
def test_whatever_bytes_change_a_file_is_rows_or_a_sentence(
    name: str, tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    folder = tmp_path_factory.mktemp("fuzz")
    whole = bytearray(whole_files(folder)[name])
    for place, value in data.draw(st.lists(st.tuples(st.integers(0, len(whole) - 1), st.integers(0, 255)), max_size=6)):
        whole[place] = value
    kept = data.draw(st.one_of(st.just(len(whole)), st.integers(0, len(whole))))
    was_read = read_or_refuse(folder, name, bytes(whole[:kept]))
    assert not was_read or kept == len(whole)


def test_an_id_that_is_no_text_is_a_sentence(tmp_path: Path) -> None:
    np.savez(tmp_path / "x.npz", features=rows(2), ids=np.array(["a", "\ud800"]), labels=np.array(["b" * 2000, "c"]))
    with pytest.raises(BadData, match="no text"):
        read_features(tmp_path / "x.npz", labels=[0, 1])
    with pytest.raises(BadData, match="labels: a text of 2000 characters, and at most 1000"):
        read_features(tmp_path / "x.npz", ids=["a", "b"])
    with pytest.raises(InvalidSetting, match=r"'none' is neither an array of 'x.npz' nor a file"):
        read_features(tmp_path / "x.npz", ids="none", labels=[0, 1])
