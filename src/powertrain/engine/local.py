"""This machine: slots are a number, processes are forks of one warm server.

The server starts when the first trainer of a process is made (:func:`warm_up`), is shared by all of them, and
goes with the process. It is forked from the calling process where that is safe, because then what the script has
imported is there already; :func:`why_fork_is_unsafe` states the rule and is asked every time. Otherwise it is
started as a fresh interpreter.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import fcntl
import itertools
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from powertrain.engine import claims, ledger, locks, process, resources
from powertrain.engine.base import (
    Capacity,
    Claim,
    EventSink,
    Exited,
    Granted,
    Inspection,
    OutputSink,
    ProcessSpec,
    Slot,
    SlotLost,
    SlotShape,
    Started,
    Waiting,
)
from powertrain.engine.output import OutputReader
from powertrain.errors import EngineError
from powertrain.wire import Hub

_numbers = itertools.count(1)
#: What the warm server has been told to sweep, by who told it: a new server must know it too.
_sweeps: dict[str, list[str]] = {}


# --------------------------------------------------------------------------- when forking is safe


def why_fork_is_unsafe() -> str:
    """Why a child forked from this process now could hang or misbehave; "" when nothing speaks against it.

    A forked child has one thread and a copy of every lock, held or not. So: no thread but this one and those
    idle ones that mere imports start and that prepare themselves for a fork (OpenBLAS) or are never waited for
    (jemalloc's); no open GPU; no Ray.
    """
    if sys.platform != "linux":
        return f"the platform is {sys.platform}"
    if threading.current_thread() is not threading.main_thread() or threading.active_count() > 1:
        return "more than one Python thread is running"
    ray = sys.modules.get("ray")
    if ray is not None and getattr(ray, "is_initialized", bool)():
        return "Ray is connected in this process"
    extra = len(_native_threads()) - 1 - _import_threads()
    if extra > 0:
        return f"{extra} native thread(s) are running that importing libraries does not start"
    if _gpu_is_open():
        return "a GPU is open in this process"
    return ""


def _native_threads() -> list[str]:
    """Names of this process's threads, those of allocators left out."""
    names = []
    for task in os.listdir("/proc/self/task"):
        with contextlib.suppress(OSError), open(f"/proc/self/task/{task}/comm") as file:
            name = file.read().strip()
            if name != "jemalloc_bg_thd":
                names.append(name)
    return names


def _import_threads() -> int:
    """Threads that the OpenBLAS copies loaded here keep: one less than each one's pool."""
    with open("/proc/self/maps") as maps:
        libraries = {line.split()[-1] for line in maps if "openblas" in line.rsplit("/", 1)[-1]}
    return sum(max(0, _openblas_pool(path) - 1) for path in libraries)


def _openblas_pool(path: str) -> int:
    library = ctypes.CDLL(path)
    for prefix in ("", "scipy_"):
        for suffix in ("", "64_"):
            function = getattr(library, f"{prefix}openblas_get_num_threads{suffix}", None)
            if function is not None:
                return int(function())
    return 1


def _gpu_is_open() -> bool:
    for descriptor in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            if os.readlink(f"/proc/self/fd/{descriptor}").startswith("/dev/nvidia"):
                return True
    return False


# --------------------------------------------------------------------------- the server's handle


@dataclass
class _Child:
    """A forked process, as the driver knows it."""

    started: Callable[[int], None]
    ended: Callable[[int, int, bool], None]
    pid: int = 0


class WarmServer:
    """The driver's end of one warm server."""

    def __init__(self, *, preloads_torch: bool = True, apart: bool = False) -> None:
        """Start it; the server warms up while the caller goes on.

        ``apart`` makes it no child of this process, for one whose children others end together with it: the server must
        outlive this process to end what its workers have started.
        """
        from powertrain.engine import server as protocol

        self._protocol = protocol
        self.owner = os.getpid()
        self.unsafe = why_fork_is_unsafe()
        self.warmed: float | None = None
        #: When it was ready (monotonic), and how long its imports had taken until then.
        self._ready_at, self._imports = float("inf"), 0.0
        self._environ = dict(os.environ)
        self._lock = threading.Lock()
        self._children: dict[str, _Child] = {}
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._is_child = not apart
        start = _start_apart if apart else _start_clean if self.unsafe else _start_forked
        self.pid = start(theirs, preloads_torch)
        theirs.close()
        self.alive = True
        for id, paths in _sweeps.items():  # of a server that was killed
            self._send(protocol.Sweep(id=id, paths=paths))
        # Not named powertrain-*: it lives as long as the server, not as long as a run.
        threading.Thread(target=self._listen, name="warm-server", daemon=True).start()

    def fork(
        self,
        id: str,
        spec: ProcessSpec,
        output: int,
        started: Callable[[int], None],
        ended: Callable[[int, int, bool], None],
        claim: int | None = None,
    ) -> None:
        """Fork a process, to be called ``id``, whose output goes to ``output`` (closed here). It keeps a descriptor of
        ``claim`` open for as long as it lives."""
        payload = os.memfd_create(f"powertrain-{id}")
        try:
            with os.fdopen(os.dup(payload), "wb") as file:
                file.write(spec.payload)
            command = self._protocol.Fork(
                id=id,
                entry=spec.entry,
                env={**changes(self._environ, os.environ), **spec.env},
                path=_import_path(),
                cwd=spec.cwd,
                title=spec.title,
                shielded=spec.shielded,
            )
            with self._lock:
                if not self.alive:
                    raise EngineError(
                        "The process that workers are forked from has ended; start the run again."
                    )
                self._children[id] = _Child(started, ended)
                kept = [claim] if claim is not None else []
                socket.send_fds(self._control, [self._protocol.encode(command)], [payload, output, *kept])
        finally:
            os.close(payload)
            os.close(output)

    def kept_waiting(self, since: float) -> tuple[float, float]:
        """Seconds that the server has kept whoever asked ``since`` then (monotonic) waiting until it was ready, and how
        many of them went into its imports."""
        waited = max(0.0, min(time.monotonic(), self._ready_at) - since)
        return waited, min(waited, self._imports)

    def kill(self, id: str, number: int) -> None:
        """Send a signal to a forked process; SIGKILL reaches its whole scope."""
        self._send(self._protocol.Kill(id=id, signal=number))

    def sweep_if_orphaned(self, id: str, paths: Sequence[str]) -> None:
        """Directories the server removes should this process die; none takes it back."""
        _sweeps[id] = list(paths)
        self._send(self._protocol.Sweep(id=id, paths=_sweeps[id] or _sweeps.pop(id)))

    def close(self) -> None:
        """Let the server go: it ends what it forked and itself. A forked child of the owner has no part in it."""
        if os.getpid() != self.owner:
            return
        with self._lock, contextlib.suppress(OSError):
            # While it still imports it hears nothing, which may be for many seconds.
            if self._is_child and self.alive and self.warmed is None and not (self._children or _sweeps):
                os.kill(self.pid, signal.SIGKILL)
        with contextlib.suppress(OSError):
            self._control.shutdown(socket.SHUT_RDWR)

    def _send(self, command: object) -> None:
        with self._lock, contextlib.suppress(OSError):
            self._control.send(self._protocol.encode(command))

    def _listen(self) -> None:
        while True:
            try:
                data = self._control.recv(1 << 16)
            except OSError:
                data = b""
            if not data:
                break
            self._handle(self._protocol.decode_report(data))
        self._mourn()

    def _handle(self, report: object) -> None:
        protocol = self._protocol
        if isinstance(report, protocol.Ready):
            self.warmed, self._imports = report.seconds, report.imports
            self._ready_at = time.monotonic()
        elif isinstance(report, protocol.Forked):
            child = self._children[report.id]
            child.pid = report.pid
            child.started(report.pid)
        elif isinstance(report, protocol.Ended):
            with self._lock:
                child = self._children.pop(report.id)
            child.ended(report.pid, report.code, report.out_of_memory)

    def _mourn(self) -> None:
        """The server is gone, and its workers die with it; make sure of their scopes and say so."""
        with self._lock:
            self.alive = False
            orphans, self._children = list(self._children.values()), {}
        with contextlib.suppress(ChildProcessError):
            os.waitpid(self.pid, 0)
        self._control.close()
        for child in orphans:
            if child.pid:
                process.kill_scope(child.pid)
            child.ended(child.pid, -signal.SIGKILL, False)


def changes(before: Mapping[str, str], now: Mapping[str, str]) -> dict[str, str | None]:
    """What turns ``before`` into ``now``: values that are new or different, ``None`` for those that are gone."""
    different: dict[str, str | None] = {
        name: value for name, value in now.items() if before.get(name) != value
    }
    return {**dict.fromkeys(before.keys() - now.keys()), **different}


def _import_path() -> list[str]:
    """Where this process finds modules now, for a process in another directory. Entries of import hooks stay."""
    return [
        os.path.abspath(entry) if os.path.exists(entry or ".") else entry
        for entry in sys.path
        if isinstance(entry, str)
    ]


def _start_forked(theirs: socket.socket, preloads_torch: bool) -> int:
    from powertrain.engine.server import serve

    started, driver = time.time(), os.getpid()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):
            stream.flush()
    pid = os.fork()
    if pid == 0:
        _blank_descriptors(keep={0, 1, 2, theirs.fileno()})
        serve(theirs, driver, started, preloads_torch)
    return pid


