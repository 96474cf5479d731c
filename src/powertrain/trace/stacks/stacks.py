"""Stacks of all threads, on demand: of this process, of its children, of any other process on this machine.

A responsive process reads its own stacks (:func:`own_stacks`). If a process cannot, because its interpreter lock is
held in C or its thread is blocked, its stacks are read from outside (:func:`stacks_of`): by py-spy if it is installed,
else by a signal. A rank is *armed* for that signal: a handler written in C, which needs no interpreter, appends all
stacks to a file. Processes that the rank forks, such as a DataLoader's workers, inherit both.

The signal would end a process without a handler, so it is sent only to a process that has one and holds the file open.
It is sent to a thread that it cannot harm: one that runs, else one that is not the main thread, because a sleeping
system call may return early when a signal arrives.
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import fcntl
import gc
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import islice
from types import FrameType
from typing import Any, BinaryIO

import msgspec

from powertrain.text.printable import escape_controls
from powertrain.trace.machine import processes
from powertrain.trace.stacks import frames
from powertrain.wire.values import Frame, ProcessStack, ThreadStack, Where

#: The signal that requests stacks; 0 if the platform has none to spare.
SIGNAL = int(signal.SIGRTMIN) + 11 if hasattr(signal, "SIGRTMIN") else 0
#: Maximum number of frames kept per thread, the innermost: an endless recursion has thousands.
_DEPTH = 200
#: Timeouts for one process to write its stacks; for all descendants of a rank; for another reader of the file.
_ANSWER_WITHIN = 0.3
_CHILDREN_WITHIN = 2.0
_TURN_WITHIN = 3.0
#: Seconds between two checks of a process that is writing.
_LOOK_EVERY = 0.002
#: A younger process may be about to become another program, which would not survive the signal.
_OLD_ENOUGH = 0.5
#: Timeouts for py-spy: to read C frames, for which it stops the process; and only Python's, for which it does not.
_NATIVE_WITHIN = 2.0
_PYTHON_WITHIN = 1.0
_STANDARD_ERROR = 2

# --------------------------------------------------------------------------- this process


@dataclass
class _Armed:
    path: str
    file: BinaryIO
    #: True if this module enabled tracebacks of crashes.
    reports_crashes: bool


_armed: _Armed | None = None
#: The thread that runs the user's function; 0 for the process's first.
_rank_thread = 0


def arm(path: str) -> None:
    """Handle :data:`SIGNAL` by appending all stacks to ``path``, here and in processes forked from here.

    Called in the thread that runs the user's function. An existing handler of other code stays, and then
    nothing is written. A crash in native code leaves a Python traceback on standard error from now on.
    """
    global _armed, _rank_thread
    disarm()
    _rank_thread = threading.get_ident()
    if not SIGNAL or processes.catches(os.getpid(), SIGNAL):
        return
    try:
        os.makedirs(os.path.dirname(path), exist_ok=True)
        file = open(path, "ab", buffering=0)  # noqa: SIM115 (closed by disarm)
    except OSError:  # a full disk loses the stacks, never the training
        return
    faulthandler.register(SIGNAL, file=file, all_threads=True, chain=False)
    _armed = _Armed(path, file, _report_crashes())


def _report_crashes() -> bool:
    """Enable tracebacks of crashes on standard error; return whether this call enabled them."""
    if faulthandler.is_enabled():
        return False
    try:
        os.fstat(_STANDARD_ERROR)
        faulthandler.enable(file=_STANDARD_ERROR)
    except OSError:
        return False
    return True


def disarm() -> None:
    """Undo :func:`arm`. Idempotent."""
    global _armed, _rank_thread
    _rank_thread = 0
    if _armed is None:
        return
    faulthandler.unregister(SIGNAL)
    if _armed.reports_crashes:
        faulthandler.disable()
    _armed.file.close()
    _armed = None


def dump_path() -> str:
    """Return the dump file of this process and its forks; "" while it is not armed."""
    return _armed.path if _armed is not None else ""


def _current_frames() -> dict[int, FrameType]:
    """Return the innermost frame of each thread.

    Without garbage collection: the interpreter holds a lock over its threads meanwhile, and a finaliser that lets
    another thread run, which starts a third, would end in a deadlock of all (CPython issue 106883, seen with 3.11.7).
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        return sys._current_frames()
    finally:
        if was_enabled:
            gc.enable()


def main_frame() -> FrameType | None:
    """Return the innermost frame of the thread that runs the user's function. Any thread."""
    return _current_frames().get(_main_thread())


