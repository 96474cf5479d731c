"""``init``, ``remote`` and ``get``: one function in one process of the engine, as in Ray.

A task is forked from the warm server, runs the function, and sends its value back through a file that only this user
can read. Nothing needs to be started first; ``init`` exists so that scripts written for Ray run, and to declare custom
resources.
"""

from __future__ import annotations

import os
import pickle
import sys
import threading
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import cloudpickle

from powertrain.engine import base
from powertrain.errors import ConfigError, ResourceError, TaskError

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

_lock = threading.Lock()
_initialized = False
#: True when ``init`` connected this process to a Ray cluster.
_on_ray = False
_resources: dict[str, float] = {}


def init(
    address: str | None = None,
    *,
    resources: Mapping[str, float] | None = None,
    ignore_reinit_error: bool = False,
    **options: Any,
) -> None:
    """Accepts what ``ray.init`` accepts. With an address, runs and tasks go to that Ray cluster; without one there is
    nothing to connect to on one machine.

    ``resources`` declares custom resources of this machine. Other options describe a cluster to start; there is none
    to start here, so they are accepted and have no part in a local run. A name that ``ray.init`` does not have is
    refused.
    """
    global _initialized, _on_ray
    if unknown := sorted(options.keys() - _OPTIONS_OF_A_CLUSTER):
        raise ConfigError(
            f"init() has no option {', '.join(map(repr, unknown))}. It takes what ray.init takes; check the spelling."
        )
    with _lock:
        if _initialized and not ignore_reinit_error:
            raise ConfigError(
                "init() was called twice. Call shutdown() first, or pass ignore_reinit_error=True."
            )
        if address not in (None, "local"):
            connect_to_ray(address, **_given(options))
            _on_ray = True
        _initialized = True
        _resources.update(resources or {})


def shutdown() -> None:
    """Forget what ``init`` declared, and leave the cluster that it connected to."""
    global _initialized, _on_ray
    with _lock:
        if _on_ray and (ray := sys.modules.get("ray")) is not None:
            ray.shutdown()
        _initialized = _on_ray = False
        _resources.clear()


def connect_to_ray(address: str | None = None, **options: Any) -> None:
    """Make this process a driver of a Ray cluster, unless it is one. Raises where that cannot be."""
    try:
        from powertrain.engine.ray import connect
    except ModuleNotFoundError as error:
        if error.name != "ray":
            raise
        raise ConfigError(
            "A Ray cluster was asked for, and Ray is not installed here. Install it with: pip install "
            "'powertrain[ray]'."
        ) from None
    connect(address, **options)


def is_on_ray() -> bool:
    """True when this process is a driver of a Ray cluster, or its environment names one."""
    ray = sys.modules.get("ray")
    connected = ray is not None and bool(getattr(ray, "is_initialized", bool)())
    return connected or bool(os.environ.get("RAY_ADDRESS"))


def _given(options: Mapping[str, Any]) -> dict[str, Any]:
    """Options of a connection, as ``ray.init`` takes them beside an address."""
    return {name: value for name, value in options.items() if value is not None}


def is_initialized() -> bool:
    return _initialized


def declared_resources() -> dict[str, float]:
    """Custom resources that ``init`` declared."""
    return dict(_resources)


class RemoteFunction:
    """A function that runs in a process of its own: ``f.remote(...)`` starts it, :func:`get` waits for its value."""

    def __init__(self, function: Callable[..., Any], shape: base.SlotShape) -> None:
        self._function, self._shape = function, shape
        self.__name__ = getattr(function, "__name__", "task")
        self.__doc__ = function.__doc__

    def remote(self, *args: Any, **kwargs: Any) -> ObjectRef:
        """Start it; returns at once."""
        return ObjectRef(cloudpickle.dumps((self._function, args, kwargs)), self._shape, self.__name__)

    def options(self, **options: Any) -> RemoteFunction:
        """The same function with other resources."""
        return RemoteFunction(self._function, _shape(**options))

    def __call__(self, *_: Any, **__: Any) -> Any:
        raise TypeError(
            f"{self.__name__} is a remote function: call {self.__name__}.remote(...) and powertrain.get() its value."
        )


def remote(*arguments: Any, **options: Any) -> Any:
    """Decorator: ``@remote`` or ``@remote(num_gpus=1, resources={...})``."""
    if len(arguments) == 1 and callable(arguments[0]) and not options:
        return RemoteFunction(arguments[0], _shape())
    if arguments:
        raise ConfigError("remote() takes only keyword options, such as @remote(num_gpus=1).")
    shape = _shape(**options)
    return lambda function: RemoteFunction(function, shape)


def get(refs: ObjectRef | Sequence[ObjectRef], *, timeout: float | None = None) -> Any:
    """The value of a task, or the values of several. Raises :class:`~powertrain.errors.TaskError` if one failed."""
    if isinstance(refs, ObjectRef):
        return refs.result(timeout)
    return [ref.result(timeout) for ref in refs]


class ObjectRef:
    """A value that is being made."""

    def __init__(self, call: bytes, shape: base.SlotShape, name: str) -> None:
        from powertrain.engine.local import LocalEngine, make_runtime_directory, warm_up

        self._name = name
        self._done = threading.Event()
        self._problem = ""
        self._result: bytes | None = None
        self._engine = LocalEngine(warm_up(), declared_resources())
        self._engine.start(self._event, self._print)
        self._directory = make_runtime_directory(f"task-{name}")
        self._call = cloudpickle.dumps((str(self._directory / "value"), call))
        try:
            self._engine.request(1, shape)
        except ResourceError:
            self._finish()
            raise

    def result(self, timeout: float | None = None) -> Any:
        """Wait for the value and open it."""
        if not self._done.wait(timeout):
            raise TimeoutError(f"{self._name} has not ended within {timeout:g} s.")
        if self._result is None:
            raise TaskError(f"{self._name} {self._problem}.")
        ok, value = pickle.loads(self._result)
        if not ok:
            raise TaskError(f"{self._name} failed:\n{value}")
        return value

    def _event(self, event: base.EngineEvent) -> None:
        if isinstance(event, base.Granted):
            slot = event.slots[0]
            env: dict[str, str | None] = {}
            if slot.gpus:
                env["CUDA_VISIBLE_DEVICES"] = ",".join(slot.gpus)
            self._engine.fork(
                slot,
                base.ProcessSpec(entry=ENTRY, payload=self._call, env=env, cwd=os.getcwd(), title=self._name),
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
    num_gpus: float = 0,
    resources: Mapping[str, float] | None = None,
    **options: Any,
) -> base.SlotShape:
    if options:
        raise ConfigError(
            f"remote() has no option {', '.join(map(repr, options))} here. It takes num_cpus, num_gpus and resources."
        )
    return base.SlotShape(
        cpus=num_cpus if num_cpus is not None else 1.0,
        gpus=num_gpus,
        custom=dict(resources or {}),
        explicit=num_cpus is not None,
    )
