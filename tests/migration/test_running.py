"""How programs are run: their end, their output, and processes that they leave behind."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
from tests.migration import running
from tests.migration.warm_driver import warm_driver


def test_the_exit_code_and_the_output_come_back(tmp_path: Path) -> None:
    ended = running.run("import sys\nprint('words', flush=True)\nsys.exit(3)\n", tmp_path, 60.0)
    assert (ended.code, ended.output) == (3, "words\n")
    assert ended.left_running == []


def test_a_program_that_takes_too_long_is_ended(tmp_path: Path) -> None:
    ended = running.run("import signal\nsignal.pause()\n", tmp_path, 0.5)
    assert ended.code == -signal.SIGKILL
    assert "ended after 0.5 s" in ended.output


def test_a_process_that_outlives_its_program_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(running, "_EXIT_TIMEOUT_S", 0.1)
    text = (
        "import subprocess, sys\n"
        "nowhere = subprocess.DEVNULL\n"
        "subprocess.Popen([sys.executable, '-c', 'import signal; signal.pause()'], stdout=nowhere, stderr=nowhere)\n"
    )
    ended = running.run(text, tmp_path, 60.0)
    (left,) = ended.left_running
    assert "signal.pause()" in left
    os.kill(int(left.partition(":")[0]), signal.SIGKILL)


def test_a_warm_driver_runs_programs_and_finds_what_they_leave(tmp_path: Path) -> None:
    text = (
        "import os, signal, sys\n"
        "assert __name__ == '__main__' and sys.argv == [__file__] and os.getcwd() == os.path.dirname(__file__)\n"
        "print('words')\n"
        "if os.fork() == 0:\n    signal.pause()\n"
        "sys.exit(3)\n"
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MIGRATION_EXIT_TIMEOUT_S", "0.2")
        with warm_driver() as driver:
            ended = driver.run(text, tmp_path, 60.0)
    assert (ended.code, ended.output) == (3, "words\n")
    assert len(ended.left_running) == 1
