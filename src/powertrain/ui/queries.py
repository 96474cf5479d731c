"""Arguments of requests, checked. Pure."""

from __future__ import annotations

from powertrain.errors import PowertrainError


class BadQuery(PowertrainError):
    """A request with an argument that makes no sense."""


def whole(text: str, name: str) -> int:
    """Return a whole number that is not negative; raises :class:`BadQuery` for anything else."""
    if not text.isascii() or not text.isdecimal() or len(text) > 18:
        raise BadQuery(f"{name}={text[:40]!r} is not a whole number")
    return int(text)


def number(text: str, name: str) -> float:
    """Return a time; raises :class:`BadQuery` for anything else."""
    try:
        value = float(text)
    except ValueError:
        raise BadQuery(f"{name}={text[:40]!r} is not a number") from None
    if not abs(value) < 1e12:
        raise BadQuery(f"{name}={text[:40]!r} is not a time")
    return value
