"""Every exception Powertrain raises on purpose.

::

    PowertrainError
    ├── ConfigError            a wrong value, an unknown field, a contradictory pair (also a ValueError)
    │   ├── TrainFunctionError   the training function has a wrong shape or cannot be pickled
    │   └── ArgumentError        an argument of another type than the function takes (also a TypeError)
    ├── ResourceError          the machine does not have what was asked for
    ├── StorageError           the storage path cannot be read, written or understood
    │   ├── RunInUseError        another live process holds this run
    │   └── FencedError          another controller has taken the run over
    ├── CheckpointError        a checkpoint is missing, incomplete or not what it claims to be
    │   └── OtherVersionError    it is whole, and only another version of Powertrain can read it
    ├── DataError              data is missing, broken or of the wrong form, or a map failed (also a ValueError)
    │   └── DataChangedError     it is not the data that a checkpoint's position belongs to
    ├── NotSupportedError      a name or an argument of Ray's that has no counterpart here (also a NotImplementedError)
    │   └── MissingMemberError   a method of Ray's that a class here does not have (also an AttributeError)
    ├── ReportError            ``report`` was handed something it cannot keep (also a ValueError)
    ├── OutsideWorkerError     a worker-only function was called elsewhere (also a RuntimeError)
    ├── WireError              a message could not be understood or was not authenticated
    ├── CollectiveError        ranks that should meet cannot (also a RuntimeError)
    ├── EngineError            processes could not be started or controlled
    ├── TaskError              a function started with ``powertrain.remote`` failed
    ├── WorkerFailedError      why one rank ended badly; never raised by itself
    ├── TrainingFailedError    ``fit`` ended in failure; carries ``worker_failures`` and the partial ``result``
    │   ├── WorkerGroupError     ranks failed
    │   │   └── NCCLHangError      ranks hung
    │   └── ControllerError      the run failed before any rank did
    └── PreemptionError        workers will be taken away, or have been
        └── PreemptedError       ``fit`` ended because of that; the run can be resumed (also a SystemExit)

Each message is written for the person who reads it: what happened, with its values; why, where that is
known; what to do next.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

from powertrain.text.redaction import FitToShow, fit_to_show
from powertrain.text.tracebacks import fold_traceback

if TYPE_CHECKING:
    from collections.abc import Mapping

# Here, because every module that logs something imports this one.
logging.getLogger("powertrain").addFilter(FitToShow())


class PowertrainError(Exception):
    """The root of everything Powertrain raises on purpose.

    Messages quote names, paths and texts that others made: secrets of addresses and control characters are taken out
    of them here, once for all.
    """

    def __init__(self, *args: Any) -> None:
        super().__init__(*(fit_to_show(arg) if type(arg) is str else arg for arg in args))


class ConfigError(PowertrainError, ValueError):
    """A configuration value cannot be used."""


class TrainFunctionError(ConfigError):
    """The training function cannot be called or cannot travel to a worker."""


class ArgumentError(ConfigError, TypeError):
    """An argument is of another type than the function takes."""


class ResourceError(PowertrainError):
    """The machine or cluster does not have the requested resources."""


class StorageError(PowertrainError):
    """The storage path cannot be used."""


class RunInUseError(StorageError):
    """Another live process holds the run of this name and path."""


class FencedError(StorageError):
    """Another controller has taken the run over, so this one can commit nothing any more."""


class CheckpointError(PowertrainError):
    """A checkpoint is missing, incomplete or not what it claims to be, or ``fit`` could not save the last one.

    ``result`` is the :class:`~powertrain.Result` where ``fit`` raised it after training; None elsewhere.
    """

    def __init__(self, message: str = "", result: Any = None) -> None:
        super().__init__(message)
        self.result = result

    def __reduce__(self) -> tuple[Any, ...]:
        return (type(self), (str(self), self.result))


class OtherVersionError(CheckpointError):
    """A checkpoint was written by a version of Powertrain whose form this one does not know."""


class DataError(PowertrainError, ValueError):
    """Data is missing, broken or of the wrong form, or a function that was to be run on it failed."""


class DataChangedError(DataError):
    """The data is not what it was when the position in it was saved."""


class NotSupportedError(PowertrainError, NotImplementedError):
    """A name or an argument of Ray's has no counterpart here; the message says what to use instead."""


class MissingMemberError(NotSupportedError, AttributeError):
    """A class has no counterpart of a method of Ray's. An AttributeError too, so that ``hasattr`` is False."""


class ReportError(PowertrainError, ValueError):
    """``report`` was given a value or an option that it cannot use."""


class OutsideWorkerError(PowertrainError, RuntimeError):
    """A function that only makes sense inside a training worker was called elsewhere."""


class WireError(PowertrainError):
    """A message could not be understood or was not authenticated."""


