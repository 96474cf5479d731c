"""What to do after a failure or a loss. Pure: values in, a decision out; the controller acts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from powertrain.run.events import WorkerFailure

#: Losses in a row, without a commit between them, after which the run ends.
LOSS_LIMIT = 3


@dataclass(frozen=True)
class Decision:
    """ "retry" or "give_up", and why in words."""

    action: str
    reason: str

    @property
    def retry(self) -> bool:
        return self.action == "retry"


def after_failure(failures_before: int, max_failures: int, fail_fast: bool) -> Decision:
    """What to do when an attempt failed and ``failures_before`` have failed earlier. -1 means no limit."""
    if fail_fast:
        return Decision("give_up", "fail_fast is set, so the first failure ends the run")
    number = failures_before + 1
    if max_failures < 0:
        return Decision("retry", f"failure {number}; max_failures=-1 sets no limit")
    if number <= max_failures:
        return Decision("retry", f"failure {number} of the {max_failures} that max_failures allows")
    if max_failures == 0:
        return Decision("give_up", "no restart was asked for (FailureConfig(max_failures=0))")
    return Decision("give_up", f"failure {number} is more than max_failures={max_failures} allows")


def after_loss(losses_since_commit: int) -> Decision:
    """What to do when slots were withdrawn, ``losses_since_commit`` losses ago the last checkpoint was committed."""
    number = losses_since_commit + 1
    if number < LOSS_LIMIT:
        return Decision("retry", f"a loss is not a failure; loss {number} since the last commit")
    return Decision("give_up", f"{number} losses without a committed checkpoint between them")


def order_by_cause(failures: Sequence[WorkerFailure]) -> list[WorkerFailure]:
    """The cause first: what is no echo of another rank's end before what is, then the earlier, then the lower rank."""
    return sorted(failures, key=lambda f: (f.secondary, f.after, f.rank))


def cause_is_known(failures: Sequence[WorkerFailure]) -> bool:
    """False while every failure seen so far reads like an echo: the cause may still be on its way."""
    return any(not failure.secondary for failure in failures)
