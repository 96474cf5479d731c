"""TFRecords: checksums, messages, columns, damaged files; checked against Google's own protocol buffers."""

from __future__ import annotations

import contextlib
import gzip
import itertools
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from hypothesis import given
from hypothesis import strategies as st
from tests.data.formats.reading_all import everything, fingerprint, ids_of_ranks, source_of

from powertrain import data
from powertrain.data.sources.files.files import file_paths
from powertrain.data.sources.formats.crc32c import crc32c, crc32c_of_all, masked, masked_all
from powertrain.data.sources.formats.examples import ExampleError, decode_example, encode_example
from powertrain.data.sources.formats.tfrecords import TFRecordSource
from powertrain.errors import DataError


def example_class() -> Any:
    """tf.train.Example, declared here as TensorFlow declares it."""
    file = descriptor_pb2.FileDescriptorProto(name="example.proto", package="tf", syntax="proto3")
    field = descriptor_pb2.FieldDescriptorProto
    for name, kind in (
        ("BytesList", field.TYPE_BYTES),
        ("FloatList", field.TYPE_FLOAT),
        ("Int64List", field.TYPE_INT64),
    ):
        one = file.message_type.add(name=name)
        one.field.add(name="value", number=1, label=field.LABEL_REPEATED, type=kind)
    feature = file.message_type.add(name="Feature")
    feature.oneof_decl.add(name="kind")
    for number, (name, kind) in enumerate(
        (("bytes_list", "BytesList"), ("float_list", "FloatList"), ("int64_list", "Int64List")), 1
    ):
        feature.field.add(
            name=name,
            number=number,
            label=field.LABEL_OPTIONAL,
            type=field.TYPE_MESSAGE,
            type_name=f".tf.{kind}",
            oneof_index=0,
        )
    features = file.message_type.add(name="Features")
    entry = features.nested_type.add(name="FeatureEntry")
    entry.options.map_entry = True
    entry.field.add(name="key", number=1, label=field.LABEL_OPTIONAL, type=field.TYPE_STRING)
    entry.field.add(
        name="value", number=2, label=field.LABEL_OPTIONAL, type=field.TYPE_MESSAGE, type_name=".tf.Feature"
    )
    features.field.add(
        name="feature",
        number=1,
        label=field.LABEL_REPEATED,
        type=field.TYPE_MESSAGE,
        type_name=".tf.Features.FeatureEntry",
    )
    example = file.message_type.add(name="Example")
    example.field.add(
        name="features",
        number=1,
        label=field.LABEL_OPTIONAL,
        type=field.TYPE_MESSAGE,
        type_name=".tf.Features",
    )
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return message_factory.GetMessageClass(pool.FindMessageTypeByName("tf.Example"))


EXAMPLE = example_class()
FIELDS = {"bytes": "bytes_list", "float": "float_list", "int": "int64_list"}


def serialized(features: dict[str, tuple[str, list[Any]]]) -> bytes:
    """An Example as Google's library writes it."""
    message = EXAMPLE()
    for name, (kind, values) in features.items():
        found = message.features.feature[name]
        if kind:
            getattr(found, FIELDS[kind]).value.extend(values)
            getattr(found, FIELDS[kind]).SetInParent()
    written: bytes = message.SerializeToString()
    return written


def framed(*records: bytes) -> bytes:
    out = b""
    for record in records:
        length = struct.pack("<Q", len(record))
        out += length + struct.pack("<I", masked(crc32c(length))) + record
        out += struct.pack("<I", masked(crc32c(record)))
    return out


def rows_file(path: Path, count: int, first: int = 0) -> Path:
    records = [
        serialized({"id": ("int", [number]), "text": ("bytes", [b"x" * (number % 50)])})
        for number in range(first, first + count)
    ]
    path.write_bytes(framed(*records))
    return path


# --------------------------------------------------------------------------- checksums


def checksums(strings: list[bytes]) -> Any:
    stops = list(itertools.accumulate(map(len, strings)))
    return crc32c_of_all(b"".join(strings), [0, *stops][: len(strings)], stops)


def test_checksums_are_those_of_the_standard() -> None:
    # The test vectors of RFC 3720, and the check value of the catalogue of checksums.
    known = {
        bytes(32): 0x8A9136AA,
        b"\xff" * 32: 0x62A8AB43,
        bytes(range(32)): 0x46DD794E,
        b"123456789": 0xE3069283,
    }
    assert {text: crc32c(text) for text in known} == known
    assert dict(zip(known, checksums(list(known)).tolist(), strict=True)) == known


