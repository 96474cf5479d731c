"""How programs are run: their end, their output, and processes that they leave behind."""

from __future__ import annotations

import signal
import time
from pathlib import Path

import pytest
from tests.migration import running
from tests.support.warm_python import WarmPython


def test_the_exit_code_and_the_output_come_back(tmp_path: Path) -> None:
    ended = running.run("import sys\nprint('words', flush=True)\nsys.exit(3)\n", tmp_path, 60.0)
    assert (ended.code, ended.output) == (3, "words\n")
    assert ended.left_running == []


@pytest.mark.parametrize("is_warm", [False, True])
def test_a_program_that_takes_too_long_is_ended(
    is_warm: bool, tmp_path: Path, warm_python: WarmPython
) -> None:
    warm = warm_python if is_warm else None
    ended = running.run("import signal\nsignal.pause()\n", tmp_path, 0.5, warm=warm)
    assert ended.code == -signal.SIGKILL
    assert "ended after 0.5 s" in ended.output


@pytest.mark.parametrize("is_warm", [False, True])
def test_a_process_that_outlives_its_program_is_found_and_ended(
    is_warm: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, warm_python: WarmPython
) -> None:
    monkeypatch.setattr(running, "_EXIT_TIMEOUT_S", 0.1)
    text = (
        "import subprocess, sys\n"
        "nowhere = subprocess.DEVNULL\n"
        "subprocess.Popen([sys.executable, '-c', 'import signal; signal.pause()'], stdout=nowhere, stderr=nowhere)\n"
    )
    ended = running.run(text, tmp_path, 60.0, warm=warm_python if is_warm else None)
    (left,) = ended.left_running
    assert "signal.pause()" in left
    pid = int(left.partition(":")[0])
    deadline = time.monotonic() + 20
    while Path(f"/proc/{pid}").exists():
        assert time.monotonic() < deadline
        time.sleep(0.01)
