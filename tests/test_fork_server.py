"""The core of a fork server, with real processes."""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from powertrain import fork_server


def output_of(script: str) -> list[str]:
    """What a process of its own prints, line by line: a server has one thread, and handlers of signals."""
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    return done.stdout.splitlines()


def test_a_server_reports_how_each_child_has_ended() -> None:
    script = """
        import os, signal, socket
        from powertrain.fork_server import ForkServer

        ours, theirs = socket.socketpair()
        core = ForkServer(theirs, os.getppid())
        pids = [core.fork(lambda: os._exit(3)), core.fork(lambda: os.kill(os.getpid(), signal.SIGKILL))]
        ended = {}
        while len(ended) < 2:
            ready = core.wait(30)
            assert ready.has_ended_child and not ready.has_command and not ready.is_orphaned
            ended.update(core.reap())
        print([ended[pid] for pid in pids])
        ours.send(b"x")
        # Both may have been reaped together: then the signal of the second is still to come.
        while not (ready := core.wait(30)).has_command:
            assert ready.has_ended_child and not core.reap()
        print(ready.has_command, ready.is_orphaned)
    """
    assert output_of(script) == [
        "[3, -9]",
        "True False",
    ]


def test_a_child_has_no_descriptor_of_the_server_and_shows_warnings() -> None:
    script = """
        import os, signal, socket, warnings
        from powertrain.fork_server import ForkServer

        def live():
            left = []
            for number in range(3, 100):
                try:
                    left.append(os.readlink(f"/proc/self/fd/{number}"))
                except OSError:
                    continue
            print(left, flush=True)
            print(signal.getsignal(signal.SIGCHLD) == signal.SIG_DFL, warnings.filters == filters, flush=True)
            os._exit(0)

        filters = list(warnings.filters)
        ours, theirs = socket.socketpair()
        core = ForkServer(theirs, os.getppid())
        core.fork(live, [ours])
        core.wait(30)
    """
    assert output_of(script) == ["[]", "True True"]


def test_children_end_with_their_server() -> None:
    script = """
        import os, signal, socket
        from powertrain.fork_server import ForkServer

        ours, theirs = socket.socketpair()
        print(ForkServer(theirs, os.getppid()).fork(signal.pause), flush=True)
        os.kill(os.getpid(), signal.SIGKILL)
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)], stdout=subprocess.PIPE, text=True, timeout=60
    )  # returns when the child, which holds the pipe, has ended as well
    assert done.returncode == -signal.SIGKILL


def test_the_end_of_the_owner_is_seen_though_another_process_holds_its_socket() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        owner = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
        server = subprocess.Popen(
            fork_server.interpreter_command("tests.test_fork_server:be_server", theirs.fileno(), owner.pid),
            pass_fds=[theirs.fileno()],
            stdout=subprocess.PIPE,
        )
        assert server.stdout is not None
        assert server.stdout.readline() == b"waiting\n"
        owner.communicate(b"\n")
        assert server.stdout.read() == b"orphaned\n"
        server.stdout.close()
        server.wait()


def be_server(descriptor: int, owner: int) -> None:
    core = fork_server.ForkServer(socket.socket(fileno=descriptor), owner)
    print("waiting", flush=True)
    print("orphaned" if core.wait(30).is_orphaned else "not", flush=True)


def test_modules_that_cannot_be_imported_are_skipped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "broken_of_a_test.py").write_text("raise RuntimeError('broken')")
    (tmp_path / "whole_of_a_test.py").write_text("CALLS = []\ndef call(): CALLS.append(1)\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    fork_server.preload(["no_such_module_here", "broken_of_a_test", "whole_of_a_test:call"])
    fork_server.preload(["whole_of_a_test:call", "whole_of_a_test:none"], with_calls=False)
    assert sys.modules["whole_of_a_test"].CALLS == [1]
    monkeypatch.delitem(sys.modules, "whole_of_a_test")
