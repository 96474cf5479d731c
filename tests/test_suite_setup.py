"""The set-up of the tests: whatever a test does to its process, the others run, it fails, and the exit code says so."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.support import durations, scheduling, tiers

ROOT = Path(__file__).parents[1]
#: Waits for a lock that it holds itself, with the GIL: no Python code runs any more, pytest-timeout's neither.
HANGS_IN_C = """
import ctypes
def test_hangs():
    mutex = ctypes.create_string_buffer(64)
    for _ in range(2): ctypes.PyDLL(None).pthread_mutex_lock(mutex)
"""
ONCE = """
from pathlib import Path
def is_first(name):
    mark = Path(__file__).with_name(name)
    was = mark.exists()
    mark.touch()
    return not was
"""


def play(directory: Path, text: str, *options: str) -> tuple[int, str]:
    """Run tests as `make test` does, with one worker; returns the exit code and what was printed."""
    (directory / "test_played.py").write_text(text)
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "tests.conftest", "-p", "no:cacheprovider", "-c", "pyproject.toml",
         f"--rootdir={directory}", "--numprocesses=1", "--dist=loadfile", "--max-worker-restart=5", *options,
         str(directory)],
        cwd=ROOT, capture_output=True, text=True, env=environment,
    )  # fmt: skip
    return done.returncode, done.stdout + done.stderr


def test_a_test_that_crashes_its_process_fails_and_the_others_run(tmp_path: Path) -> None:
    text = "import os\ndef test_before(): pass\ndef test_dies(): os._exit(0)\ndef test_after(): pass\n"
    code, printed = play(tmp_path, text)
    assert code == 1, printed
    assert "crashed while running" in printed
    assert re.search(r"FAILED .*test_played.py::test_dies", printed)
    assert "1 failed, 2 passed" in printed


#: Not at once: the main process learns asynchronously how often the test may be run.
CRASHES_ONCE = """
import os, time
def test_on_ray():
    if is_first('a'):
        time.sleep(3.0)
        os._exit(1)
def test_after(): pass
"""


def test_a_test_on_ray_that_was_crashed_is_run_once_more_and_listed(tmp_path: Path) -> None:
    """Ray's core ends processes by itself."""
    code, printed = play(tmp_path, ONCE + CRASHES_ONCE)
    assert code == 0, printed
    assert re.search(r"^RERUN .*test_played.py::test_on_ray", printed, re.MULTILINE)
    assert "2 passed, 1 rerun" in printed


def test_a_test_on_ray_that_crashes_twice_or_fails_once_is_a_failure(tmp_path: Path) -> None:
    text = ONCE + "import os\ndef test_on_ray(): os._exit(1)\ndef test_also_ray(): assert not is_first('a')\n"
    code, printed = play(tmp_path, text)
    assert code == 1, printed
    assert "2 failed, 1 rerun" in printed


def test_a_test_that_hangs_in_c_fails_with_the_stack_and_the_others_run(tmp_path: Path) -> None:
    text = HANGS_IN_C + "def test_after(): pass\n"
    code, printed = play(tmp_path, text, "-o", "timeout=3", "-o", "hang_grace=4")
    assert code == 1, printed
    assert re.search(r'test_played.py", line 5 in test_hangs', printed), "where it hung"
    assert re.search(r"FAILED .*test_played.py::test_hangs", printed)
    assert "1 failed, 1 passed" in printed


def test_a_test_that_waits_for_ever_is_ended_by_its_timeout_and_its_process_goes_on(tmp_path: Path) -> None:
    text = "import time\ndef test_waits(): time.sleep(600)\ndef test_after(): pass\n"
    code, printed = play(tmp_path, text, "-o", "timeout=3")
    assert code == 1, printed
    assert "Timeout (>3.0s)" in printed
    assert "1 failed, 1 passed" in printed
    assert "crashed" not in printed


