"""``python -m tests`` comes to its end, and to the right exit code, whatever a test does to its process."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


def played(directory: Path, text: str, *options: str, **variables: str) -> tuple[int, str]:
    (directory / "test_played.py").write_text(text)
    done = subprocess.run(
        [sys.executable, "-m", "tests", "-q", "-p", "no:cacheprovider", "-c", "/dev/null", f"--rootdir={directory}",
         *options, str(directory)],
        cwd=ROOT, capture_output=True, text=True, env={**os.environ, **variables},
    )  # fmt: skip
    return done.returncode, done.stdout + done.stderr


def test_what_comes_after_a_death_is_run_too(tmp_path: Path) -> None:
    code, said = played(
        tmp_path,
        f"""
import os
from pathlib import Path
def test_before(): pass
def test_dies_once():
    mark = Path({str(tmp_path / "mark")!r})
    if not mark.exists():
        mark.touch()
        os._exit(1)
def test_after(): pass
""",
    )
    assert code == 0, said
    assert "ended in test_played.py::test_dies_once without a word (exit code 1)" in said
    assert "2 passed, 1 deselected" in said


def test_what_needs_ray_runs_beside_the_rest_and_each_runs_once(tmp_path: Path) -> None:
    code, said = played(
        tmp_path,
        f"""
import pytest
from pathlib import Path
def meet(name, other):
    Path({str(tmp_path)!r}, name).touch()
    while not Path({str(tmp_path)!r}, other).exists(): pass
@pytest.mark.parametrize("engine", ["local", "ray"])
def test_on_an_engine(engine): meet(engine, "ray" if engine == "local" else "local")
@pytest.fixture
def ray_cluster(): pass
def test_with_a_cluster(ray_cluster): pass
def test_an_array_of_words(): pass
""",
    )
    assert code == 0, said
    assert said.count("2 passed, 2 deselected") == 2
    assert "\nray: 2 passed" in said
    assert "\nrest: 2 passed" in said


ONCE = """
import os, time
from pathlib import Path
def is_first(name):
    mark = Path(__file__).with_name(name)
    was = mark.exists()
    mark.touch()
    return not was
"""


def test_what_keeps_its_process_for_ever_is_ended_and_run_once_more(
    tmp_path: Path,
) -> None:
    waits = ONCE + "def test_waits():\n    if is_first('a'): time.sleep(600)\n"
    code, said = played(tmp_path, waits, POWERTRAIN_TESTS_PATIENCE="3")
    assert code == 0, said
    assert "ended in test_played.py::test_waits without a word (signal SIGABRT)" in said
    assert "in test_waits" in said, "where it waited"


def test_what_fails_once_is_run_once_more_and_told(tmp_path: Path) -> None:
    code, said = played(
        tmp_path,
        ONCE
        + "def test_fails_first():\n    assert not is_first('a'), 'the machine was busy'\n"
        + "def test_dies_first():\n    if is_first('b'): os._exit(0)\n"
        + "def test_after(): pass\n",
    )
    assert code == 0, said
    told = "have failed, and passed when they were run once more:\ntest_played.py::test_fails_first\n"
    assert told in said
    assert "1 passed, 2 deselected" in said, "no other is"


@pytest.mark.parametrize(
    ("text", "needle"),
    [
        ("import os\ndef test_dies(): os._exit(1)\ndef test_after(): pass", "ended in"),
        ("def test_fails(): assert 0\ndef test_after(): pass", "1 failed, 1 passed"),
        (ONCE + "def test_fails():\n    assert 0\ndef test_dies():\n    if is_first('b'): os._exit(0)\n", "1 failed"),
        (ONCE + "import pytest\n@pytest.mark.parametrize('n', range(9))\n"
         "def test_fails_first(n): assert not is_first(str(n))\n", "9 failed"),
        ("def test_is_no_python(: pass", "SyntaxError"),
    ],
    ids=["dies each time", "fails", "fails while another dies", "many fail", "cannot be collected"],
)  # fmt: skip
def test_a_failure_stays_one(tmp_path: Path, text: str, needle: str) -> None:
    code, said = played(tmp_path, text)
    assert code != 0, said
    assert needle in said


def test_what_was_never_run_is_no_success(tmp_path: Path) -> None:
    text = ONCE + "def test_fails_first(): assert not is_first('a')\ndef test_broken(): assert 0\n"
    code, said = played(tmp_path, text, "-x")
    assert code == 1, said


def test_a_failure_is_told_before_the_end(tmp_path: Path) -> None:
    """Which may never come."""
    _, said = played(tmp_path, "def test_fails(): assert 0, 'why it is'\ndef test_after(): print('later')\n")
    first, _, rest = said.partition("AssertionError: why it is")
    assert "test_played.py::test_fails (call):" in first
    assert "FAILURES" in rest
