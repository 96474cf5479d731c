"""Small programs for the engine contract: each is an entry, "module:function", that takes its payload.

They are written for a process of their own: some of them end it, or leave children behind on purpose.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from typing import Any, NoReturn

_SLEEPER = "import time; time.sleep(600)"


def _arguments(payload: bytes) -> Any:
    return json.loads(payload or b"null")


def exit_with(payload: bytes) -> int:
    """Ends with the exit code it is given."""
    return int(_arguments(payload))


def write(payload: bytes) -> int:
    """Writes each text to standard output and, every second one, to standard error."""
    for number, text in enumerate(_arguments(payload)):
        os.write(2 if number % 2 else 1, text.encode())
    return 0


def wait(payload: bytes) -> NoReturn:
    """Says "waiting" and waits for a signal; none is handled."""
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    os.write(1, b"waiting\n")
    while True:
        signal.pause()


def raise_error(payload: bytes) -> int:
    """Raises, as an entry with a fault would."""
    raise RuntimeError("this program was made to fail")


def segfault(payload: bytes) -> int:
    """Ends itself as a segmentation fault would."""
    signal.signal(signal.SIGSEGV, signal.SIG_DFL)
    os.kill(os.getpid(), signal.SIGSEGV)
    return 0


def show_surroundings(payload: bytes) -> int:
    """Writes pid, parent, working directory, standard input and the variables it is asked for, as JSON."""
    names = _arguments(payload)
    print(
        json.dumps(
            {
                "pid": os.getpid(),
                "parent": os.getppid(),
                "cwd": os.getcwd(),
                "stdin": sys.stdin.read(),
                "env": {name: os.environ.get(name) for name in names},
            }
        )
    )
    return 0


def leave_children(payload: bytes) -> int:
    """Starts a child, one in a session of its own, and one below that in yet another; then ends or waits.

    Writes their pids as one JSON line. The children hold standard output open, as careless ones do.
    """
    plain = subprocess.Popen([sys.executable, "-S", "-c", _SLEEPER])
    outer = (
        "import subprocess, sys; "
        f"p = subprocess.Popen([sys.executable, '-S', '-c', {_SLEEPER!r}], start_new_session=True); "
        "print(p.pid, flush=True); p.wait()"
    )
    apart = subprocess.Popen(
        [sys.executable, "-S", "-c", outer], stdout=subprocess.PIPE, start_new_session=True
    )
    assert apart.stdout is not None
    below = int(apart.stdout.readline())
    os.write(1, json.dumps([plain.pid, apart.pid, below]).encode() + b"\n")
    if _arguments(payload) == "wait":
        wait(b"")
    os._exit(0)


def daemonise(payload: bytes) -> NoReturn:
    """Starts a child through a middleman that ends, writes the child's pid, and waits."""
    middle = (
        "import subprocess, sys; "
        f"print(subprocess.Popen([sys.executable, '-S', '-c', {_SLEEPER!r}], stdout=subprocess.DEVNULL).pid)"
    )
    done = subprocess.run([sys.executable, "-S", "-c", middle], stdout=subprocess.PIPE, check=True)
    os.write(1, done.stdout)
    wait(b"")


def count_payload(payload: bytes) -> int:
    """Writes how many bytes it was given."""
    print(len(payload))
    return 0


def write_much(payload: bytes) -> int:
    """Writes as many numbered lines as it is asked for, as fast as it can."""
    for number in range(_arguments(payload)):
        print(number)
    return 0
