"""Processes for functions that would hold Python's lock: they work for one owner, and end with it.

::

    owner ──── control ────▶ server ── forks ──▶ process 0, 1, …
      └──────────── one channel to each process ────────┘

The server is a fresh interpreter that loads the libraries which the owner uses too, forks, and then only waits: it
tells the owner how a process has ended, and ends them all when the owner is gone or says so. Python's own pools do not
serve here: their processes import the user's script again, outlive an owner that is killed, and a death among them
is told without its signal.
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

#: What takes long to load and is there already once the processes are forked, if the owner has it loaded or the work
#: names it.
_PRELOADED = ("numpy", "pyarrow", "pandas", "torch", "PIL.Image")
#: Seconds for a server to end when told, and to say how a process has ended.
_PATIENCE = 5.0
_END = b"e"
#: Of one message: bytes of the pickle, number of buffers beside it.
_HEAD = struct.Struct("<QI")
#: How the server tells of an end: which process, its exit code or minus the signal.
_ENDED = struct.Struct("<ii")

Work = Callable[[Any], Any]


class ProcessDied(Exception):
    """A process has ended. ``code`` is its exit code, minus the signal that ended it, or None where nobody knows;
    ``task`` is which of the caller's tasks it was at, if any."""

    def __init__(self, code: int | None, task: int | None = None) -> None:
        super().__init__(how_it_ended(code))
        self.code, self.task = code, task

    def again(self) -> ProcessDied:
        """The same for another caller: an exception that is raised twice would mix their tracebacks."""
        return ProcessDied(self.code)


class PoolClosed(Exception):
    """The pool was closed before the task was done."""

    def again(self) -> PoolClosed:
        return PoolClosed(*self.args)


class _RemoteTraceback(Exception):
    """The traceback of an exception that came from another process, as the cause of its copy here."""


def how_it_ended(code: int | None) -> str:
    """An exit code in words, to follow "a process"."""
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
    called on tasks. No process is started before the first task. Any thread may call; pickling and waiting are done in
    it. An exception of ``work``, or of making it, is raised here. When a process has died every call raises
    :class:`ProcessDied`: what it held is lost, and whoever owns the pool decides.
    """

    def __init__(self, make_work: bytes, processes: int) -> None:
        self.processes = processes
        self._make_work = make_work
        self._starting = threading.Lock()
        self._server: _Server | None = None
        self._idle: queue.LifoQueue[int] = queue.LifoQueue()
        #: Why no task can be done any more.
        self._over: ProcessDied | PoolClosed | None = None

    def map(self, tasks: Iterable[Any]) -> list[Any]:
        """The work done on each task, in order, by as many processes as are free; drawn from ``tasks`` as needed."""
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
            self.close()  # interrupted, perhaps in the middle of a message: the channels are of no use any more
            raise
        return results

    def pids(self) -> list[int]:
        """Of the processes, none before the first task; the server is not among them."""
        return list(self._server.pids) if self._server else []

    def close(self) -> None:
        """End the processes; calls under way raise :class:`PoolClosed`. Nothing is left when this returns."""
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
        """Hand ``task`` to a free process. Never waits for others' while own results could be fetched."""
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
        """The result of the oldest task begun, the caller's ``task``-th; its process is free again."""
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
        """Free the processes of tasks whose results nobody wants any more."""
        while begun:
            with contextlib.suppress(OSError, EOFError):  # whoever is given this process next is told
                _received_message(server.channels[begun[0]])
            self._idle.put(begun.popleft())

    def _death(self, server: _Server, index: int, task: int | None = None) -> Exception:
        """Why the channel to a process is closed; from now on the pool does no task."""
        if isinstance(self._over, PoolClosed):
            return self._over.again()
        death = ProcessDied(server.code_of(index), task)
        self._give_up(death)
        return death

    def _give_up(self, why: ProcessDied | PoolClosed) -> None:
        self._over = self._over or why.again()
        self._idle.put(-1)  # wakes one who waits for a process, who sees why and wakes the next


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
        #: Runs when nobody holds the pool any more, and at the end of the interpreter.
        self.end = weakref.finalize(self, _end, self._owner, self._process, self._control, self.channels)
        self._codes: dict[int, int] = {}
        self._telling = threading.Lock()
        self.pids: tuple[int, ...] = ()
        try:
            wanted = [name for name in _PRELOADED if name in sys.modules or name.encode() in make_work]
            _send(self._control, (self._owner, wanted, make_work))
            self.pids = _receive(self._control)
        except (OSError, EOFError):
            code = self._process.wait(_PATIENCE)
            self.end()
            raise ProcessDied(code) from None

    def code_of(self, index: int) -> int | None:
        """How a process has ended that has closed its channel, as the server says."""
        with self._telling:
            self._control.settimeout(_PATIENCE)
            try:
                while index not in self._codes:
                    which, code = _ENDED.unpack(bytes(_received(self._control, _ENDED.size)))
                    self._codes[which] = code
            except (OSError, EOFError):
                return None
            return self._codes[index]


