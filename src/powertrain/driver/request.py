"""A checked request to train: the trainer's arguments as one value that every step of ``fit()`` reads."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any

from powertrain import functions
from powertrain.backend import STATE_FUNCTIONS, STATE_PRELOAD, preload_of
from powertrain.driver.checks import is_of_ray
from powertrain.engine.registry import EngineTraits, traits_of
from powertrain.worker.scripts.mentions import mentions

if TYPE_CHECKING:
    from powertrain.checkpoint.checkpoint import Checkpoint
    from powertrain.config.data import DataConfig
    from powertrain.config.run import RunConfig
    from powertrain.config.scaling import ScalingConfig
    from powertrain.config.validation import ValidationConfig
    from powertrain.engine.local.warm_server import WarmServer
    from powertrain.run.controller import Controller
    from powertrain.run.spec import RunSpec
    from powertrain.storage import Storage

#: Seconds for which storage that does not answer is retried at the end, at most.
_SHIP_TIMEOUT_S = 60.0


@dataclass(frozen=True)
class TrialHooks:
    """Hooks with which a sweep runs a trainer as one of its trials.

    Attributes:
        observer: Shows the run, in place of a terminal of its own.
        stop: Called after each row with the run's name, the report, and True where the row has brought a checkpoint;
            returns the reason to end the run, or "".
        on_controller: Called with the controller before it runs.
        prepare: Called with the run's storage and chain, before earlier checkpoints are searched.
        server: The process that workers are forked from, shared by all trials; None on other engines.
        sweep: The name of the sweep.
        trial_id: The id of the trial.
    """

    observer: Any
    stop: Callable[[str, dict[str, Any], bool], str]
    on_controller: Callable[[Controller], None]
    prepare: Callable[[Storage, Any], None]
    server: WarmServer | None = None
    sweep: str = ""
    trial_id: str = ""


def _as_it_is(spec: RunSpec) -> RunSpec:
    return spec


@dataclass(eq=False, kw_only=True)
class TrainRequest:
    """A user's request to a trainer. Checked when the trainer is made; ``fit()`` changes only ``remarks``."""

    trainer: str
    function: Callable[..., Any]
    config: dict[str, Any] | None
    backend: Any
    scaling: ScalingConfig
    run: RunConfig
    data: DataConfig
    datasets: Mapping[str, Any]
    validation: ValidationConfig | None
    metadata: dict[str, Any]
    begin_from: Checkpoint | None
    #: The engine that was picked, by name.
    engine: str
    #: The arguments as they were given: :meth:`DataParallelTrainer.restore` makes the trainer again from them.
    arguments: dict[str, Any]
    #: The beginning of the run's name where the user gave none; "" for the trainer's.
    name_stem: str = ""
    #: Set by a sweep that runs the trainer as one of its trials.
    trial: TrialHooks | None = None
    #: Messages of every start, and of this one.
    standing_remarks: list[str] = field(default_factory=list)
    remarks: list[str] = field(default_factory=list)
    #: Changes the spec of the run before the controller gets it.
    adjust_spec: Callable[[RunSpec], RunSpec] = _as_it_is

    @property
    def traits(self) -> EngineTraits:
        """Facts about the engine."""
        return traits_of(self.engine)

    @property
    def starts_processes(self) -> bool:
        """True where workers are processes that the engine starts, and not the user's own."""
        return self.traits.owns_processes

    @cached_property
    def preload(self) -> tuple[str, ...]:
        """Modules that workers are likely to need, so that they are loaded once for all of them."""
        entries = preload_of(self.backend)
        saves = "torch" in entries and any(mentions(self.function, name) for name in STATE_FUNCTIONS)
        return (*entries, *STATE_PRELOAD) if saves else entries

    @property
    def user_env(self) -> dict[str, str]:
        """Environment variables of the workers."""
        return dict(self.run.worker_runtime_env.get("env_vars", {}))

    @property
    def streamed_datasets(self) -> dict[str, Any]:
        """Ray datasets that come from Ray while training, by name."""
        if self.data.snapshot:
            return {}
        return {name: given for name, given in self.datasets.items() if is_of_ray(given)}

    @property
    def worker_bounds(self) -> tuple[int, int]:
        """The smallest and the largest number of workers."""
        if self.traits.shares_driver_process:
            return 1, 1
        if self.traits.has_launcher:
            from powertrain.engine.torchrun import world_size

            return world_size(), world_size()
        return self.scaling.min_workers, self.scaling.max_workers

    @property
    def storage_patience_s(self) -> float:
        """Seconds for which storage that does not answer is retried at the end, for everything but checkpoints."""
        return min(_SHIP_TIMEOUT_S, self.run.sync_config.sync_timeout)

    def pickled_function(self) -> bytes:
        """Return the function as it is now: its globals may have changed since the trainer was made."""
        if not self.starts_processes:
            return b""  # every process has its own
        return functions.pickle_function(self.function, self.config)
