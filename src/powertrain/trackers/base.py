"""The protocol of a tracker, which MLflow, W&B, TensorBoard and CSV implement here, and which users may implement."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

__all__ = ["RunEnding", "TrackedPoint", "TrackedRun", "Tracker", "TrackerSession"]


@dataclass(frozen=True)
class TrackedPoint:
    """One report of rank 0.

    Attributes:
        step: The row of the run, from 1 on: ``training_iteration`` of ``Result.metrics_dataframe``.
        time: When it was reported, in Unix seconds.
        metrics: The reported values by name, nested ones as "a/b". Besides numbers there may be text, lists and None.
    """

    step: int
    time: float
    metrics: Mapping[str, Any]

    @property
    def numbers(self) -> dict[str, float]:
        """The metrics that are numbers, NaN and infinities among them."""
        return {
            name: float(value)
            for name, value in self.metrics.items()
            if isinstance(value, (int, float)) and not isinstance(value, bool)
        }


@dataclass(frozen=True)
class TrackedRun:
    """A run, as a tracker needs to know it.

    Attributes:
        name: The run's name.
        path: Where it is kept, without credentials.
        key: A text of 16 characters that no other run has. It stays the same over restarts, so that a tracker which was
            asked to make a run, and whose answer was lost, can find it again.
        id: What ``TrackerSession.id`` was when the run was opened before; "" the first time.
        last_step: The last step that was sent, as far as the run's directory knows; 0 for none. After a crash the
            tracker may have more.
        started: When the run was first started, in Unix seconds.
        params: ``train_loop_config``, nested values as "a/b", each of them text, a number, a bool or None. Secrets are
            replaced.
        tags: What else is known of the run: ``metadata`` of its trainer and the sweep that it is a trial of.
        directory: The run's directory on this machine; "" where it is kept in an object store.
    """

    name: str
    path: str
    key: str
    id: str = ""
    last_step: int = 0
    started: float = 0.0
    params: Mapping[str, Any] = field(default_factory=dict)
    tags: Mapping[str, str] = field(default_factory=dict)
    directory: str = ""


@dataclass(frozen=True)
class RunEnding:
    """How a run ended.

    Attributes:
        state: "finished", "stopped", "failed" or "preempted".
        reason: Why, in words; "" where that says nothing more.
        findings: What held the run up, as kinds: ``("input_bound",)``. See docs/diagnosis.md.
    """

    state: str
    reason: str = ""
    findings: tuple[str, ...] = ()


class TrackerSession:
    """An open run of a tracker, as :meth:`Tracker.open` returns it. Subclass it and define at least :meth:`log`.

    It is used by one thread of the process that sends to trackers, which has nothing to do with training: methods may
    take their time. Whatever they raise is shown once, and tried again with a new session; points are kept.

    Attributes:
        id: Names the tracker's run. It is kept in the run's directory, and given to ``open`` as ``run.id`` from then
            on.
        last_step: Points after this step are sent. :attr:`TrackedRun.last_step` unless the tracker knows better.
    """

    id: str = ""
    last_step: int = 0

    def log(self, points: Sequence[TrackedPoint]) -> None:
        """Send points and return when the tracker has them, in ascending order of their steps.

        Args:
            points: New ones. After a crash those may be among them that the tracker got but whose arrival was not
                recorded; a session that can tell leaves these out.
        """
        raise NotImplementedError

    def rewind(self, step: int) -> bool:
        """Forget the points from ``step`` on: a restart went back behind them, and trains these rows again.

        Args:
            step: The first step that will be sent again.

        Returns:
            False where the tracker cannot take points back. It keeps those it has, and gets the steps after them.
        """
        return False

    def finish(self, ending: RunEnding) -> None:
        """Record how the run ended. A run that is continued later is opened again.

        Args:
            ending: Its state, its reason and what was found.
        """

    def close(self) -> None:
        """Release connections and files."""


class Tracker:
    """Settings of a tracker. Subclass it, define :meth:`open`, and give an instance to ``RunConfig(trackers=[...])``.

    An instance is pickled and sent to the process that sends to trackers, so it holds settings only; connections belong
    to the session.

    Example::

        class Webhook(powertrain.trackers.Tracker):
            name = "webhook"

            def open(self, run):
                return WebhookSession(run)
    """

    #: Names the tracker in messages and in the run's directory. Two trackers of a run have different names.
    name: str = ""

    def open(self, run: TrackedRun) -> TrackerSession:
        """Open the tracker's run: the one named by ``run.id`` or made for ``run.key`` before, else a new one.

        Args:
            run: The run.

        Returns:
            The session that points are sent with.
        """
        raise NotImplementedError

    def settled(self, directory: str) -> Tracker:
        """Return the tracker with what it takes from the environment filled in, for use in another process later.

        Args:
            directory: The run's directory on this machine; "" where it is kept in an object store.

        Raises:
            ConfigError: A package is missing, or a setting.
        """
        return self
