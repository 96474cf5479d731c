"""Checkpoints reported from the directory that ranks work in."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
import zipfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from powertrain.worker.checkpoints import shared_directory
from powertrain.worker.checkpoints.shared_directory import (
    BEFORE_ALL,
    Copied,
    Listing,
    Version,
    copy_new_entries,
    is_new,
    listing_of,
)

AFTER = 10**9
names = st.sampled_from(["a", "b", "c"])
versions = st.builds(
    lambda inode, size, changed: Version((inode, size, changed), changed),
    st.integers(1, 3),
    st.integers(0, 2),
    st.integers(0, 2 * AFTER),
)
listings = st.builds(Listing, st.just(AFTER), st.dictionaries(names, versions), st.booleans())


@pytest.fixture(autouse=True)
def _unhurried(monkeypatch: pytest.MonkeyPatch) -> None:
    """A listing is cut short after 0.25 s, which a busy machine may take for a directory of any size."""
    monkeypatch.setattr(shared_directory, "_LISTING_TIMEOUT_S", 60.0)


@given(name=names, version=versions, before=listings)
def test_an_entry_is_new_unless_the_listing_has_the_very_same(
    name: str, version: Version, before: Listing
) -> None:
    is_same = before.versions.get(name) == version
    is_recent = version.changed_ns >= AFTER - shared_directory._CLOCK_LAG_NS
    if is_recent:
        assert is_new(name, version, before)
    elif name in before.versions:
        assert is_new(name, version, before) is not is_same
    else:
        assert is_new(name, version, before) is before.is_complete
    assert is_new(name, version, BEFORE_ALL)


def put(path: Path, text: str = "x") -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


def listed(top: Path) -> Listing:
    """What a rank finds that starts when all that was put is some time ago, by the clock of the file system."""
    newest = max((path.lstat().st_ctime_ns for path in [top, *top.rglob("*")]), default=0)
    with tempfile.NamedTemporaryFile(dir=top.parent) as probe:
        while os.fstat(probe.fileno()).st_ctime_ns <= newest:
            os.utime(probe.name)
    found = listing_of(str(top))
    return replace(found, taken_ns=found.taken_ns + 10 * AFTER)


def copied(tmp_path: Path, before: Listing = BEFORE_ALL, **options: Any) -> Copied:
    (tmp_path / "target").mkdir()
    given = {"excluded": [], "outputs": [], "is_shared": False, **options}
    return copy_new_entries(str(tmp_path / "top"), str(tmp_path / "target"), before=before, **given)


def link_beside(path: Path, old: Path) -> None:
    path.unlink()
    path.symlink_to(old.name)


CHANGES: dict[str, Callable[[Path, Path], Any]] = {
    "written again": lambda path, _: path.write_text("y"),
    "appended to": lambda path, _: path.write_text(path.read_text() + "y"),
    "copied with its times": lambda path, old: shutil.copy2(old, path),
    "moved here": lambda path, old: os.rename(shutil.copy2(old, path.with_name("moving")), path),
    "linked here": link_beside,
    "removed": lambda path, _: path.unlink(),
    "left alone": lambda path, _: path.read_text(),
}


@given(
    changes=st.dictionaries(
        st.sampled_from(["model.pt", ".hidden", "deep/er/file"]), st.sampled_from(list(CHANGES))
    ),
    made=st.sets(st.sampled_from(["new.pt", ".state", "new/file", ".new/file", "deep/new"])),
)
def test_what_a_loop_has_made_or_changed_is_taken_however_it_did_so(
    changes: dict[str, str], made: set[str]
) -> None:
    with tempfile.TemporaryDirectory() as directory:
        top = Path(directory, "top")
        for name in ("model.pt", ".hidden", "deep/er/file", "old"):
            put(top / name)
            put((top / name).with_name("old"))
        before = listed(top)
        for name, change in changes.items():
            CHANGES[change](top / name, (top / name).with_name("old"))
        for name in made:
            put(top / name)
        found = copied(Path(directory), before)
        kept = {name for name, change in changes.items() if change not in ("removed", "left alone")}
        assert set(found.names) == kept | made
        assert not found.left_out
        assert all(
            Path(directory, "target", name).read_text() == (top / name).read_text() for name in kept | made
        )


def test_directories_of_tools_and_of_the_run_are_left_out(tmp_path: Path) -> None:
    top = tmp_path / "top"
    put(top / "train.py")
    put(top / ".git/index")
    before = listed(top)
    put(top / ".git/index", "another")
    put(top / ".git/ORIG_HEAD")
    put(top / "__pycache__/train.pyc")
    put(top / "venv/pyvenv.cfg")
    put(top / "runs/name/journal")
    put(top / ".powertrain-manifest.json")
    put(top / ".metadata.json")
    found = copied(tmp_path, before, excluded=[str(top / "runs" / "name")])
    assert found.names == [".metadata.json"]
    assert not found.left_out


def test_a_directory_that_was_made_for_the_ranks_is_taken_whole(tmp_path: Path) -> None:
    top = tmp_path / "top"
    names = [".git/index", "__pycache__/train.pyc", "model.pt", "venv/pyvenv.cfg"]
    for name in names:
        put(top / name)
    (top / "empty").mkdir()
    assert copied(tmp_path).names == sorted([*names, "empty/"])
    assert (tmp_path / "target/empty").is_dir()


def test_links_inside_are_taken_and_others_are_named(tmp_path: Path) -> None:
    top = tmp_path / "top"
    put(top / "step-2/model.pt", "weights")
    links: dict[str, str | Path] = {
        "latest": "step-2",
        "best.pt": "step-2/model.pt",
        "outside": put(tmp_path / "elsewhere"),
        "nowhere": "missing",
        "round": ".",
        "step-2/up": "../other",
        "other/back": "../step-2",
    }
    (top / "other").mkdir()
    for name, target in links.items():
        (top / name).symlink_to(target)
    os.mkfifo(top / "pipe")
    found = copied(tmp_path)
    assert {"best.pt", "latest/model.pt", "step-2/model.pt"} <= set(found.names)
    assert (tmp_path / "target/latest/model.pt").read_text() == "weights"
    assert not any(path.is_symlink() for path in (tmp_path / "target").rglob("*"))
    reasons = {name: reason for name, reason in found.left_out.items() if name.count("/") == 0}
    assert reasons == {
        "outside": f"it is a link out of the directory, to {str(tmp_path / 'elsewhere')!r}",
        "nowhere": "it is a link that leads nowhere",
        "round": "it is a link that leads back to itself",
        "pipe": "it is not a regular file",
    }


def test_a_link_that_was_there_before_counts_when_its_file_changes(tmp_path: Path) -> None:
    top = tmp_path / "top"
    put(top / "model.pt")
    (top / "latest.pt").symlink_to("model.pt")
    (top / "data").symlink_to(tmp_path)
    before = listed(top)
    put(top / "model.pt", "new weights")
    found = copied(tmp_path, before)
    assert found.names == ["latest.pt", "model.pt"]
    assert not found.left_out, "a link to data that was there before is not part of any checkpoint"


def test_what_the_listing_did_not_come_to_is_judged_by_its_time(tmp_path: Path) -> None:
    top = tmp_path / "top"
    for number in range(5):
        put(top / f"{number}")
    before = replace(listing_of(str(top), entries=3), taken_ns=time.time_ns() + 10 * AFTER)
    assert not before.is_complete
    assert len(before.versions) == 3
    assert copied(tmp_path, before).names == []
    shutil.rmtree(tmp_path / "target")
    assert copied(tmp_path, replace(before, taken_ns=0)).names == ["0", "1", "2", "3", "4"]
    assert not listing_of(str(tmp_path / "missing")).is_complete


# --------------------------------------------------------------------------- files that others are writing


def test_a_file_that_another_rank_is_writing_is_copied_when_it_is_whole(tmp_path: Path) -> None:
    path = tmp_path / "top" / "model.pt"
    path.parent.mkdir()
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("data", os.urandom(100_000))
    whole = path.read_bytes()
    path.write_bytes(whole[:50_000])  # as far as the other rank has come, and it pauses for long
    looked = threading.Event()
    is_whole = shared_directory._is_whole

    def look(copy: Path) -> bool:
        looked.set()
        return is_whole(copy)

    def finish() -> None:
        looked.wait()
        path.write_bytes(whole)

    other = threading.Thread(target=finish)
    other.start()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shared_directory, "_is_whole", look)
        assert copied(tmp_path, is_shared=True).names == ["model.pt"]
    other.join()
    assert (tmp_path / "target/model.pt").read_bytes() == whole


@pytest.fixture
def growing_log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A file that has grown each time that it is looked at."""
    path = put(tmp_path / "top" / "train.log")
    is_over = shared_directory._ChangingFile.is_over

    def grown_and_looked_at(changing: shared_directory._ChangingFile, into: Copied) -> bool:
        if changing.entry.name == path.name:
            with path.open("a") as file:
                file.write("another line\n")
        return is_over(changing, into)

    monkeypatch.setattr(shared_directory._ChangingFile, "is_over", grown_and_looked_at)
    return path