def _blank_descriptors(keep: set[int]) -> None:
    """Point every inherited descriptor at /dev/null, so that the driver's files and sockets close when it does.

    They are not closed: a Python object of the driver's may still own the number and close it later, when it
    has come to mean something else.
    """
    null = os.open(os.devnull, os.O_RDWR)
    for entry in os.listdir("/proc/self/fd"):
        number = int(entry)
        if number not in keep and number != null:
            with contextlib.suppress(OSError):
                os.fstat(number)
                os.dup2(null, number, inheritable=False)


def _start_clean(theirs: socket.socket, preloads_torch: bool) -> int:
    server = subprocess.Popen(
        _clean_command(theirs, preloads_torch), pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL
    )
    server.returncode = 0  # it is waited for by its pid: the object has no say in it, and must not complain
    return server.pid


def _start_apart(theirs: socket.socket, preloads_torch: bool) -> int:
    """By way of a shell that is gone at once: then it is nobody's child but the system's."""
    shell = subprocess.run(
        ["/bin/sh", "-c", '"$@" >&2 & echo $!', "sh", *_clean_command(theirs, preloads_torch)],
        pass_fds=[theirs.fileno()],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        check=True,
    )
    return int(shell.stdout)


def _clean_command(theirs: socket.socket, preloads_torch: bool) -> list[str]:
    """What a fresh interpreter is told to become the server."""
    code = (
        f"import sys; sys.path[:] = {sys.path!r}; from powertrain.engine.server import serve_clean; "
        f"serve_clean({theirs.fileno()}, {os.getpid()}, {time.time()!r}, {preloads_torch})"
    )
    return [sys.executable, "-c", code]


