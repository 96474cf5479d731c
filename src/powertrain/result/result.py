"""Result: returned by ``fit``, or loaded from a run directory."""

from __future__ import annotations

import contextlib
import html
import os
from collections.abc import Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal

from powertrain.checkpoint import committed, retention
from powertrain.checkpoint.checkpoint import Checkpoint
from powertrain.checkpoint.manifest import Manifest
from powertrain.config.checks import did_you_mean
from powertrain.errors import (
    ConfigError,
    ControllerError,
    NCCLHangError,
    PowertrainError,
    StorageError,
    TrainingFailedError,
    WorkerGroupError,
)
from powertrain.result import contents, return_value
from powertrain.result import html as result_view
from powertrain.result.given import GivenContents
from powertrain.run import events as ev
from powertrain.run import lifecycle
from powertrain.run.checkpoints.unsaved import UnsavedCheckpoint
from powertrain.run.lifecycle import RunState
from powertrain.run.metrics import reading
from powertrain.run.record import journal
from powertrain.storage import Storage, open_storage
from powertrain.storage.addresses import strip_secrets, without_secrets
from powertrain.storage.base import own_address
from powertrain.terminal.failures import failure_report
from powertrain.values.arguments import as_flag, as_path, shorten
from powertrain.values.exceptions import exceptions_of
from powertrain.worker.data.shards import DataPosition, positions_in, readable

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from pyarrow.fs import FileSystem

    from powertrain.diagnosis.finding import Finding
    from powertrain.diagnosis.summary import Report

#: Seconds for which requests to storage are retried.
_READ_WITHIN = 60.0