def test_a_test_that_fails_once_in_two_is_a_failure(tmp_path: Path) -> None:
    code, printed = play(
        tmp_path, ONCE + "def test_unsteady(): assert not is_first('a')\ndef test_b(): pass\n"
    )
    assert code == 1, printed
    assert "1 failed, 1 passed" in printed
    assert "rerun" not in printed.rpartition("===")[0].rpartition("\n")[2]


def test_only_a_test_that_is_marked_as_unsteady_is_run_again_and_it_is_listed(tmp_path: Path) -> None:
    text = (
        "import pytest\n" + ONCE + "@pytest.mark.unsteady(reason='the host')\n"
        "def test_marked(): assert not is_first('a')\n"
    )
    code, printed = play(tmp_path, text)
    assert code == 0, printed
    assert re.search(r"^RERUN .*test_played.py::test_marked", printed, re.MULTILINE)
    assert "1 passed, 1 rerun" in printed


def test_a_test_that_is_marked_as_unsteady_and_always_fails_is_a_failure(tmp_path: Path) -> None:
    text = "import pytest\n@pytest.mark.unsteady(reason='the host')\ndef test_marked(): assert 0\n"
    code, printed = play(tmp_path, text)
    assert code == 1, printed
    assert "1 failed, 2 rerun" in printed


def test_a_failure_is_printed_before_the_end(tmp_path: Path) -> None:
    """Which may never come."""
    text = "def test_fails(): assert 0, 'why it is'\ndef test_after(): pass\n"
    _, printed = play(tmp_path, text)
    first, _, rest = printed.partition("= FAILURES =")
    assert re.search(
        r"FAILED .*test_played.py::test_fails \(call\): .*py:1: AssertionError: why it is", first
    )
    assert "1 failed, 1 passed" in rest


def test_a_file_that_cannot_be_collected_is_a_failure(tmp_path: Path) -> None:
    code, printed = play(tmp_path, "def test_is_no_python(: pass")
    assert code not in (0, 5), printed
    assert "SyntaxError" in printed


def test_an_unsteady_test_needs_a_reason(tmp_path: Path) -> None:
    code, printed = play(tmp_path, "import pytest\n@pytest.mark.unsteady\ndef test_marked(): pass\n")
    assert code not in (0, 5), printed
    assert "test_marked is marked as unsteady without a reason" in printed


# --------------------------------------------------------------------------- tiers and order


@pytest.mark.parametrize(
    ("nodeid", "fixtures", "seconds", "expected"),
    [
        ("tests/data/test_order.py::test_a", [], 0.1, []),
        ("tests/stories/test_data.py::test_a[local]", [], 0.1, ["e2e"]),
        ("tests/stories/test_data.py::test_a[ray]", [], 0.1, ["e2e", "ray"]),
        ("tests/migration/test_programs.py::test_a[overview/actors]", [], 0.1, ["e2e"]),
        ("tests/migration/test_rename.py::test_a", [], 0.1, []),
        ("tests/engine/test_x.py::test_an_array", ["ray_cluster"], 0.1, ["ray"]),
        ("tests/engine/test_x.py::test_an_array", [], 60.0, ["slow"]),
        ("tests/gpu/test_x.py::test_a", [], 0.1, ["gpu"]),
    ],
)
def test_markers_follow_from_folder_fixtures_and_duration(
    nodeid: str, fixtures: list[str], seconds: float, expected: list[str]
) -> None:
    assert tiers.markers_of(nodeid, fixtures, seconds) == expected


def test_fixtures_that_every_test_has_put_no_test_into_a_slower_tier(request: pytest.FixtureRequest) -> None:
    """A fixture with "ray" as a word of its name would make all tests those of a cluster."""
    assert tiers.markers_of("tests/test_any.py::test_any", request.fixturenames, 0.0) == []


def test_the_tiers_of_the_makefile_leave_no_test_out_and_run_none_twice() -> None:
    makefile = (ROOT / "Makefile").read_text()
    expressions = (tiers.FAST, tiers.REST_ON_RAY, tiers.REST)
    assert all(f'-m "{expression}"' in makefile for expression in expressions)
    for bits in range(32):
        names = ("smoke", "e2e", "ray", "slow", "gpu")
        marks = {name: bool(bits >> number & 1) for number, name in enumerate(names)}
        assert [eval(expression, {}, marks) for expression in expressions].count(True) == 1


