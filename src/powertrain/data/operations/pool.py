"""Processes for functions that would hold the GIL: they work for one owner, and exit with it.

::

    owner ──── control ────▶ server ── forks ──▶ process 0, 1, …
      └──────────── one channel to each process ────────┘

The server is a fresh interpreter that loads the libraries used by the owner too, forks, and then only waits: it
reports to the owner how a process ended, and ends them all when the owner exits or requests it. Python's own pools do
not fit: their processes import the user's script again, outlive an owner that is killed, and do not report the signal
that ended a process.
"""

from __future__ import annotations

import contextlib
import functools
import io
import os
import pickle
import queue
import signal
import socket
import struct
import subprocess
import sys
import threading
import traceback
import weakref
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any, NoReturn

import cloudpickle
import numpy as np
import pyarrow as pa

from powertrain import fork_server

#: Libraries that are slow to load, loaded before the fork if the owner has loaded them or the work names them.
_PRELOADED = ("numpy", "pyarrow", "pandas", "torch", "PIL.Image")
#: Seconds for a server to exit on request, and to report how a process ended.
_EXIT_TIMEOUT_S = 5.0
_END = b"e"
#: Header of a message: bytes of the pickle, number of buffers beside it.
_HEAD = struct.Struct("<QI")
#: The server's report of an exit: index of the process, its exit code or minus the signal.
_ENDED = struct.Struct("<ii")

Work = Callable[[Any], Any]


class ProcessDied(Exception):
    """A process has ended. ``code`` is its exit code, minus the signal that ended it, or None if unknown; ``task`` is
    the number of the caller's task that it was running, if any."""

    def __init__(self, code: int | None, task: int | None = None) -> None:
        super().__init__(describe_exit(code))
        self.code, self.task = code, task

    def again(self) -> ProcessDied:
        """Return a copy for another caller: one exception raised twice would mix their tracebacks."""
        return ProcessDied(self.code)


class PoolClosed(Exception):
    """The pool was closed before the task was done."""

    def again(self) -> PoolClosed:
        return PoolClosed(*self.args)


class _RemoteTraceback(Exception):
    """The traceback of an exception that came from another process, as the cause of its copy here."""


def describe_exit(code: int | None) -> str:
    """Return an exit code in words, to follow "a process"."""
    if code is None:
        return "is gone, and so is the one that could say how it ended"
    if code >= 0:
        return f"ended with exit code {code}"
    try:
        name = signal.Signals(-code).name
    except ValueError:
        name = f"signal {-code}"
    likely = " (the usual reason is that the machine ran out of memory)" if code == -signal.SIGKILL else ""
    return f"was ended by {name}{likely}"


class ProcessPool:
    """``processes`` processes that each make their ``work`` once and then do it on one task at a time.

    ``make_work`` is pickled by cloudpickle: called without arguments in each process, it returns the function that is
    called on tasks. Processes start with the first task. Any thread may call, and does its own pickling and waiting. An
    exception of ``work``, or of making it, is raised here. Once a process has died every call raises
    :class:`ProcessDied`: its state is lost, and the owner of the pool decides how to proceed.
    """

    def __init__(self, make_work: bytes, processes: int) -> None:
        self.processes = processes
        self._make_work = make_work
        self._starting = threading.Lock()
        self._server: _Server | None = None
        self._idle: queue.LifoQueue[int] = queue.LifoQueue()
        #: The reason why the pool does no more tasks.
        self._over: ProcessDied | PoolClosed | None = None

    def map(self, tasks: Iterable[Any]) -> list[Any]:
        """Return the result of each task, in order, from as many processes as are free; ``tasks`` is drawn as
        needed."""
        server = self._started()
        results: list[Any] = []
        begun: deque[int] = deque()
        try:
            for task in tasks:
                begun.append(self._begin(server, task, begun, results))
            while begun:
                results.append(self._finish(server, begun, len(results)))
        except Exception:
            self._abandon(server, begun)
            raise
        except BaseException:
            self.close()  # interrupted, perhaps in the middle of a message: the channels are unusable
            raise
        return results

    def pids(self) -> list[int]:
        """Process ids, empty before the first task; without the server."""
        return list(self._server.pids) if self._server else []

    def close(self) -> None:
        """End the processes; calls under way raise :class:`PoolClosed`. All processes have exited on return."""
        with self._starting:
            self._give_up(PoolClosed("The pool is closed."))
            if self._server is not None:
                self._server.end()

    def _started(self) -> _Server:
        with self._starting:
            if self._over is not None:
                raise self._over.again()
            if self._server is None:
                self._server = _Server(self._make_work, self.processes)
                for index in range(self.processes):
                    self._idle.put(index)
            return self._server

    def _begin(self, server: _Server, task: Any, begun: deque[int], results: list[Any]) -> int:
        """Send ``task`` to a free process. Never waits for other callers while own results could be fetched."""
        while True:
            try:
                index = self._idle.get(block=not begun)
                break
            except queue.Empty:
                results.append(self._finish(server, begun, len(results)))
        if self._over is not None:
            self._idle.put(index)
            raise self._over.again()
        try:
            _send(server.channels[index], task)
        except OSError:
            raise self._death(server, index) from None
        except BaseException:
            self._idle.put(index)  # it could not be pickled: nothing was sent
            raise
        return index

    def _finish(self, server: _Server, begun: deque[int], task: int) -> Any:
        """Return the result of the oldest task begun, the caller's ``task``-th, and free its process."""
        index = begun[0]
        try:
            message = _received_message(server.channels[index])
        except (OSError, EOFError):
            raise self._death(server, index, task) from None
        begun.popleft()
        self._idle.put(index)
        good, value, text = _opened_message(message)
        if good:
            return value
        value.__cause__ = _RemoteTraceback(f"\n{text}")
        raise value

    def _abandon(self, server: _Server, begun: deque[int]) -> None:
        """Free the processes of tasks whose results are not needed any more."""
        while begun:
            with contextlib.suppress(OSError, EOFError):  # the next caller of this process gets the error
                _received_message(server.channels[begun[0]])
            self._idle.put(begun.popleft())

    def _death(self, server: _Server, index: int, task: int | None = None) -> Exception:
        """Return the reason why the channel to a process is closed; the pool does no more tasks."""
        if isinstance(self._over, PoolClosed):
            return self._over.again()
        death = ProcessDied(server.code_of(index), task)
        self._give_up(death)
        return death

    def _give_up(self, why: ProcessDied | PoolClosed) -> None:
        self._over = self._over or why.again()
        self._idle.put(-1)  # wakes one waiting caller, which reads the reason and wakes the next


