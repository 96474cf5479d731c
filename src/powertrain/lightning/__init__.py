"""Lightning's Trainer in the workers of a run: strategies, reports, resuming, tracing.

Works with ``lightning`` and with ``pytorch_lightning``, and imports neither until one of the classes is used. The names
that begin with ``Ray`` are those of ``ray.train.lightning``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from powertrain.lightning.packages import PackageClass, check_installed

check_installed()

from powertrain.lightning.environment import LightningEnvironment  # noqa: E402
from powertrain.lightning.reporting import ReportCallback  # noqa: E402
from powertrain.lightning.resuming import prepare_trainer  # noqa: E402
from powertrain.lightning.strategies import DDPStrategy, DeepSpeedStrategy, FSDPStrategy  # noqa: E402

__all__ = [
    "DDPStrategy",
    "DeepSpeedStrategy",
    "FSDPStrategy",
    "LightningEnvironment",
    "RayDDPStrategy",
    "RayDeepSpeedStrategy",
    "RayFSDPStrategy",
    "RayLightningEnvironment",
    "RayTrainReportCallback",
    "ReportCallback",
    "TraceCallback",
    "TraceMLCallback",
    "prepare_trainer",
]


def _traced(name: str, described: dict[str, Any], packages: list[Any]) -> Any:
    from powertrain.trace.integrations.lightning import TraceCallback as found

    missing = [package.Callback for package in packages if not issubclass(found, package.Callback)]
    return type(name, (found, *missing), described)


class TraceCallback(metaclass=PackageClass, build=_traced):
    """Records where the time of each training step goes, from Lightning's own hooks: give one to the Trainer.

    Its phases are those of every traced run (docs/tracing.md). ``TraceConfig(init_mode="selective", ...)`` chooses what
    is patched beside it.

    Example::

        trainer = lightning.Trainer(strategy=DDPStrategy(), callbacks=[TraceCallback()])
    """

    if TYPE_CHECKING:  # what it stands for is a class of Lightning's

        def __new__(cls, *args: Any, **kwargs: Any) -> Any:
            """Make an instance of the class for the package in use."""


RayDDPStrategy = DDPStrategy
RayFSDPStrategy = FSDPStrategy
RayDeepSpeedStrategy = DeepSpeedStrategy
RayLightningEnvironment = LightningEnvironment
RayTrainReportCallback = ReportCallback
#: TraceML's name.
TraceMLCallback = TraceCallback
