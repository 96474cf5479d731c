"""CSV and JSON: where files are cut, which types columns get, what is wrong with files."""

from __future__ import annotations

import bz2
import csv as python_csv
import gzip
import io
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import cloudpickle
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pyarrow import csv

from powertrain.data.sources.base import Source
from powertrain.data.sources.files.files import file_paths
from powertrain.data.sources.files.records import Dialect, last_line_end, pieces
from powertrain.data.sources.files.text import CsvSource, JsonSource
from powertrain.data.sources.files.text_types import wider
from powertrain.errors import DataError


def csv_source(paths: Any, **more: Any) -> CsvSource:
    return CsvSource(file_paths(paths, None), **more)


def json_source(paths: Any, **more: Any) -> JsonSource:
    return JsonSource(file_paths(paths, None), **more)


def everything(found: Source, columns: Sequence[str] | None = None) -> list[dict[str, Any]]:
    facts = found.inspect()
    rows = []
    for block, known in enumerate(facts.blocks):
        batches = list(found.read(block, columns))
        assert sum(batch.num_rows for batch in batches) == known.rows
        if columns is None:
            assert all(batch.schema.equals(facts.schema) for batch in batches)
        rows += [row for batch in batches for row in batch.to_pylist()]
    return rows


def write(path: Path, content: str | bytes) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return path


# --------------------------------------------------------------------------- where records end

_fields = st.text(st.sampled_from('ab,"\n\r ;'), max_size=6)


@given(
    st.lists(st.lists(_fields, min_size=2, max_size=2), max_size=30),
    st.integers(1, 60),
    st.sampled_from(["\n", "\r\n"]),
    st.booleans(),
)
def test_csv_is_cut_between_records_wherever_the_cut_falls(
    rows: list[list[str]], cut: int, line_end: str, all_quoted: bool
) -> None:
    text = io.StringIO(newline="")
    # Python's writer does not quote a carriage return where lines end in newlines.
    all_quoted = all_quoted or any("\r" in field for row in rows for field in row)
    quoting: Any = python_csv.QUOTE_ALL if all_quoted else python_csv.QUOTE_MINIMAL
    python_csv.writer(text, lineterminator=line_end, quoting=quoting).writerows(rows)
    data = text.getvalue().encode()
    found = list(pieces(io.BytesIO(data), cut, Dialect().last_end))
    assert b"".join(found) == data
    parsed = [row for piece in found for row in python_csv.reader(io.StringIO(piece.decode(), newline=""))]
    assert parsed == rows


@given(st.lists(st.text(st.sampled_from('a,"\n'), max_size=8), max_size=8).map("\n".join))
def test_quotes_within_fields_mean_nothing_and_both_ways_to_find_ends_agree(text: str) -> None:
    data, dialect = f"x,{text}".encode(), Dialect()
    quotes = dialect._quotes(data)
    if quotes is not None:
        assert dialect.last_end(data) == max(dialect.ends(data), default=0)


def test_a_quote_in_the_middle_of_a_field_does_not_open_it() -> None:
    data = b'1,5" disk\n2,3.5" disk\n3,"a ""b""\nc"\n4,"not en'
    assert Dialect().last_end(data) == data.index(b"4,")


def test_escapes_and_files_without_quotes_are_understood() -> None:
    assert Dialect(escape=b"\\").last_end(b'1,"a\\"\n"\n2,x\\\ny\n3,') == len(b'1,"a\\"\n"\n2,x\\\ny\n')
    assert Dialect(quote=None).last_end(b'1,"a\n2,') == len(b'1,"a\n')


@given(
    st.lists(st.binary(max_size=20).map(lambda line: line.replace(b"\n", b"")), max_size=20),
    st.integers(1, 50),
)
def test_lines_are_never_cut(lines: list[bytes], cut: int) -> None:
    data = b"\n".join(lines)
    found = list(pieces(io.BytesIO(data), cut, last_line_end))
    assert b"".join(found) == data
    assert all(piece.endswith(b"\n") for piece in found[:-1])


# --------------------------------------------------------------------------- types

_types = st.sampled_from(
    [
        pa.null(),
        pa.int64(),
        pa.float64(),
        pa.bool_(),
        pa.string(),
        pa.date32(),
        pa.timestamp("s"),
        pa.timestamp("ns"),
    ]
)


