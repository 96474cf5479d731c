"""Finding files: paths, directories, patterns, buckets, and what is said where there are none."""

from __future__ import annotations

import os
import secrets
from pathlib import Path

import cloudpickle
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pyarrow import fs
from tests.s3_server import S3Server

from powertrain.data.sources.base import Source
from powertrain.data.sources.files.files import (
    DataFile,
    file_paths,
    find_files,
    open_file,
    pattern_regex,
    read_tail,
    read_whole,
)
from powertrain.data.sources.files.images import ImageSource
from powertrain.data.sources.files.text import CsvSource
from powertrain.errors import DataError
from powertrain.storage import open_storage


def names(paths: object, extensions: list[str] | None = None, **more: object) -> list[str]:
    return [file.name for file in find_files(file_paths(paths, extensions, **more))]  # type: ignore[arg-type]


def put(root: Path, *paths: str, content: bytes = b"x") -> None:
    for path in paths:
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_bytes(content)


def test_a_directory_stands_for_the_files_below_it_in_order_and_without_hidden_ones(tmp_path: Path) -> None:
    put(
        tmp_path,
        "b.csv",
        "a/2.csv",
        "a/1.csv",
        "_SUCCESS",
        ".x",
        "._y",
        "_tmp/z.csv",
        ".git/q.csv",
        "_k=1/p.csv",
    )
    assert names(tmp_path) == ["_k=1/p.csv", "a/1.csv", "a/2.csv", "b.csv"]


def test_a_relative_path_holds_for_other_working_directories(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(tmp_path, "data/1.csv")
    with monkeypatch.context() as patch:
        patch.chdir(tmp_path)
        found = file_paths("data", None)
    assert [file.path for file in find_files(found)] == [str(tmp_path / "data/1.csv")]


def test_a_file_that_is_named_counts_whatever_its_name(tmp_path: Path) -> None:
    put(tmp_path, "_data", "x.txt")
    usual = {"usual": ["csv"]}
    assert names([tmp_path / "_data", str(tmp_path / "x.txt")], **usual) == ["_data", "x.txt"]


def test_endings_leave_others_out(tmp_path: Path) -> None:
    put(tmp_path, "1.CSV", "2.csv", "3.txt", "4.csv.gz")
    assert names(tmp_path, ["csv"]) == ["1.CSV", "2.csv"]
    assert names(tmp_path, [".csv", "csv.gz"]) == ["1.CSV", "2.csv", "4.csv.gz"]
    assert names(tmp_path, usual=["txt"]) == ["3.txt"]


def test_patterns_stay_within_a_directory_unless_they_have_two_stars(tmp_path: Path) -> None:
    put(tmp_path, "1.csv", "a/2.csv", "a/b/3.csv", "c/4.txt")
    assert names(f"{tmp_path}/*.csv") == ["1.csv"]
    assert names(f"{tmp_path}/**/*.csv") == ["1.csv", "a/2.csv", "a/b/3.csv"]
    assert names(f"{tmp_path}/a*") == ["a/2.csv", "a/b/3.csv"]
    assert names(f"{tmp_path}/**") == ["1.csv", "a/2.csv", "a/b/3.csv", "c/4.txt"]


def test_a_path_with_brackets_that_exists_is_no_pattern(tmp_path: Path) -> None:
    put(tmp_path, "run[1]/x.csv")
    assert names(tmp_path / "run[1]") == ["x.csv"]


def test_several_paths_come_in_one_order_however_they_are_given(tmp_path: Path) -> None:
    put(tmp_path, "a/1.csv", "b/2.csv", "c.csv")
    paths = [tmp_path / "c.csv", tmp_path / "b", tmp_path / "a"]
    assert names(paths) == names(paths[::-1]) == ["1.csv", "2.csv", "c.csv"]


def test_names_are_the_same_when_the_directory_is_moved(tmp_path: Path) -> None:
    put(tmp_path, "old/a/1.csv")
    before = names(tmp_path / "old")
    os.rename(tmp_path / "old", tmp_path / "new")
    assert names(tmp_path / "new") == before


def test_partition_directories_say_columns() -> None:
    file = DataFile("/x", "a=1/b=x%20y/c=__HIVE_DEFAULT_PARTITION__/d/part=0.parquet", 1)
    assert file.partitions == {"a": "1", "b": "x y", "c": None}


@pytest.mark.parametrize(
    ("path", "extensions", "words"),
    [
        ("absent", None, ["no such file or directory", "'here.csv'"]),
        ("*.parquet", None, ["No file matches the pattern"]),
        ("empty", None, ["has no files in it"]),
        ("hidden", None, ["begin with neither '.' nor '_'", "'_SUCCESS'"]),
        ("here.csv", ["parquet"], ["'.parquet'", "'here.csv'", "file_extensions"]),
        ("", ["json", "jsonl"], ["'.json' or '.jsonl'", "2 files", "'here.csv', 'hidden/_SUCCESS'"]),
    ],
)
def test_no_files_is_said_with_what_was_looked_for_and_what_is_there(
    tmp_path: Path, path: str, extensions: list[str] | None, words: list[str]
) -> None:
    put(tmp_path, "here.csv", "hidden/_SUCCESS")
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError) as caught:
        names(f"{tmp_path}/{path}", extensions)
    assert not [word for word in words if word not in str(caught.value)], caught.value


