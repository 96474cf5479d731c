"""The errors of the library by name, and how they derive from each other."""

from ray.train import (
    ControllerError,
    NCCLHangError,
    PreemptionError,
    TrainingFailedError,
    WorkerGroupError,
)

assert issubclass(WorkerGroupError, TrainingFailedError)
assert issubclass(ControllerError, TrainingFailedError)
assert issubclass(NCCLHangError, WorkerGroupError)
assert isinstance(PreemptionError, type)