@pytest.mark.parametrize(
    ("file", "text", "tier", "is_left_out"),
    [
        ("tests/test_a.py", "def test_on_ray(): pass", tiers.REST_ON_RAY, False),
        ("tests/test_a.py", "def test_a(ray_cluster): pass", tiers.REST_ON_RAY, False),
        ("tests/test_a.py", "def test_of_an_array(): pass", tiers.REST_ON_RAY, True),
        ("tests/test_a.py", "def test_on_ray(): pass", tiers.REST, True),
        ("tests/test_a.py", "pytestmark = pytest.mark.slow", tiers.REST, False),
        ("tests/test_slow.py", "", tiers.REST, False),
        ("tests/test_slow.py", "", tiers.REST_ON_RAY, True),
        ("tests/stories/test_a.py", "", tiers.REST_ON_RAY, False),
        ("tests/stories/test_a.py", "", tiers.REST, False),
        ("tests/gpu/test_a.py", "", tiers.REST, False),
        ("tests/test_a.py", "", tiers.FAST, False),
        ("tests/test_a.py", "", "", False),
    ],
    ids=map(str, range(12)),  # with their texts as names some would be marked as tests on Ray
)
def test_files_without_a_test_of_the_tier_are_left_out(
    file: str, text: str, tier: str, is_left_out: bool
) -> None:
    assert tiers.is_left_out(file, text, tier, {"tests/test_slow.py"}) == is_left_out


@given(st.dictionaries(st.text(min_size=1), st.floats(0, 100)), st.integers(1, 4))
def test_groups_take_about_equally_long(seconds: dict[str, float], groups: int) -> None:
    found = tiers.balanced(seconds, groups)
    assert found.keys() == seconds.keys()
    totals = [
        sum(seconds[name] for name, group in found.items() if group == number) for number in range(groups)
    ]
    assert max(totals) - min(totals) <= max(seconds.values(), default=0.0) + 1e-6


def test_a_test_is_scheduled_with_its_file_or_its_group() -> None:
    groups = {"tests/a.py::test_c": "ray-1"}
    assert scheduling.unit_of("tests/a.py::test_b", groups) == "tests/a.py"
    assert scheduling.unit_of("tests/a.py::test_c", groups) == "ray-1"


def test_tests_on_ray_are_all_run_by_one_worker(tmp_path: Path) -> None:
    """So that there is one cluster, however many files they are in."""
    for name in "abcd":
        (tmp_path / f"test_{name}.py").write_text(
            "import os, pytest\nfrom pathlib import Path\n@pytest.fixture\ndef ray_cluster(): pass\n"
            f"def test_on_a_cluster(ray_cluster): Path({str(tmp_path)!r}, 'ray-{name}').write_text(str(os.getpid()))\n"
            f"def test_elsewhere(): Path({str(tmp_path)!r}, 'other-{name}').write_text(str(os.getpid()))\n"
        )
    code, printed = play(tmp_path, "", "--numprocesses=2")
    assert code == 0, printed
    assert len({path.read_text() for path in tmp_path.glob("ray-*")}) == 1
    assert len([*tmp_path.glob("other-*")]) == 4


def test_durations_are_read_from_a_report_of_pytest() -> None:
    report = """<testsuites><testsuite>
        <testcase classname="tests.data.test_order" name="test_a[1.5]" time="0.44"/>
        <testcase classname="tests.stories.test_data" name="test_b[ray]" time="12.34"/>
        <testcase classname="tests.run.test_lease.TestOnDisks" name="test_c" time="1.0"/>
    </testsuite></testsuites>"""
    assert durations.read_report(report) == {
        "tests/data/test_order.py::test_a[1.5]": 0.4,
        "tests/stories/test_data.py::test_b[ray]": 12.3,
        "tests/run/test_lease.py::TestOnDisks::test_c": 1.0,
    }