def test_a_log_that_never_rests_is_left_out_and_named_and_waited_for_once(
    tmp_path: Path, growing_log: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shared_directory, "_REST_TIMEOUT_S", 0.5)
    put(tmp_path / "top" / "model.pt", "weights")
    put(tmp_path / "top" / "cut.pt", "PK\x03\x04 and no end")
    found = copied(tmp_path, is_shared=True)
    assert found.names == ["model.pt"], "what rests is taken, whatever else there is"
    assert found.left_out.keys() == found.changing == {"cut.pt", "train.log"}
    assert "it was being written all the time" in found.left_out["train.log"]
    assert [path.name for path in (tmp_path / "target").iterdir()] == ["model.pt"]

    monkeypatch.setattr(shared_directory, "_REST_TIMEOUT_S", 600.0)  # a second wait would end the test
    shutil.rmtree(tmp_path / "target")
    assert copied(tmp_path, is_shared=True, hopeless=found.changing).names == ["model.pt"]


def test_the_file_that_output_goes_to_is_left_out_without_a_wait(
    tmp_path: Path, growing_log: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shared_directory, "_REST_TIMEOUT_S", 600.0)
    put(tmp_path / "top" / "model.pt")
    found = copied(tmp_path, is_shared=True, outputs=[os.path.realpath(growing_log)])
    assert found.names == ["model.pt"]
    assert not found.left_out


def test_output_to_a_file_is_found_and_output_to_a_pipe_is_not(tmp_path: Path) -> None:
    found = "powertrain.worker.checkpoints.shared_directory"
    code = f"import sys; from {found} import output_files; sys.exit(repr(output_files()))"
    log = tmp_path / "nohup.out"
    with log.open("w") as file:
        ran = subprocess.run(
            [sys.executable, "-c", code], cwd=tmp_path, stdout=file, stderr=subprocess.PIPE, text=True
        )
    assert ran.stderr.strip() == repr([str(log)])
