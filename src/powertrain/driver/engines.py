"""Which engine a run uses, and the shape of its workers."""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Mapping
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

from powertrain import functions
from powertrain.backend import BackendConfig
from powertrain.config.checks import did_you_mean
from powertrain.config.scaling import ScalingConfig
from powertrain.driver.datasets import function_here
from powertrain.engine.registry import EngineRun, provider_of, traits_of
from powertrain.errors import ConfigError

if TYPE_CHECKING:
    from powertrain.data.plan.prepared import Prepared
    from powertrain.driver.request import TrainRequest
    from powertrain.engine.base import Engine
    from powertrain.engine.local.warm_server import WarmServer
    from powertrain.storage import Storage


def pick_engine(scaling: ScalingConfig) -> str:
    """Return the requested engine, or the one that applies here."""
    from powertrain.engine.torchrun import is_torchrun

    if scaling.engine == "ray":
        _require_ray()
    if scaling.engine == "torchrun" and not is_torchrun():
        raise ConfigError(
            "ScalingConfig(engine='torchrun') needs torchrun, but this process was not started by it. Start the script "
            "with 'torchrun --nproc-per-node=N script.py', or use engine='local'."
        )
    if scaling.engine != "auto":
        _check_options(scaling)
        return scaling.engine
    if is_torchrun():
        return "torchrun"
    if scaling.max_workers == 0:
        return "inline"
    if _ray_is_chosen(scaling):
        _require_ray()
        return "ray"
    if sys.platform != "linux":
        raise ConfigError(
            f"ScalingConfig(num_workers={scaling.num_workers}) needs worker processes, which this version starts on "
            f"Linux only; this is {sys.platform}. Use num_workers=0 to train in this process, or torchrun."
        )
    return "local"


def _check_options(scaling: ScalingConfig) -> None:
    """Refuse options that the engine does not know. ``ScalingConfig`` has done so for the engines of this package."""
    known = traits_of(scaling.engine).options
    foreign = [name for name in scaling.engine_options if name not in known]
    if foreign:
        raise ConfigError(
            f"The engine {scaling.engine!r} has no option {foreign[0]!r}. {did_you_mean(foreign[0], known)}Its options "
            f"are: {', '.join(known) or 'none'}. Correct ScalingConfig(engine_options=...)."
        )


def _ray_is_chosen(scaling: ScalingConfig) -> bool:
    """Return True when something other than the engine's name selects a Ray cluster."""
    from powertrain.tasks import is_on_ray

    options = scaling.engine_options.keys() & {"address", "runtime_env"} or scaling.label_selector
    return bool(options) or is_on_ray()


def _require_ray() -> None:
    import importlib.util

    if importlib.util.find_spec("ray") is None:
        raise ConfigError(
            "This run uses a Ray cluster, and Ray is not installed here. Install it with: "
            "pip install 'powertrain[ray]'. To run on this machine, use ScalingConfig(engine='local')."
        )


#: True once this process has warned that its workers import modules anew.
_has_said_clean = False


def about_clean_workers(server: WarmServer) -> str:
    """Return a warning about state that workers do not see, once in a process; "" where they see all of it."""
    global _has_said_clean
    if server.is_forked or _has_said_clean:
        return ""
    _has_said_clean = True
    return (
        f"Workers import the script's modules anew from their files, because {server.unsafe}: they "
        "do not see settings or patches that this process has made in modules. Pass settings in train_loop_config."
    )


def custom_resources() -> Mapping[str, float]:
    """Return custom resources that ``powertrain.init(resources=...)`` declared."""
    from powertrain import tasks

    return tasks.declared_resources()


def shape(scaling: ScalingConfig) -> Any:
    from powertrain.engine.base import SlotShape

    amounts = scaling.resources
    custom = {name: amount for name, amount in amounts.items() if name not in ("CPU", "GPU")}
    return SlotShape(
        cpus=amounts.get("CPU", 0.0),
        gpus=amounts.get("GPU", 0.0),
        custom=custom,
        explicit=scaling.explicit_resources,
        placement=scaling.placement_strategy,
        gang=not scaling.is_elastic,
        labels=_labels(scaling.label_selector),
    )


def _labels(selector: Any) -> tuple[Mapping[str, str], ...]:
    if selector is None:
        return ()
    return (selector,) if isinstance(selector, Mapping) else tuple(selector)


