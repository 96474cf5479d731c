"""TraceML's names for a traced Ray Train trainer.

Every trainer of Powertrain is traced, so there is little to them: ``TraceMLRayConfig`` is
:class:`~powertrain.config.trace.TraceConfig`, and ``traceml_config`` is ``RunConfig(trace=...)``.

Needs no Ray: like any trainer, ``TraceMLTorchTrainer`` runs on this machine, or on the cluster that ``powertrain.init``
has connected to.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from powertrain.config.checks import as_config, replace
from powertrain.config.run import RunConfig
from powertrain.config.trace import TraceConfig
from powertrain.errors import ConfigError

if TYPE_CHECKING:
    from powertrain.torch.trainer import TorchTrainer

    class TraceMLTorchTrainer(TorchTrainer):
        """The class that :func:`_trainer_class` returns."""

        def __init__(
            self, train_loop_per_worker: Any, *, traceml_config: TraceConfig | None = None, **arguments: Any
        ) -> None: ...


__all__ = ["TraceMLRayConfig", "TraceMLTorchTrainer"]

TraceMLRayConfig = TraceConfig


def with_trace(run_config: RunConfig | None, traceml_config: TraceConfig | None) -> RunConfig:
    """Return the run's config with this tracing. Raises ConfigError if the two contradict each other."""
    run: RunConfig = as_config(run_config, RunConfig, "run_config")
    if traceml_config is None:
        return run
    trace: TraceConfig = as_config(traceml_config, TraceConfig, "traceml_config")
    if run.trace not in (TraceConfig(), trace):
        raise ConfigError(
            f"traceml_config={trace!r} and RunConfig(trace={run.trace!r}) contradict each other. Give "
            "one of them."
        )
    return replace(run, trace=trace)


def _trainer_class() -> type[TorchTrainer]:
    """Return the trainer's class, loaded on first use because trainers are a layer above tracing."""
    from powertrain.torch.trainer import TorchTrainer

    class TraceMLTorchTrainer(TorchTrainer):
        """:class:`~powertrain.torch.TorchTrainer` with one more argument, ``traceml_config``."""

        __module__, __qualname__ = __name__, "TraceMLTorchTrainer"

        def __init__(
            self,
            train_loop_per_worker: Any,
            *,
            traceml_config: TraceConfig | None = None,
            run_config: RunConfig | None = None,
            **arguments: Any,
        ) -> None:
            super().__init__(
                train_loop_per_worker, run_config=with_trace(run_config, traceml_config), **arguments
            )

    return TraceMLTorchTrainer


def __getattr__(name: str) -> Any:
    if name != "TraceMLTorchTrainer":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    globals()[name] = _trainer_class()
    return globals()[name]
