"""A hook that runs when a module is loaded: immediately, or after the user's code imports it."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any


class Arrival(MetaPathFinder):
    """Call ``then`` once, when the module ``name`` is loaded; immediately if it is loaded already.

    Exceptions of ``then`` are not raised by the import: they are passed to ``failed``.
    """

    def __init__(self, name: str, then: Callable[[], None], failed: Callable[[Exception], None]) -> None:
        self._name, self._then, self._failed = name, then, failed

    def wait(self) -> None:
        """Start waiting. Raises exceptions of ``then`` if the module is loaded already."""
        there = sys.modules.get(self._name)  # also None for a module whose import is blocked
        if there is not None and not _is_being_loaded(there):
            self._then()
        else:
            sys.meta_path.insert(0, self)

    def give_up(self) -> None:
        """Cancel the hook. Idempotent, and harmless after the hook has run."""
        if self in sys.meta_path:
            sys.meta_path.remove(self)

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return the spec of the other finders, with a hook that runs when the module has been loaded."""
        if fullname != self._name:
            return None
        self.give_up()
        spec = importlib.util.find_spec(fullname)
        loader: Any = spec.loader if spec is not None else None
        if loader is None:
            sys.meta_path.insert(0, self)  # the module may exist at the next attempt
            return None
        load = loader.exec_module

        def load_and_report(module: ModuleType) -> None:
            loader.exec_module = load
            load(module)
            try:
                self._then()
            except Exception as error:
                self._failed(error)

        loader.exec_module = load_and_report
        return spec


def _is_being_loaded(module: ModuleType) -> bool:
    return bool(getattr(module.__spec__, "_initializing", False))
