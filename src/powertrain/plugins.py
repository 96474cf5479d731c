"""Parts that other packages add by entry point: engines, trackers and sources of data.

Entry points are only read for a name that is not one of this package's own, so they cost nothing otherwise.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from powertrain.errors import ConfigError
from powertrain.text.errors import describe_error

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

#: Groups of entry points.
ENGINES = "powertrain.engines"
TRACKERS = "powertrain.trackers"
SOURCES = "powertrain.sources"


def names(group: str) -> tuple[str, ...]:
    """Return the names that installed packages have registered in a group, in order."""
    return tuple(sorted(_found(group)))


def load(group: str, name: str) -> Any:
    """Import and return the object that a package has registered.

    Raises:
        ConfigError: No package has registered the name, or the object cannot be imported.
    """
    entry_point = _found(group).get(name)
    if entry_point is None:
        raise ConfigError(
            f"No installed package has registered {name!r} in the group of entry points {group!r}. Registered are: "
            f"{', '.join(map(repr, names(group))) or 'none'}."
        )
    try:
        return entry_point.load()
    except Exception as error:  # anything that the import of another package raises
        raise ConfigError(
            f"{name!r}, which a package has registered in the group of entry points {group!r} as "
            f"{entry_point.value!r}, cannot be imported: {describe_error(error)}. Update or remove that package."
        ) from error


def _found(group: str) -> dict[str, EntryPoint]:
    """The entry points of a group by name. Of two with one name the first on ``sys.path`` counts, as for modules."""
    from importlib.metadata import entry_points

    found: dict[str, EntryPoint] = {}
    for entry_point in entry_points(group=group):
        found.setdefault(entry_point.name, entry_point)
    return found
