"""Whether a training function mentions a name, found in its code without running it."""

from __future__ import annotations

import contextlib
import functools
import types
from collections.abc import Iterator
from typing import Any

#: Functions that are looked at.
_MOST = 500


def mentions(function: Any, name: str) -> bool:
    """Return whether a function names ``name``, or a function or class of the same module that it names does."""
    seen: set[int] = set()
    found = [function]
    modules = {"__main__", *_modules_of(function)}
    while found and len(seen) < _MOST:
        one = found.pop()
        if id(one) in seen:
            continue
        seen.add(id(one))
        for part in _functions_of(one):
            names = set(_names_of(part.__code__))
            if name in names:
                return True
            found += [part.__globals__[known] for known in names & part.__globals__.keys()]
            found += _closed_over(part)
        found = [other for other in found if _may_mention(other, modules)]
    return False


def _modules_of(function: Any) -> Iterator[Any]:
    """Yield the modules of the user's code: of the function, of what it closes over, and of an object's class."""
    inner = _without_partial(function)
    for one in (inner, type(inner), *map(_without_partial, _closed_over(inner))):
        yield getattr(one, "__module__", None)


def _without_partial(one: Any) -> Any:
    while isinstance(one, functools.partial):
        one = one.func
    return one


def _functions_of(one: Any) -> Iterator[types.FunctionType]:
    """Yield the functions that a function, a method, a partial, a class or a callable object consists of."""
    one = _without_partial(one)
    if isinstance(one, types.MethodType):
        one = one.__func__
    if isinstance(one, types.FunctionType):
        yield one
        if isinstance(wrapped := getattr(one, "__wrapped__", None), types.FunctionType):
            yield wrapped
    else:
        one = one if isinstance(one, type) else type(one)
        yield from (value for value in vars(one).values() if isinstance(value, types.FunctionType))


def _names_of(code: types.CodeType) -> Iterator[str]:
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _names_of(constant)


def _may_mention(other: Any, modules: set[Any]) -> bool:
    """Return whether it is code of the user's modules: that of installed packages has too many names."""
    if isinstance(other, (functools.partial, types.MethodType)):
        return True
    return isinstance(other, (types.FunctionType, type)) and other.__module__ in modules


def _closed_over(function: Any) -> list[Any]:
    found = []
    for cell in getattr(function, "__closure__", None) or ():
        with contextlib.suppress(ValueError):  # an empty cell
            found.append(cell.cell_contents)
    return found
