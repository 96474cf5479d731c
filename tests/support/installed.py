"""Packages that look installed, without pip: a ``dist-info`` directory on ``sys.path``."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest


def install(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    name: str,
    entry_points: Mapping[str, Mapping[str, str]],
    package: Path | None = None,
) -> None:
    """Make a package visible to ``importlib.metadata``, and importable.

    Args:
        monkeypatch: Undoes it at the end of the test.
        tmp_path: Holds the ``dist-info`` directory, and modules that a test writes.
        name: The name of the package.
        entry_points: Values by name, by group.
        package: A directory with the package's modules, if they are not in ``tmp_path``.
    """
    info = tmp_path / f"{name}-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
    groups = (
        f"[{group}]\n" + "".join(f"{key} = {value}\n" for key, value in named.items())
        for group, named in entry_points.items()
    )
    (info / "entry_points.txt").write_text("\n".join(groups))
    monkeypatch.syspath_prepend(str(tmp_path))
    if package is not None:
        monkeypatch.syspath_prepend(str(package))
