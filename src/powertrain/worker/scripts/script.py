"""Classes and functions of the user's script in a process that did not run the script.

They arrive pickled by value, with ``__module__ == "__main__"`` or the name of a module that only the driver can import.
Later they are pickled by reference: by ``torch.save(model)``, by a DataLoader with spawned workers. So :func:`load`
makes them attributes of that module in this process, and :func:`bring_to_children` passes them on to spawned processes.
These would otherwise run the script again to find them, and with it a ``fit()`` without an ``if __name__ ==
"__main__"`` guard.
"""

from __future__ import annotations

import contextlib
import functools
import io
import os
import pickle
import sys
import types
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import cloudpickle

#: The functions by which cloudpickle reconstructs objects pickled by value.
_MAKERS = frozenset({"_make_function", "_make_skeleton_class", "_make_skeleton_enum"})
#: The file that a spawned process runs in place of the script.
_STUB = "from powertrain.worker.scripts.script import restored\nglobals().update(restored({pickled!r}))\n"


def load(pickled: bytes) -> Any:
    """Unpickle, and register classes and functions that were pickled by value under their names."""
    unpickler = _Unpickler(io.BytesIO(pickled))
    value = unpickler.load()
    publish(unpickler.made)
    return value


def publish(objects: Iterable[Any]) -> None:
    """Make each class and function an attribute of the module that it names, if that is not a module with a file."""
    for found in objects:
        module, name = getattr(found, "__module__", None), getattr(found, "__qualname__", "")
        if not module or not name.isidentifier() or (module, name) in _published:
            continue  # nested in a class or a function, or a second copy of a known object
        home = _module(module)
        if module == "__main__" or getattr(home, "__file__", None) is None:
            setattr(home, name, found)
            _published[module, name] = found


#: Objects registered by :func:`publish`, by module and name.
_published: dict[tuple[str, str], Any] = {}


def _module(name: str) -> types.ModuleType:
    """Return the module of this name; an empty one if only the driver can import it."""
    return sys.modules.setdefault(name, types.ModuleType(name))


class _Unpickler(pickle.Unpickler):
    """Unpickler that records reconstructed (not imported) objects."""

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file)
        self.made: list[Any] = []

    def find_class(self, module: str, name: str) -> Any:
        found = super().find_class(module, name)
        if name not in _MAKERS or not module.startswith("cloudpickle"):
            return found

        def make(*args: Any) -> Any:
            self.made.append(found(*args))
            return self.made[-1]

        return make


def bring_to_children() -> None:
    """Pass the script's classes to processes spawned from now on, which then do not run the script."""
    from multiprocessing import spawn

    if getattr(spawn.get_preparation_data, "__module__", "") == __name__:
        return
    spawn.get_preparation_data = _with_stub(spawn.get_preparation_data)


def _with_stub(prepare: Any) -> Any:
    def get_preparation_data(name: str) -> dict[str, Any]:
        data: dict[str, Any] = prepare(name)
        for key in ("init_main_from_name", "init_main_from_path"):
            data.pop(key, None)
        if _published:
            data["init_main_from_path"] = _stub(os.getpid(), len(_published))
        return data

    get_preparation_data.__module__ = __name__
    get_preparation_data.__wrapped__ = prepare  # type: ignore[attr-defined]
    return get_preparation_data


def let_children_run_script() -> None:
    """Let processes spawned from now on import ``__main__`` from its file, as multiprocessing does."""
    from multiprocessing import spawn

    prepare: Any = spawn.get_preparation_data
    if getattr(prepare, "__module__", "") == __name__:
        spawn.get_preparation_data = prepare.__wrapped__


@functools.lru_cache(maxsize=1)
def _stub(pid: int, published: int) -> str:
    """Return the path of an in-memory file, which exists as long as this process; renewed when objects are added."""
    descriptor = os.memfd_create("powertrain-script")
    with os.fdopen(os.dup(descriptor), "w") as file:
        file.write(_STUB.format(pickled=_pickled(_published)))
    return f"/proc/{pid}/fd/{descriptor}"


def _pickled(objects: Mapping[tuple[str, str], Any]) -> bytes:
    """Pickle all objects together, without those that cannot be pickled: a spawned process may not need them."""
    with _by_value({module for module, _ in objects} - {"__main__"}):
        try:
            return bytes(cloudpickle.dumps(dict(objects)))
        except Exception:
            return bytes(cloudpickle.dumps({name: one for name, one in objects.items() if _can_travel(one)}))


@contextlib.contextmanager
def _by_value(modules: Iterable[str]) -> Iterator[None]:
    """Make cloudpickle pickle these modules by value: a spawned process cannot import them."""
    changed = [
        sys.modules[name] for name in modules if name not in cloudpickle.list_registry_pickle_by_value()
    ]
    for module in changed:
        cloudpickle.register_pickle_by_value(module)
    try:
        yield
    finally:
        for module in changed:
            cloudpickle.unregister_pickle_by_value(module)


def _can_travel(value: Any) -> bool:
    try:
        cloudpickle.dumps(value)
    except Exception:
        return False
    return True


def restored(pickled: bytes) -> dict[str, Any]:
    """Register the classes and functions in a spawned process; return those of ``__main__`` by name."""
    objects: dict[tuple[str, str], Any] = pickle.loads(pickled)
    for (module, name), found in objects.items():
        if module != "__main__":
            setattr(_module(module), name, found)
    _published.update(objects)  # for processes spawned by this one
    bring_to_children()
    return {name: found for (module, name), found in objects.items() if module == "__main__"}
