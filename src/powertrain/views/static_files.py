"""The page, its scripts and its style, which ship with the package."""

from __future__ import annotations

from importlib import resources


def read_static() -> dict[str, bytes]:
    """Return the files by name."""
    folder = resources.files("powertrain.views") / "static"
    return {file.name: file.read_bytes() for file in folder.iterdir() if file.is_file()}
