"""Every exception Powertrain raises on purpose.

::

    PowertrainError
    ├── ConfigError            a wrong value, an unknown field, a contradictory pair (also a ValueError)
    │   └── TrainFunctionError   the training function has a wrong shape or cannot be pickled
    ├── ResourceError          the machine does not have what was asked for
    ├── StorageError           the storage path cannot be read, written or understood
    │   ├── RunInUseError        another live process holds this run
    │   └── FencedError          another controller has taken the run over
    ├── CheckpointError        a checkpoint is missing, incomplete or not what it claims to be
    │   └── OtherVersionError    it is whole, and only another version of Powertrain can read it
    ├── DataError              data is missing, broken or of the wrong form, or a map failed (also a ValueError)
    │   └── DataChangedError     it is not the data that a checkpoint's position belongs to
    ├── ReportError            ``report`` was handed something it cannot keep (also a ValueError)
    ├── OutsideWorkerError     a worker-only function was called elsewhere (also a RuntimeError)
    ├── WireError              a message could not be understood or was not authenticated
    ├── CollectiveError        ranks that should meet cannot (also a RuntimeError)
    ├── EngineError            processes could not be started or controlled
    ├── TaskError              a function started with ``powertrain.remote`` failed
    ├── WorkerFailedError      why one rank ended badly; never raised by itself
    ├── TrainingFailedError    ``fit`` ended in failure; carries ``worker_failures`` and the partial ``result``
    └── PreemptedError         ``fit`` ended because the run must leave; it can be resumed (also a SystemExit)

Each message is written for the person who reads it: what happened, with its values; why, where that is
known; what to do next.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping


class PowertrainError(Exception):
    """The root of everything Powertrain raises on purpose."""


class ConfigError(PowertrainError, ValueError):
    """A configuration value cannot be used."""


class TrainFunctionError(ConfigError):
    """The training function cannot be called or cannot travel to a worker."""


class ResourceError(PowertrainError):
    """The machine or cluster does not have what was asked for."""


class StorageError(PowertrainError):
    """The storage path cannot be used."""


class RunInUseError(StorageError):
    """Another live process holds the run of this name and path."""


class FencedError(StorageError):
    """Another controller has taken the run over, so this one can commit nothing any more."""


class CheckpointError(PowertrainError):
    """A checkpoint is missing, incomplete or not what it claims to be."""


class OtherVersionError(CheckpointError):
    """A checkpoint was written by a version of Powertrain whose form this one does not know."""


class DataError(PowertrainError, ValueError):
    """Data is missing, broken or of the wrong form, or a function that was to be run on it failed."""


class DataChangedError(DataError):
    """The data is not what it was when the position in it was saved."""


class ReportError(PowertrainError, ValueError):
    """``report`` was handed something it cannot keep."""


class OutsideWorkerError(PowertrainError, RuntimeError):
    """A function that only makes sense inside a training worker was called elsewhere."""


class WireError(PowertrainError):
    """A message could not be understood or was not authenticated."""


class EngineError(PowertrainError):
    """Processes could not be started or controlled."""


class CollectiveError(PowertrainError, RuntimeError):
    """Ranks that should meet at a barrier or broadcast cannot: one has ended, or they called different things."""


class TaskError(PowertrainError):
    """A function started with ``powertrain.remote`` failed; the message holds its traceback."""


class WorkerFailedError(PowertrainError):
    """Why one rank ended badly, as an exception: its text is the rank's traceback, or how its process died.

    ``failure`` is the :class:`~powertrain.run.events.WorkerFailure`, whose fields (``rank``, ``kind``, ``summary``,
    ``error_type``, ``file``, ``line``, ...) can also be read from the exception itself.
    """

    def __init__(self, failure: Any) -> None:
        super().__init__(f"{failure.summary}\n{failure.traceback}".rstrip())
        self.failure = failure

    def __getattr__(self, name: str) -> Any:
        if name == "failure" or name.startswith("__"):
            raise AttributeError(name)
        return getattr(self.failure, name)

    def __reduce__(self) -> tuple[Any, ...]:
        return (type(self), (self.failure,))


class TrainingFailedError(PowertrainError):
    """``fit`` ended in failure.

    ``worker_failures`` maps each failed rank to its :class:`WorkerFailedError`, the first failing rank first.
    ``result`` is the partial :class:`~powertrain.Result`: metrics and checkpoints up to the failure.
    """

    def __init__(
        self,
        message: str,
        worker_failures: Mapping[int, Any] | None = None,
        result: Any = None,
    ) -> None:
        super().__init__(message)
        self.worker_failures = dict(worker_failures or {})
        self.result = result

    def __reduce__(self) -> tuple[Any, ...]:
        return (type(self), (str(self), self.worker_failures, self.result))


class PreemptedError(PowertrainError, SystemExit):
    """``fit`` ended because this process, or too many ranks, will be taken away; the run can be resumed.

    Nobody need catch it: the script then ends as a process does that was asked to by SIGTERM, with exit code 143, and
    whoever schedules it starts it again. ``result`` is the partial :class:`~powertrain.Result`.
    """

    def __init__(self, message: str, result: Any = None) -> None:
        super().__init__(message)
        self.result = result
        self.code = 128 + 15  # what a shell calls the end by SIGTERM

    def __reduce__(self) -> tuple[Any, ...]:
        return (type(self), (str(self), self.result))
