"""The end of a run: failures, the return value, files that could not be removed."""

from __future__ import annotations

import os
import platform
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from powertrain.run.events import WorkerFailure
    from powertrain.run.outcome import RunOutcome
    from powertrain.storage import Storage


def own_failure(rank: int, error: BaseException) -> WorkerFailure:
    """A failure as the rank itself can tell it, where the controller is in another process."""
    from powertrain.run.health.failures import reported
    from powertrain.worker.failure import describe

    kind = "exit" if isinstance(error, SystemExit) else "raised"
    return reported(rank, describe(error), kind, host=platform.node(), pid=os.getpid())


def tell(terminal: Any, message: str) -> None:
    from powertrain.run.events import Warned

    terminal.event(Warned(time=time.time(), message=message))


def keep_return_value(outcome: RunOutcome, storage: Storage, kept: Storage, terminal: Any) -> None:
    """So that ``Result.from_path`` has it too. What does not answer is not waited for once more."""
    from powertrain.result import return_value

    unkept = getattr(kept, "problem", "") if outcome.value else ""
    unkept = unkept or return_value.store(storage, outcome.value)
    if unkept:
        tell(
            terminal,
            f"What the training function returned is not kept in the run's directory: {unkept}. "
            "Result.return_value has it while this process lives.",
        )


def about_gone_directory(path: str) -> str:
    return (
        f"The run's directory {path!r} is gone: it was removed, or made anew by another start, while the run was going "
        "on. The Result has the last metrics and the return value of this process; checkpoints and all else that was "
        "kept there are lost."
    )


def tell_left_files(terminal: Any, runtime: Path) -> None:
    """The scratch directory goes with the run: say so where the user's code left files there."""
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
