"""Ray calls: connecting, listing nodes, and the one thread on which an engine calls Ray."""

from __future__ import annotations

import contextlib
import inspect
import logging
import os
import queue
import socket
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import ray
from ray._private import auto_init_hook
from ray.util.placement_group import PlacementGroup, remove_placement_group

from powertrain.config.checks import did_you_mean
from powertrain.engine.ray import capacity
from powertrain.errors import ConfigError, EngineError
from powertrain.text.loggers import module_logger

_logger = module_logger(__name__)
_POLL_INTERVAL_S = 1.0
#: Seconds that Ray may take for the last calls.
_STOP_TIMEOUT_S = 10.0
_BREAKPOINT = "PYTHONBREAKPOINT"
#: Ray's environment variables: the address of its cluster, and its runtime_env plugins.
_ADDRESS, _PLUGINS = "RAY_ADDRESS", "RAY_RUNTIME_ENV_PLUGINS"
#: Seconds for which a cluster is awaited at its address.
_REPLY_TIMEOUT_S = 5.0
#: The number of attempts for a failing Ray call.
TRIES = 5
#: Ray's messages about actors that ended, with their nodes or by themselves.
GONE = (ray.exceptions.ActorDiedError, ray.exceptions.ActorUnavailableError)
#: Seconds within which Ray counts released resources as free: a tenth is usual. An elastic run, which starts with what
#: is free, waits for this long. And when this process last released some.
_RELEASE_TIMEOUT_S = 1.0
_released_at = float("-inf")
#: Seconds to wait for a call to Ray that Ray Data's poller has begun.
_POLL_TIMEOUT_S = 5.0


def cluster_resources() -> dict[str, float]:
    """Return the total resources of the cluster, in use or not."""
    found: dict[str, float] = ray.cluster_resources()  # type: ignore[no-untyped-call]
    return found


def leave() -> None:
    """Disconnect this process from its cluster."""
    stop_usage_poller()
    ray.shutdown()


def stop_usage_poller() -> None:
    """Keep Ray Data's poller of cluster usage from calling Ray after ``ray.shutdown()``.

    Ray Data samples the cluster every 10 s on a thread that never ends, and Ray's core ends the whole process when a
    thread calls it without a connection. The thread continues without anything to sample; the next execution of Ray
    Data starts another.
    """
    module = sys.modules.get("ray.data._internal.usage.poller")
    poller = getattr(module, "_poller", None)
    if poller is None:
        return
    with contextlib.suppress(AttributeError):  # of another version of Ray
        poller._metrics.clear()
        module._poller = None  # type: ignore[union-attr]
        deadline = time.monotonic() + _POLL_TIMEOUT_S
        while time.monotonic() < deadline:  # a call that has begun must end first
            frame = sys._current_frames().get(poller._thread.ident)
            if frame is None or frame.f_code is type(poller)._run.__code__:
                return
            time.sleep(0.005)


def connect(address: str | None = None, **options: Any) -> None:
    """Connect this process to a Ray cluster, unless it is connected to it.

    Raises :class:`EngineError` where the address does not answer, where it is not a cluster's, and where this process
    is already connected to another cluster.
    """
    _refuse_ray_client(address, repr(address))
    if ray.is_initialized():
        _refuse_second_cluster(address)
        return
    target, named = _target(address)
    _refuse_ray_client(target, named)
    _refuse_unknown_fields(options.get("runtime_env"), "init(runtime_env=...)")
    try:
        _await_answer(target)
        with _own_breakpoint():
            # Output of actors is of no interest to users of this library.
            ray.init(address=address, **{"log_to_driver": False, "logging_level": logging.WARNING, **options})
    except (ConnectionError, RuntimeError, ValueError, OSError, OverflowError) as error:
        where = f"the Ray cluster at {named}" if target else "Ray"
        raise EngineError(
            f"This process cannot connect to {where}: {str(error).rstrip('. ')}. Check the address ('auto' finds a "
            "cluster on this machine), or start a cluster with 'ray start --head'."
        ) from error
    node: Any = ray._private.worker._global_node
    if target is None and node is not None and node.is_head():
        _logger.warning("No Ray cluster was found: one was started on this machine for this script.")


