"""One rank's life: set up, answer calls, run the user's function, send the outcome, wait to be dismissed."""

from __future__ import annotations

import contextlib
import hashlib
import inspect
import os
import pickle
import random
import sys
import threading
import traceback
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import cloudpickle
import msgspec

from powertrain.errors import EngineError
from powertrain.storage import boundaries
from powertrain.text.errors import message_of
from powertrain.text.redaction import redact
from powertrain.trace.stacks import stacks
from powertrain.wire import hub
from powertrain.wire.from_controller import Dismissed, Drop, Execute, Train, UploadShare
from powertrain.wire.from_worker import DebugQuit, Executed, Hello, Noted, Outcome
from powertrain.wire.keys import ConnectionInfo
from powertrain.worker import context, failure
from powertrain.worker import session as worker_session
from powertrain.worker.debugger import Debugger, Dialogue, where_quit
from powertrain.worker.hints import hint_for
from powertrain.worker.place import Place
from powertrain.worker.progress import Gate, StopProcess, StopRun, progress
from powertrain.worker.scripts import script
from powertrain.worker.scripts.working_directory import (
    enter_launch_dir,
    launch_dir_here,
)
from powertrain.worker.service.service import Service
from powertrain.worker.session import Session
from powertrain.worker.signals import NoticedSignals
from powertrain.worker.tracing import TraceSettings, Tracing, Untraced

if TYPE_CHECKING:
    from powertrain.checkpoint.uploader import ShareUploader

#: "package.module:function" for :class:`powertrain.engine.base.ProcessSpec`.
ENTRY = "powertrain.worker.main:run"
#: The exit code of a rank that cannot reach its run, and so cannot report why it exits.
UNREACHABLE = 113
#: The longest path of a Unix socket, and the length of the name that multiprocessing gives to one.
_SOCKET_PATH_BYTES, _SOCKET_NAME_BYTES = 107, len("/listener-12345678")
#: After how many seconds a thread lets another run while a rank starts: the usual 5 ms are spent several times then,
#: because the main thread and the service thread take turns.
_START_SWITCH_INTERVAL_S = 0.0005
#: Put among the commands when the side thread is gone and no command will ever come.
_BROKEN = Dismissed(summary={"broken": True})


class WorkerSpec(msgspec.Struct, frozen=True, kw_only=True):
    """Everything one rank needs, as one payload."""

    connection: ConnectionInfo
    place: Place
    #: The pickled training function and its config; empty where the process has them already (``local_function``).
    function: bytes = b""
    #: Text of source files that exist only in the driver, by file name.
    sources: dict[str, str] = {}
    #: Index of this rank's GPU among those visible to it; -1 for none.
    device: int = -1
    seed: int = 0
    #: The run's pickled storage, for a rank that uploads its own shares of checkpoints, and how long it tries.
    storage: bytes = b""
    sync_timeout: float = 1800.0
    #: The pickled datasets of the run; empty where there are none, or the process has them already.
    datasets: bytes = b""
    #: How the rank is traced; None for not at all.
    trace: TraceSettings | None = None
    #: True when an error opens a debugger before it is reported.
    post_mortem: bool = False


def run(payload: bytes) -> int:
    """Run one rank in this process; return the exit code."""
    spec = msgspec.msgpack.decode(payload, type=WorkerSpec)
    identity = spec.place.run
    identity = msgspec.structs.replace(identity, launch_dir=launch_dir_here(identity.launch_dir))
    here = msgspec.structs.replace(spec.place, run=identity)
    spec = msgspec.structs.replace(spec, place=here)
    boundaries.role = f"rank-{spec.place.rank}"
    return Rank(spec).live()