def _start(ends: list[socket.socket]) -> subprocess.Popen[bytes]:
    """The server as a process; ``ends`` are its control and the processes' channels."""
    numbers = [end.fileno() for end in ends]
    command = fork_server.interpreter_command("powertrain.data.operations.pool:serve", numbers)
    # Several processes that each use every core are slower than one: the cores are shared out by `processes` already.
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
    """Have the server end its processes and itself, and wait until it has."""
    if os.getpid() == owner:  # a fork of the owner has these too, and no say in it
        with contextlib.suppress(OSError):
            control.sendall(_END)
        try:
            process.wait(_PATIENCE)
        except subprocess.TimeoutExpired:
            process.kill()  # the processes go with it
            process.wait()
        for channel in channels:
            with contextlib.suppress(OSError):
                channel.shutdown(socket.SHUT_RDWR)  # wakes a thread that still reads from it
    for end in (control, *channels):
        end.close()


# --------------------------------------------------------------------------- the server


def serve(numbers: list[int]) -> NoReturn:
    """The life of the server: load, fork, wait, end. ``numbers`` are the descriptors of its control and channels."""
    control, *channels = [socket.socket(fileno=number) for number in numbers]
    try:
        owner, modules, make_work = _receive(control)
    except (OSError, EOFError):
        os._exit(0)  # the owner is gone already
    fork_server.preload(modules)
    core = fork_server.ForkServer(control, owner)
    pids: dict[int, int] = {}
    for index, channel in enumerate(channels):
        others = [other for other in channels if other is not channel]
        pids[core.fork(functools.partial(_live, channel, make_work), others)] = index
    for channel in channels:
        channel.close()
    with contextlib.suppress(OSError):
        _send(control, tuple(pids))
    _wait_for_the_end(core, control, owner, pids)
    for pid in pids:
        with contextlib.suppress(OSError):
            os.kill(pid, signal.SIGKILL)
    for pid in pids:
        with contextlib.suppress(OSError):
            os.waitpid(pid, 0)
    os._exit(0)


def _wait_for_the_end(
    core: fork_server.ForkServer, control: socket.socket, owner: int, pids: dict[int, int]
) -> None:
    """Until the owner says so, closes its end or is gone. Processes that end are told of, and leave ``pids``."""
    while os.getppid() == owner:
        ready = core.wait()
        if ready.has_command or ready.is_orphaned:
            return
        for pid, code in core.reap():
            with contextlib.suppress(OSError):
                control.sendall(_ENDED.pack(pids.pop(pid), code))


def _live(channel: socket.socket, make_work: bytes) -> NoReturn:
    code = 1
    try:
        _work(channel, make_work)
        code = 0
    except (OSError, EOFError):
        code = 0  # the owner is gone
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(code)


def _work(channel: socket.socket, make_work: bytes) -> None:
    """The life of a process: tasks, until the channel closes."""
    work: Work | None = None
    while True:
        message = _received_message(channel)
        try:
            if work is None:
                work = cloudpickle.loads(make_work)()
            answer = (True, work(_opened_message(message)), "")
        except (Exception, SystemExit) as error:
            answer = (False, travelling(error), traceback.format_exc())
        _flush_output()
        try:
            _send(channel, answer)
        except OSError:
            raise
        except Exception as error:
            _send(channel, (False, travelling(error), traceback.format_exc()))


def _flush_output() -> None:
    """What was printed must be seen before the result is, and not be lost when the process is ended."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):
            stream.flush()


def travelling(error: BaseException) -> Exception:
    """``error``, or one that says the same where it cannot be pickled and opened again, or would end who raises it."""
    try:
        if isinstance(error, Exception):
            cloudpickle.loads(cloudpickle.dumps(error))
            return error
    except Exception:
        pass  # whatever went wrong in its own methods
    return RuntimeError(f"{type(error).__qualname__}: {error}")


# --------------------------------------------------------------------------- messages


class _Pickler(cloudpickle.Pickler):  # type: ignore[misc]  # cloudpickle has no types
    """Arrow arrays go as Arrow writes them: pickled, a slice would take all the rows of its whole with it."""

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
    """Send any object; large arrays are written from where they are."""
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
    """The next object; its arrays are writable. Raises EOFError when the other side is gone."""
    return _opened_message(_received_message(channel))


def _received_message(channel: socket.socket) -> list[memoryview]:
    """A whole message, not opened yet: what opening it may raise must not be taken for a closed channel."""
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