_server: WarmServer | None = None
_server_lock = threading.Lock()


def warm_up() -> WarmServer:
    """The warm server of this process, started if there is none."""
    global _server
    with _server_lock:
        if _server is None or not _server.alive or _server.owner != os.getpid():
            _server = WarmServer()
            atexit.register(_server.close)
        return _server


def _forget_what_the_parent_has() -> None:
    """In a forked child: the server, its sweeps and what is held are the parent's, and so are the locks."""
    global _server, _server_lock, _ledger
    _server, _server_lock = None, threading.Lock()
    _ledger = ledger.Ledger(runtime_root)
    _sweeps.clear()


os.register_at_fork(after_in_child=_forget_what_the_parent_has)


def server_pids() -> list[int]:
    """Pids of the live warm servers of this process."""
    server = _server
    return [server.pid] if server is not None and server.alive and server.owner == os.getpid() else []


# --------------------------------------------------------------------------- directories


def runtime_root() -> Path:
    """Where this user's sockets and scratch directories live on this machine."""
    base = os.environ.get("XDG_RUNTIME_DIR")
    if base and os.access(base, os.W_OK):
        return Path(base) / "powertrain"
    return Path(tempfile.gettempdir()) / f"powertrain-{os.getuid()}"


_SHARED_MEMORY = "/dev/shm"
#: The runtime directories of this process, each with the descriptor that holds its lock.
_held: dict[Path, int] = {}


def shared_memory_root() -> Path | None:
    """Where this user's shared memory lies; None where the machine has none that can be named."""
    return Path(_SHARED_MEMORY, f"powertrain-{os.getuid()}") if os.access(_SHARED_MEMORY, os.W_OK) else None


def make_runtime_directory(name: str, root: Path | None = None) -> Path:
    """A fresh directory of one run, readable by this user only; what nobody holds any more is swept.

    It is this process's until :func:`remove_runtime_directory`: a lock on it says so to processes that cannot see
    this one, such as those in another container. ``root`` is the user's runtime directory by default.
    """
    root = root or runtime_root()
    with locks.locked_directory(root):  # so that nobody sweeps it between its making and its lock
        _sweep(root)
        claims.sweep(root)
        directory = Path(tempfile.mkdtemp(prefix=f"{name[:24]}-{os.getpid()}-", dir=root))
        descriptor = _held[directory] = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
        fcntl.flock(descriptor, fcntl.LOCK_EX)
    return directory


def remove_runtime_directory(directory: Path) -> None:
    """Remove what :func:`make_runtime_directory` made, and let go of it."""
    shutil.rmtree(directory, ignore_errors=True)
    locks.let_go(_held.pop(directory))
    if directory.parent == shared_memory_root():
        with contextlib.suppress(OSError):  # another run is in it
            directory.parent.rmdir()