@given(_types, _types, st.booleans())
def test_a_wider_type_does_not_depend_on_which_comes_first(
    one: pa.DataType, other: pa.DataType, text: bool
) -> None:
    found = wider(one, other, text_fits_all=text)
    assert found == wider(other, one, text_fits_all=text)
    if found is not None:
        assert wider(found, other, text_fits_all=text) == found


def test_structs_and_lists_are_widened_within() -> None:
    one = pa.struct([("a", pa.int64()), ("b", pa.list_(pa.null()))])
    other = pa.struct([("b", pa.list_(pa.float64())), ("c", pa.string()), ("a", pa.float64())])
    wanted = pa.struct([("a", pa.float64()), ("b", pa.list_(pa.float64())), ("c", pa.string())])
    assert wider(one, other, text_fits_all=False) == wanted
    assert wider(pa.list_(pa.int64()), pa.int64(), text_fits_all=False) is None


# --------------------------------------------------------------------------- CSV


def test_blocks_of_a_csv_file_agree_on_the_types(tmp_path: Path) -> None:
    lines = [f"{i},{i},,{i % 2 == 0}" for i in range(50)] + ["50,5.5,x,maybe"]
    path = write(tmp_path / "x.csv", "a,b,c,d\n" + "\n".join(lines))
    found = csv_source(path, block_bytes=100)
    facts = found.inspect()
    assert len(facts.blocks) > 4
    fields: list[tuple[str, pa.DataType]] = [
        ("a", pa.int64()),
        ("b", pa.float64()),
        ("c", pa.string()),
        ("d", pa.string()),
    ]
    assert facts.schema == pa.schema(fields)
    rows = everything(found)
    assert [row["a"] for row in rows] == list(range(51))
    assert rows[0] == {"a": 0, "b": 0.0, "c": "", "d": "True"}
    assert rows[50] == {"a": 50, "b": 5.5, "c": "x", "d": "maybe"}
    last = len(facts.blocks) - 1
    assert found.name_row(last, facts.blocks[last].rows - 1) == "x.csv, row 50"


def test_quoted_newlines_cross_the_cut(tmp_path: Path) -> None:
    values = ['line\nbreak, and "quotes"\r\n' * (1 + i % 3) for i in range(40)]
    text = io.StringIO(newline="")
    python_csv.writer(text).writerows([["n", "s"], *enumerate(values)])
    found = csv_source(write(tmp_path / "x.csv", text.getvalue()), block_bytes=64)
    assert len(found.inspect().blocks) > 10
    assert [row["s"] for row in everything(found)] == values


def test_csv_files_share_columns_in_any_order_with_blank_lines_and_no_last_newline(tmp_path: Path) -> None:
    write(tmp_path / "a.csv", "\xef\xbb\xbfa,b\n1,x\n\n2,y".encode("latin-1"))
    write(tmp_path / "b.csv", "\nb,a\r\nz,3\r\n")
    write(tmp_path / "c.csv", "")
    write(tmp_path / "d.csv", "a,b\n")
    found = csv_source(tmp_path)
    assert everything(found) == [{"a": 1, "b": "x"}, {"a": 2, "b": "y"}, {"a": 3, "b": "z"}]
    assert everything(found, ["b"]) == [{"b": "x"}, {"b": "y"}, {"b": "z"}]
    assert sum(batch.num_rows for block in range(2) for batch in found.read(block, [])) == 3


def test_partitions_and_paths_are_columns_of_text_files_too(tmp_path: Path) -> None:
    path = write(tmp_path / "k=v/a.csv", "a,b\n1,2\n")
    found = csv_source(tmp_path, include_paths=True)
    assert everything(found) == [{"a": 1, "b": 2, "k": "v", "path": str(path)}]
    assert everything(found, ["k"]) == [{"k": "v"}]
    write(tmp_path / "k=v/a.csv", "a,k\n1,2\n")
    assert everything(csv_source(tmp_path)) == [{"a": 1, "k": 2}]