class Rank:
    """One rank in this process."""

    def __init__(
        self,
        spec: WorkerSpec,
        local_function: Callable[[], Any] | None = None,
        *,
        watch: int = -1,
        orphaned: Callable[[], None] = lambda: None,
    ) -> None:
        """``local_function`` is called instead of unpickling one: for engines that share the driver's process.
        ``orphaned`` is called when the descriptor ``watch`` becomes readable."""
        self._spec = spec
        self._place = spec.place
        self._local_function = local_function
        self._switch_interval = sys.getswitchinterval()
        if local_function is None:
            sys.setswitchinterval(_START_SWITCH_INTERVAL_S)
        self._gate = Gate()
        progress.reset()
        is_users_own = local_function is not None and watch < 0
        self._signals: NoticedSignals | None = None
        if threading.current_thread() is threading.main_thread():
            self._signals = NoticedSignals(_end_at_once if is_users_own else None)
        self._service = Service(
            spec.connection,
            self._place.rank,
            self._place.attempt,
            self._gate,
            progress,
            failed=self._on_service_failure,
            unreachable=lambda: self._on_service_failure(UNREACHABLE),
            watch=watch,
            orphaned=orphaned,
            signals=self._signals,
        )
        self._debugger = self._make_debugger(native=is_users_own)
        self._uploader: ShareUploader | None = None
        self._untraced: Untraced | None = None
        #: The summary of the controller at the end: see ``wire.Dismissed``.
        self.summary: dict[str, Any] = {}
        #: The exception of the user's function.
        self.error: BaseException | None = None
        self.place = spec.place

    def _make_debugger(self, *, native: bool) -> Debugger:
        dialogue = Dialogue(self._service.send_now, native=native)
        self._service.on_debug = dialogue.on_reply
        self._service.is_debugged = lambda: dialogue.is_open
        self._service.when_over(dialogue.over)
        return Debugger(self._place.rank, dialogue)

    def live(self) -> int:
        """Run from handshake to dismissal. Never raises for errors of the user's code."""
        self._service.on_upload_order = self._handle_upload_order
        self._service.send_now(Hello(pid=os.getpid(), host=os.uname().nodename))
        session = self._session = Session(self._place, self._service, self._gate, self._spec.datasets)
        session.device = self._spec.device
        worker_session.open_session(session)
        code = 0
        try:
            failure.remember_sources(self._spec.sources)
            self._prepare()
            while True:
                command = self._service.commands.get()
                if isinstance(command, Execute):
                    self._execute(command)
                elif isinstance(command, Train):
                    code = self._train()
                elif command is _BROKEN:
                    return 1
                elif isinstance(command, Dismissed):
                    self.summary = command.summary
                    return code
        except BaseException as error:
            traceback.print_exc()
            self._service.post(Outcome(status="raised", error=failure.describe(error)))
            return 1
        finally:
            worker_session.close_session()
            self._service.close()
            stacks.disarm()
            if self._signals is not None:
                self._signals.close()
            session.close()
            if self._uploader is not None:
                self._uploader.close()

    def _handle_upload_order(self, order: UploadShare | Drop) -> None:
        """Upload a share of this rank itself: there is no uploader on this node. Service thread."""
        if self._uploader is None:
            from powertrain.checkpoint.uploader import ShareUploader

            storage = self._spec.storage
            self._uploader = ShareUploader(
                lambda: pickle.loads(storage), self._service.send_now, self._spec.sync_timeout
            )
        if isinstance(order, UploadShare):
            self._uploader.upload(order)
        else:
            self._uploader.drop(order)

    def _on_service_failure(self, code: int = 1) -> None:
        """Exit at once after the side thread has failed, so that the engine notifies the controller."""
        if self._local_function is None:
            os._exit(code)
        self._service.commands.put(_BROKEN)  # the process is the user's own: only the rank ends

    def _prepare(self) -> None:
        """Set seeds per rank and attempt, directories, import path and the current GPU."""
        if self._local_function is None and not self._place.files.working_dir:
            enter_launch_dir(self._place.run.launch_dir)
        if self._place.run.launch_dir and self._place.run.launch_dir not in sys.path:
            sys.path.insert(0, self._place.run.launch_dir)
        if self._place.files.stacks:
            stacks.arm(self._place.files.stacks)
        if self._local_function is None:
            # A process group has two connections with each other rank.
            hub.make_room_for_connections(2 * self._place.world_size)
            _seed_everything(self._spec.seed, self._place.rank, self._place.attempt)
            _limit_threads()
            if directory := context.runtime_directory_of(self._place):
                _set_multiprocessing_directory(os.path.join(directory, "mp"))
        if self._spec.device >= 0:
            _choose_gpu(self._spec.device)

    def _execute(self, command: Execute) -> None:
        try:
            function, args, kwargs = pickle.loads(command.function)
            value = cloudpickle.dumps(function(*args, **kwargs))
        except BaseException as error:
            self._service.post(Executed(call=command.call, error=failure.describe(error)))
        else:
            self._service.post(Executed(call=command.call, value=value))

    def _train(self) -> int:
        """Call the user's function and post its outcome; return the exit code."""
        progress.phase = "training"
        progress.startup.begin(self._service.send_now)
        try:
            with self._debugger.installed():
                function = self._local_function or _load_function(self._spec.function)
                self._session.function = function
                self._begin_tracing()
                sys.setswitchinterval(self._switch_interval)
                progress.startup.loaded()
                value = function()
        except StopRun as stop:
            self._post_outcome(Outcome(status="stopped"))
            if isinstance(stop, StopProcess):
                self._service.commands.put(Dismissed(summary={}))
            return 0
        except SystemExit as error:
            return self._on_exit(error)
        except BaseException as error:
            return self._on_error(error)
        finally:
            progress.phase = "end"
        self._post_outcome(self._returned(value))
        return 0

    def _on_error(self, error: BaseException) -> int:
        """Report an exception of the function: a failure, unless the user quit a debugger."""
        self.error = error
        if (frame := where_quit(error)) is not None:
            self._service.send_now(DebugQuit(frame=frame))
            self._post_outcome(Outcome(status="stopped"))
            return 0
        hint = ""
        if self._local_function is None:  # it belongs into the rank's log; inline, ``fit`` raises it
            hint = hint_for(error, self._place.run.launch_dir, self._place.files.scratch)
            text = "".join(traceback.format_exception(type(error), error, error.__traceback__))
            print(redact(text + (f"{hint}\n" if hint else "")), end="", file=sys.stderr)
        if self._spec.post_mortem:
            self._debugger.post_mortem(error)
        self._post_outcome(Outcome(status="raised", error=failure.describe(error, hint)))
        return 1

    def _begin_tracing(self) -> None:
        """Begin tracing just before the user's function: loading it is no part of a step."""
        self._untraced = Untraced()
        if self._spec.trace is not None:
            send = self._service.send_now
            self._service.tracing = Tracing.begin(
                self._spec.trace,
                lambda message: send(Noted(message=message)),
                self._spec.device,
                every=self._service.gather,
            )
            if self._service.tracing is not None:
                self._service.on_profile = self._service.tracing.profile_for(send)
                self._service.tracing.profile_given_steps(self._place.rank, send)

    def _post_outcome(self, outcome: Outcome) -> None:
        """Post the outcome of the function, with the rest of its telemetry and the position of its data."""
        progress.startup.over()
        tracing = self._service.tracing
        if tracing is not None and (rest := tracing.end()) is not None:
            self._service.post(rest)
        if self._untraced is not None:
            self._untraced.restore()
        with contextlib.suppress(Exception):  # a shard that broke is why the function raised
            outcome = msgspec.structs.replace(outcome, data=self._session.data.describe_now())
        self._service.post(outcome)

    def _on_exit(self, error: SystemExit) -> int:
        """Report ``sys.exit()``: with 0 or nothing it is a return, with anything else a failure."""
        if error.code is None or error.code == 0:
            self._post_outcome(Outcome(status="returned"))
            return 0
        self.error = error
        code = error.code if isinstance(error.code, int) else 1
        self._post_outcome(Outcome(status="exited", error=failure.describe(error)))
        return code

    def _returned(self, value: Any) -> Outcome:
        if value is None or self._place.rank != 0:
            return Outcome(status="returned")
        try:
            return Outcome(status="returned", value=cloudpickle.dumps(value))
        except Exception as error:
            self._service.post(
                Noted(
                    message=f"The training function returned a {type(value).__name__}, which cannot be pickled "
                    f"({message_of(error)}); Result.return_value will be None."
                )
            )
            return Outcome(status="returned")