def _target(address: str | None) -> tuple[str | None, str]:
    """Return the address that Ray goes by, as it is and as the user knows it; None where it looks for a cluster
    itself."""
    variable = os.environ.get(_ADDRESS, "")
    if variable and address in (None, "auto"):
        return variable, f"{_ADDRESS}={variable!r}"
    return address, repr(address)


def _refuse_ray_client(address: str | None, named: str) -> None:
    """Raise :class:`EngineError` where this process would not be, or is not, part of the cluster."""
    client: Any = ray.util.client.ray
    if client.is_connected():
        what = "This process is connected through Ray's client, and so"
    elif address is None or "://" not in address:
        return
    elif address.startswith(("http://", "https://")):
        what = f"{named} is the address of Ray's dashboard, which takes jobs. Behind it this process"
    else:
        what = f"{named} is an address for Ray's client, behind which this process"
    raise EngineError(
        f"{what} is not part of the cluster: workers could not reach the run in it. Start the script on a node of the "
        "cluster, where the address 'auto' finds it, or submit it with 'ray job submit'."
    )


def _refuse_second_cluster(address: str | None) -> None:
    """Raise :class:`EngineError` where this process is in another cluster than that at ``address``."""
    if address in (None, "auto", "local"):
        return
    here: str = ray.get_runtime_context().gcs_address
    if not _are_one_cluster(address, here):
        raise EngineError(
            f"{address!r} was given as the address of a Ray cluster, and this process is connected to the one at "
            f"{here!r} already. A process is in one cluster: remove the address to use this one, or call "
            "ray.shutdown() first."
        )


def _are_one_cluster(address: str, here: str) -> bool:
    """Return True when ``address`` belongs to the cluster that this process reaches at ``here``.

    One cluster has many addresses: names, those of other networks, a service in front of it. So the cluster is queried
    for its id.
    """
    there, own = _host_and_port(address), _host_and_port(here)
    if there is None or own is None or there == own:
        return there == own and there is not None
    if there[1] != own[1]:
        return False
    raylet: Any = ray._raylet  # not typed
    worker: Any = ray._private.worker.global_worker
    try:
        _await_answer(address)
        return bool(raylet.GcsClient(address=address).cluster_id == worker.gcs_client.cluster_id)
    except (OSError, ray.exceptions.RayError):
        return False


def _host_and_port(address: str) -> tuple[str, int] | None:
    """Return the host and port to which Ray would connect for ``address``; None where it has none."""
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal():
        return None
    services: Any = ray._private.services
    return services.resolve_ip_for_localhost(host.strip("[]")), int(port)


def _await_answer(address: str | None) -> None:
    """Raise ``OSError`` where no process listens at ``address``, if it is a host and a port.

    Ray would try for minutes, in code that no signal interrupts.
    """
    place = None if address is None else _host_and_port(address)
    if place is None:
        return
    deadline = time.monotonic() + _REPLY_TIMEOUT_S
    while True:
        try:
            socket.create_connection(place, timeout=max(0.1, deadline - time.monotonic())).close()
            return
        except OSError as error:
            # A head that is just starting is waited for; a name that means nothing is not.
            if isinstance(error, socket.gaierror) or time.monotonic() >= deadline:
                raise ConnectionError(f"no process answers there ({error.strerror or error})") from error
        time.sleep(0.1)


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
    """Upload the local directories of a ``runtime_env`` and return it with their copies in the cluster, for an actor.

    Ray does that by itself for a whole job only. Raises :class:`ConfigError` for invalid entries.
    """
    from ray._private.runtime_env.py_modules import upload_py_modules_if_needed
    from ray._private.runtime_env.working_dir import upload_working_dir_if_needed

    env = dict(runtime_env)
    _refuse_unknown_fields(env, "ScalingConfig(engine_options={'runtime_env': ...})")
    try:
        with tempfile.TemporaryDirectory() as scratch:
            for upload in (upload_py_modules_if_needed, upload_working_dir_if_needed):
                env = upload(env, include_gitignore=True, scratch_dir=scratch, logger=_logger)
        env.pop("excludes", None)  # it was for the upload
        ray.runtime_env.RuntimeEnv(**env)
    except (ValueError, TypeError, OSError, ray.exceptions.RuntimeEnvSetupError) as error:
        raise ConfigError(
            f"ScalingConfig(engine_options={{'runtime_env': ...}}) cannot be used: {str(error).rstrip('. ')}. See "
            "Ray's documentation on runtime environments."
        ) from error
    return env


