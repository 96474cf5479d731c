"""``python -m tests`` comes to its end, and to the right exit code, whatever a test does to its process."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


def played(directory: Path, text: str) -> tuple[int, str]:
    (directory / "test_played.py").write_text(text)
    done = subprocess.run(
        [sys.executable, "-m", "tests", "-q", "-p", "no:cacheprovider", "-c", "/dev/null", f"--rootdir={directory}",
         str(directory)],
        cwd=ROOT, capture_output=True, text=True,
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


@pytest.mark.parametrize(
    ("text", "needle"),
    [
        ("import os\ndef test_dies(): os._exit(1)\ndef test_after(): pass", "ended in"),
        ("def test_fails(): assert 0\ndef test_after(): pass", "1 failed, 1 passed"),
        ("import os\nfrom pathlib import Path\ndef test_fails_first():\n    mark = Path(__file__).with_name('m')\n"
         "    was = mark.exists()\n    mark.touch()\n    assert was\n"
         "def test_dies_once():\n    mark = Path(__file__).with_name('n')\n    was = mark.exists()\n    mark.touch()\n"
         "    if not was: os._exit(0)\n", "2 passed"),
    ],
    ids=["dies each time", "fails", "fails before another dies"],
)  # fmt: skip
def test_a_failure_stays_one(tmp_path: Path, text: str, needle: str) -> None:
    code, said = played(tmp_path, text)
    assert code == 1, said
    assert needle in said