def _choose_gpu(device: int) -> None:
    """Make a GPU torch's current one, where there is torch; raises :class:`EngineError` where torch cannot use it."""
    try:
        import torch
    except ModuleNotFoundError:
        return  # the ranks of other frameworks choose theirs by the local rank

    try:
        torch.cuda.set_device(device)
    except (
        AttributeError,
        RuntimeError,
        AssertionError,
    ) as error:  # a build without CUDA has not even the function
        visible = os.environ.get("CUDA_VISIBLE_DEVICES", "")
        raise EngineError(
            f"This rank was given the GPU {visible!r} of {os.uname().nodename}, and torch {torch.__version__} cannot "
            f"use it there: {error}. Install a build of torch for that machine's GPUs, or train with use_gpu=False."
        ) from error


def _end_at_once() -> None:
    raise StopRun("asked to end for the second time")


def bind(function: Callable[..., Any], config: dict[str, Any] | None) -> Callable[[], Any]:
    """Return the user's function bound to its config, or as it is where it takes no argument."""
    if _takes_config(function):
        return lambda: function({} if config is None else config)
    return function


def _takes_config(function: Callable[..., Any]) -> bool:
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return True
    return any(p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD, p.VAR_POSITIONAL) for p in parameters)


def _load_function(pickled: bytes) -> Callable[[], Any]:
    function, config = script.load(pickled)
    script.bring_to_children()
    return bind(function, config)


def _set_multiprocessing_directory(directory: str) -> None:
    """Make multiprocessing create its sockets in a directory of the run, also in children such as DataLoader workers.

    multiprocessing removes its default directory when a process exits by itself. DataLoader workers of a dead rank are
    killed, and would leave it behind. A path too long for a socket keeps the default.
    """
    if len(os.fsencode(directory)) + _SOCKET_NAME_BYTES > _SOCKET_PATH_BYTES:
        return
    from multiprocessing import process

    with contextlib.suppress(OSError):
        os.makedirs(directory, mode=0o700, exist_ok=True)
        process.current_process()._config["tempdir"] = directory  # type: ignore[attr-defined]


def _seed_everything(seed: int, rank: int, attempt: int) -> None:
    """Give each rank and attempt its own random state: forks share one."""
    digest = hashlib.blake2b(f"{seed}/{rank}/{attempt}".encode(), digest_size=8).digest()
    own = int.from_bytes(digest, "little")
    random.seed(own)
    if (numpy := sys.modules.get("numpy")) is not None:
        numpy.random.seed(own % 2**32)
    if (torch := sys.modules.get("torch")) is not None:
        torch.manual_seed(own % 2**63)


def _limit_threads() -> None:
    """Set the number of threads again: OMP_NUM_THREADS is read when the library loads, which was in the warm server."""
    torch = sys.modules.get("torch")
    with contextlib.suppress(ValueError):
        if torch is not None:
            torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
