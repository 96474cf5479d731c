"""The end of a run: failures, the return value, files that could not be removed."""

from __future__ import annotations

import contextlib
import os
import platform
import time
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from powertrain.config.trace import TraceConfig
from powertrain.driver.messages import warn
from powertrain.driver.resume import split_run_path
from powertrain.errors import CheckpointError, PreemptedError, StorageError
from powertrain.text.errors import describe_error

if TYPE_CHECKING:
    from powertrain.driver.request import TrainRequest
    from powertrain.engine.base import Engine
    from powertrain.result.notebook import NotebookView
    from powertrain.result.result import Result
    from powertrain.run.events import WorkerFailure
    from powertrain.run.outcome import RunOutcome
    from powertrain.storage import Storage


def own_failure(rank: int, error: BaseException) -> WorkerFailure:
    """Return a failure as seen by the rank itself, where the controller is in another process."""
    from powertrain.run.health.failures import reported
    from powertrain.worker.failure import describe

    kind = "exit" if isinstance(error, SystemExit) else "raised"
    return reported(rank, describe(error), kind, host=platform.node(), pid=os.getpid())


def keep_return_value(outcome: RunOutcome, storage: Storage, append_storage: Storage, terminal: Any) -> None:
    """Store the return value for ``Result.from_path``. Unresponsive storage is not waited for once more."""
    from powertrain.result import return_value

    not_stored = getattr(append_storage, "problem", "") if outcome.value else ""
    not_stored = not_stored or return_value.store(storage, outcome.value)
    if not_stored:
        warn(
            terminal,
            f"The training function's return value is not kept in the run's directory: {not_stored}. "
            "Result.return_value has it while this process lives.",
        )


def about_gone_directory(path: str) -> str:
    return (
        f"The run's directory {path!r} is gone: it was removed, or made anew by another start, while the run was going "
        "on. The Result has the last metrics and the return value of this process; checkpoints and all else that was "
        "kept there are lost."
    )


def warn_about_left_files(terminal: Any, runtime: Path) -> None:
    """Warn where the user's code left files in the scratch directory, which is removed with the run."""
    from powertrain.run.events import Warned

    left = sorted(str(p.relative_to(runtime)) for p in runtime.glob("scratch/**/*") if p.is_file())
    if left:
        shown = ", ".join(left[:3]) + (f" and {len(left) - 3} more" if len(left) > 3 else "")
        terminal.event(
            Warned(
                time=time.time(),
                message=f"Files left in the scratch directory of the ranks are removed now: {shown}. Write to "
                "get_context().launch_dir, report them as a checkpoint, or leave RunConfig(working_dir='scratch') out.",
            )
        )


def conclude(request: TrainRequest, outcome: RunOutcome, storage: Storage, engine: Engine) -> Result:
    """Return the result of a successful run; otherwise raise the exception for its outcome."""
    from powertrain.result.result import Result, failure
    from powertrain.run.checkpoints.unsaved import error_text
    from powertrain.storage.addresses import without_secrets
    from powertrain.values.kinds import with_originals
    from powertrain.worker.debugger import where_quit

    result = Result(
        path=storage.uri,
        storage_filesystem=getattr(storage, "filesystem", None),
        state=outcome.state,
        reason=outcome.reason,
        metrics=with_originals(outcome.metrics, outcome.originals),
        config={"train_loop_config": request.config},
        value=outcome.value,
        unsaved=outcome.run.unsaved if outcome.run is not None else None,
    )
    if outcome.interrupted:
        name = split_run_path(storage.uri)[1]
        how = "by the same script" if request.run.name else f"with RunConfig(name={name!r})"
        raise KeyboardInterrupt(
            f"the run was interrupted and can be resumed {how}: {without_secrets(storage.uri)}"
        )
    if outcome.state == "preempted":
        raise PreemptedError(f"the run was preempted and can be resumed: {outcome.reason}", result)
    if outcome.state != "failed" and outcome.is_to_leave:
        raise PreemptedError(f"the run is {outcome.state}, and this process was asked to end", result)
    raised = engine.rank_in_driver.error if engine.rank_in_driver is not None else None
    if outcome.state == "stopped" and raised is not None and where_quit(raised) is not None:
        raise raised  # it was plain pdb in this very process, which leaves the whole script
    if outcome.state != "failed":
        if outcome.run is not None and outcome.run.lost_last is not None:
            on_lost_checkpoint(
                request, error_text(result.unsaved_checkpoints, outcome.run.newest_commit[1]), result
            )
        return result
    result.error = failure(result, storage, outcome.failures, trusted=True, raised_here=raised)
    raise result.error from raised


