"""``init``, ``remote``, ``get``, ``put``, ``wait``: functions and actors in processes of the engine, as in Ray.

On one machine a task is forked from a warm server, runs the function, and sends its value back through a file that
only this user can read. Like the workers of a run it sees modules as the script has set them when it is started, unless
the script cannot be forked (threads, an open GPU): then it imports them from their files, as in Ray. Nothing needs to
be started first; ``init`` exists so that scripts written for Ray run, and to declare custom resources.

In a process that belongs to a Ray cluster, by ``init(address=...)``, ``ray.init`` or ``RAY_ADDRESS``, tasks are Ray's
own: ``remote`` gives Ray's references, and ``get`` takes them.
"""

from __future__ import annotations

import math
import os
import pickle
import sys
import threading
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import cloudpickle

from powertrain.calls import options as call_options
from powertrain.calls.failures import caused_by, failed
from powertrain.calls.references import PutReference, Reference, references_in, wait_for, with_values
from powertrain.engine import base
from powertrain.engine.forking import ServiceThread, working
from powertrain.errors import ArgumentError, ConfigError, EngineError, ResourceError, TaskError
from powertrain.text.errors import describe_error
from powertrain.values.arguments import as_flag, as_seconds, as_text_keys, plain_scalar, shorten

ENTRY = "powertrain.tasks:run_task"

#: Options of ``ray.init`` beyond the names below. They describe a cluster to start, and there is none to start here.
_OPTIONS_OF_A_CLUSTER = frozenset(
    {
        *("num_cpus", "num_gpus", "labels", "object_store_memory", "local_mode", "job_config", "namespace"),
        *("include_dashboard", "dashboard_host", "dashboard_port", "runtime_env", "proxy_server_url"),
        *("configure_logging", "logging_level", "logging_format", "logging_config", "log_to_driver"),
        *("enable_resource_isolation", "cgroup_path", "system_reserved_cpu", "system_reserved_memory"),
        *("_enable_object_reconstruction", "_plasma_directory", "_object_spilling_directory", "_memory"),
        *("_node_ip_address", "_driver_object_store_memory", "_redis_username", "_redis_password"),
        *("_temp_dir", "_metrics_export_port", "_system_config", "_tracing_startup_hook", "_node_name"),
        *("_skip_env_hook", "allow_multiple"),
    }
)

#: Of those, the options about the machine on which Ray would be started: nodes of a running cluster have them already.
_OPTIONS_OF_A_MACHINE = frozenset({"num_cpus", "num_gpus", "labels", "object_store_memory"})
_lock = threading.Lock()
_initialized = False
#: True when ``init`` was called for a Ray cluster; and when it connected this process to it.
_on_ray = _connected_here = False
#: True when ``init`` was called with "local", whatever the environment has.
_stays_here = False
_resources: dict[str, float] = {}


def init(
    address: str | None = None,
    *,
    resources: Mapping[str, float] | None = None,
    ignore_reinit_error: bool = False,
    **options: Any,
) -> None:
    """Initialise with the options of ``ray.init``. Runs and tasks go to the Ray cluster that is named, if one is.

    Args:
        address: The address of a Ray cluster, such as ``"auto"``; None for that of ``RAY_ADDRESS``, where it is set.
            ``"local"`` stays on this machine.
        resources: Custom resources of this machine, by name.
        ignore_reinit_error: Accept a second call.
        **options: Other options of ``ray.init``. They describe a cluster to start, and have no part in a local run.

    Raises:
        ConfigError: ``ray.init`` has no such option, a resource is not an amount, or this is the second call.

    Example::

        powertrain.init(resources={"licence": 2})
    """
    global _initialized, _on_ray, _connected_here, _stays_here
    if unknown := sorted(options.keys() - _OPTIONS_OF_A_CLUSTER):
        raise ConfigError(
            f"init() has no option {', '.join(map(repr, unknown))}. It takes ray.init's options; check the spelling."
        )
    if address is not None and not isinstance(address, str):
        raise ArgumentError(
            f"init(address=...) was given {shorten(address)}. Give a string such as 'auto', or None."
        )
    ignore_reinit_error = as_flag(ignore_reinit_error, "init(ignore_reinit_error=...)")
    resources = as_text_keys(resources, "init(resources=...)") or None
    with _lock:
        if _initialized and is_initialized() and not ignore_reinit_error:
            raise ConfigError(
                "init() was called twice. Call shutdown() first, or pass ignore_reinit_error=True."
            )
        if address not in (None, "local") or (address is None and is_on_ray()):
            _refuse_description_of_a_machine({**options, "resources": resources})
            was_connected = _is_connected()
            connect_to_ray(address, **_given(options))
            _on_ray, _connected_here = True, _connected_here if was_connected else True
        else:
            _resources.update(_amounts(resources or {}))
            _stays_here = address == "local"
        _initialized = True