class Result:
    """The end and the results of a run. Large parts are read from the run's directory on access.

    Attributes:
        metrics: Exactly the dict that rank 0 reported last; None when it never did.
        error: The error that ``fit`` raised when training failed; None after any other end.
        path: The run's directory, a path or an address without credentials.
        state: "finished", "stopped", "failed", "preempted", or the current state of a live run.
        reason: Why the run ended.

    Example::

        result = TorchTrainer(train_func).fit()
        print(result.metrics["loss"], result.checkpoint)
    """

    def __init__(
        self,
        metrics: dict[str, Any] | None = None,
        checkpoint: Checkpoint | None = None,
        error: BaseException | None = None,
        path: str = "",
        metrics_dataframe: pd.DataFrame | None = None,
        best_checkpoints: list[tuple[Checkpoint, dict[str, Any]]] | None = None,
        _storage_filesystem: Any = None,
        return_value: Any = None,
        *,
        state: str = "",
        reason: str = "",
        config: dict[str, Any] | None = None,
        value: bytes | None = None,
        storage_filesystem: Any = None,
        unsaved: Sequence[UnsavedCheckpoint] | None = None,
    ) -> None:
        """Make a result of these values, as in Ray Train; ``fit`` and :meth:`from_path` make those of runs.

        Args:
            metrics: What rank 0 reported last.
            checkpoint: The newest checkpoint.
            error: Why the training failed.
            path: The run's directory.
            metrics_dataframe: The metrics of all reports.
            best_checkpoints: The checkpoints that were kept, with their metrics.
            _storage_filesystem: The pyarrow file system that ``path`` is on.
            return_value: What the training function returned.
            state: Of a run: how it ended. Where it is given, all that is large is read from ``path``.
            reason: Of a run: why it ended.
            config: Of a run: what ``config`` returns.
            value: Of a run: the pickled return value.
            storage_filesystem: Of a run: the file system that was given.
            unsaved: Of a run: the checkpoints that were lost.
        """
        #: The run's directory: a path or an address, on the file system that was given or the one it names.
        filesystem = storage_filesystem if _storage_filesystem is None else _storage_filesystem
        #: It has no credentials; together with ``filesystem`` it names the same run again.
        self._address = own_address(filesystem, path) or path
        self.path = strip_secrets(self._address) if "://" in self._address else path
        self._given_filesystem = None if self._address != path else filesystem
        #: The values of a result that was made by hand.
        self._given: GivenContents | None = None
        if not state:
            self._given = GivenContents(checkpoint, metrics_dataframe, best_checkpoints, return_value)
            state = "finished" if error is None else "failed"
        self._config = config
        #: "finished", "stopped", "failed", "preempted", or the current state of a live run; and the reason.
        self.state = state
        self.reason = reason
        #: Exactly the dict that rank 0 reported last; None when it never did.
        self.metrics = metrics
        #: The error that ``fit`` raised when training failed; None after any other end.
        self.error: Any = error
        #: The pickled return value; None where only the run's directory may have it.
        self._value = value
        #: Checkpoints that were lost; None where only the run's journal knows.
        self._unsaved = unsaved

    @classmethod
    def from_path(cls, path: str | os.PathLike[str], storage_filesystem: Any = None) -> Result:
        """Load the result of the run in this directory, of any user and after any end.

        Args:
            path: A plain path or an address such as ``s3://bucket/runs/name``, or, with ``storage_filesystem``, a path
                of that.
            storage_filesystem: A pyarrow or fsspec file system.

        Returns:
            The result; its ``state`` is the current one where the run is live.

        Raises:
            StorageError: There is no run in the directory, or it cannot be read.

        Example::

            result = Result.from_path("~/powertrain_runs/digits")
        """
        path = as_path(path, "Result.from_path(path=...)")
        storage = open_storage(path, filesystem=storage_filesystem, timeout=_READ_WITHIN)
        events = _journal_of(storage, path)
        state = journal.replay(events)
        result = cls(
            path=path,
            state=state.state,
            reason=state.reason,
            metrics=reading.last_of_rank(storage, state, 0),
            storage_filesystem=storage_filesystem,
            unsaved=state.unsaved,
        )
        if state.state == lifecycle.FAILED:
            result.error = failure(result, storage, _last_failures(events))
        return result

    @property
    def _storage(self) -> Storage:
        return open_storage(self._address, filesystem=self._given_filesystem, timeout=_READ_WITHIN)

    @cached_property
    def _facts(self) -> list[ev.Event]:
        return _journal_of(self._storage, self.path)

    @cached_property
    def _run_state(self) -> RunState:
        return journal.replay(self._facts)

    @cached_property
    def _manifests(self) -> list[Manifest]:
        """The oldest first, with the metrics of their validations."""
        if self._given is not None:
            return self._given.manifests()
        return committed.with_validations(
            committed.committed(self._storage), committed.validations(self._storage)
        )

    @cached_property
    def return_value(self) -> Any:
        """The return value of rank 0's function; None after a failure. Unpickled on access only.

        In another process than the one that trained it comes from the run's directory, and only where this user wrote
        it on this machine; otherwise a :class:`~powertrain.errors.StorageError` says what to do.
        """
        return self.open_return_value()

    def open_return_value(self, *, trust: bool = False) -> Any:
        """Return :attr:`return_value`; with ``trust`` also of a run that another user, or another machine, has trained.

        Args:
            trust: True runs code from the run's directory: only do it if you trust all users who can write there.

        Returns:
            The return value of rank 0's function; None after a failure.

        Raises:
            StorageError: Another user or another machine wrote the value, and ``trust`` is False.

        Example::

            value = Result.from_path("s3://bucket/runs/digits").open_return_value(trust=True)
        """
        trust = as_flag(trust, "open_return_value(trust=...)")
        if self._given is not None:
            return self._given.return_value
        if self._value is None and not _returned_bytes(self._facts):
            return None
        data = return_value.load(self._storage, trust=trust) if self._value is None else self._value
        return return_value.opened(data)

    @property
    def config(self) -> dict[str, Any] | None:
        """``{"train_loop_config": ...}`` of the trainer, after ``fit``; else what was reported as "config", or None."""
        if self._config is not None:
            return self._config
        return (self.metrics or {}).get("config")

    @property
    def metrics_dataframe(self) -> pd.DataFrame:
        """Every point of rank 0 that is part of the run's history, as :meth:`dataframe` returns it."""
        return self.dataframe()

    def dataframe(self, ranks: int | Literal["all"] = 0) -> pd.DataFrame:
        """Return the points that are part of the run's history; those that a restart went back behind are left out.

        Args:
            ranks: The rank whose points are wanted, or "all" for those of every rank.

        Returns:
            A line for each report, sorted by row and rank. Columns are the metrics ("a/b" for nested ones), then
            ``rank``, ``attempt``, ``training_iteration`` and ``timestamp``.

        Raises:
            ConfigError: ``ranks`` is neither a rank nor "all".

        Example:
            >>> result.dataframe(ranks="all").groupby("rank")["loss"].mean()
        """
        if self._given is not None:
            given: pd.DataFrame = self._given.metrics_dataframe
            return given
        if ranks == "all":
            return reading.dataframe(self._storage, self._run_state)
        if isinstance(ranks, bool) or not isinstance(ranks, int) or ranks < 0:
            raise ConfigError(f'ranks={shorten(ranks)} is not a rank. Give a number from 0 on, or "all".')
        return reading.dataframe(self._storage, self._run_state, rank=ranks)

    @property
    def checkpoint(self) -> Checkpoint | None:
        """The newest committed checkpoint."""
        if self._given is not None:
            return self._given.checkpoint
        return self._checkpoint_of(self._manifests[-1]) if self._manifests else None

    def _checkpoint_of(self, manifest: Manifest) -> Checkpoint:
        if self._given is not None:
            return self._given.checkpoint_of(manifest)
        return committed.checkpoint_of(self._storage, manifest)

    @property
    def unsaved_checkpoints(self) -> list[UnsavedCheckpoint]:
        """The checkpoints that were reported and could not be saved, oldest first; empty where all were.

        Each has its ``row``, ``name``, ``reason`` and ``place``. A checkpoint whose rows were trained again after a
        restart is not in the list. Should the last one be lost, ``fit`` raises
        :class:`~powertrain.errors.CheckpointError` (see ``CheckpointConfig(on_lost=...)``).
        """
        if self._given is not None:
            return []
        return list(self._run_state.unsaved if self._unsaved is None else self._unsaved)

    @property
    def data_positions(self) -> dict[str, DataPosition]:
        """Position of each dataset at the newest committed checkpoint, from which the run would resume."""
        return readable(positions_in(self._manifests[-1].extras)) if self._manifests else {}

    @property
    def best_checkpoints(self) -> list[tuple[Checkpoint, dict[str, Any]]]:
        """Every checkpoint that was kept, with its metrics (those of its validation too), oldest first."""
        return [(self._checkpoint_of(m), dict(m.metrics)) for m in self._manifests]

    def get_best_checkpoint(self, metric: str, mode: str) -> Checkpoint | None:
        """Return the kept checkpoint with the greatest ("max") or smallest ("min") value of ``metric``.

        Args:
            metric: The name of a metric that was reported with the checkpoints; "a/b" for one within a dict.
            mode: Which values are better.

        Returns:
            The checkpoint, or None where no checkpoint is kept, or none has a metric.

        Raises:
            ConfigError: No kept checkpoint has this metric, although they have others.

        Example::

            best = result.get_best_checkpoint("accuracy", "max")
        """
        if not isinstance(metric, str):
            raise ConfigError(f"metric={shorten(metric)} is not the name of a metric. Give a string.")
        if not isinstance(mode, str) or mode not in ("min", "max"):
            raise ConfigError(
                f"mode={shorten(mode)} is neither 'min' nor 'max'. Say which values of {shorten(metric)} are better."
            )
        best = retention.best(self._manifests, metric, mode)
        if best is not None:
            return self._checkpoint_of(best)
        if names := retention.score_names(self._manifests):
            raise ConfigError(
                f"No kept checkpoint has a number under the metric {shorten(metric)}. {did_you_mean(metric, names)}"
                f"There are {', '.join(names)}."
            )
        return None

    @cached_property
    def findings(self) -> tuple[Finding, ...]:
        """Findings of the diagnosis, the most severe and costliest first. Empty without telemetry.

        They are from ``final_summary.json``, or from the telemetry of a run that has not ended.
        """
        report = self._report
        return report.findings if report is not None else ()

    @cached_property
    def _report(self) -> Report | None:
        from powertrain.diagnosis import final

        return None if self._given is not None else final.report_of(self._storage, self._run_state.name)

    def plot(
        self,
        metrics: str | Sequence[str] | None = None,
        *,
        x: Literal["row", "time"] = "row",
        rank: int | Literal["all"] = 0,
        ax: Axes | None = None,
        smooth: float = 0.0,
        path: str | os.PathLike[str] | None = None,
    ) -> Figure:
        """Plot metrics, one below the other, as a matplotlib figure.

        Each is a line in the band from the smallest to the largest value; checkpoints are marked on it, the best with
        a star, and failures, restarts and changes of size as upright lines.

        Needs matplotlib: ``pip install 'powertrain[plot]'``.

        Args:
            metrics: The names of metrics; by default all numeric ones.
            x: The horizontal axis: "row" or "time".
            rank: The rank whose points are drawn, or "all".
            ax: Axes to draw one metric into.
            smooth: The weight of previous values, from 0 up to 1.
            path: A file to save the figure to, in the format of its suffix.

        Returns:
            The figure.

        Raises:
            ConfigError: An argument has a wrong value, matplotlib is not installed, or the result has no run.

        Example::

            result.plot(["loss", "accuracy"], path="curves.png")
        """
        if self._given is not None:
            raise ConfigError(
                "Result.plot() draws the curves of a run, and this result was not loaded from a run. Use "
                "Result.from_path."
            )
        plot = _matplotlib()
        picture = contents.picture_of(self._contents, metrics, x=x, rank=rank, smooth=smooth)
        if ax is not None and len(picture.panels) != 1:
            raise ConfigError(
                f"plot(ax=...) draws one metric, and this would be {len(picture.panels)}. Name one: "
                f"plot({picture.panels[0].name!r}, ax=ax)."
            )
        figure: Figure = plot.draw(picture, ax)
        if path is not None:
            figure.savefig(path)
        return figure

    def _repr_html_(self) -> str:
        """Return the card for notebooks. Never raises: an unreadable part shows its error."""
        if self._given is not None:
            return f"<pre>{html.escape(repr(self))}</pre>"
        card = contents.card_of(
            self._contents,
            state=self.state,
            reason=self.reason,
            metrics=self.metrics,
            error=self.error,
        )
        return result_view.html(card)

    @property
    def _contents(self) -> contents.Contents:
        return contents.Contents(
            path=self.path,
            storage=lambda: self._storage,
            facts=lambda: self._facts,
            state=lambda: self._run_state,
            manifests=lambda: self._manifests,
            findings=lambda: self.findings,
            report=lambda: self._report,
        )

    @property
    def filesystem(self) -> FileSystem:
        """A pyarrow file system on which ``path``, and the files below it, can be read."""
        return Checkpoint(self._address, self._given_filesystem).filesystem

    def __repr__(self) -> str:
        fields = [
            f"state={self.state!r}",
            f"metrics={self.metrics!r}",
            f"path={without_secrets(self.path)!r}",
        ]
        try:
            if self.checkpoint is not None:
                fields.append(f"checkpoint={self.checkpoint!r}")
        except (OSError, PowertrainError) as error:  # a result can be shown when its storage is gone
            fields.append(f"checkpoint=<unread: {type(error).__name__}>")
        if self._unsaved:
            fields.append(f"unsaved_checkpoints={len(self._unsaved)}")
        if self.error is not None:
            fields.append(f"error={str(self.error).splitlines()[0]!r}")
        return f"Result({', '.join(fields)})"


