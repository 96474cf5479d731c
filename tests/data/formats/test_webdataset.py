"""WebDatasets: samples, decoding by ending, where tar files are cut, damaged files."""

from __future__ import annotations

import gzip
import io
import json
import tarfile
from pathlib import Path
from typing import Any

import msgpack
import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image
from tests.data.formats.reading_all import everything, fingerprint, ids_of_ranks, source_of

from powertrain import data
from powertrain.data.sources.files.files import file_paths
from powertrain.data.sources.formats.tar_samples import TarSelection
from powertrain.data.sources.formats.webdataset import WebDatasetSource
from powertrain.errors import DataError, NotSupportedError


def tar_of(members: list[tuple[str, bytes]], form: Any = tarfile.PAX_FORMAT) -> bytes:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w", format=form) as archive:
        for name, content in members:
            info = tarfile.TarInfo(name)
            info.size = len(content)
            archive.addfile(info, io.BytesIO(content))
    return out.getvalue()


def numbered(count: int, first: int = 0) -> list[tuple[str, bytes]]:
    return [
        member
        for number in range(first, first + count)
        for member in [(f"{number:05d}.txt", b"t" * number), (f"{number:05d}.cls", str(number).encode())]
    ]


def png(value: int) -> bytes:
    out = io.BytesIO()
    Image.fromarray(np.full((2, 3, 3), value, np.uint8)).save(out, "PNG")
    return out.getvalue()


def npy(array: Any) -> bytes:
    out = io.BytesIO()
    np.save(out, array)
    return out.getvalue()


def test_members_are_decoded_by_their_endings(tmp_path: Path) -> None:
    members = [
        ("a/1.png", png(5)),
        ("a/1.txt", "grün".encode()),
        ("a/1.cls", b"3"),
        ("a/1.meta.json", json.dumps({"k": [1, 2], "f": 0.5}).encode()),
        ("a/1.npy", npy(np.arange(4).reshape(2, 2))),
        ("a/1.mp", msgpack.packb({"z": 1})),
        ("a/1.bin", b"\0\1"),
        ("a/readme", b"left out: it has no ending"),
    ]
    path = tmp_path / "s.tar"
    path.write_bytes(tar_of(members))
    (row,) = data.read_webdataset(str(path)).take_all()
    assert (row["__key__"], row["__url__"]) == ("a/1", str(path))
    assert row["png"].tolist() == np.full((2, 3, 3), 5).tolist()
    assert row["npy"].tolist() == [[0, 1], [2, 3]]
    assert (row["txt"], row["cls"], row["bin"]) == ("grün", 3, b"\0\1")
    assert (row["meta.json"], row["mp"]) == ({"k": [1, 2], "f": 0.5}, {"z": 1})
    (raw,) = data.read_webdataset(str(path), decoder=None).take_all()
    assert raw["png"] == png(5)
    assert raw["cls"] == b"3"


def test_decoders_of_users_get_the_sample(tmp_path: Path) -> None:
    path = tmp_path / "s.tar"
    path.write_bytes(tar_of(numbered(3)))

    def twice(sample: dict[str, Any]) -> dict[str, Any]:
        return {**sample, "cls": 2 * int(sample["cls"])}

    assert [row["cls"] for row in data.read_webdataset(str(path), decoder=[True, twice]).take_all()] == [
        0,
        2,
        4,
    ]
    raw = data.read_webdataset(str(path), decoder=twice).take_all()
    assert [(row["cls"], row["txt"]) for row in raw] == [(0, b""), (2, b"t"), (4, b"tt")]


def test_members_are_selected_and_renamed(tmp_path: Path) -> None:
    path = tmp_path / "s.tar"
    path.write_bytes(tar_of(numbered(2)))

    def columns(**more: Any) -> list[str]:
        return list(data.read_webdataset(str(path), **more).take(1)[0])

    assert columns(suffixes=["cls"]) == ["__key__", "__url__", "cls"]
    assert columns(suffixes=["*xt"]) == ["__key__", "__url__", "txt"]
    assert columns(fileselect=lambda name: name.endswith("cls")) == ["__key__", "__url__", "cls"]
    assert columns(filerename=[lambda name: name.replace("cls", "label.cls")])[-1] == "label.cls"
    assert columns(include_paths=True)[-1] == "path"


def test_keys_of_json_become_columns(tmp_path: Path) -> None:
    path = tmp_path / "s.tar"
    path.write_bytes(tar_of([("1.json", b'{"a": 1}'), ("2.json", b'{"a": 2}')]))
    rows = data.read_webdataset(str(path), expand_json=True).take_all()
    assert [(row["a"], row["json"]) for row in rows] == [(1, {"a": 1}), (2, {"a": 2})]
    assert data.read_webdataset(str(path), expand_json=True, decoder=None).take(1)[0]["json"] == b'{"a": 1}'
    path.write_bytes(tar_of([("1.txt", b"x")]))
    with pytest.raises(DataError, match="sample '1' has no member 'json'"):
        data.read_webdataset(str(path), expand_json=True).count()