def test_options_of_pyarrow_hold(tmp_path: Path) -> None:
    path = write(tmp_path / "x.csv", "# made by hand\nskip me;too\n1;NA\n2;7\n")
    found = csv_source(
        path,
        read_options=csv.ReadOptions(skip_rows=2, column_names=["a", "b"]),
        parse_options=csv.ParseOptions(delimiter=";"),
        convert_options=csv.ConvertOptions(column_types={"a": pa.int8()}, null_values=["NA"]),
        block_bytes=4,
    )
    assert found.inspect().schema == pa.schema([("a", pa.int8()), ("b", pa.int64())])
    again = cloudpickle.loads(cloudpickle.dumps(found))
    assert everything(again) == [{"a": 1, "b": None}, {"a": 2, "b": 7}]
    only = csv_source(
        write(tmp_path / "y.csv", "a,b\n1,2\n"), convert_options=csv.ConvertOptions(include_columns=["b"])
    )
    assert everything(only) == [{"b": 2}]
    unnamed = csv_source(path, read_options=csv.ReadOptions(skip_rows=2, autogenerate_column_names=True))
    assert everything(unnamed)[0] == {"f0": "1;NA"}


@pytest.mark.parametrize("compress", [gzip.compress, bz2.compress])
def test_a_compressed_file_is_one_block_read_in_pieces(tmp_path: Path, compress: Any) -> None:
    data = ("a,b\n" + "\n".join(f'{i},"{i}\n"' for i in range(100))).encode()
    path = write(tmp_path / ("x.csv.gz" if compress is gzip.compress else "x.csv.bz2"), compress(data))
    found = csv_source(path, block_bytes=100)
    assert [block.rows for block in found.inspect().blocks] == [100]
    assert len(list(found.read(0))) > 3
    assert [row["a"] for row in everything(found)] == list(range(100))


def test_bad_csv_is_named(tmp_path: Path) -> None:
    path = write(tmp_path / "bad.csv", "a,b\n1,2\n3\n")
    with pytest.raises(DataError, match=r"bad\.csv' cannot be parsed: .*Expected 2 columns, got 1"):
        csv_source(path).inspect()
    write(tmp_path / "good.csv", "a,c\n1,2\n")
    write(tmp_path / "bad.csv", "a,b\n1,2\n")
    with pytest.raises(DataError, match=r"bad\.csv' has 'b' and '.*good\.csv' does not"):
        csv_source(tmp_path).inspect()
    with pytest.raises(DataError, match="names the column 'a' twice"):
        csv_source(write(tmp_path / "twice.csv", "a,a\n1,2\n")).inspect()


def test_the_fingerprint_of_text_follows_every_byte_and_not_the_cut(tmp_path: Path) -> None:
    path = write(tmp_path / "x.csv", "a\n" + "1\n" * 100)
    first = csv_source(path).inspect().fingerprint
    assert csv_source(path, block_bytes=20).inspect().fingerprint == first
    write(path, "a\n" + "1\n" * 99 + "2\n")
    assert csv_source(path).inspect().fingerprint != first
    write(path, "b\n" + "1\n" * 100)
    assert csv_source(path).inspect().fingerprint != first


def test_a_text_file_that_changes_while_in_use_is_noticed(tmp_path: Path) -> None:
    path = write(tmp_path / "x.csv", "a\n" + "1\n" * 10)
    found = csv_source(path)
    found.inspect()
    write(path, "a\n" + "1\n" * 8)
    with pytest.raises(
        DataError, match=r"not the one that was inspected: a part of it had 10 records and has 8"
    ):
        list(found.read(0))
    path.unlink()
    with pytest.raises(DataError, match="is gone"):
        list(found.read(0))


def test_files_without_a_record_have_no_rows(tmp_path: Path) -> None:
    write(tmp_path / "x.csv", "")
    assert everything(csv_source(tmp_path)) == []
    write(tmp_path / "x.jsonl", "\n\n")
    assert everything(json_source(tmp_path / "x.jsonl")) == []


# --------------------------------------------------------------------------- JSON


def test_keys_that_only_some_lines_have_are_columns_with_nulls(tmp_path: Path) -> None:
    records = [{"a": i} for i in range(20)] + [{"b": [1.5], "c": {"d": "x"}}, {"a": 2.5, "b": []}]
    text = "\n\n  \n".join(json.dumps(record) for record in records)
    found = json_source(write(tmp_path / "x.jsonl", text), block_bytes=40)
    assert len(found.inspect().blocks) > 3
    rows = everything(found)
    assert rows[0] == {"a": 0.0, "b": None, "c": None}
    assert rows[20:] == [{"a": None, "b": [1.5], "c": {"d": "x"}}, {"a": 2.5, "b": [], "c": None}]
    assert everything(found, ["c"])[20] == {"c": {"d": "x"}}
    assert cloudpickle.loads(cloudpickle.dumps(found))._facts == found.inspect()


