"""Which run is meant: by a path, an address or a bare name, under way or not."""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path

import pytest
from tests.cli.test_logs import invoke, write

from powertrain.errors import StorageError
from powertrain.lookup import asking
from powertrain.lookup.finding import find_run
from powertrain.run.remote import protocol
from powertrain.storage import Storage, open_storage

#: Has a run of that name and path listen, as long as a block lasts.
Going = Callable[..., AbstractContextManager[None]]


@pytest.fixture
def place() -> Storage:
    """The storage path that commands look at when none is given."""
    return open_storage(os.environ["POWERTRAIN_STORAGE"])


@pytest.fixture
def going() -> Iterator[Going]:
    """Runs that answer nothing but their names."""
    with tempfile.TemporaryDirectory(prefix="r-", dir="/tmp") as root, pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_RUNTIME_DIR", root)

        def listen(name: str, path: str, *, answers: bool = True) -> AbstractContextManager[None]:
            directory = Path(tempfile.mkdtemp(dir=Path(root, "powertrain")))
            card = protocol.Card(name=name, path=path, pid=os.getpid(), files=path)
            return protocol.listening(
                directory, card, lambda _, client: client.answer(name) if answers else None
            )

        Path(root, "powertrain").mkdir()
        yield listen


def test_a_bare_name_is_first_that_of_a_run_under_way(place: Storage, going: Going) -> None:
    write(place.child("run"))
    with going("run", "/elsewhere/run"):
        found = find_run("run")
        assert (found.place.uri, found.live is not None) == ("/elsewhere/run", True)
        assert find_run("run", place.uri).live is None
    assert find_run("run").place.uri == f"{place.uri}/run"


def test_two_runs_of_one_name_are_distinguished_by_their_paths(place: Storage, going: Going) -> None:
    with going("run", "/here/run"), going("run", "/there/run"):
        with pytest.raises(StorageError, match=r"2 active runs are named 'run': .*/here/run"):
            find_run("run")
        assert find_run("/there/run").live is not None


def test_a_run_under_way_is_found_by_any_path_that_leads_to_it(
    place: Storage, going: Going, tmp_path: Path
) -> None:
    write(place.child("run"))
    (tmp_path / "link").symlink_to(place.uri)
    with going("run", f"{place.uri}/run"):
        assert find_run(f"{tmp_path}/link/run/").live is not None
        assert find_run("run", f"{tmp_path}/link").live is not None
        for listed in (invoke("ls").output, invoke("ls", f"{tmp_path}/link").output):
            assert f"pid {os.getpid()}" in listed
            assert "is running at" not in listed
        assert invoke("resize", "run", "2").output == "run\n"


def test_a_run_whose_process_is_suspended_is_listed_without_a_long_wait(
    place: Storage, going: Going, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(asking, "_STATUS_TIMEOUT_S", 0.05)
    write(place.child("run"))
    with going("run", f"{place.uri}/run", answers=False):
        began = time.monotonic()
        assert f"pid {os.getpid()}" in invoke("ls").output
        assert time.monotonic() - began < 30.0


def test_runs_under_way_elsewhere_are_listed_too(place: Storage, going: Going) -> None:
    with going("far", "/elsewhere/far"):
        assert f"far is running at /elsewhere/far (pid {os.getpid()})." in invoke("ls").output


def test_an_unknown_name_is_reported_with_the_nearest_and_those_under_way(
    place: Storage, going: Going
) -> None:
    for name in ("digits-1", "digits-2", "faces"):
        write(place.child(name))
    with going("letters", "/elsewhere/letters"), pytest.raises(StorageError) as refused:
        find_run("digit-1")
    said = str(refused.value)
    assert f"There is no run 'digit-1' in {place.uri}. It has 'digits-1', 'digits-2' and 1 more." in said
    assert "Active on this machine: 'letters'." in said


def test_in_the_directory_of_a_run_a_dot_names_it(place: Storage) -> None:
    write(place.child("run"))
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(f"{place.uri}/run/journal")
        assert (find_run("..").name, find_run("../.").name) == ("run", "run")
        patch.chdir("..")
        assert find_run(".").name == "run"


def test_an_empty_name_is_reported_as_such() -> None:
    with pytest.raises(StorageError, match="The name of the run is empty"):
        find_run("")


@pytest.mark.parametrize("path", ["/nowhere/at/all", "./nothing", "/"])
def test_a_path_without_a_run_is_reported(path: str) -> None:
    with pytest.raises(StorageError, match=r"There is no run at .*: it has no journal"):
        find_run(path)


def test_the_name_of_a_run_in_an_object_store_is_without_its_settings(going: Going) -> None:
    address = "s3://bucket/runs/digits?endpoint_override=http://127.0.0.1:1"
    with going("digits", address):
        assert find_run(address).name == "digits"