@given(st.lists(st.binary(max_size=400), max_size=12))
def test_checksums_of_many_are_those_of_each(strings: list[bytes]) -> None:
    assert checksums(strings).tolist() == [crc32c(each) for each in strings]
    assert masked_all(checksums(strings)).tolist() == [masked(crc32c(each)) for each in strings]


def test_a_long_string_has_its_checksum() -> None:
    long = np.random.default_rng(0).bytes(300_001)
    assert checksums([long, long[:77]]).tolist() == [crc32c(long), crc32c(long[:77])]


# --------------------------------------------------------------------------- messages

_ints = st.lists(st.integers(-(2**63), 2**63 - 1), max_size=40)
_floats = st.lists(st.floats(width=32, allow_nan=False), max_size=20)
_features = st.dictionaries(
    st.text(max_size=8),
    st.one_of(
        st.tuples(st.just("int"), _ints),
        st.tuples(st.just("float"), _floats),
        st.tuples(st.just("bytes"), st.lists(st.binary(max_size=200), max_size=5)),
        st.just(("", [])),
    ),
    max_size=6,
)


def plain(features: dict[str, Any]) -> dict[str, Any]:
    return {name: (kind, list(values)) for name, (kind, values) in features.items()}


@given(_features)
def test_messages_are_read_and_written_as_google_does(features: dict[str, tuple[str, list[Any]]]) -> None:
    assert plain(decode_example(serialized(features))) == features
    again = EXAMPLE()
    again.ParseFromString(encode_example(features))
    assert again.features == EXAMPLE.FromString(serialized(features)).features


def test_a_feature_in_several_parts_is_one() -> None:
    one, other = (serialized({"x": ("int", values)}) for values in ([1, 2], [3]))
    feature = [EXAMPLE.FromString(each).features.feature["x"].SerializeToString() for each in (one, other)]
    entry = b"\n\x01x\x12" + bytes([len(b"".join(feature))]) + b"".join(feature)
    features = b"\n" + bytes([len(entry)]) + entry
    whole = b"\n" + bytes([len(features)]) + features
    assert list(EXAMPLE.FromString(whole).features.feature["x"].int64_list.value) == [1, 2, 3]
    assert decode_example(whole) == {"x": ("int", [1, 2, 3])}


@given(st.binary(max_size=60))
def test_other_bytes_are_refused_and_never_crash(record: bytes) -> None:
    with contextlib.suppress(ExampleError):
        assert all(isinstance(name, str) for name in decode_example(record))


# --------------------------------------------------------------------------- rows


def test_one_value_is_a_value_and_several_are_a_list(tmp_path: Path) -> None:
    records = [
        serialized(
            {"id": ("int", [1]), "x": ("float", [0.5, 1.5]), "name": ("bytes", [b"a"]), "many": ("int", [7])}
        ),
        serialized({"id": ("int", [-2]), "x": ("float", []), "many": ("int", [1, 2])}),
        serialized({"id": ("int", [3]), "x": ("", []), "name": ("bytes", [b"c"]), "many": ("int", [])}),
    ]
    (tmp_path / "a.tfrecord").write_bytes(framed(*records))
    dataset = data.read_tfrecords(str(tmp_path))
    schema = source_of(dataset).inspect().schema
    assert schema.field("id").type == pa.int64()
    assert schema.field("x").type == pa.list_(pa.float32())
    assert schema.field("name").type == pa.binary()
    assert everything(source_of(dataset)) == [
        {"id": 1, "x": [0.5, 1.5], "name": b"a", "many": [7]},
        {"id": -2, "x": [], "name": None, "many": [1, 2]},
        {"id": 3, "x": [], "name": b"c", "many": []},
    ]
    assert everything(source_of(dataset), ["many", "id"])[1] == {"many": [1, 2], "id": -2}
    assert everything(source_of(dataset), []) == [{}, {}, {}]


def test_a_list_in_a_later_block_makes_all_of_them_lists(tmp_path: Path) -> None:
    records = [serialized({"id": ("int", [number])}) for number in range(20)]
    records.append(serialized({"id": ("int", [1, 2]), "late": ("float", [2.0])}))
    (tmp_path / "a.tfrecord").write_bytes(framed(*records))
    source = TFRecordSource(file_paths(str(tmp_path), None), block_bytes=100)
    assert len(source.inspect().blocks) > 3
    assert everything(source) == [
        *({"id": [number], "late": None} for number in range(20)),
        {"id": [1, 2], "late": 2.0},
    ]