class EngineError(PowertrainError):
    """Processes could not be started or controlled."""


class CollectiveError(PowertrainError, RuntimeError):
    """Ranks that should meet at a barrier or broadcast cannot: one has ended, or they called different things."""


class TaskError(PowertrainError):
    """A function started with ``powertrain.remote`` failed; the message holds its traceback.

    What ``powertrain.get`` raises for an exception in the function is of that exception's class too, with its ``args``
    and attributes, where this process has the class: ``except ValueError`` catches it.

    ``cause`` is that exception; None where there was none, or its class is not known here.
    """

    cause: BaseException | None = None

    def __reduce__(self) -> tuple[Any, ...]:
        return (type(self), self.args)  # without the cause, which may not be picklable


class WorkerFailedError(PowertrainError):
    """Why one rank ended badly, as an exception: its text is the rank's traceback, or how its process died.

    In the text frames of this package are folded to one line; ``traceback`` has all of them.

    ``failure`` is the :class:`~powertrain.run.events.WorkerFailure`, whose fields (``rank``, ``kind``, ``summary``,
    ``error_type``, ``file``, ``line``, ...) can also be read from the exception itself.
    """

    def __init__(self, failure: Any) -> None:
        super().__init__(f"{failure.summary}\n{fold_traceback(failure.traceback)}".rstrip())
        self.failure = failure

    def __getattr__(self, name: str) -> Any:
        if name == "failure" or name.startswith("__"):
            raise AttributeError(name)
        return getattr(self.failure, name)

    def __reduce__(self) -> tuple[Any, ...]:
        return (type(self), (self.failure,))


class TrainingFailedError(PowertrainError):
    """``fit`` ended in failure.

    Attributes:
        worker_failures: The exception of each failed rank, the first failing rank first: one of the same class where it
            can be rebuilt in this process, else a :class:`WorkerFailedError` whose class has the same name. The
            ``failure`` of each says more (``rank``, ``kind``, ``file``, ``line``, ``traceback``, ...).
        result: The partial :class:`~powertrain.Result`: metrics and checkpoints up to the failure.

    Example::

        try:
            trainer.fit()
        except TrainingFailedError as error:
            print(error.worker_failures, error.result.checkpoint)
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


class WorkerGroupError(TrainingFailedError):
    """``fit`` ended because ranks failed; ``worker_failures`` has the exception of each."""

    def __init__(self, error_message: str, worker_failures: Mapping[int, Any], result: Any = None) -> None:
        super().__init__(error_message, worker_failures, result)


class NCCLHangError(WorkerGroupError):
    """``fit`` ended because ranks hung, in NCCL or anywhere else."""


class ControllerError(TrainingFailedError):
    """``fit`` ended before any rank failed; ``controller_failure`` says why."""

    def __init__(self, controller_failure: BaseException, result: Any = None) -> None:
        super().__init__(str(controller_failure), {}, result)
        self.controller_failure = controller_failure

    def __reduce__(self) -> tuple[Any, ...]:
        return (type(self), (self.controller_failure, self.result))


class TuneError(PowertrainError):
    """A sweep, or a trial of one, has failed."""


class TrialFailedError(TuneError):
    """A trial of a sweep has failed, in a process that is gone. The message is the one that the sweep has recorded."""


class PreemptionError(PowertrainError):
    """Workers will be taken away, or have been. ``fit`` raises :class:`PreemptedError`, which is one.

    It is not a :class:`TrainingFailedError`: a script that handles failed trainings must still end when its scheduler
    asks it to.
    """

    def __init__(self, preemption_info: Any, drain_timed_out: bool = False) -> None:
        ranks = getattr(preemption_info, "preempted_ranks", [])
        super().__init__(
            f"Training was interrupted by preemption (ranks {ranks}, drain_timed_out={drain_timed_out})."
        )
        self.preemption_info, self.drain_timed_out = preemption_info, drain_timed_out

    def __reduce__(self) -> tuple[Any, ...]:
        return (type(self), (self.preemption_info, self.drain_timed_out))


class PreemptedError(PreemptionError, SystemExit):
    """``fit`` ended because this process, or too many ranks, will be taken away; the run can be resumed.

    It need not be caught: the script then ends as a process does that receives SIGTERM, with exit code 143, and its
    scheduler starts it again.

    Attributes:
        result: The partial :class:`~powertrain.Result`.
    """

    def __init__(self, message: str, result: Any = None) -> None:
        PowertrainError.__init__(self, message)
        self.preemption_info, self.drain_timed_out = None, False
        self.result = result
        self.code = 128 + 15  # what a shell calls the end by SIGTERM

    def __reduce__(self) -> tuple[Any, ...]:
        return (type(self), (str(self), self.result))
