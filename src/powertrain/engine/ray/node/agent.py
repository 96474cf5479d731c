"""The agent of a run on a node other than the driver's: it starts processes there and reports their state.

The agent talks to the driver over the run's own wire, so a short network failure loses nothing. It starts one warm
server, which all processes are forked from, and sends a heartbeat once a second. When the driver has been silent long
enough to declare the node lost, the agent ends everything, so that no process works for a run that continues elsewhere.

The exit of the agent's process ends the rest: the server follows the agent, and its processes follow the server.
"""

from __future__ import annotations

import contextlib
import fcntl
import importlib.util
import os
import pickle
import re
import signal
import socket
import sys
import threading
import time
import zipfile
from collections import deque
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from powertrain.checkpoint.staging import remove_earlier_shares, sealed_reports
from powertrain.engine import process
from powertrain.engine.base import ProcessSpec, Slot
from powertrain.engine.local.warm_server import WarmServer
from powertrain.engine.output import OutputReader
from powertrain.engine.ray.node.files import (
    LAUNCH,
    SCRIPT,
    extract,
    fresh,
    hold,
    lock,
    places_here,
    read_token,
    unpack_at,
)
from powertrain.engine.ray.node.storage import prove_storage
from powertrain.errors import EngineError
from powertrain.storage.files.descriptors import remove_quietly
from powertrain.storage.files.private_roots import hold_root, remove_empty_parents, root_above
from powertrain.storage.safety import is_network_file_system
from powertrain.text.tracebacks import is_installed, is_ours
from powertrain.version import __version__
from powertrain.wire.envelope import FromController, FromWorker
from powertrain.wire.from_node import (
    NodeBeat,
    NodeReady,
    ProcessEnded,
    ProcessOutput,
    ProcessSeen,
    ProcessStarted,
)
from powertrain.wire.link import Link
from powertrain.wire.to_node import EndNode, LookAt, SignalProcess, StartProcess
from powertrain.worker.checkpoints.newest_reports import read_newest_reports
from powertrain.worker.scripts.working_directory import LAUNCH_DIR_VARIABLE
from powertrain.worker.service.spill import BATCH as REPORTS_OF_A_BATCH
from powertrain.worker.tracing import newest_steps

if TYPE_CHECKING:
    from powertrain.engine.ray.node.spec import NodeSpec


#: Seconds of silence after which an agent ends everything. Before the driver declares the node lost
#: (``ray.LOST_TIMEOUT_S``), so that processes started elsewhere never overlap with it; but long enough for a network
#: failure of 4 s, whose end TCP may notice 3 s late.
FENCE_TIMEOUT_S = 12.0
_BEAT_INTERVAL_S = 1.0
#: The numbers of newest reports and steps that are sent of a dead rank: more than it makes between two messages.
_REPORTS_OF_THE_DEAD = 2 * REPORTS_OF_A_BATCH
_STEPS_OF_THE_DEAD = 4000
#: Messages in one batch, and bytes of output that may wait to be sent: beyond it printing blocks.
_BATCH, _OUTPUT_LIMIT = 256, 16 * 2**20
#: Seconds for the processes to exit and the last messages to be acknowledged.
_END_TIMEOUT_S = 8.0


