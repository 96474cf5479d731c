"""One trial as an ordinary run of a trainer, in the sweep's directory."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from powertrain.config.checks import replace
from powertrain.config.run import RunConfig
from powertrain.driver.request import TrialHooks
from powertrain.errors import ConfigError, PreemptedError
from powertrain.run.events import Warned
from powertrain.trainer import DataParallelTrainer

if TYPE_CHECKING:
    from powertrain.checkpoint.chain import Chain
    from powertrain.engine.local.warm_server import WarmServer
    from powertrain.run.controller import Controller
    from powertrain.storage import Storage
    from powertrain.tune.sweep.grafts import Graft

#: The trainer arguments that a search space may set; other entries are those of ``train_loop_config``.
SECTIONS = ("train_loop_config", "scaling_config", "run_config", "datasets", "dataset_config", "metadata")


@dataclass(frozen=True)
class TrialEnd:
    """The outcome of one start of a trial's run.

    Attributes:
        state: The state of the run: "finished", "stopped", "preempted" or "failed".
        reason: The reason, as text.
        error: The exception of ``fit``.
        is_interrupted: Whether the run was stopped with the driver, and can be resumed.
    """

    state: str
    reason: str = ""
    error: BaseException | None = None
    is_interrupted: bool = False


class TrialRun:
    """One start of a trial.

    Args:
        trainer: The trainer of this trial.
        observer: Shows the run.
        on_report: Called with each row's number, its report, the seconds of this start less those of waiting for slots,
            and whether it includes a checkpoint; returns the reason to stop, or "".
        server: The process that workers are forked from.
        graft: A checkpoint of another trial to continue from.
        sweep: The name of the sweep, for the trial's context.
        trial_id: The id of the trial.
    """

    def __init__(
        self,
        trainer: DataParallelTrainer,
        observer: Any,
        on_report: Callable[[int, Mapping[str, Any], float, bool], str],
        server: WarmServer | None,
        graft: Graft | None = None,
        sweep: str = "",
        trial_id: str = "",
    ) -> None:
        self._trainer, self._on_report, self._graft = trainer, on_report, graft
        self._observer = observer
        self._guard = threading.RLock()  # a signal handler may interrupt the handler of another signal
        self._interrupts = 0
        self._controller: Controller | None = None
        #: The pending action for the controller.
        self._pending: list[Callable[[Controller], None]] = []
        trainer._request.trial = TrialHooks(
            observer, self._stop, self._take_controller, self._prepare, server, sweep, trial_id
        )

    def on_recover(self, call: Callable[[], None]) -> None:
        """Register a function to call when the run has failed and is restarted."""
        self._observer.on_recover = call

    def fit(self) -> TrialEnd:
        """Run to the end. Never raises for an error of a trial."""
        try:
            result = self._trainer.fit()
        except PreemptedError as error:
            return TrialEnd("preempted", str(error), error, is_interrupted=True)
        except KeyboardInterrupt as error:
            return TrialEnd("stopped", str(error), error, is_interrupted=True)
        except Exception as error:
            return TrialEnd("failed", str(error), error)
        finally:
            with self._guard:
                self._controller = None
        return TrialEnd(result.state, result.reason)

    def end_early(self, reason: str) -> None:
        """End the run at its next boundary. Any thread."""
        self._with_controller(lambda controller: controller.end_early(reason))

    def interrupt(self, level: int = 1) -> None:
        """End the run so that it can be resumed: level 1 at its next boundary, 2 immediately. Any thread.

        A repeated level has no effect: two threads may receive the same Ctrl-C.
        """
        with self._guard:
            while self._interrupts < level:
                self._interrupts += 1
                self._with_controller(lambda controller: controller.interrupt())

    def _with_controller(self, act: Callable[[Controller], None]) -> None:
        with self._guard:
            if self._controller is None:
                self._pending.append(act)
            else:
                act(self._controller)

    def _take_controller(self, controller: Controller) -> None:
        with self._guard:
            self._controller = controller
            for act in self._pending:
                act(controller)
            self._pending.clear()

    def _stop(self, _: str, result: dict[str, Any], is_saved: bool) -> str:
        metrics = dict(result)
        row, seconds = int(metrics.pop("training_iteration")), float(metrics.pop("time_total_s"))
        return self._on_report(row, metrics, max(0.0, seconds - self._observer.waited_s), is_saved)

    def _prepare(self, storage: Storage, chain: Chain) -> None:
        if self._graft is None:
            return
        self._graft.apply(storage, chain)
        if self._graft.problem:
            self._observer.event(
                Warned(
                    time=time.time(),
                    message="It was to continue from another trial's checkpoint and continues from its own: of the "
                    f"other one {self._graft.problem}. Report checkpoints at least as often as trials are compared.",
                )
            )


def make_trainer(
    base: DataParallelTrainer, sections: Mapping[str, Any], run_config: RunConfig
) -> DataParallelTrainer:
    """Return a copy of a trainer with the values of a configuration.

    Args:
        base: The trainer of the sweep.
        sections: The values of the trial by trainer argument.
        run_config: The trial's run configuration.

    Raises:
        ConfigError: The trainer rejects a value.
    """
    arguments = dict(base._request.arguments)
    for name, value in sections.items():
        arguments[name] = _merged(arguments.get(name), value)
    arguments["run_config"] = run_config
    arguments["resume_from_checkpoint"] = base._request.begin_from
    return type(base)(**arguments)


def split_sections(config: Mapping[str, Any]) -> dict[str, Any]:
    """Split a configuration by trainer argument.

    Args:
        config: With sections such as "train_loop_config", or flat, which is then the ``train_loop_config``.

    Raises:
        ConfigError: It has both, or a section that cannot be searched.
    """
    named = [key for key in config if key in SECTIONS]
    if not named:
        return {"train_loop_config": dict(config)}
    others = sorted(set(config) - set(named))
    if others:
        raise ConfigError(
            f"param_space has both sections of the trainer ({', '.join(named)}) and entries outside of them "
            f"({', '.join(others)}). Put those into 'train_loop_config'."
        )
    if "run_config" in named:
        raise ConfigError("param_space['run_config'] cannot be searched. Give it to Tuner(run_config=...).")
    return {key: config[key] for key in named}


def _merged(given: Any, drawn: Any) -> Any:
    """Merge the drawn values into a trainer argument: dicts and configs keep their other entries."""
    if isinstance(drawn, Mapping) and isinstance(given, Mapping):
        return {**given, **drawn}
    if isinstance(drawn, Mapping) and given is not None and hasattr(given, "__dataclass_fields__"):
        return replace(given, **drawn)
    return drawn