def _amounts(resources: Mapping[str, Any]) -> dict[str, float]:
    """Return custom resources as amounts; raise :class:`ConfigError` for a value that is none."""
    for name, amount in resources.items():
        if name in ("CPU", "GPU"):
            raise ConfigError(
                f"init(resources={{{name!r}: {amount!r}}}) would change nothing: the {name}s of this machine are "
                "counted by themselves. Declare only custom resources."
            )
        amount = plain_scalar(amount)
        is_number = isinstance(amount, (int, float)) and not isinstance(amount, bool)
        if not is_number or not math.isfinite(amount) or amount < 0:
            raise ConfigError(
                f"init(resources={{{shorten(name)}: {shorten(amount)}}}) is not an amount. Give a finite number that "
                "is not below 0."
            )
    return {name: float(plain_scalar(amount)) for name, amount in resources.items()}


def _refuse_description_of_a_machine(options: Mapping[str, Any]) -> None:
    names = _OPTIONS_OF_A_MACHINE | {"resources"}
    given = sorted(name for name, value in options.items() if name in names and value is not None)
    if given:
        raise ConfigError(
            f"init() was given {', '.join(given)} together with a Ray cluster that runs already. The resources of its "
            "nodes were set when they were started ('ray start --num-gpus=...'). Remove this from init()."
        )


def shutdown() -> None:
    """Undo ``init``: forget its declarations, and leave the cluster if ``init`` connected to it."""
    global _initialized, _on_ray, _connected_here, _stays_here
    with _lock:
        if _connected_here and "ray" in sys.modules:
            from powertrain.engine.ray.client import leave

            leave()
        _initialized = _on_ray = _connected_here = _stays_here = False
        _resources.clear()


def connect_to_ray(address: str | None = None, **options: Any) -> None:
    """Make this process a driver of a Ray cluster, unless it is one. Raises where that cannot be."""
    try:
        from powertrain.engine.ray.client import connect
    except ModuleNotFoundError as error:
        if error.name != "ray":
            raise
        raise ConfigError(
            "A Ray cluster is named (address= or RAY_ADDRESS), and Ray is not installed here. Install it with: "
            "pip install 'powertrain[ray]'."
        ) from None
    connect(address, **options)


def is_on_ray() -> bool:
    """Return True when this process is connected to a Ray cluster, or its environment names one."""
    named = os.environ.get("RAY_ADDRESS", "") not in ("", "local")
    return _is_connected() or (named and not _stays_here)


def _is_connected() -> bool:
    """Return True when Ray is initialised in this process. Does not import Ray."""
    ray = sys.modules.get("ray")
    return ray is not None and bool(getattr(ray, "is_initialized", bool)())


def _ray() -> Any:
    """Return the module ``ray``, in a process that is connected to a cluster by then."""
    connect_to_ray()
    return sys.modules["ray"]