def test_a_file_that_is_named_twice_is_read_twice(tmp_path: Path) -> None:
    put(tmp_path, "1.csv", "2.csv")
    assert names([tmp_path, tmp_path / "1.csv"]) == ["1.csv", "1.csv", "2.csv"]


@pytest.mark.parametrize("paths", [[], "", [3], ["a", ""]])
def test_what_is_no_path_is_refused(paths: object) -> None:
    with pytest.raises(DataError, match="path"):
        file_paths(paths, None)  # type: ignore[arg-type]


def test_an_unknown_scheme_or_file_system_is_refused() -> None:
    with pytest.raises(DataError, match=r"'hdfs' is not a supported scheme.*filesystem="):
        file_paths("hdfs://x/y", None)
    with pytest.raises(DataError, match="neither a pyarrow"):
        file_paths("x", None, filesystem=object())


def test_a_file_address_is_a_path(tmp_path: Path) -> None:
    put(tmp_path, "a b.csv")
    assert names(f"file://{tmp_path}/a%20b.csv") == ["a b.csv"]


def test_a_given_file_system_is_listed_and_read(tmp_path: Path) -> None:
    put(tmp_path, "d/k=1/1.csv", "d/2.txt", content=b"hello")
    below = fs.SubTreeFileSystem(str(tmp_path), fs.LocalFileSystem())
    found = find_files(file_paths("d", ["csv"], filesystem=below))
    assert [file.name for file in found] == ["k=1/1.csv"]
    assert names("d/*.txt", filesystem=below) == ["2.txt"]
    assert names("d/k=1/1.csv", filesystem=below) == ["1.csv"]
    assert read_tail(found[0], 3, below) == b"llo"
    with pytest.raises(DataError, match="no such file"):
        names("absent", filesystem=below)


def test_an_fsspec_file_system_is_accepted(tmp_path: Path) -> None:
    import fsspec

    put(tmp_path, "1.csv")
    assert names(str(tmp_path), filesystem=fsspec.filesystem("file")) == ["1.csv"]


def test_objects_of_a_bucket_are_found_and_read_in_pieces(s3: S3Server) -> None:
    top = f"d{secrets.token_hex(4)}"
    storage = open_storage(s3.uri(top))
    for key in ("a/1.csv", "a/k=2/2.csv", "a/_SUCCESS", "b.csv"):
        storage.put(key, key.encode() * 100)
    assert names(s3.uri(top)) == ["a/1.csv", "a/k=2/2.csv", "b.csv"]
    assert names(s3.uri(f"{top}/*.csv")) == ["b.csv"]
    assert names(s3.uri(f"{top}/**/*.csv")) == ["a/1.csv", "a/k=2/2.csv", "b.csv"]
    (file,) = find_files(file_paths(s3.uri(f"{top}/a/1.csv"), None))
    assert (file.name, file.size) == ("1.csv", 700)
    assert read_whole(file) == b"a/1.csv" * 100
    assert read_tail(file, 4) == b".csv"
    assert "testing" not in file.shown.partition("secret_key")[2]
    with open_file(file) as opened:
        opened.seek(7)
        assert opened.read(7) == b"a/1.csv"
        assert opened.size() == 700
    with pytest.raises(DataError, match="no such file"):
        names(s3.uri(f"{top}/absent"))


def test_text_and_images_are_read_from_a_bucket(s3: S3Server) -> None:
    top = f"d{secrets.token_hex(4)}"
    storage = open_storage(s3.uri(top))
    storage.put("k=1/a.csv", b"a,b\n" + b"".join(b"%d,x\n" % number for number in range(100)))
    storage.put("z.png", b"encoded")
    text = CsvSource(file_paths(s3.uri(f"{top}/k=1"), None), block_bytes=100)
    elsewhere = cloudpickle.loads(cloudpickle.dumps(_inspected(text)))
    numbers = [
        row
        for block in range(len(text.inspect().blocks))
        for row in next(elsewhere.read(block))["a"].to_pylist()
    ]
    assert numbers == list(range(100))
    images = ImageSource(file_paths(s3.uri(top), ["png"]))
    assert next(_inspected(images).read(0)).to_pylist() == [{"image": b"encoded"}]
    assert not images.cheap_to_decode


def _inspected(source: Source) -> Source:
    source.inspect()
    return source


@given(st.lists(st.sampled_from(["a", "b", "ab", "x.csv"]), min_size=1, max_size=4))
def test_two_stars_match_what_any_number_of_directories_would(parts: list[str]) -> None:
    name = "/".join(parts)
    assert bool(pattern_regex("**/*.csv").match(name)) == ("x.csv" in parts)
    assert pattern_regex("*").match(name), "all that lies below a match counts"
    assert bool(pattern_regex("[!a]*").match(name)) == (parts[0][0] != "a")


def test_what_keeps_data_from_being_listed_is_said_in_whole_sentences(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse(*_: object) -> None:
        raise OSError("The bucket is closed.")

    monkeypatch.setattr("powertrain.data.sources.files.files._listed", refuse)
    with pytest.raises(DataError, match=r"cannot be listed: The bucket is closed\. Check the path"):
        find_files(file_paths("s3://bucket/x", None))