class _Server:
    """The owner's side of the server, and the channels to its processes."""

    def __init__(self, make_work: bytes, processes: int) -> None:
        self._owner = os.getpid()
        self._control, theirs = socket.socketpair()
        self.channels, far = [], []
        for _ in range(processes):
            near_end, far_end = socket.socketpair()
            self.channels.append(near_end)
            far.append(far_end)
        try:
            self._process = _start([theirs, *far])
        finally:
            for end in (theirs, *far):
                end.close()
        #: Runs when the pool is dropped, and at the end of the interpreter.
        self.end = weakref.finalize(self, _end, self._owner, self._process, self._control, self.channels)
        self._codes: dict[int, int] = {}
        self._telling = threading.Lock()
        self.pids: tuple[int, ...] = ()
        try:
            wanted = [name for name in _PRELOADED if name in sys.modules or name.encode() in make_work]
            _send(self._control, (self._owner, wanted, make_work))
            self.pids = _receive(self._control)
        except (OSError, EOFError):
            code = self._process.wait(_EXIT_TIMEOUT_S)
            self.end()
            raise ProcessDied(code) from None

    def code_of(self, index: int) -> int | None:
        """Return the exit code of a process that has closed its channel, as reported by the server."""
        with self._telling:
            self._control.settimeout(_EXIT_TIMEOUT_S)
            try:
                while index not in self._codes:
                    which, code = _ENDED.unpack(bytes(_received(self._control, _ENDED.size)))
                    self._codes[which] = code
            except (OSError, EOFError):
                return None
            return self._codes[index]


