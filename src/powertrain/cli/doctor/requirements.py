"""Requirements of packages, as Powertrain's own metadata states them. Pure.

Only the forms that pyproject.toml uses are read: a name, one of ``>=`` and ``==``, a version, and the extra.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

_REQUIREMENT = re.compile(
    r"^\s*(?P<name>[A-Za-z0-9._-]+)(\[[^\]]*\])?\s*(?P<operator>>=|==)\s*(?P<version>[\w.+!]+)"
)
_EXTRA = re.compile(r"extra\s*==\s*['\"](?P<extra>[\w-]+)['\"]")
#: Extras for work on Powertrain itself: a user's machine need not satisfy them.
_OWN_EXTRAS = frozenset({"dev", "bench", "examples"})


@dataclass(frozen=True)
class Requirement:
    """One required package; ``extra`` is "" for those that every installation needs."""

    name: str
    operator: str
    version: str
    extra: str = ""

    @property
    def text(self) -> str:
        """The requirement in the form that pip takes."""
        return f"{self.name}{self.operator}{self.version}"


def parse_requirements(lines: Iterable[str]) -> list[Requirement]:
    """Return the requirements of a package's metadata, without those for work on Powertrain itself."""
    found = []
    for line in lines:
        stated, _, marker = line.partition(";")
        match, extra = _REQUIREMENT.match(stated), _EXTRA.search(marker)
        if match and (extra is None or extra["extra"] not in _OWN_EXTRAS):
            found.append(
                Requirement(
                    match["name"], match["operator"], match["version"], extra["extra"] if extra else ""
                )
            )
    return found


def release(version: str) -> tuple[int, ...]:
    """Return the numbers of a version up to the first part that has none: (2, 13, 0) for "2.13.0+cpu"."""
    plain = re.split(r"[+-]", version.rpartition("!")[2])[0]
    numbers = []
    for part in plain.split("."):
        digits = re.match(r"\d+", part)
        if digits is None:
            break
        numbers.append(int(digits[0]))
        if digits[0] != part:  # a pre-release, such as 3.0rc1
            break
    while numbers and numbers[-1] == 0:
        numbers.pop()
    return tuple(numbers)


def satisfies(version: str, requirement: Requirement) -> bool:
    """Return True when a version fits a requirement. Pre-releases count as the release that they lead to."""
    have, need = release(version), release(requirement.version)
    return have == need if requirement.operator == "==" else have >= need
