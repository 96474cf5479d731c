"""``init``, ``remote`` and ``get``: one function in one process of the engine, as in Ray.

On one machine a task is forked from the warm server, runs the function, and sends its value back through a file that
only this user can read. Nothing needs to be started first; ``init`` exists so that scripts written for Ray run, and to
declare custom resources.

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
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import cloudpickle

from powertrain.engine import base
from powertrain.errors import ConfigError, EngineError, ResourceError, TaskError

ENTRY = "powertrain.tasks:run_task"

#: What ``ray.init`` takes beyond the names below. They describe a cluster to start, and there is none to start here.
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

#: Of those, what describes the machine that Ray would be started on: nodes of a running cluster have been described.
_OPTIONS_OF_A_MACHINE = frozenset({"num_cpus", "num_gpus", "labels", "object_store_memory"})
#: What ``ray.remote`` takes for a function. On one machine only the first line means something.
_OPTIONS_HERE = frozenset({"num_cpus", "num_gpus", "resources"})
_OPTIONS_OF_A_TASK = _OPTIONS_HERE | {
    *(
        "memory",
        "accelerator_type",
        "label_selector",
        "fallback_strategy",
        "scheduling_strategy",
        "runtime_env",
    ),
    *("name", "num_returns", "max_calls", "max_retries", "retry_exceptions", "object_store_memory"),
    *("placement_group", "placement_group_bundle_index", "placement_group_capture_child_tasks"),
    *("enable_task_events", "_labels", "_generator_backpressure_num_objects", "_num_objects_per_yield"),
}

_lock = threading.Lock()
_initialized = False
#: Whether ``init`` was called for a Ray cluster, and whether it is what connected this process to it.
_on_ray = _connected_here = False
#: True when ``init`` was told to stay on this machine, whatever the environment says.
_stays_here = False
_resources: dict[str, float] = {}


def init(
    address: str | None = None,
    *,
    resources: Mapping[str, float] | None = None,
    ignore_reinit_error: bool = False,
    **options: Any,
) -> None:
    """Accepts what ``ray.init`` accepts. With an address, or where ``RAY_ADDRESS`` names one, runs and tasks go to that
    Ray cluster; without one there is nothing to connect to on one machine. ``"local"`` stays on this machine.

    ``resources`` declares custom resources of this machine. Other options describe a cluster to start; there is none
    to start here, so they are accepted and have no part in a local run. A name that ``ray.init`` does not have is
    refused.
    """
    global _initialized, _on_ray, _connected_here, _stays_here
    if unknown := sorted(options.keys() - _OPTIONS_OF_A_CLUSTER):
        raise ConfigError(
            f"init() has no option {', '.join(map(repr, unknown))}. It takes what ray.init takes; check the spelling."
        )
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
    """Custom resources as all processes of the user can be told of them; refuses what is no amount."""
    for name, amount in resources.items():
        if name in ("CPU", "GPU"):
            raise ConfigError(
                f"init(resources={{{name!r}: {amount!r}}}) would change nothing: the {name}s of this machine are "
                "counted by themselves. Declare only custom resources."
            )
        is_number = isinstance(amount, (int, float)) and not isinstance(amount, bool)
        if not is_number or not math.isfinite(amount) or amount < 0:
            raise ConfigError(
                f"init(resources={{{name!r}: {amount!r}}}) is no amount. Give a finite number that is not below 0."
            )
    return {name: float(amount) for name, amount in resources.items()}


def _refuse_description_of_a_machine(options: Mapping[str, Any]) -> None:
    names = _OPTIONS_OF_A_MACHINE | {"resources"}
    given = sorted(name for name, value in options.items() if name in names and value is not None)
    if given:
        raise ConfigError(
            f"init() was given {', '.join(given)} together with a Ray cluster that runs already. Its nodes have said "
            "what they have when they were started ('ray start --num-gpus=...'). Remove this from init()."
        )


def shutdown() -> None:
    """Forget what ``init`` declared, and leave the cluster if it is ``init`` that connected to it."""
    global _initialized, _on_ray, _connected_here, _stays_here
    with _lock:
        if _connected_here and (ray := sys.modules.get("ray")) is not None:
            ray.shutdown()
        _initialized = _on_ray = _connected_here = _stays_here = False
        _resources.clear()


def connect_to_ray(address: str | None = None, **options: Any) -> None:
    """Make this process a driver of a Ray cluster, unless it is one. Raises where that cannot be."""
    try:
        from powertrain.engine.ray_client import connect
    except ModuleNotFoundError as error:
        if error.name != "ray":
            raise
        raise ConfigError(
            "A Ray cluster was asked for, and Ray is not installed here. Install it with: pip install "
            "'powertrain[ray]'."
        ) from None
    connect(address, **options)


def is_on_ray() -> bool:
    """True when this process is connected to a Ray cluster, or its environment names one."""
    named = os.environ.get("RAY_ADDRESS", "") not in ("", "local")
    return _is_connected() or (named and not _stays_here)


def _is_connected() -> bool:
    """Whether Ray is initialised in this process, by whomever. Looking does not load Ray."""
    ray = sys.modules.get("ray")
    return ray is not None and bool(getattr(ray, "is_initialized", bool)())


def _ray() -> Any:
    """The module ``ray``, in a process that is connected to a cluster by then."""
    connect_to_ray()
    return sys.modules["ray"]


def _given(options: Mapping[str, Any]) -> dict[str, Any]:
    """Options of a connection, as ``ray.init`` takes them beside an address."""
    return {name: value for name, value in options.items() if value is not None}


def is_initialized() -> bool:
    """True after ``init``, and in a process that is connected to a Ray cluster by other means."""
    return _is_connected() or (_initialized and not _on_ray)


def declared_resources() -> dict[str, float]:
    """Custom resources that ``init`` declared."""
    return dict(_resources)


class RemoteFunction:
    """A function that runs in a process of its own: ``f.remote(...)`` starts it, :func:`get` waits for its value."""

    def __init__(self, function: Callable[..., Any], options: Mapping[str, Any]) -> None:
        """Raises :class:`ConfigError` for what ``ray.remote`` does not take."""
        if unknown := sorted(options.keys() - _OPTIONS_OF_A_TASK):
            raise ConfigError(
                f"remote() has no option {', '.join(map(repr, unknown))}. It takes num_cpus, num_gpus and resources, "
                "and on a Ray cluster what ray.remote takes for a function; check the spelling."
            )
        self._function, self._options = function, dict(options)
        #: The same as a remote function of Ray's, once it has been needed.
        self._of_ray: Any = None
        self.__name__ = getattr(function, "__name__", "task")
        self.__doc__ = function.__doc__

    def remote(self, *args: Any, **kwargs: Any) -> Any:
        """Start it; returns at once, with an :class:`ObjectRef` or, on a cluster, with what Ray returns."""
        if is_on_ray():
            return self._as_rays(_ray()).remote(*args, **kwargs)
        shape = _shape(**self._options)
        return ObjectRef(cloudpickle.dumps((self._function, args, kwargs)), shape, self.__name__)

    def options(self, **options: Any) -> RemoteFunction:
        """The same function with other options in place of those it has, and the rest of them."""
        return RemoteFunction(self._function, {**self._options, **options})

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_of_ray": None}  # whoever gets it makes its own

    def _as_rays(self, ray: Any) -> Any:
        if self._of_ray is None:  # it is sent to the cluster once, not with each call
            self._of_ray = (ray.remote(**self._options) if self._options else ray.remote)(self._function)
        return self._of_ray

    def __call__(self, *_: Any, **__: Any) -> Any:
        raise TypeError(
            f"{self.__name__} is a remote function: call {self.__name__}.remote(...) and powertrain.get() its value."
        )


def remote(*arguments: Any, **options: Any) -> Any:
    """Decorator: ``@remote`` or ``@remote(num_gpus=1, resources={...})``."""
    if len(arguments) == 1 and callable(arguments[0]) and not options:
        return _remote_function(arguments[0], {})
    if arguments:
        raise ConfigError("remote() takes only keyword options, such as @remote(num_gpus=1).")
    return lambda function: _remote_function(function, options)


def _remote_function(function: Callable[..., Any], options: Mapping[str, Any]) -> RemoteFunction:
    if isinstance(function, type):
        raise ConfigError(
            f"remote() was given the class {function.__name__}, and it runs functions only. For an actor on a Ray "
            "cluster use ray.remote."
        )
    return RemoteFunction(function, options)


def get(refs: Any, *, timeout: float | None = None) -> Any:
    """The value of a task, or the values of several: what ``remote`` has returned, Ray's own references among it.

    ``timeout`` is in seconds, for all of them together. Raises :class:`~powertrain.errors.TaskError` if one failed,
    ``TimeoutError`` if one takes longer.
    """
    if not isinstance(refs, Sequence):
        return _values([refs], timeout)[0]
    return _values(refs, timeout)


def _values(refs: Sequence[Any], timeout: float | None) -> list[Any]:
    until = None if timeout is None else time.monotonic() + timeout
    fetched = iter(_values_from_ray([ref for ref in refs if not isinstance(ref, ObjectRef)], timeout))
    return [
        ref.result(None if until is None else max(0.0, until - time.monotonic()))
        if isinstance(ref, ObjectRef)
        else next(fetched)
        for ref in refs
    ]


def _values_from_ray(refs: Sequence[Any], timeout: float | None) -> list[Any]:
    """What Ray's references stand for, all fetched at once."""
    if not refs:
        return []
    ray = sys.modules.get("ray")
    strange = [ref for ref in refs if ray is None or not isinstance(ref, ray.ObjectRef)]
    if strange:
        raise TypeError(
            f"get() takes what remote() has returned, or a list of that, and was given a {type(strange[0]).__name__}."
        )
    assert ray is not None
    try:
        return list(ray.get(list(refs), timeout=timeout))
    except ray.exceptions.GetTimeoutError:
        raise TimeoutError(f"A task on the Ray cluster has not ended within {timeout:g} s.") from None
    except ray.exceptions.RayTaskError as error:
        raise TaskError(f"A task on the Ray cluster failed:\n{error}") from error.cause
    except ray.exceptions.RayError as error:
        raise TaskError(f"A task on the Ray cluster did not end well: {error}") from error


