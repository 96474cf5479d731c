"""``FailureConfig``: which failures a run survives."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from powertrain.config.checks import (
    Config,
    Refusal,
    finite,
    flag,
    ignored,
    one_of,
    option,
    optional,
    positive,
    whole,
)


def _fail_fast(value: Any) -> bool | str:
    if isinstance(value, bool):
        return value
    if isinstance(value, str) and value.lower() == "raise":
        return "raise"
    raise Refusal("it is neither True, False nor 'raise'", "Use one of True, False, 'raise'.")


@dataclass(frozen=True, repr=False)
class FailureConfig(Config):
    """Handling of worker failures. The loss of a slot or node is not a failure and is not counted.

    Raises :class:`~powertrain.errors.ConfigError` for a wrong value.

    Example::

        RunConfig(failure_config=FailureConfig(max_failures=3))
    """

    max_failures: int = option(0, whole(at_least=-1))
    """Number of worker failures to recover from, each from the newest committed checkpoint; -1 for any number."""

    fail_fast: bool | str = option(False, _fail_fast)
    """True ends the run at the first failure. ``"raise"`` is Ray Tune's name for the same: ``fit`` raises in any
    case."""

    controller_failure_limit: int = ignored(
        -1,
        whole(-1),
        "the controller lives in the process that called fit(); start the script again to go on",
    )
    """Ray Train's limit for restarts of its controller. Without effect: the controller runs in the process that called
    ``fit()``, and the run resumes when the script is started again."""

    max_preemption_failures: int = option(-1, whole(at_least=-1))
    """Number of announced preemptions to resume from, counted apart from ``max_failures``; -1 for any number, 0 to end
    the run instead."""

    relax_collectives_on_preemption: bool = ignored(
        False,
        flag,
        "report() waits for other ranks only with report_barrier, and a lost rank ends the attempt",
    )
    """Ray Train's. Without effect: ``report()`` waits for other ranks only with ``report_barrier``, and a lost rank
    ends the attempt in any case."""

    preemption_grace_s: float = ignored(0.0, finite, "no time is added after a node's deadline")
    """Ray Train's. Without effect: no time is added after a node's deadline."""

    hang_timeout_s: float | None = option(None, optional(positive))
    """Seconds without any progress after which ``on_hang`` applies, whatever the rank is doing. None: 120 s, or three
    times the longest pause that this run has recovered from by itself, or sixty usual steps, whichever is longest; half
    an hour before a rank's first step and while it saves a checkpoint; and never while a rank moves from line to line
    of its code. A notice that names the hanging rank and its location comes long before, after 5 s or five usual
    steps. Where ranks wait in a collective for a rank that has returned, it applies after 10 s at the latest."""

    on_hang: str = option("restart", one_of("restart", "report", "fail"))
    """The action on a hang: ``"restart"`` counts as a failure of the hanging rank and restarts if ``max_failures``
    allows it, ``"fail"`` ends the run, ``"report"`` only warns. With ``num_workers=0``, which trains in the calling
    process, a hang is only reported."""

    signal_grace_s: float = option(30.0, positive)
    """Seconds from a SIGTERM (or a grace signal of the scheduler) to the kill that follows it: the time of a run to
    save and end. 30 is the default of Kubernetes and Slurm. Signals to the driver are handled where ``fit`` runs in its
    main thread."""

    def _contradictions(self) -> None:
        if self.fail_fast and self.max_failures != 0:
            raise self._contradiction(
                ("max_failures", "fail_fast"),
                "a run cannot both end at the first failure and recover from it",
                "Set max_failures=0, or leave fail_fast out.",
            )