def make_engine(
    request: TrainRequest,
    name: str,
    storage: Storage,
    swept: list[str],
    datasets: Mapping[str, Prepared],
    stack: ExitStack,
    server: WarmServer | None,
) -> Engine:
    """``swept`` are directories to remove should this process be killed; ``datasets`` are for a rank in it."""
    if request.engine == "ray":
        return _make_ray_engine(request, name, storage, swept)
    if server is not None:
        from powertrain.engine.local.engine import LocalEngine

        server.sweep_if_orphaned(swept[0], [path for path in swept if path])
        stack.callback(server.sweep_if_orphaned, swept[0], [])
        return LocalEngine(server, custom_resources(), run=name)
    function = function_here(request, lambda _: datasets)
    if request.engine == "inline":
        from powertrain.engine.inline import InlineEngine

        return InlineEngine(function, custom_resources())
    if request.engine == "torchrun":
        from powertrain.engine.torchrun import TorchrunEngine

        return TorchrunEngine(function, request.user_env)
    run = EngineRun(name, swept[0], request.scaling.engine_options, custom_resources())
    return provider_of(request.engine).make(run)


def prepare_engine(request: TrainRequest) -> None:
    """Start the slow preparations for ``fit()`` early: join the cluster, warm a server."""
    if request.engine == "ray":
        from powertrain.tasks import connect_to_ray

        connect_to_ray(request.scaling.engine_options.get("address"))
    elif request.engine == "local":
        from powertrain.engine.local.warm_server import prepare_server

        prepare_server(request.preload)


def count_trials_with_room(request: TrainRequest, workers: int) -> int:
    """Return how many trials with so many workers fit on the machine or the cluster."""
    scaling = request.scaling
    if request.engine == "ray":
        from powertrain.engine.ray.client import cluster_resources

        needed = {name: amount * workers for name, amount in scaling.resources.items()}
        return count_fitting(cluster_resources(), needed)
    from powertrain.engine import resources

    machine, wanted = resources.detect(custom_resources()), shape(scaling)
    slots = resources.slots_free(machine, wanted, ())
    if wanted.explicit and wanted.cpus:  # the requested number shares the cores
        return slots // workers
    return min(slots, machine.cpus * workers) // workers


def count_fitting(there: Mapping[str, float], needed: Mapping[str, float]) -> int:
    """Return how often some amounts fit into the available ones. Amounts of zero need nothing."""
    fits = [math.floor(there.get(name, 0.0) / amount) for name, amount in needed.items() if amount > 0]
    return min(fits) if fits else max(1, int(there.get("CPU", 1)))


def enter_server(request: TrainRequest, stack: ExitStack) -> WarmServer | None:
    """Return the process that workers of this run are forked from, until the run ends; None on other engines."""
    if request.engine != "local":
        return None
    if request.trial is not None and request.trial.server is not None:
        return request.trial.server
    from powertrain.engine.local.warm_server import server_of_run

    return stack.enter_context(server_of_run(request.preload))


def _make_ray_engine(request: TrainRequest, name: str, storage: Storage, directories: list[str]) -> Engine:
    """Return an engine on the cluster that this process is connected to."""
    from powertrain.engine.ray.client import uploaded
    from powertrain.engine.ray.engine import RayEngine
    from powertrain.engine.ray.node.files import LAUNCH, SCRIPT
    from powertrain.engine.ray.options import RayOptions
    from powertrain.engine.ray.streams import RankStream

    runtime, _, _, blocks = directories
    options = RayOptions(
        run=name,
        runtime_dir=runtime,
        directories=directories[1:],
        modules={LAUNCH: os.getcwd(), SCRIPT: functions.script_directory()},
        import_path=[os.path.abspath(entry) for entry in sys.path if isinstance(entry, str)],
        copied=[os.path.join(blocks, "rows")] if blocks else [],
        runtime_env=uploaded(request.scaling.engine_options.get("runtime_env") or {}),
        trainer_resources=request.scaling.trainer_resources or {},
        preload=request.preload,
        streams=[
            RankStream(name, given, request.data.is_split(name))
            for name, given in request.streamed_datasets.items()
        ],
    )
    return RayEngine(options, storage)


def check_limits_of_run(request: TrainRequest) -> None:
    """Refuse a number of workers that the limits of this machine do not allow."""
    from powertrain.engine import resources
    from powertrain.engine.system_limits import check_limits

    if request.traits.shares_driver_process:
        return
    least, most = request.worker_bounds
    workers = least
    if request.engine == "local" and most > least:  # it grows as far as this machine lets it
        machine = resources.detect(custom_resources())
        workers = max(least, min(most, resources.slots_free(machine, shape(request.scaling), ())))
    check_limits(
        f"ScalingConfig(num_workers={request.scaling.num_workers})",
        workers,
        connected=type(request.backend) is not BackendConfig,
        starts_processes=request.starts_processes and not request.traits.spans_nodes,
    )


def check_machine(request: TrainRequest) -> None:
    """Refuse a request that this machine can never hold, before anything is started."""
    from powertrain.engine import resources

    machine = resources.detect(custom_resources())
    count = request.worker_bounds[0]
    if request.traits.has_launcher:  # which may have started others on other machines
        from powertrain.engine.torchrun import local_world_size

        count = local_world_size()
    resources.check(machine, count, shape(request.scaling))