def _start(ends: list[socket.socket]) -> subprocess.Popen[bytes]:
    """Start the server process; ``ends`` are its control and the processes' channels."""
    numbers = [end.fileno() for end in ends]
    command = fork_server.interpreter_command("powertrain.data.operations.pool:serve", numbers)
    # Several processes that each use every core are slower than one: `processes` shares out the cores already.
    environment = {"OMP_NUM_THREADS": "1", **os.environ}
    # Blocked from the first instruction on: a scheduler's SIGTERM to every process of a job must not end these, because
    # the rank needs its batches until it has saved.
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM, signal.SIGHUP, signal.SIGINT})
    try:
        return subprocess.Popen(command, pass_fds=numbers, stdin=subprocess.DEVNULL, env=environment)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _end(
    owner: int, process: subprocess.Popen[bytes], control: socket.socket, channels: list[socket.socket]
) -> None:
    """Make the server end its processes and exit, and wait until it has."""
    if os.getpid() == owner:  # a fork of the owner holds these too, but must not end them
        with contextlib.suppress(OSError):
            control.sendall(_END)
        try:
            process.wait(_EXIT_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            process.kill()  # the processes exit with it
            process.wait()
        for channel in channels:
            with contextlib.suppress(OSError):
                channel.shutdown(socket.SHUT_RDWR)  # wakes a thread that still reads from it
    for end in (control, *channels):
        end.close()


# --------------------------------------------------------------------------- the server


def serve(numbers: list[int]) -> NoReturn:
    """Run the server: load, fork, wait, end. ``numbers`` are the descriptors of its control and channels."""
    control, *channels = [socket.socket(fileno=number) for number in numbers]
    try:
        owner, modules, make_work = _receive(control)
    except (OSError, EOFError):
        os._exit(0)  # the owner has exited already
    fork_server.preload(modules)
    core = fork_server.ForkServer(control, owner)
    pids: dict[int, int] = {}
    for index, channel in enumerate(channels):
        others = [other for other in channels if other is not channel]
        pids[core.fork(functools.partial(_run_process, channel, make_work), others)] = index
    for channel in channels:
        channel.close()
    with contextlib.suppress(OSError):
        _send(control, tuple(pids))
    _wait_for_close(core, control, owner, pids)
    for pid in pids:
        with contextlib.suppress(OSError):
            os.kill(pid, signal.SIGKILL)
    for pid in pids:
        with contextlib.suppress(OSError):
            os.waitpid(pid, 0)
    os._exit(0)


def _wait_for_close(
    core: fork_server.ForkServer, control: socket.socket, owner: int, pids: dict[int, int]
) -> None:
    """Wait until the owner requests the end, closes its end or exits. Reports exits, and removes them from ``pids``."""
    while os.getppid() == owner:
        ready = core.wait()
        if ready.has_command or ready.is_orphaned:
            return
        for pid, code in core.reap():
            with contextlib.suppress(OSError):
                control.sendall(_ENDED.pack(pids.pop(pid), code))


def _run_process(channel: socket.socket, make_work: bytes) -> NoReturn:
    code = 1
    try:
        _work(channel, make_work)
        code = 0
    except (OSError, EOFError):
        code = 0  # the owner has exited
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(code)


def _work(channel: socket.socket, make_work: bytes) -> None:
    """Do tasks until the channel closes; the main function of a process."""
    work: Work | None = None
    while True:
        message = _received_message(channel)
        try:
            if work is None:
                work = cloudpickle.loads(make_work)()
            answer = (True, work(_opened_message(message)), "")
        except (Exception, SystemExit) as error:
            answer = (False, picklable_error(error), traceback.format_exc())
        _flush_output()
        try:
            _send(channel, answer)
        except OSError:
            raise
        except Exception as error:
            _send(channel, (False, picklable_error(error), traceback.format_exc()))


def _flush_output() -> None:
    """Flush standard output: it must appear before the result, and not be lost when the process is ended."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):
            stream.flush()


def picklable_error(error: BaseException) -> Exception:
    """Return ``error``, or a substitute where it cannot be pickled and unpickled, or would end the caller."""
    try:
        if isinstance(error, Exception):
            cloudpickle.loads(cloudpickle.dumps(error))
            return error
    except Exception:
        pass  # its own methods failed
    return RuntimeError(f"{type(error).__qualname__}: {error}")


# --------------------------------------------------------------------------- messages


class _Pickler(cloudpickle.Pickler):  # type: ignore[misc]  # cloudpickle has no types
    """Pickles Arrow arrays as IPC: a plain pickle of a slice would contain the whole array."""

    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, pa.Array):
            return _opened_array, (_written_array(obj),)
        return super().reducer_override(obj)


def _written_array(array: pa.Array[Any]) -> pa.Buffer:
    batch = pa.RecordBatch.from_arrays([array], names=["array"])
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, batch.schema) as writer:
        writer.write_batch(batch)
    return sink.getvalue()


def _opened_array(buffer: Any) -> pa.Array[Any]:
    return pa.ipc.open_stream(buffer).read_next_batch().column(0)


def _send(channel: socket.socket, message: Any) -> None:
    """Send any object; large arrays are written without a copy."""
    buffers: list[pickle.PickleBuffer] = []
    file = io.BytesIO()
    _Pickler(file, protocol=5, buffer_callback=buffers.append).dump(message)
    views = [buffer.raw() for buffer in buffers]
    body = file.getbuffer()
    lengths = np.array([view.nbytes for view in views], "<u8").tobytes()
    channel.sendall(_HEAD.pack(body.nbytes, len(views)) + lengths)
    channel.sendall(body)
    for view in views:
        channel.sendall(view)


def _receive(channel: socket.socket) -> Any:
    """Return the next object; its arrays are writable. Raises EOFError when the other side has closed."""
    return _opened_message(_received_message(channel))


def _received_message(channel: socket.socket) -> list[memoryview]:
    """Return a whole message, not unpickled yet: its exceptions must not be taken for a closed channel."""
    size, count = _HEAD.unpack(bytes(_received(channel, _HEAD.size)))
    lengths = np.frombuffer(bytes(_received(channel, 8 * count)), "<u8")
    return [_received(channel, int(length)) for length in (size, *lengths)]


def _opened_message(message: list[memoryview]) -> Any:
    body, *buffers = message
    return pickle.loads(body, buffers=buffers)


def _received(channel: socket.socket, size: int) -> memoryview:
    view = np.empty(size, np.uint8).data  # a bytearray would be cleared first
    rest = view
    while rest.nbytes:
        count = channel.recv_into(rest)
        if count == 0:
            raise EOFError
        rest = rest[count:]
    return view
