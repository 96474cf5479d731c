"""One line, once per process and argument, for arguments of Ray's that have no effect here."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from powertrain.data.arguments import shown
from powertrain.text.loggers import module_logger

logger = module_logger(__name__)
_noted: set[tuple[str, str]] = set()


def note_without_effect(method: str, given: Mapping[str, Any]) -> None:
    """Log the arguments that were given and have no effect, each once per process."""
    new = {name: value for name, value in given.items() if (method, name) not in _noted}
    if new:
        _noted.update((method, name) for name in new)
        listed = ", ".join(f"{name}={shown(value)}" for name, value in new.items())
        logger.warning("Accepted as in Ray Data, but without effect here: %s(%s).", method, listed)
