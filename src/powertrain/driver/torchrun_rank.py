"""``fit()`` under torchrun in every rank but 0."""

from __future__ import annotations

import contextlib
import functools
import pickle
from typing import TYPE_CHECKING

from powertrain.driver.conclusion import on_lost_checkpoint, own_failure
from powertrain.driver.datasets import function_here, prepare_like_rank_zero
from powertrain.driver.running import handle_interrupts
from powertrain.errors import ControllerError, PowertrainError, PreemptedError, WorkerGroupError

if TYPE_CHECKING:
    from powertrain.driver.request import TrainRequest
    from powertrain.result.result import Result


def fit_torchrun_rank(request: TrainRequest) -> Result:
    """Run any rank but 0 under torchrun."""
    from powertrain.engine import torchrun
    from powertrain.result.result import Result
    from powertrain.run.record.directories import remove_data_cache

    function = function_here(request, functools.partial(prepare_like_rank_zero, request))
    with handle_interrupts(lambda: None, users_code_is_here=True) as interrupts:
        code, rank = torchrun.run_other_rank(function, request.user_env)
    if rank.place.local_rank == 0:  # the first of a node that is not rank 0's
        remove_data_cache(rank.place.data.cache)
    if interrupts:
        from powertrain.storage.addresses import without_secrets

        place = without_secrets(rank.place.run.path)
        raise KeyboardInterrupt(f"the run was interrupted and can be resumed: {place}")
    elsewhere, stopped = rank.summary.get("failed", ""), rank.summary.get("stopped", "")
    result = Result(
        path=rank.place.run.path,
        storage_filesystem=pickle.loads(filesystem) if (filesystem := rank.place.run.filesystem) else None,
        state="failed" if code or elsewhere else "stopped" if stopped else "finished",
        reason=stopped,
        metrics=rank.summary.get("metrics"),
        value=b"",  # it is rank 0's, in whose process it is
    )
    if reason := rank.summary.get("preempted"):
        raise PreemptedError(f"the run was preempted and can be resumed: {reason}", result)
    if result.state != "failed":
        if unsaved := rank.summary.get("unsaved"):
            on_lost_checkpoint(request, unsaved, result)
        return result
    if rank.error is not None:
        from powertrain.terminal.failures import failure_report

        failure = own_failure(rank.place.rank, rank.error)
        with contextlib.suppress(AttributeError):  # of a class with slots
            rank.error.failure = failure  # type: ignore[attr-defined]
        result.error = WorkerGroupError(failure_report([failure]), {failure.rank: rank.error}, result)
    else:
        what = (
            f"The run failed: {elsewhere}." if elsewhere else f"Rank {rank.place.rank} could not be set up."
        )
        result.error = ControllerError(PowertrainError(f"{what} See the output of this rank."), result)
    raise result.error from rank.error
