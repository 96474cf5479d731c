"""Test distribution for pytest-xdist: whole files, the longest first, and each group of Ray tests on one worker.

A file stays together because its tests share fixtures, such as an S3 server. Only workers collect tests and know their
groups; they write them to a file for the scheduler, which lives in the main process. (xdist's own way, the group's name
at the end of the node id, does not work with every pytest.)
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from xdist.scheduler import LoadScopeScheduling

#: Assumed seconds of a test without a recorded duration.
_UNRECORDED = 0.05
#: Environment variable with the path of the groups file.
_VARIABLE = "POWERTRAIN_TESTS_GROUPS"


def make_groups_file() -> Path:
    """Create the groups file, in the main process before it starts workers."""
    descriptor, name = tempfile.mkstemp(prefix="tests-groups-")
    os.close(descriptor)
    os.environ[_VARIABLE] = name
    return Path(name)


def write_groups(items: Sequence[pytest.Item]) -> None:
    """Write the groups of tests, in a worker. All workers write the same."""
    groups = {item.nodeid: str(mark.args[0]) for item in items for mark in item.iter_markers("xdist_group")}
    with tempfile.NamedTemporaryFile("w", dir=Path(os.environ[_VARIABLE]).parent, delete=False) as file:
        json.dump(groups, file)
    os.replace(file.name, os.environ[_VARIABLE])


def read_groups() -> dict[str, str]:
    """Return the group of each test that has one, in the main process once the workers have collected."""
    groups: dict[str, str] = json.loads(Path(os.environ[_VARIABLE]).read_text() or "{}")
    return groups


def unit_of(nodeid: str, groups: Mapping[str, str]) -> str:
    """Return the scheduling unit of a test: its group, or its file."""
    return groups.get(nodeid) or nodeid.partition("::")[0]


def in_order(items: Sequence[pytest.Item], seconds: Mapping[str, float]) -> list[pytest.Item]:
    """Sort tests so that the longest files and groups begin first; the order within each is kept."""
    totals: dict[str, float] = {}
    units = []
    for item in items:
        group = item.get_closest_marker("xdist_group")
        units.append(str(group.args[0]) if group is not None else unit_of(item.nodeid, {}))
        totals[units[-1]] = totals.get(units[-1], 0.0) + seconds.get(item.nodeid, _UNRECORDED)
    order = sorted(range(len(items)), key=lambda number: (-totals[units[number]], units[number]))
    return [items[number] for number in order]


class ByFile(LoadScopeScheduling):
    """Schedule files and groups in collection order; a test that crashed its worker is never repeated."""

    def __init__(self, config: pytest.Config, log: Any) -> None:
        super().__init__(config, log)
        config.option.loadscopereorder = False
        self._groups: dict[str, str] = {}

    def schedule(self) -> None:
        """Schedule tests, after all workers have collected."""
        self._groups = self._groups or read_groups()
        super().schedule()

    def _split_scope(self, nodeid: str) -> str:
        return unit_of(nodeid, self._groups)

    def _reschedule(self, node: Any) -> None:
        """Schedule more tests on a worker, or shut it down.

        A worker begins a test only when it knows the next one, so it is never left with a single one.
        """
        super()._reschedule(node)
        while not node.shutting_down and self._pending_of(self.assigned_work[node]) < 2:
            super()._reschedule(node)

    def mark_test_pending(self, item: str) -> None:  # type: ignore[override, unused-ignore]
        """Reschedule a test that has crashed its worker, if its marker allows that."""
        self._groups[item] = f"again: {item}"
        self.workqueue[self._groups[item]] = {item: False}
        for node in self.nodes:
            self._reschedule(node)

    def remove_node(self, node: Any) -> str | None:
        """Remove a worker that has ended; return the test that it crashed in, if any, and reschedule the rest."""
        running = next(
            (
                (unit, nodeid)
                for unit in self.assigned_work[node].values()
                for nodeid, is_done in unit.items()
                if not is_done
            ),
            None,
        )
        if running is None:
            super().remove_node(node)
            return None
        unit, crashed = running
        unit[crashed] = True
        super().remove_node(node)
        return crashed