def _journal_of(storage: Storage, path: str) -> list[ev.Event]:
    """Return the facts of a run. Raises :class:`StorageError` if there are none, because the run is gone."""
    facts = journal.read(storage)
    if not facts:
        raise StorageError(
            f"{without_secrets(path)!r} holds no run, or not any more: there is no journal in it. Give "
            "Result.from_path the directory of one run, which is storage_path/name."
        )
    return facts


def failure(
    result: Result,
    storage: Storage,
    failures: Sequence[ev.WorkerFailure],
    *,
    trusted: bool = False,
    raised_here: BaseException | None = None,
) -> TrainingFailedError:
    """Return the error of a run that failed; its text is the same in ``fit`` and in ``from_path``.

    Args:
        result: What the run left.
        storage: The run's directory.
        failures: Why its ranks failed.
        trusted: Whether the failures come from ranks of this process, and not from files.
        raised_here: What rank 0 raised, where it ran in this process.
    """
    logs = os.path.join(storage.uri, "logs")
    text = failure_report(failures, result.reason, logs=logs if os.path.isdir(logs) else "")
    if not failures:
        return ControllerError(PowertrainError(text), result)
    exceptions = exceptions_of(failures, trusted=trusted)
    own = next((f for f in failures if f.rank == 0 and f.kind in ("raised", "exit")), None)
    if raised_here is not None and own is not None:
        with contextlib.suppress(AttributeError):  # of a class with slots
            raised_here.failure = own  # type: ignore[attr-defined]
        exceptions[0] = raised_here
    first = next((f for f in failures if not f.secondary), failures[0])
    kind = NCCLHangError if first.kind == "hung" else WorkerGroupError
    return kind(text, exceptions, result)


def _matplotlib() -> Any:
    """The module that draws; raises :class:`ConfigError` where matplotlib is not installed."""
    try:
        from powertrain.result import plot as result_plot
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != "matplotlib":
            raise
        raise ConfigError(
            "Result.plot() draws with matplotlib, which is not installed. Install it with: "
            "pip install 'powertrain[plot]'."
        ) from None
    return result_plot


def _last_failures(facts: Sequence[ev.Event]) -> tuple[ev.WorkerFailure, ...]:
    """Return failures of the last failed attempt of the newest start; () if it failed before any worker did."""
    for fact in reversed(facts):
        if isinstance(fact, ev.Failed):
            return fact.failures
        if isinstance(fact, ev.RunStarted):
            break
    return ()


def _returned_bytes(facts: Sequence[ev.Event]) -> int:
    """Return the size of the return value at the run's end; 0 if it returned nothing, or is live."""
    last = next((fact for fact in reversed(facts) if isinstance(fact, (ev.Ended, ev.RunStarted))), None)
    return last.returned if isinstance(last, ev.Ended) else 0