def _main_thread() -> int:
    return _rank_thread or threading.main_thread().ident or 0


def own_where(main: FrameType | None) -> Where | None:
    """Return the location of the thread of this innermost frame: see :func:`powertrain.trace.stacks.frames.where`."""
    found = frames.where(frames.lines_of(main), frames.averages_gradients())
    if found is None or found.inside == "compiler" or not frames.is_in_backward(frames.lines_of(main)):
        return found
    # The backward of a compiled model is compiled by a thread of autograd, for which this one waits.
    others = (frame for thread, frame in _current_frames().items() if thread != _main_thread())
    if any(frames.is_in_compiler(frames.lines_of(frame)) for frame in others):
        return msgspec.structs.replace(found, inside="compiler")
    return found


def own_debugged(main: FrameType | None) -> bool:
    """Return whether a debugger is attached to this process, or is on the stack of this innermost frame."""
    return frames.is_debugged(frames.lines_of(main)) or processes.is_traced(os.getpid())


def own_stacks() -> list[ThreadStack]:
    """Return the stacks of all Python threads of this process, the main one first. Any thread."""
    main = _main_thread()
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    stacks = [
        ThreadStack(
            name=names.get(ident, f"thread {ident:#x}"),
            main=ident == main,
            frames=[frames.as_frame(line) for line in islice(frames.lines_of(frame), _DEPTH)],
        )
        for ident, frame in _current_frames().items()
    ]
    return sorted(stacks, key=lambda stack: not stack.main)


def own_process(title: str) -> ProcessStack:
    """Return this process with its own stacks."""
    pid = os.getpid()
    return ProcessStack(pid=pid, title=title, state=processes.state(pid), threads=own_stacks())


# --------------------------------------------------------------------------- another process


def stacks_of(pid: int, title: str, dump: str) -> ProcessStack:
    """Return the stacks of a process, read from outside. ``dump`` is its dump file, "" for none."""
    state = processes.state(pid)
    if state in ("gone", "zombie", "dead"):
        return ProcessStack(pid=pid, title=title, state=state, remark="It has ended.")
    threads = _by_py_spy(pid, native=state not in processes.CANNOT_ANSWER)
    remark = ""
    if not threads:
        threads, remark = _by_signal(pid, state, dump)
    return ProcessStack(pid=pid, title=title, state=state, threads=threads, remark=remark)


def children_stacks(pid: int, title: str, dump: str) -> list[ProcessStack]:
    """Return the stacks of the processes below ``pid``; ``title`` is the name of ``pid``, such as "rank 1".

    Takes about 10 ms for each, and at most two seconds: the remaining ones are named without stacks.
    """
    deadline = time.monotonic() + _CHILDREN_WITHIN
    found, sharing = [], [pid]
    for child in processes.descendants(pid):
        found.append(_child(child, title, dump, deadline, sharing))
        sharing.append(child)
    return found


def _child(pid: int, parent: str, dump: str, deadline: float, sharing: Sequence[int]) -> ProcessStack:
    state, name = processes.state(pid), processes.name(pid)
    threads: list[ThreadStack] = []
    if time.monotonic() > deadline:
        remark = "No time was left to read its stacks: its parent has many processes, or slow ones."
    else:
        threads, remark = _by_signal(pid, state, dump, sharing)
        if remark and (read := _by_py_spy(pid, native=False)):  # also where the dump was cut off
            threads, remark = read, ""
    title = f"DataLoader worker of {parent}" if _is_loader_worker(threads) else name or f"process {pid}"
    return ProcessStack(pid=pid, title=title, state=state, threads=threads, remark=remark)


def _is_loader_worker(threads: Sequence[ThreadStack]) -> bool:
    of_main = (frame.file for thread in threads if thread.main for frame in thread.frames)
    return any(file.endswith("torch/utils/data/_utils/worker.py") for file in of_main)


# --------------------------------------------------------------------------- by signal


def _by_signal(pid: int, state: str, dump: str, sharing: Sequence[int] = ()) -> tuple[list[ThreadStack], str]:
    """Return the stacks that a process dumps on the signal; or none, and the reason.

    ``sharing`` are other processes that may still be writing to the same file.
    """
    if remark := _why_not_to_ask(pid, state, dump):
        return [], remark
    try:
        with _reading(dump) as file:
            if not _await_earlier_dumps([*sharing, pid]):
                return [], "Stacks that were requested earlier are still being written."
            before = file.seek(0, os.SEEK_END)
            asked = _ask(pid)
            if not asked:
                return [], "All of its threads block signals, so its stacks cannot be read."
            answered = _await_answer(pid, asked, file, before)
            file.seek(before)
            threads = parse_dump(file.read().decode("utf-8", "replace"), complete=answered)
    except OSError as error:
        return [], f"Its stacks could not be read from {dump}: {error}."
    if not threads:
        return [], f"It did not write its stacks within {_ANSWER_WITHIN:g} s."
    return (
        threads,
        "" if answered else f"It was still writing after {_ANSWER_WITHIN:g} s: frames are missing.",
    )


