"""What to do after a failure, a loss or a notice. Pure: values in, a decision out; the controller acts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from powertrain.run.events import WorkerFailure

#: Losses in a row, without a commit between them, after which the run ends.
LOSS_LIMIT = 3
#: Seconds before a run that died before its first boundary is tried again: this, then twice as long each time.
_FIRST_DELAY, _LONGEST_DELAY = 0.5, 60.0


@dataclass(frozen=True)
class FailureDecision:
    """ "retry" or "give_up", and why in words; ``delay`` is how many seconds to wait before."""

    action: str
    reason: str
    delay: float = 0.0

    @property
    def retry(self) -> bool:
        return self.action == "retry"


def after_failure(
    failures_before: int, max_failures: int, fail_fast: bool, early_deaths: int = 0
) -> FailureDecision:
    """What to do when an attempt failed and ``failures_before`` have failed earlier. -1 means no limit.

    ``early_deaths`` is how many attempts in a row, this one included, died before any rank had come to a boundary.
    """
    if fail_fast:
        return FailureDecision("give_up", "fail_fast is set, so the first failure ends the run")
    number = failures_before + 1
    delay = back_off(early_deaths)
    if max_failures < 0:
        return FailureDecision("retry", f"failure {number}; max_failures=-1 sets no limit", delay)
    if number <= max_failures:
        return FailureDecision(
            "retry", f"failure {number} of the {max_failures} that max_failures allows", delay
        )
    if max_failures == 0:
        return FailureDecision("give_up", "no restart was asked for (FailureConfig(max_failures=0))")
    return FailureDecision("give_up", f"failure {number} is more than max_failures={max_failures} allows")


def back_off(early_deaths: int) -> float:
    """Seconds to wait: none for a run that had begun to train, longer and longer for one that never gets there."""
    return min(_LONGEST_DELAY, _FIRST_DELAY * 2.0 ** min(early_deaths - 1, 20)) if early_deaths else 0.0


def after_loss(
    losses_since_commit: int,
    *,
    preempted: bool = False,
    preemptions_before: int = 0,
    max_preemptions: int = -1,
) -> FailureDecision:
    """What to do when slots were withdrawn, ``losses_since_commit`` losses ago the last checkpoint was committed.

    ``preempted`` losses were announced by a notice and have a budget of their own; -1 means no limit.
    """
    if preempted and 0 <= max_preemptions <= preemptions_before:
        number = preemptions_before + 1
        return FailureDecision(
            "give_up", f"preemption {number} is more than max_preemption_failures={max_preemptions} allows"
        )
    number = losses_since_commit + 1
    if number < LOSS_LIMIT:
        return FailureDecision("retry", f"a loss is not a failure; loss {number} since the last commit")
    return FailureDecision("give_up", f"{number} losses without a committed checkpoint between them")


def order_by_cause(failures: Sequence[WorkerFailure]) -> list[WorkerFailure]:
    """The cause first: what is no echo of another rank's end before what is, then the earlier, then the lower rank."""
    return sorted(failures, key=lambda f: (f.secondary, f.after, f.rank))


def cause_is_known(failures: Sequence[WorkerFailure]) -> bool:
    """False while every failure seen so far reads like an echo: the cause may still be on its way."""
    return any(not failure.secondary for failure in failures)
