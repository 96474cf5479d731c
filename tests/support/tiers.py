"""Markers and groups of tests, from their folder, their fixtures and their recorded durations.

===========  =====================================================================================
marker       given to
===========  =====================================================================================
``e2e``      whole runs: everything in ``tests/stories`` and ``tests/seeds``, and the programs of ``tests/migration``
``ray``      tests on a Ray cluster: "ray" is a word of their name or of a fixture
``slow``     tests that took :data:`SLOW_SECONDS` or more when they were recorded
``gpu``      everything in ``tests/gpu``; without a GPU they are skipped, visibly
``smoke``    by hand: the stories that ``make test`` runs, at least one for each promise
``timed``    by hand: tests that measure time
===========  =====================================================================================

``make test`` runs :data:`FAST`, ``make test-rest`` the others (those on Ray in a process of their own) and
``make test-all`` both.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence

import pytest

FAST = "smoke or not (e2e or ray or slow or gpu)"
REST_ON_RAY = "not smoke and ray and not gpu"
REST = "not smoke and (gpu or (e2e or slow) and not ray)"
SLOW_SECONDS = 1.0
#: Number of groups of Ray tests. A group stays on one worker, which starts one cluster for all of it.
RAY_GROUPS = 1
#: Number of retries of a test that is marked as unsteady.
RERUNS = 2
#: Matches no error text. Ray's core exits a connected process silently (``_Exit(1)``) when one of its own checks fails,
#: once in some hundred runs: a crashed test on Ray is retried once, and listed. A failed one is not.
_NO_ERROR = r"(?!)"
#: A file outside the whole runs can have a test of a slower tier only if its text matches one of these.
_RAY_WORD, _REST_BY_HAND = re.compile(r"(?<![a-z])ray(?![a-z])"), re.compile(r"\bmark\.(slow|e2e|gpu)\b")
_WHOLE_RUNS = ("tests/stories/", "tests/seeds/", "tests/migration/test_programs")

MARKERS = (
    "e2e: a whole run, in processes of its own",
    "ray: needs a Ray cluster",
    "slow: takes a second or more",
    "gpu: needs a GPU",
    "smoke: one of the whole runs that `make test` includes",
    "timed: measures time, so a busy machine can disturb it",
    "unsteady(reason): may fail for the given reason, which is not a defect of the code under test; is run again",
)


def needs_ray(name: str, fixtures: Sequence[str]) -> bool:
    """Return whether "ray" is a word of a test's name or of one of its fixtures."""
    return any(word == "ray" for text in (name, *fixtures) for word in re.split(r"[^a-z]+", text))


def markers_of(nodeid: str, fixtures: Sequence[str], seconds: float) -> list[str]:
    """Return the names of the markers that a test has by its folder, its fixtures and its duration."""
    marks = {
        "e2e": nodeid.startswith(_WHOLE_RUNS),
        "ray": needs_ray(nodeid, fixtures),
        "slow": seconds >= SLOW_SECONDS,
        "gpu": nodeid.startswith("tests/gpu/"),
    }
    return [name for name, applies in marks.items() if applies]


def slow_files(seconds: Mapping[str, float]) -> set[str]:
    """Return the files with tests that take long by their recorded durations."""
    return {_file(nodeid) for nodeid, found in seconds.items() if found >= SLOW_SECONDS}


def is_left_out(file: str, text: str, expression: str, slow: Collection[str]) -> bool:
    """Return whether a file has no test of the tier that is run, so that it need not be collected.

    Args:
        file: Its path below the project's directory.
        text: Its text.
        expression: The marker expression of the session. All but those of the two slower tiers take all files.
        slow: Files with slow tests.
    """
    if file.startswith((*_WHOLE_RUNS, "tests/gpu/")):
        return False
    if expression == REST_ON_RAY:
        return not _RAY_WORD.search(text)
    return expression == REST and file not in slow and not _REST_BY_HAND.search(text)


def left_out_by_mistake(items: Sequence[pytest.Item], seconds: Mapping[str, float]) -> list[str]:
    """Return the collected tests whose own tier would leave out their file."""
    slow, texts, found = slow_files(seconds), {}, []
    for item in items:
        marks = {mark.name for mark in item.iter_markers()}
        if "smoke" in marks or not marks & {"ray", "slow", "e2e", "gpu"}:
            continue
        file = _file(item.nodeid)
        if file not in texts:
            texts[file] = item.path.read_text("utf-8")
        tier = REST_ON_RAY if "ray" in marks and "gpu" not in marks else REST
        if is_left_out(file, texts[file], tier, slow):
            found.append(item.nodeid)
    return found


def balanced(seconds: Mapping[str, float], groups: int) -> dict[str, int]:
    """Divide names among groups of similar duration; return the group of each, from 0."""
    totals = [0.0] * groups
    group_of = {}
    for name in sorted(seconds, key=lambda name: (-seconds[name], name)):
        least = totals.index(min(totals))
        totals[least] += seconds[name]
        group_of[name] = least
    return group_of


def mark(items: Sequence[pytest.Item], seconds: Mapping[str, float]) -> None:
    """Give each test its markers, and each test on Ray its group, which is the same for all of a file.

    Args:
        items: All collected tests.
        seconds: Recorded durations by node id.
    """
    of_ray: dict[str, list[pytest.Item]] = {}
    for item in items:
        fixtures = getattr(item, "fixturenames", ())
        for name in markers_of(item.nodeid, fixtures, seconds.get(item.nodeid, 0.0)):
            item.add_marker(name)
            if name == "ray":
                of_ray.setdefault(_file(item.nodeid), []).append(item)
        if item.get_closest_marker("unsteady") is not None:
            item.add_marker(pytest.mark.flaky(reruns=RERUNS))
        elif item.get_closest_marker("ray") is not None:
            item.add_marker(pytest.mark.flaky(reruns=1, only_rerun=_NO_ERROR))
    files = {file: sum(seconds.get(one.nodeid, 1.0) for one in tests) for file, tests in of_ray.items()}
    groups = balanced(files, RAY_GROUPS)
    for file, tests in of_ray.items():
        for item in tests:
            item.add_marker(pytest.mark.xdist_group(f"ray-{groups[file] + 1}"))


def _file(nodeid: str) -> str:
    return nodeid.partition("::")[0]