def _given(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return options of a connection, as ``ray.init`` takes them beside an address."""
    return {name: value for name, value in options.items() if value is not None}


def is_initialized() -> bool:
    """Return True after ``init``, and in a process that is connected to a Ray cluster by other means."""
    return _is_connected() or (_initialized and not _on_ray)


def declared_resources() -> dict[str, float]:
    """Return custom resources that ``init`` declared."""
    return dict(_resources)


class RemoteFunction:
    """A function that runs in a process of its own: ``f.remote(...)`` starts it, :func:`get` waits for its value."""

    def __init__(self, function: Callable[..., Any], options: Mapping[str, Any]) -> None:
        """Raises :class:`ConfigError` for what ``ray.remote`` does not take."""
        call_options.check_names(options, call_options.OF_A_TASK, "remote() of a function")
        self._function, self._options = function, dict(options)
        #: The same as a remote function of Ray's, once it has been needed.
        self._of_ray: Any = None
        self.__name__ = getattr(function, "__name__", "task")
        self.__doc__ = function.__doc__

    def remote(self, *args: Any, **kwargs: Any) -> Any:
        """Start the task; return at once, with an :class:`ObjectRef` or, on a cluster, with Ray's reference."""
        if is_on_ray():
            return self._as_rays(_ray()).remote(*args, **kwargs)
        meaning = call_options.of_a_task(self._options, self.__name__)
        title = self._options.get("name") or self.__name__
        if references_in(args, kwargs):
            later = partial(_call_with_values, self._function, args, kwargs)
            awaited = [value for value in (*args, *kwargs.values()) if isinstance(value, Reference)]
            return ObjectRef(later, meaning.shape, title, meaning.env, awaited)
        return ObjectRef(cloudpickle.dumps((self._function, args, kwargs)), meaning.shape, title, meaning.env)

    def options(self, **options: Any) -> RemoteFunction:
        """Return the same function with these options of ``ray.remote`` in place of those it has."""
        return RemoteFunction(self._function, {**self._options, **options})

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_of_ray": None}  # each process makes its own

    def _as_rays(self, ray: Any) -> Any:
        if self._of_ray is None:  # it is sent to the cluster once, not with each call
            self._of_ray = (ray.remote(**self._options) if self._options else ray.remote)(self._function)
        return self._of_ray

    def __call__(self, *_: Any, **__: Any) -> Any:
        """Refuse a direct call: ``remote`` starts the task."""
        raise TypeError(
            f"{self.__name__} is a remote function: call {self.__name__}.remote(...) and powertrain.get() its value."
        )


def remote(*arguments: Any, **options: Any) -> Any:
    """Make a function, or a class, remote: ``@remote`` or ``@remote(num_gpus=1, resources={...})``.

    Args:
        *arguments: The function or the class, where the decorator has no options.
        **options: The options of ``ray.remote``.

    Returns:
        A :class:`RemoteFunction` or a :class:`RemoteClass`; with options, a decorator that makes one.

    Raises:
        ConfigError: ``ray.remote`` does not take an option.

    Example::

        @powertrain.remote(num_cpus=1)
        def square(x):
            return x * x

        assert powertrain.get(square.remote(3)) == 9
    """
    if len(arguments) == 1 and callable(arguments[0]) and not options:
        return _remote_function(arguments[0], {})
    if arguments:
        raise ConfigError("remote() takes only keyword options, such as @remote(num_gpus=1).")
    return lambda function: _remote_function(function, options)


def _remote_function(
    function: Callable[..., Any], options: Mapping[str, Any]
) -> RemoteFunction | RemoteClass:
    return RemoteClass(function, options) if isinstance(function, type) else RemoteFunction(function, options)


def _call_with_values(function: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> bytes:
    """Return the pickled call, once the references among its arguments have values."""
    args, kwargs = with_values(args, kwargs)
    pickled: bytes = cloudpickle.dumps((function, args, kwargs))
    return pickled


class RemoteClass:
    """A class whose objects live in a process each: ``C.remote(...)`` starts one and returns its handle."""

    def __init__(self, kind: type, options: Mapping[str, Any]) -> None:
        """Raises :class:`ConfigError` for what ``ray.remote`` does not take."""
        call_options.check_names(options, call_options.OF_AN_ACTOR, "remote() of a class")
        self._kind, self._options = kind, dict(options)
        self.__name__, self.__doc__ = kind.__name__, kind.__doc__

    def remote(self, *args: Any, **kwargs: Any) -> Any:
        """Start an actor; return at once, with an ``ActorHandle`` or, on a cluster, with Ray's."""
        if is_on_ray():
            ray = _ray()
            of_ray = (ray.remote(**self._options) if self._options else ray.remote)(self._kind)
            return of_ray.remote(*args, **kwargs)
        from powertrain.calls import actors

        meaning = call_options.of_an_actor(self._options, self.__name__)
        values, named = with_values(args, kwargs)
        return actors.start(self._kind, values, named, meaning, declared_resources())

    def options(self, **options: Any) -> RemoteClass:
        """Return the same class with these options of ``ray.remote`` in place of those it has."""
        return RemoteClass(self._kind, {**self._options, **options})

    def __call__(self, *_: Any, **__: Any) -> Any:
        """Refuse a direct call: ``remote`` starts an actor."""
        raise TypeError(f"{self.__name__} is a remote class: make an actor with {self.__name__}.remote(...).")


def kill(actor: Any, *, no_restart: bool = True) -> None:
    """End an actor now. Calls that it has not answered fail.

    Args:
        actor: The handle that ``remote`` of a class has returned.
        no_restart: As in Ray, for actors of a cluster.

    Raises:
        ArgumentError: ``actor`` is not the handle of an actor.
    """
    from powertrain.calls import actors

    if isinstance(actor, actors.ActorHandle):
        actors.kill(actor)
    elif (ray := sys.modules.get("ray")) is not None and isinstance(actor, ray.actor.ActorHandle):
        ray.kill(actor, no_restart=no_restart)
    else:
        raise ArgumentError(f"kill() takes the handle of an actor, and was given a {type(actor).__name__}.")


def put(value: Any) -> Any:
    """Return a reference to a copy of ``value``, for :func:`get` and as an argument of remote functions.

    Args:
        value: Anything that can be pickled.

    Example::

        weights = powertrain.put(model.state_dict())
    """
    return _ray().put(value) if is_on_ray() else PutReference.of(value)


def wait(
    refs: Sequence[Any], *, num_returns: int = 1, timeout: float | None = None, fetch_local: bool = True
) -> tuple[list[Any], list[Any]]:
    """Wait until some tasks have ended.

    Args:
        refs: References from ``remote`` or :func:`put`, each once.
        num_returns: The number of tasks to wait for.
        timeout: Seconds after which the finished ones are returned; None for no limit.
        fetch_local: As in Ray; without effect on one machine.

    Returns:
        At most ``num_returns`` references that are done, and all others, both in the given order.

    Raises:
        ArgumentError: ``refs`` is not a list of references, or ``num_returns`` is not between 1 and their number.

    Example::

        done, running = powertrain.wait(references, num_returns=1, timeout=10)
    """
    timeout = as_seconds(timeout, "wait(timeout=...)")
    if not isinstance(refs, Sequence) or isinstance(refs, (str, bytes)):
        raise ArgumentError(f"wait() takes a list of references, and was given a {type(refs).__name__}.")
    if not isinstance(num_returns, int) or not 1 <= num_returns <= len(refs):
        raise ArgumentError(
            f"wait(num_returns={shorten(num_returns)}) cannot be met with {len(refs)} references. Give a number from 1 "
            "to that."
        )
    if all(isinstance(ref, Reference) for ref in refs):
        return wait_for(refs, num_returns, timeout)
    if any(isinstance(ref, Reference) for ref in refs):
        raise ArgumentError(
            "wait() was given references of this machine and of Ray. Wait for them separately."
        )
    ready, others = _ray().wait(list(refs), num_returns=num_returns, timeout=timeout, fetch_local=fetch_local)
    return list(ready), list(others)


def get(refs: Any, *, timeout: float | None = None) -> Any:
    """Return the value of a task, or the values of several.

    Args:
        refs: A reference from ``remote``, :func:`put` or Ray, or a list of them.
        timeout: Seconds to wait, for all of them together; None for no limit.

    Returns:
        The value; a list of values for a list of references.

    Raises:
        TaskError: A task failed. It is of the class of the task's exception too, where this process has that class.
        TimeoutError: A task takes longer than ``timeout``.

    Example::

        squares = powertrain.get([square.remote(x) for x in range(4)])
    """
    timeout = as_seconds(timeout, "get(timeout=...)")
    if not isinstance(refs, Sequence) or isinstance(refs, (str, bytes, bytearray, memoryview, range)):
        return _values([refs], timeout)[0]
    return _values(refs, timeout)


def _values(refs: Sequence[Any], timeout: float | None) -> list[Any]:
    until = None if timeout is None else time.monotonic() + timeout
    fetched = iter(_values_from_ray([ref for ref in refs if not isinstance(ref, Reference)], timeout))
    return [
        ref.result(None if until is None else max(0.0, until - time.monotonic()))
        if isinstance(ref, Reference)
        else next(fetched)
        for ref in refs
    ]


def _values_from_ray(refs: Sequence[Any], timeout: float | None) -> list[Any]:
    """Return the values of Ray's references, all fetched at once."""
    if not refs:
        return []
    ray = sys.modules.get("ray")
    strange = [ref for ref in refs if ray is None or not isinstance(ref, ray.ObjectRef)]
    if strange:
        raise ArgumentError(
            f"get() takes a reference from remote(), or a list of them, and was given a {type(strange[0]).__name__}."
        )
    assert ray is not None
    try:
        return list(ray.get(list(refs), timeout=timeout))
    except ray.exceptions.GetTimeoutError:
        raise TimeoutError(f"A task on the Ray cluster has not ended within {timeout:g} s.") from None
    except ray.exceptions.RayTaskError as error:
        raise caused_by(f"A task on the Ray cluster failed:\n{error}", error.cause) from error.cause
    except ray.exceptions.RayError as error:
        raise TaskError(f"A task on the Ray cluster did not end well: {error}") from error


class ObjectRef(Reference):
    """The value of a task that runs in a process of its own."""

    def __init__(
        self,
        call: bytes | Callable[[], bytes],
        shape: base.SlotShape,
        name: str,
        env: Mapping[str, str] | None = None,
        awaited: Sequence[Reference] = (),
    ) -> None:
        """Create the task. ``call`` is the pickled call, or returns it once the ``awaited`` tasks are done."""
        from powertrain.engine.local.engine import LocalEngine
        from powertrain.engine.local.runtime_directories import make_runtime_directory
        from powertrain.engine.local.warm_server import server_of_call

        super().__init__(name)
        #: The reason for its wait before the start.
        self._waits_for = ""
        self._env = dict(env or {})
        self._cwd = os.getcwd()  # of now: it may have to wait while the script continues
        self._server = server_of_call()
        self._engine = LocalEngine(self._server, declared_resources())
        self._engine.start(self._event, self._print)
        self._directory = make_runtime_directory(f"task-{name}")
        if not isinstance(call, bytes):
            begin = partial(self._begin_later, call, shape, awaited)
            ServiceThread(target=begin, name="powertrain-task", daemon=True).start()
            return
        try:
            self._begin(call, shape)
        except (ResourceError, EngineError):
            self._finish()
            raise

    def _begin(self, call: bytes, shape: base.SlotShape) -> None:
        self._call = cloudpickle.dumps((str(self._directory / "value"), call))
        self._engine.request(1, shape)

    def _begin_later(
        self, call: Callable[[], bytes], shape: base.SlotShape, awaited: Sequence[Reference]
    ) -> None:
        self._waits_for = "waiting for the values that it is called with"
        for reference in awaited:
            reference.wait()
        try:
            with working():
                self._begin(call(), shape)
        except Exception as error:
            self._problem = f"could not be started: {describe_error(error)}"
            self._cause = error.cause if isinstance(error, TaskError) else error
            self._finish()

    def _why_late(self) -> str:
        return f": it is {self._waits_for}" if self._waits_for else ""

    def _event(self, event: base.EngineEvent) -> None:
        if isinstance(event, base.Waiting):
            self._waits_for = event.reason
        elif isinstance(event, base.Granted):
            self._waits_for, slot = "", event.slots[0]
            env: dict[str, str | None] = {**self._env}
            if slot.gpus:
                env["CUDA_VISIBLE_DEVICES"] = ",".join(slot.gpus)
            self._engine.fork(
                slot,
                base.ProcessSpec(entry=ENTRY, payload=self._call, env=env, cwd=self._cwd, title=self._name),
            )
        elif isinstance(event, base.Remark):
            warnings.warn(event.text, stacklevel=2)
        elif isinstance(event, base.Exited):
            self._problem = base.describe_exit(event)[1]
            ServiceThread(target=self._finish, name="powertrain-task", daemon=True).start()
        elif isinstance(event, base.SlotLost):
            self._problem = f"was lost: {event.reason}"
            ServiceThread(target=self._finish, name="powertrain-task", daemon=True).start()

    def _finish(self) -> None:
        from powertrain.engine.local.runtime_directories import remove_runtime_directory
        from powertrain.engine.local.warm_server import end_server_of_call

        value = self._directory / "value"
        with working():
            result = value.read_bytes() if value.exists() else None
            self._engine.close()
        end_server_of_call(self._server)  # which takes a while, and must not hold up a fork
        with working():
            remove_runtime_directory(self._directory)
            self.set_outcome(result, self._problem)

    def _print(self, _: base.Slot, data: bytes) -> None:
        print(data.decode("utf-8", "replace"), end="", flush=True)


def run_task(payload: bytes) -> int:
    """Call the function in the new process, and leave its value at the requested place."""
    path, call = pickle.loads(payload)
    try:
        function, args, kwargs = pickle.loads(call)
        result = cloudpickle.dumps((True, function(*args, **kwargs)))
    except BaseException as error:
        result = failed(error)
    unfinished = Path(f"{path}.part")
    unfinished.write_bytes(result)
    unfinished.rename(path)
    return 0
