"""Scripts that a warm process forks see what a fresh interpreter's script sees, and are found by their marks."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from tests.support.warm_python import MARK, ForkedScript, WarmPython, new_mark, processes_marked

#: Prints what a script sees of its process.
LOOKS = """
import json, os, sys, threading
class Own:
    pass
def annotated(value: Own): pass
print(json.dumps({
    "name": __name__, "file": __file__, "argv": sys.argv, "path": sys.path[0], "cwd": os.getcwd(),
    "module of a class": Own.__module__, "main has it": sys.modules["__main__"].Own is Own,
    "annotation": str(annotated.__annotations__),
    "variables": {name: value for name, value in os.environ.items() if name != "LC_CTYPE"},
    "leads its session": os.getsid(0) == os.getpid(),
    "streams": [(stream.encoding, stream.errors) for stream in (sys.stdout, sys.stderr)],
    "threads": threading.active_count(), "native threads": len(os.listdir("/proc/self/task")),
}))
"""


class Started:
    """A script of a test, from the warm process or from a fresh interpreter."""

    def __init__(self, warm: WarmPython | None, directory: Path, text: str, *arguments: str) -> None:
        self.script, self._output, self.mark = directory / "script.py", directory / "output", new_mark()
        self.script.write_text(text)
        language = {
            name: value for name, value in os.environ.items() if name in ("LANG", "LC_ALL", "LC_CTYPE")
        }
        env = {**language, "PATH": os.environ["PATH"], "SOME": "thing", MARK: self.mark}
        with self._output.open("wb") as file:
            self.process: ForkedScript | subprocess.Popen[bytes]
            if warm is not None:
                self.process = warm.start(
                    self.script, *arguments, env=env, cwd=directory, output=file.fileno(), mark=self.mark
                )
            else:
                command = [sys.executable, str(self.script), *arguments]
                self.process = subprocess.Popen(
                    command, env=env, cwd=directory, stdout=file, stderr=file, start_new_session=True
                )

    @property
    def output(self) -> str:
        return self._output.read_text()

    def await_line(self) -> None:
        """Wait until it has printed something."""
        deadline = time.monotonic() + 60
        while not self.output.endswith("\n"):
            assert self.process.poll() is None, self.output
            assert time.monotonic() < deadline
            time.sleep(0.01)


def test_a_script_sees_what_it_sees_in_a_fresh_interpreter(tmp_path: Path, warm_python: WarmPython) -> None:
    seen = []
    for warm in (warm_python, None):
        started = Started(warm, tmp_path, LOOKS, "one", "two")
        assert started.process.wait(60) == 0, started.output
        seen.append(json.loads(started.output))
        assert seen[-1]["variables"].pop(MARK) == started.mark
    assert seen[0] == seen[1]


@pytest.mark.parametrize(
    "text", ["import sys; print('said'); sys.exit(3)", "1 / 0", "raise SystemExit('no')", "x ="]
)
def test_its_exit_code_and_its_output_are_those_of_a_fresh_interpreter(
    text: str, tmp_path: Path, warm_python: WarmPython
) -> None:
    ends = []
    for warm in (warm_python, None):
        started = Started(warm, tmp_path, text)
        ends.append((started.process.wait(60), started.output))
    assert ends[0] == ends[1]
    assert ends[0][0] != 0


def test_it_and_its_children_are_found_by_their_mark_and_no_others(
    tmp_path: Path, warm_python: WarmPython
) -> None:
    text = (
        "import os, signal\nif os.fork() == 0: signal.pause()\nprint('forked', flush=True)\nsignal.pause()\n"
    )
    directories = [tmp_path / name for name in ("first", "second")]
    for directory in directories:
        directory.mkdir()
    first, second = (Started(warm_python, directory, text) for directory in directories)
    for started in (first, second):
        started.await_line()
    for started in (first, second):
        found = processes_marked(started.mark)
        assert len(found) == 2
        assert started.process.pid in found
    assert not set(processes_marked(first.mark)) & set(processes_marked(second.mark))

    for started in (first, second):
        with pytest.raises(subprocess.TimeoutExpired):
            started.process.wait(0.01)
        for pid in processes_marked(started.mark):
            os.kill(pid, signal.SIGTERM)
        assert started.process.wait(60) == -signal.SIGTERM


def test_ctrl_c_raises_in_it(tmp_path: Path, warm_python: WarmPython) -> None:
    text = (
        "import time\nprint('there', flush=True)\n"
        "try:\n    time.sleep(60)\nexcept KeyboardInterrupt:\n    raise SystemExit(7)\n"
    )
    started = Started(warm_python, tmp_path, text)
    started.await_line()
    started.process.send_signal(signal.SIGINT)
    assert started.process.wait(60) == 7, started.output


def test_a_warm_process_ends_with_its_owner_and_its_scripts_go_on(tmp_path: Path) -> None:
    with WarmPython() as warm:
        started = Started(warm, tmp_path, "import time\nprint('there', flush=True)\ntime.sleep(60)\n")
        started.await_line()
    (pid,) = processes_marked(started.mark)
    os.kill(pid, signal.SIGKILL)


def test_a_script_that_no_process_waits_for_ends_no_other(tmp_path: Path, warm_python: WarmPython) -> None:
    started = Started(warm_python, tmp_path, "import time\nprint('there', flush=True)\ntime.sleep(60)\n")
    started.await_line()
    (pid,) = processes_marked(started.mark)
    del started
    os.kill(pid, signal.SIGKILL)
    for _ in range(2):
        again = Started(warm_python, tmp_path, "print('again')")
        assert again.process.wait(60) == 0