class NodeAgent:
    """The agent, in a process of its own on its node. ``run`` returns when the run is over.

    A node may share any of the driver's directories and not the others: containers of one machine do. So each directory
    is checked on its own.
    """

    def __init__(
        self,
        spec: NodeSpec,
        working_dir: str = "",
        *,
        is_of_job: bool = False,
        server: WarmServer | None = None,
        keeps_server: bool = False,
    ) -> None:
        """Create an agent.

        Args:
            spec: What the driver sent.
            working_dir: The local path of the ``runtime_env``'s: the launch directory of ranks.
            is_of_job: True where that is of the whole script: it is used where there is no other.
            server: The warm server of an earlier agent of this process, which has imported the same modules.
            keeps_server: True leaves the server to :attr:`kept_server` when the run has ended properly.
        """
        self._spec, self._keeps_server = spec, keeps_server
        #: After :meth:`run`: the server for the next agent of this process; None where it had to be ended.
        self.kept_server: WarmServer | None = None
        self._import_path = list(sys.path)
        self._has_token = read_token(spec.runtime_dir) == spec.token
        #: Which of :data:`LAUNCH` and :data:`SCRIPT` need not be brought.
        self._here = places_here(spec.token)
        if working_dir and not is_of_job:
            self._here = {LAUNCH, SCRIPT}
        self._launch_dir = "" if is_of_job and LAUNCH in self._here else working_dir
        #: Directories of the run on this node: the driver's own, those removed with this agent, and the locks on both.
        self._drivers: set[Path] = set()
        self._owned: list[Path] = []
        self._locks: dict[Path, int] = {}
        #: The roots that these lie in, each with the descriptor that keeps other runs from removing it.
        self._roots: dict[Path, int] = {}
        self._processes: dict[str, StartProcess] = {}
        self._pids: dict[str, int] = {}
        self._outbox: deque[FromWorker] = deque()
        self._room = threading.Condition()
        self._waiting_output = 0
        self._server = server
        #: True for a server that was started in the middle of the run, and may have imported from its directories.
        self._is_late_server = self._is_unpacking = False
        self._looks: list[threading.Thread] = []
        self._is_going = self._is_over = False
        self._output = OutputReader()
        self._output.deliver = self._printed
        self._link = Link(spec.connection, -1, 0)
        self._greet(self._make_ready(), wants_files=self._wants_files())

    def bring(self, parcels: Mapping[str, bytes]) -> None:
        """Unpack archives of directories, by where they are to be: a path, :data:`LAUNCH` or :data:`SCRIPT`."""
        with self._room:
            if self._is_over:
                return
            self._is_unpacking = True
        problem = ""
        try:
            self._unpack(parcels)
        except (OSError, zipfile.BadZipFile) as error:
            problem = f"the run's files cannot be unpacked there: {error}"
        finally:
            self._is_unpacking = False
        self._greet(problem, wants_files=False)

    def _greet(self, problem: str, *, wants_files: bool) -> None:
        self._queue_message(
            NodeReady(
                pid=os.getpid(),
                host=socket.gethostname(),
                address=self._spec.address,
                version=__version__,
                problem=problem,
                wants_files=wants_files,
            )
        )

    # -- the agent's thread

    def run(self) -> str:
        """Handle the driver's commands until it ends the agent or is gone. Return why it was never reached, or ""."""
        last_beat = 0.0
        self._is_going = True  # without a command to end, its processes count as lost
        try:
            while True:
                commands, _ = self._link.poll(
                    0.0 if self._outbox and self._link.room else _BEAT_INTERVAL_S / 4
                )
                for command in commands:
                    if isinstance(command, EndNode):
                        self._is_going = False
                        return ""
                    self._do(command)
                if self._link.reached and self._link.silence > FENCE_TIMEOUT_S:
                    return ""
                if why := self._link.why_unreachable():
                    return f"it cannot reach the run at {self._link.endpoint}: {why}"
                now = time.monotonic()
                if now - last_beat >= _BEAT_INTERVAL_S and self._link.room > 0:
                    last_beat = now
                    self._outbox.append(NodeBeat())
                self._send()
        finally:
            with self._room:
                self._is_over = True
            self._end()

    def _send(self) -> None:
        while self._outbox and self._link.room > 0:
            batch = [self._outbox.popleft() for _ in range(min(_BATCH, len(self._outbox)))]
            self._link.send(batch, 0, 0)
            printed = sum(len(m.data) for m in batch if isinstance(m, ProcessOutput))
            if printed:
                with self._room:
                    self._waiting_output -= printed
                    self._room.notify_all()

    def _queue_message(self, message: FromWorker) -> None:
        """Any thread."""
        self._outbox.append(message)
        self._link.wake()

    def _printed(self, slot: Slot, data: bytes) -> None:
        """Queue output, on the reader's thread: when too much waits to be sent, printing blocks."""
        with self._room:
            self._room.wait_for(lambda: self._waiting_output < _OUTPUT_LIMIT)
            self._waiting_output += len(data)
        self._queue_message(ProcessOutput(id=slot.id, data=data))

    # -- commands

    def _do(self, command: FromController) -> None:
        if isinstance(command, StartProcess):
            self._start(command)
        elif isinstance(command, SignalProcess):
            if command.id in self._processes and self._server is not None:
                self._server.kill(command.id, command.number)
        elif isinstance(command, LookAt):
            # It may take seconds, and beats must not wait for it.
            look = threading.Thread(
                target=self._look_at, args=(command,), name="powertrain-look", daemon=True
            )
            self._looks = [*filter(threading.Thread.is_alive, self._looks), look]
            look.start()

    def _start(self, command: StartProcess) -> None:
        id = command.id
        self._processes[id] = command
        if command.rank >= 0 and command.staging and not self._is_drivers(command.staging):
            remove_earlier_shares(command.staging, command.attempt)  # the controller cannot reach them
        if self._server is None or not self._server.alive:
            self._server, self._is_late_server = self._start_server(), True
        read, write = os.pipe()
        self._output.add(_slot(id), read, "")
        spec = ProcessSpec(
            entry=command.entry,
            payload=command.payload,
            env={**self._own_env(), **command.env},
            cwd=command.cwd,
            title=command.title,
            shielded=command.shielded,
        )
        server, requested_at = self._server, time.monotonic()
        try:
            server.fork(
                id,
                spec,
                write,
                started=lambda pid: self._started(id, pid, *server.kept_waiting(requested_at)),
                ended=lambda pid, code, oom: self._ended(id, pid, code, oom),
            )
        except EngineError:
            self._ended(id, 0, -signal.SIGKILL, False)

    def _own_env(self) -> dict[str, str | None]:
        return {LAUNCH_DIR_VARIABLE: self._launch_dir} if self._launch_dir else {}

    def _started(self, id: str, pid: int, waited: float, imports: float) -> None:
        self._pids[id] = pid
        self._queue_message(ProcessStarted(id=id, pid=pid, waited=waited, imports=imports))

    def _ended(self, id: str, pid: int, code: int, oom: bool) -> None:
        """Report an exit, on the server's thread: its output first, then its last reports, then its end."""
        self._output.drain(_slot(id))
        command = self._processes.pop(id)
        self._pids.pop(id, None)
        row, reports, steps = 0, [], b""
        if command.rank >= 0:  # also where the controller could look itself
            row, newest = read_newest_reports(command.mark)
            found = {point.row: point for point in newest[-_REPORTS_OF_THE_DEAD:]}
            if command.staging:
                found |= sealed_reports(command.staging, command.attempt, command.rank)
            reports = [point for _, point in sorted(found.items())]
            steps = newest_steps(command.ring, most=_STEPS_OF_THE_DEAD) if command.ring and code else b""
        lost = self._server is None or not self._server.alive or (self._is_over and self._is_going)
        self._queue_message(
            ProcessEnded(
                id=id, pid=pid, code=code, out_of_memory=oom, lost=lost, row=row, reports=reports, steps=steps
            )
        )

    def _look_at(self, command: LookAt) -> None:
        started = self._processes.get(command.id)
        title, dump = (started.title, started.stacks) if started is not None else ("", "")
        seen = process.inspection(self._pids.get(command.id, 0), title, dump, command.stacks)
        self._queue_message(
            ProcessSeen(
                ask=command.ask,
                pid=seen.pid,
                state=seen.state,
                processes=list(seen.processes),
                debugged=seen.debugged,
            )
        )

    # -- beginning and end

    def _make_ready(self) -> str:
        """Make the run's directories and check that the storage is the driver's; return the problem, or ""."""
        if self._spec.version != __version__:
            return f"it has Powertrain {__version__}, and the driver {self._spec.version}: install the same everywhere"
        sys.path += [
            entry for entry in self._spec.import_path if entry not in sys.path and os.path.exists(entry)
        ]
        try:
            for path in (self._spec.runtime_dir, *self._spec.directories):
                self._take(Path(path))
        except EngineError as error:
            return f"the run's directories are not safe there: {error}"
        except OSError as error:
            return (
                f"the run's directories cannot be made there: {error}. They are below XDG_RUNTIME_DIR and TMPDIR of "
                "the script: set these to paths that every node has, such as /tmp"
            )
        # From here on the directories go when this process does.
        if self._server is not None and self._server.alive:
            self._sweep_with(self._server)
        else:
            self._server = self._start_server()
        problem = prove_storage(self._spec)
        if problem:
            self._remove_directories()  # such an agent is killed, maybe before its server could sweep
        else:
            self._keep_stored_files()
        return problem

    def _take(self, path: Path) -> None:
        """Make a directory of the run here. It is removed with this agent, unless it is or may be the driver's."""
        if path == Path(self._spec.runtime_dir) and self._has_token:
            self._drivers.add(path)
            return
        root = root_above(path)
        if root is not None and root not in self._roots:
            self._roots[root] = hold_root(root)
        self._locks[path], is_drivers = hold(path)
        # Where checkpoints wait the driver holds no lock, though it may have the same directory.
        is_staging = str(path) in self._spec.directories[:1]
        if is_drivers or (is_staging and (self._has_token or is_network_file_system(path))):
            self._drivers.add(path)
        else:
            self._owned.append(path)

    def _keep_stored_files(self) -> None:
        """Keep files in the shared storage out of the sweep: checkpoints of all nodes wait there."""
        found = pickle.loads(self._spec.storage).local_path("x") if self._spec.storage else None
        shared = [path for path in self._owned if found is not None and found.parent in path.parents]
        if shared:
            self._drivers.update(shared)
            self._owned = [path for path in self._owned if path not in shared]
            assert self._server is not None
            self._sweep_with(self._server)

    def _is_drivers(self, path: str) -> bool:
        return not self._drivers.isdisjoint((Path(path), *Path(path).parents))

    def _wants_files(self) -> bool:
        return self._here != {LAUNCH, SCRIPT} or not all(map(self._is_drivers, self._spec.directories[1:]))

    def _unpack(self, parcels: Mapping[str, bytes]) -> None:
        for place, archive in parcels.items():
            if place not in (LAUNCH, SCRIPT):
                if not self._is_drivers(place):
                    unpack_at(Path(place), archive)
            elif place not in self._here:
                target = fresh(self._spec.runtime_dir, place)
                extract(archive, target)
                sys.path.insert(0, str(target))  # processes forked from now on find modules there
                if place == LAUNCH:
                    self._launch_dir = str(target)

    def _start_server(self) -> WarmServer:
        # A Ray process that ends kills its children, and with them all that could end their children's.
        server = WarmServer(preload=self._spec.preload, apart=True)
        self._sweep_with(server)
        return server

    def _sweep_with(self, server: WarmServer) -> None:
        server.sweep_if_orphaned(self._spec.runtime_dir, [str(path) for path in self._owned])

    def _end(self) -> None:
        """End all processes and report it, as far as the driver is reachable."""
        with self._room:
            self._waiting_output = -(2**62)  # printing never blocks again
            self._room.notify_all()
        for id in list(self._processes):
            if self._server is not None:
                self._server.kill(id, signal.SIGKILL)
        deadline = time.monotonic() + _END_TIMEOUT_S
        while (
            self._processes or self._outbox or not self._link.is_acknowledged
        ) and time.monotonic() < deadline:
            nobody_listens = not self._link.reached or self._link.silence > FENCE_TIMEOUT_S
            if nobody_listens and not self._processes:
                break
            self._link.poll(0.05)
            self._send()
        self.kept_server = self._server if self._is_clean() else None
        if self.kept_server is not None:
            self._output.close()
            sys.path[:] = self._import_path
        elif self._server is not None:
            # It has nothing left to end, and may be in the middle of its imports.
            process.kill_scope(self._server.pid)
            with contextlib.suppress(ChildProcessError):
                os.waitpid(self._server.pid, 0)
        self._link.close()
        self._remove_directories()
        if self.kept_server is not None:
            self.kept_server.sweep_if_orphaned(self._spec.runtime_dir, [])

    def _is_clean(self) -> bool:
        """Return whether nothing of the run is left in this process and the server, so that another can follow."""
        server = self._server
        return (
            self._keeps_server
            and not (self._is_going or self._processes or self._is_unpacking)
            and not any(look.is_alive() for look in self._looks)
            and (server is not None and server.alive and server.warmed is not None)
            and not (self._is_late_server or _has_users_modules(self._spec.preload))
        )

    def _remove_directories(self) -> None:
        while self._locks:
            path, descriptor = self._locks.popitem()
            # The agent of another container may have the same directory, and continues.
            if path in self._owned and lock(descriptor, fcntl.LOCK_EX):
                remove_quietly(path)
                remove_empty_parents(path)
            os.close(descriptor)
        while self._roots:
            root, descriptor = self._roots.popitem()
            with contextlib.suppress(OSError):  # the driver's directories are in it
                root.rmdir()
            os.close(descriptor)


def _has_users_modules(preload: Sequence[str]) -> bool:
    """Return True where this process or its server has loaded modules that the user may change before the next run."""
    files = [getattr(module, "__file__", None) for module in list(sys.modules.values())]
    for entry in preload:
        with contextlib.suppress(ImportError, ValueError):
            found = importlib.util.find_spec(re.split(r"[.:]", entry)[0])
            files.append(found.origin if found is not None else None)
    return any(file and os.path.isabs(file) and not (is_ours(file) or is_installed(file)) for file in files)


def _slot(id: str) -> Slot:
    return Slot(id=id, host="", address="")