#: Waits for a line, or for the end of whoever would write it. The others are removed only in the second case.
_KEEPER = 'trap "" INT TERM HUP; if read _; then exec rm -rf -- "$0"; else exec rm -rf -- "$0" "$@"; fi'


@contextlib.contextmanager
def removed_at_the_end(directory: Path, *others: str) -> Iterator[None]:
    """Remove ``directory`` when the block ends, or when this process does, however it does; then the others too.

    For engines without a server to do it: a shell waits at a pipe that only this process holds open.
    """
    keeper = subprocess.Popen(
        ["/bin/sh", "-c", _KEEPER, str(directory), *filter(None, others)],
        stdin=subprocess.PIPE,
        start_new_session=True,
        close_fds=True,
    )
    assert keeper.stdin is not None
    try:
        yield
    finally:
        with contextlib.suppress(BrokenPipeError):
            keeper.stdin.write(b"\n")  # closing is not enough while a forked child has the pipe as well
            keeper.stdin.close()
        keeper.wait()
        locks.let_go(_held.pop(directory))


def _sweep(root: Path) -> None:
    """Remove the runtime directories in ``root`` that no process holds."""
    for entry in root.iterdir():
        owner = entry.name.rsplit("-", 2)[1:2]
        if not (owner and owner[0].isdigit()):
            continue
        with contextlib.suppress(OSError):
            descriptor = os.open(entry, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(entry, ignore_errors=True)
            finally:
                os.close(descriptor)


# --------------------------------------------------------------------------- the engine


_ledger = ledger.Ledger(runtime_root)
#: The claim under which processes beside the slots are kept; it holds no resources.
_ATTENDANTS = "attendants"


@dataclass(frozen=True)
class LocalClaim:
    id: str
    count: int
    shape: SlotShape


class LocalEngine:
    """Slots on this machine."""

    name = "local"
    restarts = True
    replaces = False

    def __init__(
        self,
        server: WarmServer | None = None,
        custom_resources: Mapping[str, float] | None = None,
        run: str = "",
    ) -> None:
        """``run`` is what those are told who wait for something held here; the script's name by default."""
        self._server = server or warm_up()
        self._owner = f"engine-{next(_numbers)}"
        self._run = f"run {run}" if run else os.path.basename(sys.argv[0]) or "python"
        self._machine = resources.detect(custom_resources)
        self._host = socket.gethostname()
        #: Claims not granted yet, slots held by each claim, and those to give back once their process is gone.
        self._waiting: set[str] = set()
        self._slots: dict[str, dict[str, Slot]] = {}
        self._leaving: set[str] = set()
        self._processes: dict[str, str] = {}
        self._pids: dict[str, int] = {}
        #: What the process of each slot is called, and where it writes its stacks.
        self._dumps: dict[str, tuple[str, str]] = {}
        self._changed = threading.Condition()
        self._closed = False
        self._events: EventSink = lambda _: None
        self._output = OutputReader()

    def connect(self, hub: Hub) -> None:
        """Its server is a child of this process, and needs no wire."""

    def start(self, events: EventSink, output: OutputSink) -> None:
        self._events = events
        self._output.deliver = output

    def wire_address(self) -> str:
        return "ipc"

    def request(self, count: int, shape: SlotShape) -> LocalClaim:
        resources.check(self._machine, count, shape)
        if not self._server.alive:  # killed: its workers were lost with it, and a new one begins again
            self._server = warm_up()
        claim = LocalClaim(f"local-{next(_numbers)}", count, shape)
        request = ledger.Request(
            id=claim.id,
            owner=self._owner,
            run=self._run,
            host=self._host,
            machine=self._machine,
            count=count,
            shape=shape,
        )
        self._waiting.add(claim.id)
        try:
            _ledger.claim(
                request,
                granted=lambda gpus: self._grant(claim, gpus),
                waits=lambda reason: self._events(Waiting(claim.id, 0, reason)),
            )
        except EngineError:
            self._waiting.discard(claim.id)
            raise
        return claim

    def withdraw(self, claim: Claim) -> None:
        self._waiting.discard(claim.id)
        _ledger.withdraw(claim.id)

    def watch_capacity(self, shape: SlotShape, wanted: int = 0) -> None:
        """Where the shape holds nothing countable there is always room: :data:`resources.BOUNDLESS` is told, once."""
        if resources.counted(shape, 1):
            _ledger.watch(self._owner, self._machine, shape, lambda count: self._events(Capacity(count)))
        else:
            _ledger.unwatch(self._owner)
            self._events(Capacity(resources.BOUNDLESS))

    def fork(self, slot: Slot, spec: ProcessSpec) -> None:
        if slot.id in self._processes:
            raise EngineError(f"slot {slot.id} has a process already")
        read, write = os.pipe()
        self._output.add(slot, read, spec.log_path)
        self._dumps[slot.id] = (spec.title, spec.stacks)
        id = self._processes[slot.id] = f"p{next(_numbers)}"
        asked = time.monotonic()
        # So what it uses is held until it is gone, even if this process is killed before it.
        claim = _ledger.lend(slot.id.rsplit("/", 1)[0])
        try:
            self._server.fork(
                id,
                spec,
                write,
                started=lambda pid: self._started(slot, pid, asked),
                ended=lambda pid, code, oom: self._ended(slot, pid, code, oom),
                claim=claim,
            )
        except EngineError:  # the server is gone: so is the slot
            self._ended(slot, 0, -signal.SIGKILL, False)
        finally:
            if claim is not None:
                locks.close(claim)

    def attend(self, beside: Slot, spec: ProcessSpec) -> Slot:
        if not self._server.alive:
            self._server = warm_up()
        slot = Slot(id=f"{_ATTENDANTS}/{next(_numbers)}", host=self._host, address="127.0.0.1")
        with self._changed:
            self._slots.setdefault(_ATTENDANTS, {})[slot.id] = slot
        self.fork(slot, spec)
        return slot

    def signal(self, slot: Slot, number: signal.Signals) -> None:
        id = self._processes.get(slot.id)
        if id is not None:
            self._server.kill(id, number)

    def inspect(self, slot: Slot, stacks: bool = False) -> Inspection:
        title, dump = self._dumps.get(slot.id, ("", ""))
        return process.inspection(self._pids.get(slot.id, 0), title, dump, stacks)

    def is_in_doubt(self, since: float) -> bool:
        return False

    def release(self, slots: Sequence[Slot]) -> None:
        for slot in slots:
            with self._changed:
                self._leaving.add(slot.id)
                busy = slot.id in self._processes
            if busy:
                self.signal(slot, signal.SIGKILL)
            else:
                self._give_back(slot.id)

    def close(self) -> None:
        self._events = lambda _: None
        with self._changed:
            self._closed = True
        _ledger.unwatch(self._owner)
        for claim in list(self._waiting):
            _ledger.withdraw(claim)
        self.release([slot for slots in list(self._slots.values()) for slot in list(slots.values())])
        with self._changed:
            self._changed.wait_for(lambda: not self._processes, timeout=10.0)
        self._output.close()

    def _give_back(self, slot_id: str) -> None:
        """The slot is free for others: nothing runs on it, and its GPUs are not another slot's of the claim."""
        claim = slot_id.rsplit("/", 1)[0]
        with self._changed:
            self._leaving.discard(slot_id)
            slot = self._slots.get(claim, {}).pop(slot_id, None)
            if claim == _ATTENDANTS:
                return
            shared = {gpu for other in self._slots.get(claim, {}).values() for gpu in other.gpus}
        if slot is not None:
            _ledger.give_back_slot(claim, [gpu for gpu in slot.gpus if gpu not in shared])

    def _grant(self, claim: LocalClaim, gpus: tuple[str, ...]) -> None:
        shares = resources.share_gpus(gpus, claim.count, claim.shape.gpus)
        slots = tuple(
            Slot(id=f"{claim.id}/{i}", host=self._host, address="127.0.0.1", gpus=shares[i])
            for i in range(claim.count)
        )
        with self._changed:
            self._waiting.discard(claim.id)
            self._slots[claim.id] = {slot.id: slot for slot in slots}
            too_late = self._closed
        if too_late:
            self.release(slots)
        self._events(Granted(claim.id, slots))

    def _started(self, slot: Slot, pid: int, asked: float) -> None:
        self._pids[slot.id] = pid
        self._events(Started(slot, pid, *self._server.kept_waiting(asked)))

    def _ended(self, slot: Slot, pid: int, code: int, oom: bool) -> None:
        self._output.drain(slot)
        with self._changed:
            self._processes.pop(slot.id, None)
            self._pids.pop(slot.id, None)
            self._dumps.pop(slot.id, None)
            leaving = slot.id in self._leaving
            self._changed.notify_all()
        lost = not self._server.alive
        if leaving or lost:
            self._give_back(slot.id)
        if not lost:
            self._events(Exited(slot, pid, code, oom))
        else:
            self._events(SlotLost(slot, "the process that workers are forked from was killed"))