def on_lost_checkpoint(request: TrainRequest, message: str, result: Result) -> None:
    """Raise :class:`CheckpointError` for a last checkpoint that was not saved, unless the user wants the result."""
    if request.run.checkpoint_config.on_lost == "raise":
        raise CheckpointError(message, result)


def remove_ends(request: TrainRequest, storage: Storage) -> None:
    """Remove the summary, the report and the return value of an earlier start, until this one has ended."""
    from powertrain.result import return_value

    try:
        storage.delete("final_summary.json")
        storage.delete("report.html")
        return_value.remove(storage)
    except (StorageError, OSError) as error:
        request.remarks.append(
            f"The summary, the report and the return value of an earlier start could not be removed: {error}"
        )


def live_findings(
    request: TrainRequest, storage: Storage, name: str, terminal: Any
) -> AbstractContextManager[Any]:
    """Return the live findings of ``TraceConfig(mode="cli")``."""
    trace = request.run.trace
    if not isinstance(trace, TraceConfig) or trace.mode != "cli":
        return contextlib.nullcontext()
    from powertrain.diagnosis.live import Live

    return Live(storage, name, terminal.text)


def notebook_view(
    request: TrainRequest, storage: Storage, name: str
) -> NotebookView | contextlib.nullcontext[None]:
    """Return the view of a run in the cell that started it; an empty context elsewhere, and with ``verbose=0``."""
    from powertrain.result.notebook import NotebookView, in_notebook

    if request.trial is not None or request.run.verbose == 0 or not in_notebook():
        return contextlib.nullcontext()
    return NotebookView(storage, name)


def diagnose(request: TrainRequest, storage: Storage, name: str, terminal: Any) -> None:
    """Print and store the diagnosis of the run's time. The run is over: failures here are only reported."""
    trace = request.run.trace
    if not isinstance(trace, TraceConfig):
        return
    if request.trial is not None:  # of many short runs: 'powertrain diagnose' makes it when it is wanted
        return
    if getattr(storage, "problem", ""):  # it would be waited for in vain, and maybe for long
        warn(
            terminal,
            "The storage does not respond, so there is no diagnosis and no report yet. Run "
            f"'powertrain diagnose {name}' and 'powertrain report {name}' later.",
        )
        return
    from powertrain.diagnosis import card, final

    try:
        report = final.conclude(storage, name)
        if report is None:
            return
        if final.is_telling(report):
            terminal.text(card.render(report))
        if trace.logs_dir is not None:
            final.copy_to(os.fspath(trace.logs_dir), trace.session_id, report)
    except Exception as error:
        warn(terminal, f"The run's diagnosis could not be kept: {describe_error(error)}")


def write_report(request: TrainRequest, storage: Storage, name: str, terminal: Any) -> None:
    """Write ``report.html`` into the run's directory. The run is over: failures here are only reported."""
    if not request.run.report or request.trial is not None:  # 'powertrain report' makes one of a trial
        return
    if getattr(storage, "problem", ""):  # it would be waited for in vain, and maybe for long
        if not isinstance(request.run.trace, TraceConfig):  # otherwise the diagnosis has warned of it
            warn(
                terminal,
                f"The storage does not respond, so there is no report yet. Run 'powertrain report {name}' later.",
            )
        return
    try:
        from powertrain.views.report.writing import keep_report

        keep_report(storage, name)
    except Exception as error:
        warn(
            terminal,
            f"The run's report could not be written: {describe_error(error)}. Run 'powertrain report {name}' later, or "
            "leave it out with RunConfig(report=False).",
        )