class ObjectRef:
    """A value that is being made."""

    def __init__(self, call: bytes, shape: base.SlotShape, name: str) -> None:
        from powertrain.engine.local import LocalEngine, make_runtime_directory, warm_up

        self._name = name
        self._done = threading.Event()
        self._problem = ""
        #: What it waits for before it can start, in words.
        self._waits_for = ""
        self._cwd = os.getcwd()  # of now: it may have to wait, and the script goes on
        self._result: bytes | None = None
        self._engine = LocalEngine(warm_up(), declared_resources())
        self._engine.start(self._event, self._print)
        self._directory = make_runtime_directory(f"task-{name}")
        self._call = cloudpickle.dumps((str(self._directory / "value"), call))
        try:
            self._engine.request(1, shape)
        except (ResourceError, EngineError):
            self._finish()
            raise

    def result(self, timeout: float | None = None) -> Any:
        """Wait for the value and open it."""
        if not self._done.wait(timeout):
            why = f": it is {self._waits_for}" if self._waits_for else ""
            raise TimeoutError(f"{self._name} has not ended within {round(timeout or 0.0, 3):g} s{why}.")
        if self._result is None:
            raise TaskError(f"{self._name} {self._problem}.")
        ok, value = pickle.loads(self._result)
        if not ok:
            raise TaskError(f"{self._name} failed:\n{value}")
        return value

    def _event(self, event: base.EngineEvent) -> None:
        if isinstance(event, base.Waiting):
            self._waits_for = event.reason
        elif isinstance(event, base.Granted):
            self._waits_for, slot = "", event.slots[0]
            env: dict[str, str | None] = {}
            if slot.gpus:
                env["CUDA_VISIBLE_DEVICES"] = ",".join(slot.gpus)
            self._engine.fork(
                slot,
                base.ProcessSpec(entry=ENTRY, payload=self._call, env=env, cwd=self._cwd, title=self._name),
            )
        elif isinstance(event, base.Exited):
            self._problem = base.describe_exit(event)[1]
            threading.Thread(target=self._finish, name="powertrain-task", daemon=True).start()
        elif isinstance(event, base.SlotLost):
            self._problem = f"was lost: {event.reason}"
            threading.Thread(target=self._finish, name="powertrain-task", daemon=True).start()

    def _finish(self) -> None:
        from powertrain.engine.local import remove_runtime_directory

        value = self._directory / "value"
        if value.exists():
            self._result = value.read_bytes()
        self._engine.close()
        remove_runtime_directory(self._directory)
        self._done.set()

    def _print(self, _: base.Slot, data: bytes) -> None:
        print(data.decode("utf-8", "replace"), end="", flush=True)


def run_task(payload: bytes) -> int:
    """In the new process: call the function and leave its value where it was asked for."""
    path, call = pickle.loads(payload)
    try:
        function, args, kwargs = pickle.loads(call)
        result = cloudpickle.dumps((True, function(*args, **kwargs)))
    except BaseException:
        result = cloudpickle.dumps((False, traceback.format_exc()))
    unfinished = Path(f"{path}.part")
    unfinished.write_bytes(result)
    unfinished.rename(path)
    return 0


def _shape(
    num_cpus: float | None = None,
    num_gpus: float | None = None,
    resources: Mapping[str, float] | None = None,
    **options: Any,
) -> base.SlotShape:
    if options:
        raise ConfigError(
            f"The option {', '.join(map(repr, options))} of remote() means something on a Ray cluster only, and this "
            "process is connected to none. Call init(address=...) first, or keep to num_cpus, num_gpus and resources."
        )
    return base.SlotShape(
        cpus=num_cpus if num_cpus is not None else 1.0,
        gpus=num_gpus or 0,
        custom=dict(resources or {}),
        explicit=num_cpus is not None,
    )