def _why_not_to_ask(pid: int, state: str, dump: str) -> str:
    """Return the reason not to send the signal: no reply, or harm; "" if it can be sent."""
    if state in processes.CANNOT_ANSWER:
        return f"Its state is {state!r}, in which the stacks of a process cannot be read."
    if not dump or not processes.has_open(pid, dump) or not processes.catches(pid, SIGNAL):
        return "It was not forked from a rank that can dump stacks, so its stacks cannot be read."
    if processes.age(pid) < _OLD_ENOUGH:
        return "It had only just started."
    return ""


@contextlib.contextmanager
def _reading(dump: str) -> Iterator[BinaryIO]:
    """Open the dump file exclusively. Raises ``TimeoutError`` if another reader keeps it."""
    with open(dump, "rb", buffering=0) as file:
        deadline = time.monotonic() + _TURN_WITHIN
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise TimeoutError("another process is reading from it") from None
                time.sleep(_LOOK_EVERY)
        try:
            yield file
        finally:
            fcntl.flock(
                file, fcntl.LOCK_UN
            )  # closing is not enough: a forked child may have the same open file


def _ask(pid: int) -> list[int]:
    """Send the signal to the thread that is disturbed least; return the threads of which one will handle it."""
    willing = [thread for thread in processes.threads(pid) if not processes.blocks(pid, thread, SIGNAL)]
    if not willing:
        return []
    running = [thread for thread in willing if processes.runs(pid, thread)]
    thread = (running or [thread for thread in willing if thread != pid] or willing)[0]
    send_to_thread = getattr(ctypes.CDLL(None, use_errno=True), "tgkill", None)
    if send_to_thread is None:
        os.kill(pid, SIGNAL)
        return willing
    if send_to_thread(pid, thread, SIGNAL) != 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))
    return [thread]


def _await_earlier_dumps(pids: Sequence[int]) -> bool:
    """Wait until none of these processes writes a dump whose reader has stopped waiting; return False on timeout.

    ``faulthandler`` writes one dump at a time and drops a request that comes meanwhile, so the reply to the next
    request would be the rest of the earlier one. A signal that stays pending, as in a thread that is stuck in the
    kernel, does not count: such a thread writes nothing.
    """
    deadline = time.monotonic() + _ANSWER_WITHIN
    while True:
        is_last = time.monotonic() >= deadline
        found = {phase for pid in pids for phase in _signal_phases(pid)}
        if not found or is_last:
            return "handling" not in found
        time.sleep(_LOOK_EVERY)


def _await_answer(pid: int, asked: list[int], file: BinaryIO, before: int) -> bool:
    """Wait until the process has written and left its handler; return False on timeout.

    While a handler runs, its signal is blocked in its thread: so the end of the text is known, not guessed.
    """
    deadline = time.monotonic() + _ANSWER_WITHIN
    while True:
        # Read before the look: if this process stood still beyond the deadline, what was written meanwhile counts.
        is_last = time.monotonic() >= deadline
        wrote = os.fstat(file.fileno()).st_size > before
        is_over = wrote and not any(processes.signal_phase(pid, thread, SIGNAL) for thread in asked)
        # Nor does another thread write, late for an earlier request.
        if is_over and "handling" not in _signal_phases(pid):
            return True
        if is_last:
            return False
        time.sleep(_LOOK_EVERY)


def _signal_phases(pid: int) -> set[str]:
    phases = {processes.signal_phase(pid, thread, SIGNAL) for thread in processes.threads(pid)}
    return phases - {""}


_THREAD = re.compile(r"^(?:Current thread|Thread) 0x([0-9a-f]+)(?: \[(.*)\])? \(most recent call first\):$")
_FRAME = re.compile(r'^  File "(.*)", line (\d+|\?\?\?) in (.*)$')
_ESCAPED = re.compile(r"\\x([0-9a-f]{2})|\\u([0-9a-f]{4})|\\U([0-9a-f]{8})")


