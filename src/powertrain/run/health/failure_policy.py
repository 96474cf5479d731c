"""The policy after a failure, a loss or a notice. Pure: values in, a decision out; the controller acts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from powertrain.run.events import WorkerFailure

#: Losses in a row, without a commit between them, after which the run ends.
LOSS_LIMIT = 3
#: Seconds before a run that died before its first boundary is tried again: this, then twice as long each time.
_FIRST_RETRY_DELAY_S, _MAX_RETRY_DELAY_S = 0.5, 60.0


@dataclass(frozen=True)
class FailureDecision:
    """ "retry" or "give_up", and why in words; ``delay`` is the seconds to wait before a retry."""

    action: str
    reason: str
    delay: float = 0.0

    @property
    def retry(self) -> bool:
        return self.action == "retry"


def after_failure(
    failures_before: int, max_failures: int, fail_fast: bool, early_deaths: int = 0
) -> FailureDecision:
    """Decide after a failed attempt, with ``failures_before`` earlier failures. -1 means no limit.

    ``early_deaths`` is how many attempts in a row, this one included, died before any rank had reached a boundary.
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
        return FailureDecision(
            "give_up",
            "the run is not restarted with FailureConfig(max_failures=0); max_failures=N allows N restarts",
        )
    return FailureDecision("give_up", f"failure {number} is more than max_failures={max_failures} allows")


def back_off(early_deaths: int) -> float:
    """Return the seconds to wait: none for a run that had begun to train, growing for one that never gets there."""
    return (
        min(_MAX_RETRY_DELAY_S, _FIRST_RETRY_DELAY_S * 2.0 ** min(early_deaths - 1, 20))
        if early_deaths
        else 0.0
    )


def after_loss(
    losses_since_commit: int,
    *,
    preempted: bool = False,
    preemptions_before: int = 0,
    max_preemptions: int = -1,
) -> FailureDecision:
    """Decide after a loss of slots, with ``losses_since_commit`` losses since the last committed checkpoint.

    ``preempted`` losses were announced by a notice and have a budget of their own; -1 means no limit.
    """
    if preempted and 0 <= max_preemptions <= preemptions_before:
        number = preemptions_before + 1
        return FailureDecision(
            "give_up", f"preemption {number} is more than max_preemption_failures={max_preemptions} allows"
        )
    number = losses_since_commit + 1
    if number < LOSS_LIMIT:
        return FailureDecision(
            "retry",
            f"lost workers do not count as failures (loss {number} since the last checkpoint; {LOSS_LIMIT} end a run)",
        )
    return FailureDecision("give_up", f"{number} losses without a committed checkpoint between them")


def order_by_cause(failures: Sequence[WorkerFailure]) -> list[WorkerFailure]:
    """Sort failures, the cause first: echoes of another rank's end come last, then by time, then by rank."""
    return sorted(failures, key=lambda f: (f.secondary, f.after, f.rank))


def cause_is_known(failures: Sequence[WorkerFailure]) -> bool:
    """Return False while every failure so far reads like an echo: the cause may still be on its way."""
    return any(not failure.secondary for failure in failures)
