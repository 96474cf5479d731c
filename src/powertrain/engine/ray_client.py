"""Talking to Ray: connecting to it, what its nodes are, and the one thread on which an engine asks it for anything."""

from __future__ import annotations

import contextlib
import logging
import os
import queue
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import ray

from powertrain.engine import cluster
from powertrain.errors import ConfigError, EngineError

_logger = logging.getLogger("powertrain")
_LOOK_EVERY = 1.0
_BREAKPOINT = "PYTHONBREAKPOINT"
#: How often Ray is asked for a thing that it fails to do.
TRIES = 5
#: What Ray says of actors that ended, with their nodes or by themselves.
GONE = (ray.exceptions.ActorDiedError, ray.exceptions.ActorUnavailableError)


def connect(address: str | None = None, **options: Any) -> None:
    """Connect this process to a Ray cluster, unless it is connected. Raises :class:`EngineError`."""
    if address is not None and address.startswith("ray://"):
        raise EngineError(
            f"{address!r} is an address for Ray's client, whose process is not part of the cluster: workers could not "
            "reach the run in it. Start the script on a node of the cluster, or submit it with 'ray job submit'."
        )
    if ray.is_initialized():
        return
    try:
        with _own_breakpoint():
            # What actors print is nothing that a user of this library wants to see.
            ray.init(address=address, **{"log_to_driver": False, "logging_level": logging.WARNING, **options})
    except (ConnectionError, RuntimeError, ValueError, OSError) as error:
        where = f"the Ray cluster at {address!r}" if address else "Ray"
        raise EngineError(
            f"This process cannot connect to {where}: {error} Check the address ('auto' finds a cluster on this "
            "machine), or start a cluster with 'ray start --head'."
        ) from error


@contextlib.contextmanager
def _own_breakpoint() -> Iterator[None]:
    """Ray makes its own debugger that of ``breakpoint()``, for this process and for all that inherit its variables; but
    it is for Ray's processes, and the user's function runs in none."""
    before = os.environ.get(_BREAKPOINT)
    try:
        yield
    finally:
        if before is None:
            os.environ.pop(_BREAKPOINT, None)
        else:
            os.environ[_BREAKPOINT] = before


def uploaded(runtime_env: Mapping[str, Any]) -> dict[str, Any]:
    """A ``runtime_env`` as an actor may have it: what names directories of this machine names copies in the cluster.

    Ray does that by itself for a whole job only. Raises :class:`ConfigError` for what Ray would not take.
    """
    from ray._private.runtime_env.py_modules import upload_py_modules_if_needed
    from ray._private.runtime_env.working_dir import upload_working_dir_if_needed

    env = dict(runtime_env)
    try:
        with tempfile.TemporaryDirectory() as scratch:
            for upload in (upload_py_modules_if_needed, upload_working_dir_if_needed):
                env = upload(env, include_gitignore=True, scratch_dir=scratch, logger=_logger)
        env.pop("excludes", None)  # it was for the upload
        ray.runtime_env.RuntimeEnv(**env)
    except (ValueError, TypeError, OSError, ray.exceptions.RuntimeEnvSetupError) as error:
        raise ConfigError(
            f"ScalingConfig(engine_options={{'runtime_env': ...}}) cannot be used: {str(error).rstrip('. ')}. Ray's "
            "documentation says what a runtime_env may hold."
        ) from error
    return env


def nodes() -> list[cluster.Node]:
    """The live nodes of the cluster, now."""
    state: Any = ray._private.state.state
    free, draining = state.available_resources_per_node(), state.get_draining_nodes()
    return [
        cluster.Node(
            id=found["NodeID"],
            name=found["NodeManagerHostname"] or found["NodeManagerAddress"],
            total=found["Resources"],
            free=free.get(found["NodeID"], {}),
            labels=found.get("Labels") or {},
            draining=found["NodeID"] in draining,
        )
        for found in alive()
    ]


def alive() -> list[dict[str, Any]]:
    """What Ray says of each live node."""
    table: Any = ray.nodes  # not typed
    return [found for found in table() if found["Alive"]]


def kill(actor: Any) -> None:
    """End an actor, if there is one and it has not ended."""
    if actor is None:
        return
    try:
        ray.kill(actor)
    except Exception:  # it is gone already, or Ray is
        pass


class RayThread:
    """All of Ray is asked on this thread. It wakes when Ray has an answer, and once a second to look at the cluster,
    for which Ray has no event."""

    def __init__(self, look: Callable[[], None], give_up: Callable[[str], None]) -> None:
        """``look`` is called once a second, ``give_up`` with why Ray does not do what it was asked over and over."""
        self._look, self._give_up = look, give_up
        self._todo: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        #: What is done at the next look, how often it has failed, and the last failure. This thread only.
        self._later: list[Callable[[], None]] = []
        self._failures: Counter[Callable[[], None]] = Counter()
        self._trouble = ""
        #: Set by the engine that ends: what fails from now on is nobody's concern.
        self.closing = False
        self._thread = threading.Thread(target=self._run, name="powertrain-ray", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """What was asked before is done; nothing is done after this."""
        if self._thread.is_alive():
            self._todo.put(None)
            self._thread.join()

    def soon(self, act: Callable[[], None]) -> None:
        """Call ``act`` on this thread. Any thread."""
        self._todo.put(act)

    def at_next_look(self, act: Callable[[], None]) -> None:
        """Call ``act`` within a second. This thread only."""
        self._later.append(act)

    def then(self, reference: Any, act: Callable[[Any, BaseException | None], None]) -> None:
        """Call ``act`` on this thread with what ``reference`` stands for, or with why there is nothing. Any thread."""

        def done(future: Any) -> None:
            error = future.exception()
            value = None if error is not None else future.result()
            self._todo.put(lambda: act(value, error))

        reference.future().add_done_callback(done)

    def _run(self) -> None:
        look_at = time.monotonic() + _LOOK_EVERY
        while True:
            try:
                task = self._todo.get(timeout=max(0.0, look_at - time.monotonic()))
                if task is None:
                    return
                tasks = [task]
            except queue.Empty:
                tasks, self._later = [*self._later, self._look], []
                look_at = time.monotonic() + _LOOK_EVERY
            for task in tasks:
                try:
                    task()
                except Exception as error:  # of Ray: the cluster may be going away
                    self._failed(task, error)

    def _failed(self, task: Callable[[], None], error: Exception) -> None:
        """Ray did not do it: it is tried again for a while, since a cluster may be busy, and then given up."""
        problem = f"{type(error).__name__}: {error}"
        if self.closing:
            return
        if problem != self._trouble:
            self._trouble = problem
            _logger.warning("Ray could not do what it was asked (%s). It is asked again.", problem)
        if task == self._look:
            return
        self._failures[task] += 1
        if self._failures[task] < TRIES:
            self._later.append(task)
            return
        self._give_up(f"Ray could not do what the run needs: {problem}")
