"""Which engine a run uses, and the shape of its workers."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from powertrain.config.scaling import ScalingConfig
from powertrain.errors import ConfigError

if TYPE_CHECKING:
    from powertrain.engine.local.warm_server import WarmServer


def pick_engine(scaling: ScalingConfig) -> str:
    """The engine that was asked for, or the one that applies here."""
    from powertrain.engine.torchrun import is_torchrun

    if scaling.engine == "ray":
        _require_ray()
    if scaling.engine == "torchrun" and not is_torchrun():
        raise ConfigError(
            "ScalingConfig(engine='torchrun') needs torchrun, but this process was not started by it. Start the script "
            "with 'torchrun --nproc-per-node=N script.py', or use engine='local'."
        )
    if scaling.engine != "auto":
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


def _ray_is_chosen(scaling: ScalingConfig) -> bool:
    """True when something but the engine's name says that the run is meant for a Ray cluster."""
    from powertrain.tasks import is_on_ray

    asked = scaling.engine_options.keys() & {"address", "runtime_env"} or scaling.label_selector
    return bool(asked) or is_on_ray()


def _require_ray() -> None:
    import importlib.util

    if importlib.util.find_spec("ray") is None:
        raise ConfigError(
            "This run uses a Ray cluster, and Ray is not installed here. Install it with: "
            "pip install 'powertrain[ray]'. To run on this machine, use ScalingConfig(engine='local')."
        )


#: Whether this process has said that its workers import modules anew.
_has_said_clean = False


def about_clean_workers(server: WarmServer) -> str:
    """What workers do not see, said once in a process; "" where they see all of it."""
    global _has_said_clean
    if server.is_forked or _has_said_clean:
        return ""
    _has_said_clean = True
    return (
        f"Workers import the script's modules anew from their files, because {server.unsafe}: they "
        "do not see what this process has set or patched in modules. Pass settings in train_loop_config."
    )


def custom_resources() -> Mapping[str, float]:
    """Custom resources that ``powertrain.init(resources=...)`` declared."""
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
