"""Callbacks run when a module has been loaded, by any importer."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from powertrain.trace.recording.arrival import Arrival


def unexpected(error: Exception) -> None:
    pytest.fail(str(error))


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    (tmp_path / "arriving_module.py").write_text("value = 1\n")
    (tmp_path / "broken_module.py").write_text("value = 1 / 0\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    before = list(sys.meta_path)
    yield "arriving_module"
    assert sys.meta_path == before
    for name in ("arriving_module", "broken_module"):
        sys.modules.pop(name, None)


def test_it_is_done_once_the_module_is_whole(module: str) -> None:
    seen: list[int] = []
    Arrival(module, lambda: seen.append(sys.modules[module].value), unexpected).wait()
    assert seen == []
    importlib.import_module(module)
    importlib.reload(sys.modules[module])
    assert seen == [1]


def test_it_is_done_at_once_where_the_module_is_there(module: str) -> None:
    importlib.import_module(module)
    seen: list[int] = []
    Arrival(module, lambda: seen.append(1), unexpected).wait()
    assert seen == [1]


def test_a_module_that_may_not_be_imported_never_comes(module: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    arrival = Arrival(module, pytest.fail, unexpected)
    arrival.wait()
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module(module)
    arrival.give_up()


def test_what_fails_then_does_not_fail_the_import(module: str) -> None:
    failed: list[Exception] = []

    def fail() -> None:
        raise ZeroDivisionError

    Arrival(module, fail, failed.append).wait()
    assert importlib.import_module(module).value == 1
    assert isinstance(failed[0], ZeroDivisionError)


def test_a_module_that_fails_to_load_fails_as_without_it(module: str) -> None:
    Arrival("broken_module", pytest.fail, unexpected).wait()
    with pytest.raises(ZeroDivisionError):
        importlib.import_module("broken_module")


def test_given_up_nothing_is_done(module: str) -> None:
    arrival = Arrival(module, pytest.fail, unexpected)
    arrival.wait()
    arrival.give_up()
    arrival.give_up()
    importlib.import_module(module)


def test_a_module_that_is_not_there_is_waited_for(module: str, tmp_path: Path) -> None:
    done: list[int] = []
    arrival = Arrival("late_module", lambda: done.append(1), unexpected)
    arrival.wait()
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module("late_module")
    (tmp_path / "late_module.py").write_text("")
    importlib.invalidate_caches()
    importlib.import_module("late_module")
    assert done == [1]
    del sys.modules["late_module"]