def parse_dump(text: str, complete: bool = True) -> list[ThreadStack]:
    """Parse one process's ``faulthandler`` text into stacks, the main one first.

    The text lists the newest thread first, so the last is the initial thread. If the text is not ``complete``, or ends
    in "...", where ``faulthandler`` has reached its limit of threads, the main thread is missing.
    """
    stacks: list[tuple[str, list[Frame]]] = []
    for line in text.splitlines():
        if found := _THREAD.match(line):
            stacks.append((found[2] or f"thread 0x{found[1].lstrip('0')}", []))
        elif (found := _FRAME.match(line)) and stacks:
            stacks[-1][1].append(_parsed_frame(*found.groups()))
        elif line == "...":
            complete = False
    last = len(stacks) - 1
    parsed = [
        ThreadStack(
            name="MainThread" if complete and index == last else name,
            main=complete and index == last,
            frames=of_thread,
        )
        for index, (name, of_thread) in enumerate(stacks)
    ]
    return sorted(parsed, key=lambda stack: not stack.main)


def _parsed_frame(file: str, line: str, function: str) -> Frame:
    number = int(line) if line.isdigit() else 0
    return frames.as_frame((_unescaped(file), number, _unescaped(function)))


def _unescaped(text: str) -> str:
    """Decode the escapes of faulthandler, which writes ASCII only."""
    return _ESCAPED.sub(lambda found: chr(int(found[1] or found[2] or found[3], 16)), text)


# --------------------------------------------------------------------------- by py-spy


@lru_cache(maxsize=1)
def py_spy() -> str:
    """Return the path of py-spy, on the search path or beside this interpreter; "" if it is not installed."""
    beside = os.path.join(os.path.dirname(sys.executable), "py-spy")
    return shutil.which("py-spy") or (beside if os.access(beside, os.X_OK) else "")


def _by_py_spy(pid: int, native: bool) -> list[ThreadStack]:
    """Return the stacks read by py-spy, with C frames if ``native``; none if it is not installed, not permitted, or too
    slow."""
    if not py_spy():
        return []
    ways = [("--native", _NATIVE_WITHIN)] if native else []
    for option, seconds in [*ways, ("--nonblocking", _PYTHON_WITHIN)]:
        command = [py_spy(), "dump", "--json", option, "--pid", str(pid)]
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError, subprocess.TimeoutExpired):
            done = subprocess.run(command, capture_output=True, timeout=seconds, stdin=subprocess.DEVNULL)
            if done.returncode == 0 and (stacks := _parse_py_spy(json.loads(done.stdout), pid)):
                return stacks
    return []


def _parse_py_spy(threads: list[dict[str, Any]], pid: int) -> list[ThreadStack]:
    stacks = [
        ThreadStack(
            name=thread.get("thread_name") or f"thread {thread['thread_id']:#x}",
            main=thread.get("os_thread_id") == pid or thread.get("thread_name") == "MainThread",
            frames=[_py_spy_frame(frame) for frame in thread["frames"][:_DEPTH]],
        )
        for thread in threads
    ]
    return sorted(stacks, key=lambda stack: not stack.main)


def _py_spy_frame(frame: dict[str, Any]) -> Frame:
    """Parse a frame; a C frame has the library as its file, and no line."""
    line = 0 if frame.get("module") else int(frame["line"])
    return frames.as_frame((frame.get("module") or frame["filename"], line, frame["name"]))


# --------------------------------------------------------------------------- formatting


_RANKS_LIFE = os.path.join(frames.OURS, "worker", "main.py")


def text(looked_at: Sequence[ProcessStack]) -> str:
    """Format stacks as text: each process, each of its threads, innermost frame first."""
    return "\n".join(_process_text(process) for process in looked_at)


def _of_the_rank(lines: Sequence[Frame]) -> Sequence[Frame]:
    """Return the stack of a rank without the frames of its fork server."""
    for number, frame in enumerate(lines):
        if frame.file == _RANKS_LIFE and frame.function == "_train":
            return lines[: number + 1]
    return lines


def _process_text(process: ProcessStack) -> str:
    lines = [f"{process.title} (process {process.pid}, {process.state})"]
    if process.remark:
        lines.append(f"  {process.remark}")
    for thread in process.threads:
        lines.append(f"  {thread.name}{' (main)' if thread.main and thread.name != 'MainThread' else ''}")
        for frame in _of_the_rank(thread.frames):
            place = f"{frame.file}:{frame.line}" if frame.line else frame.file
            lines.append(f"    {frame.function} at {place}")
            if frame.source:
                lines.append(f"      {frame.source}")
        if not thread.frames:
            lines.append("    runs no Python")
    return "\n".join(map(escape_controls, lines)) + "\n"