@pytest.mark.parametrize("form", [tarfile.PAX_FORMAT, tarfile.GNU_FORMAT, tarfile.USTAR_FORMAT])
@given(
    keys=st.lists(
        st.text(st.sampled_from("ab/"), min_size=1, max_size=90).filter(lambda key: key[-1] != "/"),
        max_size=12,
        unique=True,
    ),
    block_bytes=st.integers(1, 6000),
)
def test_samples_are_never_cut(
    tmp_path_factory: pytest.TempPathFactory, form: Any, keys: list[str], block_bytes: int
) -> None:
    members = [
        (f"{key}.{ending}", ending.encode() * len(key))
        for key in keys
        for ending in ("txt", "bin")[: 1 + len(key) % 2]
    ]
    path = tmp_path_factory.mktemp("cut") / "s.tar"
    path.write_bytes(tar_of(members, form))
    source = WebDatasetSource(file_paths(str(path), None), selection=TarSelection(), block_bytes=block_bytes)
    found = everything(source)
    assert [row["__key__"] for row in found] == keys
    assert [row["txt"] for row in found] == ["txt" * len(key) for key in keys]


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_every_sample_comes_once_at_any_number_of_ranks(tmp_path: Path, ranks: int) -> None:
    (tmp_path / "a.tar").write_bytes(tar_of(numbered(15)))
    (tmp_path / "b.tar.gz").write_bytes(gzip.compress(tar_of(numbered(9, first=15))))
    dataset = data.read_webdataset(str(tmp_path), shuffle="files")
    assert sorted(ids_of_ranks(dataset, ranks, "cls")) == list(range(24))


def test_arrays_of_several_shapes_are_lists_also_across_blocks(tmp_path: Path) -> None:
    members = [(f"{number}.npy", npy(np.ones((1 + number // 6, 2), np.int32))) for number in range(12)]
    path = tmp_path / "s.tar"
    path.write_bytes(tar_of(members))
    source = WebDatasetSource(file_paths(str(path), None), selection=TarSelection(), block_bytes=4000)
    assert len(source.inspect().blocks) > 2
    assert source.inspect().schema.field("npy").type == pa.list_(pa.list_(pa.int32()))
    assert [len(row["npy"]) for row in everything(source)] == [1] * 6 + [2] * 6


def test_the_fingerprint_follows_the_data(tmp_path: Path) -> None:
    path = tmp_path / "s.tar"
    path.write_bytes(tar_of(numbered(3)))
    first = fingerprint(data.read_webdataset(str(path)))
    assert fingerprint(data.read_webdataset(str(path))) == first
    path.write_bytes(tar_of(numbered(3, first=1)))
    assert fingerprint(data.read_webdataset(str(path))) != first


# --------------------------------------------------------------------------- damaged files


def refused(path: Path, content: bytes) -> str:
    path.write_bytes(content)
    with pytest.raises(DataError) as caught:
        data.read_webdataset(str(path)).count()
    assert str(path) in str(caught.value)
    return str(caught.value)


def test_damaged_files_are_refused_with_the_member_and_the_cause(tmp_path: Path) -> None:
    path, whole = tmp_path / "s.tar", tar_of(numbered(10))
    end = len(whole.rstrip(b"\0"))
    assert "is not complete: the file was cut off" in refused(path, whole[: end - 20])
    header = whole.index(b"00005.txt")
    broken = whole[:header] + b"X" + whole[header + 1 :]
    assert "the member after '00004', at byte" in refused(path, broken)
    assert "has a broken header" in refused(path, broken)
    assert "not a tar file" in refused(path, b"id,text\n" * 1000)
    again = tar_of([("1.txt", b"a"), ("2.txt", b"b"), ("1.cls", b"1")])
    assert "sample '1' are not one after the other" in refused(path, again)
    assert "two members 'txt'" in refused(path, tar_of([("1.txt", b"a"), ("1.txt", b"b")]))
    assert "member 'cls' of the sample '1' cannot be decoded" in refused(path, tar_of([("1.cls", b"one")]))
    assert "runs code of the file" in refused(path, tar_of([("1.pkl", b"")]))
    mixed = tar_of([("1.json", b"[1]"), ("2.json", b'{"a": 1}')])
    assert "json" in refused(path, mixed)


def test_a_broken_image_is_named_when_it_is_read(tmp_path: Path) -> None:
    path = tmp_path / "s.tar"
    path.write_bytes(tar_of([("1.png", b"not an image")]))
    with pytest.raises(DataError, match=r"s\.tar, row 0"):
        data.read_webdataset(str(path)).take_all()


@pytest.mark.parametrize(
    ("arguments", "kind", "words"),
    [
        ({"decoder": "PIL"}, NotSupportedError, "images are arrays"),
        ({"decoder": 3}, DataError, "is not valid"),
        ({"decoder": [str, True]}, DataError, "True first"),
        ({"filerename": ["x"]}, DataError, "cannot be called"),
        ({"suffixes": [3]}, DataError, "not text"),
        ({"expand_json": "x"}, DataError, "True or False"),
    ],
)
def test_wrong_arguments_are_refused(arguments: dict[str, Any], kind: type[Exception], words: str) -> None:
    with pytest.raises(kind, match=words):
        data.read_webdataset("x.tar", **arguments)


def test_an_empty_archive_has_no_rows(tmp_path: Path) -> None:
    path = tmp_path / "s.tar"
    path.write_bytes(tar_of([]))
    assert data.read_webdataset(str(path)).count() == 0
    assert source_of(data.read_webdataset(str(path))).inspect().schema.names == ["__key__", "__url__"]