@given(count=st.integers(0, 40), block_bytes=st.integers(1, 400))
def test_records_are_never_cut(
    tmp_path_factory: pytest.TempPathFactory, count: int, block_bytes: int
) -> None:
    path = rows_file(tmp_path_factory.mktemp("cut") / "a", count)
    source = TFRecordSource(file_paths(str(path), None), block_bytes=block_bytes)
    assert [row["id"] for row in everything(source)] == list(range(count))


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_every_row_comes_once_at_any_number_of_ranks(tmp_path: Path, ranks: int) -> None:
    rows_file(tmp_path / "a.tfrecord", 25)
    rows_file(tmp_path / "b.tfrecord", 12, first=25)
    dataset = data.read_tfrecords(str(tmp_path), include_paths=True, shuffle="files")
    assert sorted(ids_of_ranks(dataset, ranks, "id")) == list(range(37))
    assert {Path(row["path"]).name for row in dataset.iter_rows()} == {"a.tfrecord", "b.tfrecord"}


def test_compressed_files_and_the_same_file_twice(tmp_path: Path) -> None:
    path = rows_file(tmp_path / "a.tfrecord", 5)
    (tmp_path / "b.tfrecord.gz").write_bytes(gzip.compress(path.read_bytes()))
    dataset = data.read_tfrecords([str(path), str(path), str(tmp_path / "b.tfrecord.gz")])
    assert [row["id"] for row in dataset.iter_rows()] == [*range(5)] * 3


def test_the_fingerprint_follows_the_data(tmp_path: Path) -> None:
    here, there = tmp_path / "here", tmp_path / "there"
    for directory in (here, there):
        directory.mkdir()
        rows_file(directory / "a", 5)
    assert fingerprint(data.read_tfrecords(str(here))) == fingerprint(data.read_tfrecords(str(there)))
    rows_file(there / "a", 5, first=1)
    assert fingerprint(data.read_tfrecords(str(here))) != fingerprint(data.read_tfrecords(str(there)))


# --------------------------------------------------------------------------- damaged files


def damaged(path: Path, content: bytes) -> str:
    path.write_bytes(content)
    with pytest.raises(DataError) as caught:
        data.read_tfrecords(str(path)).count()
    message = str(caught.value)
    assert str(path) in message
    assert "leave it out" in message
    return message


def test_damaged_files_are_refused_with_the_record_and_the_cause(tmp_path: Path) -> None:
    path = rows_file(tmp_path / "a.tfrecord", 10)
    whole = path.read_bytes()
    assert "record 9 is not complete: the file was cut off" in damaged(path, whole[:-3])
    assert "record 10 is not complete" in damaged(path, whole + b"1234")
    flipped = bytearray(whole)
    flipped[20] ^= 1
    assert "record 0 do not fit their checksum" in damaged(path, bytes(flipped))
    flipped = bytearray(whole)
    flipped[1] ^= 1
    assert "record 0 has a length that does not fit its checksum" in damaged(path, bytes(flipped))
    assert "not a TFRecord file" in damaged(path, b"id,text\n1,hello there everyone\n" * 3)
    assert "record 0 is not a tf.train.Example" in damaged(path, framed(b"\xff" * 30))
    assert "no features" in damaged(path, framed(serialized({})))
    mixed = framed(serialized({"x": ("int", [1])}), serialized({"x": ("float", [1.0])}))
    assert "the feature 'x' has int64 in some records and float in others" in damaged(path, mixed)


def test_types_that_differ_between_files_are_refused(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(framed(serialized({"x": ("int", [1])})))
    (tmp_path / "b").write_bytes(framed(serialized({"x": ("bytes", [b"1"])})))
    with pytest.raises(DataError, match=r"feature 'x' .* int64 in what comes first and binary in '.*b'"):
        data.read_tfrecords(str(tmp_path)).count()


def test_a_file_that_changed_after_the_inspection_is_noticed(tmp_path: Path) -> None:
    path = rows_file(tmp_path / "a", 5)
    source = source_of(data.read_tfrecords(str(path)))
    source.inspect()
    path.write_bytes(
        framed(*[serialized({"id": ("int", [1, 2]), "text": ("bytes", [b"x"])})] * 5)[: path.stat().st_size]
    )
    with pytest.raises(DataError):
        everything(source)