def _refuse_unknown_fields(runtime_env: Any, named: str) -> None:
    """Raise :class:`ConfigError` for fields that Ray does not know: it would take no notice of them."""
    if not isinstance(runtime_env, Mapping) or os.environ.get(_PLUGINS):
        return  # with plugins, only the nodes know which fields there are
    kind: Any = ray.runtime_env.RuntimeEnv
    takes = inspect.signature(kind.__init__).parameters
    known = sorted(name for name in {*kind.known_fields, *takes} - {"self", "kwargs"} if name[0] != "_")
    for name in runtime_env:
        if name not in known and name not in kind.known_fields:
            raise ConfigError(
                f"{named} has the field {name!r}, which Ray's runtime_env does not have. "
                f"{did_you_mean(name, known)}Its fields are {', '.join(known)}. "
                f"For one of a plugin, set {_PLUGINS} here as on the nodes."
            )


def nodes() -> list[capacity.Node]:
    """Return the live nodes of the cluster, now."""
    state: Any = ray._private.state.state
    free, draining = state.available_resources_per_node(), state.get_draining_nodes()
    return [
        capacity.Node(
            id=found["NodeID"],
            name=found["NodeManagerHostname"] or found["NodeManagerAddress"],
            total=found["Resources"],
            free=free.get(found["NodeID"], {}),
            labels=found.get("Labels") or {},
            draining=found["NodeID"] in draining,
        )
        for found in alive()
    ]


def _on_released() -> None:
    global _released_at
    _released_at = time.monotonic()


def settled_at() -> float:
    """Return when Ray counts as free what this process has released until now, at the latest (monotonic clock)."""
    return _released_at + _RELEASE_TIMEOUT_S


def alive() -> list[dict[str, Any]]:
    """Return Ray's record of each live node."""
    table: Any = ray.nodes  # not typed
    return [found for found in table() if found["Alive"]]


class _AutoConnectOverride:
    """Replaces Ray's flag for connecting automatically on a call without a cluster: False within
    :func:`without_joining`. Checking for a connection first is not enough: the process may leave the cluster between
    the check and the call."""

    is_unwanted = threading.local()

    def __init__(self, plain: Any) -> None:
        self._plain = plain

    def __bool__(self) -> bool:
        return bool(self._plain) and not getattr(self.is_unwanted, "here", False)

    @classmethod
    def install(cls) -> None:
        """For this process. Again is fine."""
        if not isinstance(auto_init_hook.enable_auto_connect, cls):
            vars(auto_init_hook)["enable_auto_connect"] = cls(auto_init_hook.enable_auto_connect)


@contextlib.contextmanager
def without_joining() -> Iterator[None]:
    """Make Ray calls of this thread in the block raise, not reconnect, where this process has left the cluster."""
    _AutoConnectOverride.install()
    was = getattr(_AutoConnectOverride.is_unwanted, "here", False)
    _AutoConnectOverride.is_unwanted.here = True
    try:
        yield
    finally:
        _AutoConnectOverride.is_unwanted.here = was


