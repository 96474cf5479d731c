"""The Lightning that a program uses: ``lightning`` and ``pytorch_lightning`` have classes of their own each.

A Trainer takes only strategies and plugins that are derived from classes of its own package, and ``pip install
lightning`` installs both packages. So the classes here choose their bases when they are first used, after the program
has imported its Lightning, and importing them imports no Lightning.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from importlib import import_module
from importlib.util import find_spec
from typing import Any

#: By which names Lightning is imported, the one that is preferred first.
NAMES = ("lightning.pytorch", "pytorch_lightning")


def check_installed() -> None:
    """Raise :class:`ImportError` where Lightning is not installed. Imports nothing."""
    if not any(find_spec(name.partition(".")[0]) for name in NAMES):
        raise ImportError(
            "powertrain.lightning needs Lightning, which is not installed: pip install lightning"
        )


def packages_in_use() -> list[Any]:
    """Return the packages that this process has imported, else the first that can be."""
    loaded = [sys.modules[name] for name in NAMES if sys.modules.get(name) is not None]
    if loaded:
        return loaded
    check_installed()
    name = next(name for name in NAMES if find_spec(name.partition(".")[0]))
    return [import_module(name)]


class PackageClass(type):
    """The type of classes that stand for one class in each package of Lightning.

    Calling such a class, or deriving from it, uses the one for the package that the program has imported. Where both
    are imported, that is ``lightning.pytorch``.
    """

    def __new__(
        mcls, name: str, bases: tuple[Any, ...], namespace: dict[str, Any], build: Any = None, **options: Any
    ) -> Any:
        """``build`` makes the class for some packages, from its name, its attributes and the packages."""
        if any(isinstance(base, PackageClass) for base in bases):
            real = tuple(base.concrete() if isinstance(base, PackageClass) else base for base in bases)
            return type(real[0])(name, real, namespace, **options)
        return super().__new__(mcls, name, bases, namespace)

    def __init__(
        cls, name: str, bases: tuple[Any, ...], namespace: dict[str, Any], build: Any = None, **options: Any
    ) -> None:
        super().__init__(name, bases, namespace)
        cls._build: Callable[[str, dict[str, Any], list[Any]], Any] = build
        cls._built: dict[tuple[str, ...], Any] = {}

    def concrete(cls) -> Any:
        """Return the class for the package in use, which is imported for it if need be."""
        packages = packages_in_use()
        key = tuple(package.__name__ for package in packages)
        if key not in cls._built:
            described = {"__module__": cls.__module__, "__doc__": cls.__doc__}
            cls._built[key] = cls._build(cls.__name__, described, packages)
        return cls._built[key]

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        """Make an instance of the class for the package in use."""
        return cls.concrete()(*args, **kwargs)

    def __instancecheck__(cls, instance: Any) -> bool:
        return any(isinstance(instance, built) for built in cls._built.values())

    def __subclasscheck__(cls, subclass: type) -> bool:
        return subclass is cls or any(issubclass(subclass, built) for built in cls._built.values())

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(cls.concrete(), name)

    @property
    def __signature__(cls) -> inspect.Signature:
        return inspect.signature(cls.concrete())


def derived(part: type, *path: str) -> Callable[[str, dict[str, Any], list[Any]], Any]:
    """Return a function that builds a class from ``part`` and the class at ``path`` in the preferred package in use."""

    def build(name: str, described: dict[str, Any], packages: list[Any]) -> Any:
        package = packages[0]
        home = import_module(".".join([package.__name__, *path[:-1]]))
        base = getattr(home, path[-1])
        return type(base)(name, (part, base), described)

    return build


def callback(part: type) -> Callable[[str, dict[str, Any], list[Any]], Any]:
    """Return a function that builds a callback from ``part``, for the Trainers of all packages in use."""

    def build(name: str, described: dict[str, Any], packages: list[Any]) -> Any:
        return type(name, (part, *(package.Callback for package in packages)), described)

    return build
