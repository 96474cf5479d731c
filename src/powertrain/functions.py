"""Checks of the user's function before it is sent: its signature, its pickle, and sources for tracebacks."""

from __future__ import annotations

import functools
import inspect
import linecache
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

import cloudpickle

from powertrain.errors import TrainFunctionError
from powertrain.text.errors import describe_error


def check_shape(function: Any, argument: str = "train_loop_per_worker") -> None:
    """Raise :class:`TrainFunctionError` unless ``function`` can be called with nothing or with one config."""
    if not callable(function):
        raise TrainFunctionError(
            f"{argument} must be a function, not {type(function).__name__}. Pass the function itself, without "
            "calling it."
        )
    try:
        parameters = list(inspect.signature(function).parameters.values())
    except (TypeError, ValueError):
        return  # some builtins have no signature; the call checks the arguments
    by_name = [p.name for p in parameters if p.default is p.empty and p.kind is p.KEYWORD_ONLY]
    if by_name:
        raise TrainFunctionError(
            f"{argument} {_name(function)}() requires {', '.join(by_name)} by name, but a worker calls it with one "
            "config dict, or with nothing. Take the config as the first argument, or give these a default."
        )
    required = [
        p.name for p in parameters if p.default is p.empty and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)
    ]
    if len(required) > 1:
        raise TrainFunctionError(
            f"{argument} {_name(function)}() has {len(required)} required arguments ({', '.join(required)}), but a "
            "worker calls it with one config dict or with nothing. Give it one argument and pass the rest in "
            "train_loop_config, or bind them with functools.partial."
        )


def pickle_function(
    function: Callable[..., Any],
    config: Any,
    argument: str = "train_loop_per_worker",
    config_argument: str = "train_loop_config",
) -> bytes:
    """Pickle (function, config); raises :class:`TrainFunctionError` naming the object that cannot be pickled."""
    try:
        with by_value_where_needed(function):
            data: bytes = cloudpickle.dumps((function, config))
            return data
    except Exception as error:
        culprit = _culprit(function, config, config_argument)
        raise TrainFunctionError(
            f"{argument} {_name(function)}() cannot be sent to the workers: {culprit} cannot be pickled "
            f"({describe_error(error)}). Create it inside the function, or leave it out."
        ) from error


def script_directory() -> str:
    """Return the directory of this process's script; "" without a script, or where it is the launch directory."""
    script = getattr(sys.modules.get("__main__"), "__file__", None)
    directory = os.path.dirname(os.path.abspath(script)) if script else ""
    return directory if directory in sys.path and directory != os.getcwd() else ""


def sources_only_here() -> dict[str, str]:
    """Return the text of every "file" that only this process has, by name: a notebook's cells, input at a prompt.

    All of them, because an error may come from any that the training function reaches.
    """
    return {
        name: "".join(entry[2])
        for name, entry in list(linecache.cache.items())
        if len(entry) == 4 and entry[2] and not os.path.exists(name)
    }


@contextmanager
def by_value_where_needed(*functions: Callable[..., Any]) -> Iterator[None]:
    """Inside, pickling sends the modules of functions along that a worker could not import by their names."""
    inside = [_inside_partials(function) for function in functions]
    modules = {sys.modules.get(getattr(function, "__module__", None) or "") for function in inside}
    with ExitStack() as stack:
        for module in modules:
            if module is not None and module.__name__ != "__main__" and not _importable(module):
                cloudpickle.register_pickle_by_value(module)
                stack.callback(cloudpickle.unregister_pickle_by_value, module)
        yield


def _inside_partials(function: Callable[..., Any]) -> Callable[..., Any]:
    while isinstance(function, functools.partial):
        function = function.func
    return function


def _importable(module: Any) -> bool:
    """Return True when a fresh process would find this very module by its name."""
    origin = getattr(module, "__file__", None)
    if origin is None:
        return getattr(module, "__spec__", None) is not None  # built in, or made by hand
    found = _origin_on_path(module.__name__)
    return found is not None and os.path.realpath(found) == os.path.realpath(origin)


def _origin_on_path(name: str) -> str | None:
    """Return the file that an import of ``name`` would read, without importing and without using loaded modules."""
    locations: list[str] | None = None
    spec = None
    parts = name.split(".")
    for end in range(1, len(parts) + 1):
        spec = _find(".".join(parts[:end]), locations)
        if spec is None:
            return None
        locations = list(spec.submodule_search_locations or ())
    return spec.origin if spec is not None else None


def _find(name: str, locations: list[str] | None) -> Any:
    for finder in sys.meta_path:
        find = getattr(finder, "find_spec", None)
        spec = find(name, locations) if find is not None else None
        if spec is not None:
            return spec
    return None


def _culprit(function: Callable[..., Any], config: Any, config_argument: str) -> str:
    """Return the first object the function reaches, or the config holds, that cannot be pickled by itself."""
    for where, value in _reached(function, config, config_argument):
        try:
            cloudpickle.dumps(value)
        except Exception:
            return f"{where} (a {type(value).__module__}.{type(value).__qualname__})"
    return "something it uses"


def _reached(function: Callable[..., Any], config: Any, config_argument: str) -> Iterator[tuple[str, Any]]:
    if isinstance(config, Mapping):
        for key, value in config.items():
            yield f"{config_argument}[{key!r}]", value
    inner = inspect.unwrap(function)
    owner = getattr(inner, "__self__", None)
    if owner is not None:
        yield "the object the method belongs to", owner
    for argument in getattr(inner, "args", ()):
        yield "a bound argument", argument
    for key, argument in getattr(inner, "keywords", {}).items():
        yield f"the bound argument {key!r}", argument
    inner = getattr(inner, "func", inner)
    try:
        variables = inspect.getclosurevars(inner)
    except TypeError:
        return
    for name, value in variables.nonlocals.items():
        yield f"the captured variable {name!r}", value
    for name, value in variables.globals.items():
        if not inspect.ismodule(value):
            yield f"the global variable {name!r}", value


def _name(function: Any) -> str:
    return str(
        getattr(function, "__qualname__", None) or getattr(function, "__name__", type(function).__name__)
    )