class RayThread:
    """The thread that makes all Ray calls. It wakes when Ray has a result, and once a second to poll the cluster, for
    which Ray has no event.

    An unresponsive head blocks this thread, and nothing else: a second thread watches timeouts, and also detects that
    the process has left the cluster, since a call in progress at that moment may block. After that Ray is not called
    again: it would join any cluster it finds.
    """

    def __init__(
        self,
        look: Callable[[], None],
        watch: Callable[[], None],
        give_up: Callable[[str], None],
        left: Callable[[], None],
    ) -> None:
        """Create the thread. Once a second it calls ``look``, and the second thread calls ``watch``, which must not
        call Ray; ``give_up`` is called with the reason when a Ray call keeps failing; ``left`` once the cluster was
        left."""
        self._look, self._watch, self._give_up, self._left = look, watch, give_up, left
        self._todo: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        #: Actions for the next poll, the number of failures, and the last failure. This thread only.
        self._later: list[Callable[[], None]] = []
        self._failures: Counter[Callable[[], None]] = Counter()
        self._trouble = ""
        #: Set by an engine that closes: later failures are ignored.
        self.closing = False
        self._job = ""
        self._is_gone = False
        self._leaving = threading.Lock()
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="powertrain-ray", daemon=True)
        self._watcher = threading.Thread(target=self._keep_watch, name="powertrain-nodes", daemon=True)

    def start(self) -> None:
        """Before: this process is connected."""
        self._job = ray.get_runtime_context().get_job_id()
        self._thread.start()
        self._watcher.start()

    def stop(self) -> bool:
        """Finish the queued calls and stop. Return False where Ray does not let the thread end in time."""
        self._stopped.set()
        if self._thread.is_alive():
            self._todo.put(None)
            self._thread.join(_STOP_TIMEOUT_S)
        if self._watcher.is_alive():
            self._watcher.join()
        return not self._thread.is_alive()

    @property
    def is_connected(self) -> bool:
        """Return True while this process is still part of the engine's cluster."""
        with without_joining():
            try:
                return ray.is_initialized() and ray.get_runtime_context().get_job_id() == self._job
            except Exception:  # it leaves the cluster at this moment
                return False

    def soon(self, act: Callable[[], None]) -> None:
        """Call ``act`` on this thread. Any thread."""
        self._todo.put(act)

    def at_next_look(self, act: Callable[[], None]) -> None:
        """Call ``act`` within a second. This thread only."""
        self._later.append(act)

    def then(self, reference: Any, act: Callable[[Any, BaseException | None], None]) -> None:
        """Call ``act`` on this thread with the value of ``reference``, or with its error. Any thread."""

        def done(future: Any) -> None:
            error = future.exception()
            value = None if error is not None else future.result()
            self._todo.put(lambda: act(value, error))

        reference.future().add_done_callback(done)

    def kill(self, actor: Any, *, holds_resources: bool = True) -> None:
        """End an actor, if there is one and it has not ended. Never raises."""
        with without_joining(), contextlib.suppress(Exception):  # it is gone already, or Ray is
            if actor is not None and self.is_connected:
                ray.kill(actor)
                if holds_resources:
                    _on_released()

    def remove(self, group: PlacementGroup) -> None:
        """Give back a placement group. Never raises."""
        with without_joining(), contextlib.suppress(Exception):
            if self.is_connected:
                remove_placement_group(group)
                _on_released()

    def _run(self) -> None:
        look_at = time.monotonic() + _POLL_INTERVAL_S
        while True:
            try:
                task = self._todo.get(timeout=max(0.0, look_at - time.monotonic()))
                if task is None:
                    return
                tasks = [task]
            except queue.Empty:
                tasks, self._later = [*self._later, self._look], []
                look_at = time.monotonic() + _POLL_INTERVAL_S
            for task in tasks:
                self._do(task)

    def _do(self, task: Callable[[], None]) -> None:
        if self._has_left():
            return
        try:
            with without_joining():
                task()
        except Exception as error:  # of Ray: the cluster may be going away
            self._failed(task, error)

    def _has_left(self) -> bool:
        """Return True when this process has left the cluster. Both threads check; the engine is notified once."""
        with self._leaving:
            if self._is_gone or self.is_connected:
                return self._is_gone
            self._is_gone = True
        self._left()
        return True

    def _failed(self, task: Callable[[], None], error: Exception) -> None:
        """Handle a failed Ray call: retry it for a while, since a cluster may be busy, and then give up."""
        problem = f"{type(error).__name__}: {error}"
        if self.closing:
            return
        if problem != self._trouble:
            self._trouble = problem
            _logger.warning("A Ray call failed (%s). It is retried.", problem)
        if task == self._look:
            return
        self._failures[task] += 1
        if self._failures[task] < TRIES:
            self._later.append(task)
            return
        self._give_up(f"Ray calls of the run keep failing: {problem}")

    def _keep_watch(self) -> None:
        while not self._stopped.wait(_POLL_INTERVAL_S):
            try:
                if not self._has_left():
                    self._watch()
            except Exception:  # a bug: the next poll may succeed
                _logger.exception("Nodes could not be watched.")


def in_a_line(error: BaseException) -> str:
    """Return Ray's message about a failure: the last line with text, since the first ones are tracebacks."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[-1] if lines else type(error).__name__
