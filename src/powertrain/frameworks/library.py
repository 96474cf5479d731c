"""A library that training needs and that this package does not bring."""

from __future__ import annotations

from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from typing import Any


@dataclass(frozen=True)
class Library:
    """A library that people install themselves."""

    #: The module to import.
    module: str
    #: The name of the package for pip.
    package: str

    def load(self, needed_by: str) -> Any:
        """Import the library and return its module.

        Args:
            needed_by: What needs it, for the error.

        Raises:
            ImportError: It is not there, or cannot be imported.
        """
        try:
            return import_module(self.module)
        except ImportError as error:
            raise ImportError(self._absence(needed_by, f" ({error})")) from error

    def check_installed(self, needed_by: str) -> None:
        """Raise :class:`ImportError` where the library is not installed, without importing it."""
        try:
            is_there = find_spec(self.module) is not None
        except (ImportError, ValueError):  # a module without a spec was put into sys.modules
            is_there = False
        if not is_there:
            raise ImportError(self._absence(needed_by, ""))

    def _absence(self, needed_by: str, why: str) -> str:
        return f"{needed_by} needs {self.module}, which cannot be imported{why}: pip install {self.package}"