def test_text_that_looks_like_a_time_in_some_blocks_stays_text(tmp_path: Path) -> None:
    found = json_source(write(tmp_path / "x.jsonl", '{"t": "2020-01-01"}\n{"t": "soon"}\n'), block_bytes=8)
    assert len(found.inspect().blocks) == 2
    assert [row["t"] for row in everything(found)] == ["2020-01-01", "soon"]


def test_whole_documents_are_read_without_lines(tmp_path: Path) -> None:
    write(tmp_path / "a.json", json.dumps([{"n": 1}, {"n": 2}], indent=2))
    write(tmp_path / "b.json", json.dumps({"n": 3}, indent=2))
    write(tmp_path / "c.json", " ")
    assert everything(json_source(tmp_path, lines=False, block_bytes=4)) == [{"n": 1}, {"n": 2}, {"n": 3}]
    with pytest.raises(DataError, match=r"a\.json.*lines=False"):
        json_source(tmp_path).inspect()
    with pytest.raises(DataError, match="it holds 1 where an object should be"):
        json_source(write(tmp_path / "d.json", "[1]"), lines=False).inspect()


def test_bad_json_is_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"bad\.jsonl' cannot be parsed: .*changed from number to string"):
        json_source(write(tmp_path / "bad.jsonl", '{"a": 1}\n{"a": "x"}\n')).inspect()
    with pytest.raises(DataError, match=r"'a' of the JSON files has int64 .* and string in '.*bad\.jsonl'"):
        json_source(tmp_path / "bad.jsonl", block_bytes=4).inspect()
    with pytest.raises(DataError, match=r"cut\.jsonl' cannot be parsed"):
        json_source(write(tmp_path / "cut.jsonl", '{"a": 1}\n{"a":')).inspect()


def test_a_key_that_is_also_a_partition_is_that_of_the_records(tmp_path: Path) -> None:
    write(tmp_path / "k=9/x.jsonl", '{"k": 1, "n": 2}\n')
    assert everything(json_source(tmp_path)) == [{"k": 1, "n": 2}]


@pytest.mark.parametrize("content", ["a,b\n", "a,b", "a,b\r\n", "\ufeffa,b\n"])
def test_a_csv_file_of_names_alone_has_these_columns(tmp_path: Path, content: str) -> None:
    found = csv_source(write(tmp_path / "x.csv", content))
    assert found.inspect().schema == pa.schema([("a", pa.null()), ("b", pa.null())])
    assert everything(found) == []
    typed = csv.ConvertOptions(column_types={"b": pa.int8()}, include_columns=["b"])
    assert csv_source(tmp_path / "x.csv", convert_options=typed).inspect().schema == pa.schema(
        [("b", pa.int8())]
    )


def test_text_in_another_encoding_is_refused_and_read_when_it_is_named(tmp_path: Path) -> None:
    path = write(tmp_path / "x.csv", "name\nä\n".encode("latin-1"))
    with pytest.raises(DataError, match=r"Column 'name' of the CSV file .*ReadOptions\(encoding='latin-1'\)"):
        csv_source(path).inspect()
    assert everything(csv_source(path, read_options=csv.ReadOptions(encoding="latin-1"))) == [{"name": "ä"}]
    as_bytes = csv.ConvertOptions(column_types={"name": pa.binary()})
    assert everything(csv_source(path, convert_options=as_bytes)) == [{"name": b"\xe4"}]
    header = write(tmp_path / "y.csv", "ä\n1\n".encode("latin-1"))
    with pytest.raises(DataError, match=r"beginning of the CSV file .*ReadOptions\(encoding='latin-1'\)"):
        csv_source(header).inspect()
    with pytest.raises(DataError, match="cannot be read in the encoding 'utf16'"):
        csv_source(path, read_options=csv.ReadOptions(encoding="utf16"))


@pytest.mark.parametrize("block_bytes", [4, 1000])
def test_a_quote_that_is_never_closed_is_an_error(tmp_path: Path, block_bytes: int) -> None:
    path = write(tmp_path / "x.csv", 'a,b\n1,"x"\n2,"y\n3,z\n')
    with pytest.raises(DataError, match="never closed, in the record that begins b'2,"):
        csv_source(path, block_bytes=block_bytes).inspect()
    unquoted = csv.ParseOptions(quote_char=False)
    assert len(everything(csv_source(path, parse_options=unquoted, block_bytes=block_bytes))) == 3
