"""The user's function before it travels."""

from __future__ import annotations

import functools
import importlib.util
import linecache
import pickle
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import cloudpickle
import pytest

from powertrain.errors import TrainFunctionError
from powertrain.functions import check_shape, pickle_function, sources_only_here

LOCK = threading.Lock()


class Trainer:
    def __init__(self, held: Any = None) -> None:
        self.held = held

    def train(self, config: dict[str, Any]) -> None: ...

    def __call__(self) -> None: ...


def no_arguments() -> int: ...  # type: ignore[empty-body]
def one_argument(config: dict[str, Any]) -> None: ...
def one_default(config: dict[str, Any] | None = None, other: int = 1) -> None: ...
def anything(*args: Any, **kwargs: Any) -> None: ...
def two_required(config: dict[str, Any], model: Any) -> None: ...
def named_only(*, config: dict[str, Any]) -> None: ...


@pytest.mark.parametrize(
    "function",
    [
        no_arguments,
        one_argument,
        one_default,
        anything,
        lambda config: None,
        Trainer().train,
        Trainer(),
        functools.partial(two_required, model=1),
        print,
    ],
)
def test_a_function_of_a_config_or_of_nothing_is_fine(function: Callable[..., Any]) -> None:
    check_shape(function)


@pytest.mark.parametrize(
    ("function", "words"),
    [
        (two_required, r"two_required\(\) has 2 required arguments \(config, model\)"),
        (lambda a, b, c: None, r"3 required arguments \(a, b, c\)"),
        (named_only, "requires config by name"),
        (3, "must be a function, not int"),
        (no_arguments.__doc__, "not NoneType"),
    ],
)
def test_a_function_of_another_shape_is_refused(function: Any, words: str) -> None:
    with pytest.raises(TrainFunctionError, match=words):
        check_shape(function)


def test_a_function_and_its_config_travel() -> None:
    captured = [1, 2]

    def train(config: dict[str, Any]) -> Any:
        return [*captured, config["x"]]

    function, config = pickle.loads(pickle_function(train, {"x": 3}))
    assert function(config) == [1, 2, 3]


def _captures() -> Callable[[], Any]:
    handle = threading.Lock()
    return lambda: handle


@pytest.mark.parametrize(
    ("function", "config", "culprit"),
    [
        (_captures(), None, "the captured variable 'handle' .*lock"),
        (lambda: LOCK, None, "the global variable 'LOCK' .*lock"),
        (lambda config: None, {"rate": 1, "lock": threading.Lock()}, r"train_loop_config\['lock'\]"),
        (Trainer(threading.Lock()).train, None, "the object the method belongs to .*Trainer"),
        (functools.partial(two_required, model=threading.Lock()), None, "the bound argument 'model'"),
    ],
)
def test_what_cannot_be_pickled_is_named(function: Callable[..., Any], config: Any, culprit: str) -> None:
    with pytest.raises(TrainFunctionError, match=culprit):
        pickle_function(function, config)


def test_an_argument_of_a_validation_that_cannot_be_pickled_is_named() -> None:
    with pytest.raises(
        TrainFunctionError, match=r"the validation function anything\(\).*fn_kwargs\['lock'\]"
    ):
        pickle_function(anything, {"lock": LOCK}, "the validation function", "fn_kwargs")


@pytest.fixture
def module(tmp_path: Path) -> Iterator[ModuleType]:
    """A module that was loaded from a place which is not on the path."""
    path = tmp_path / "not_on_the_path.py"
    path.write_text("HELPER = 5\ndef helper():\n    return HELPER\ndef train():\n    return helper()\n")
    spec = importlib.util.spec_from_file_location("not_on_the_path", path)
    assert spec is not None
    assert spec.loader is not None
    loaded = importlib.util.module_from_spec(spec)
    sys.modules["not_on_the_path"] = loaded
    spec.loader.exec_module(loaded)
    yield loaded
    sys.modules.pop("not_on_the_path", None)


def test_a_function_that_a_worker_could_not_import_travels_by_value(module: ModuleType) -> None:
    data = pickle_function(module.train, None)
    del sys.modules["not_on_the_path"]
    function, _ = pickle.loads(data)
    assert function() == 5
    assert not cloudpickle.list_registry_pickle_by_value()


def test_a_function_that_a_worker_can_import_travels_by_name(
    module: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(Path(str(module.__file__)).parent))
    data = pickle_function(module.train, None)
    assert len(data) < 200
    assert b"HELPER" not in data
    del sys.modules["not_on_the_path"]
    function, _ = pickle.loads(data)
    assert function() == 5


def test_another_file_of_the_same_name_on_the_path_is_not_taken_for_it(
    module: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "not_on_the_path.py").write_text("def train():\n    return 'wrong'\n")
    monkeypatch.syspath_prepend(str(elsewhere))
    data = pickle_function(module.train, None)
    del sys.modules["not_on_the_path"]
    assert pickle.loads(data)[0]() == 5


def test_the_source_of_a_notebook_cell_goes_along_and_of_a_file_does_not() -> None:
    text = "def train():\n    return 1\n"
    linecache.cache["<cell 3>"] = (len(text), None, text.splitlines(keepends=True), "<cell 3>")
    linecache.getlines(__file__)
    try:
        sources = sources_only_here()
    finally:
        del linecache.cache["<cell 3>"]
    assert sources["<cell 3>"] == text
    assert __file__ not in sources
