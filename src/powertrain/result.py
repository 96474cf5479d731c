"""Result: what ``fit`` returns, or what a run directory says."""

from __future__ import annotations

import os
from collections.abc import Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal

from powertrain import result_contents, result_view, return_value
from powertrain.checkpoint import commit, retention
from powertrain.checkpoint.checkpoint import Checkpoint
from powertrain.checkpoint.manifest import Manifest
from powertrain.errors import (
    ConfigError,
    PowertrainError,
    StorageError,
    TrainingFailedError,
    WorkerFailedError,
)
from powertrain.run import events as ev
from powertrain.run import journal, lifecycle
from powertrain.run import metrics as metrics_store
from powertrain.run.lifecycle import RunState
from powertrain.storage import Storage, open_storage
from powertrain.storage.addresses import without_secrets
from powertrain.terminal import failure_report
from powertrain.worker.shards import DataPosition, positions_in, readable

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from pyarrow.fs import FileSystem

    from powertrain.diagnosis.finding import Finding

#: Seconds for which storage that does not answer is asked again.
_READ_WITHIN = 60.0


class Result:
    """How a run ended and what it left. What is large is read from the run's directory when it is asked for."""

    def __init__(
        self,
        *,
        path: str,
        state: str,
        reason: str = "",
        metrics: dict[str, Any] | None = None,
        error: TrainingFailedError | None = None,
        value: bytes | None = None,
        storage_filesystem: Any = None,
    ) -> None:
        #: The run's directory: a path or an address, on the file system that was given or the one it names.
        self.path = path
        self._given_filesystem = storage_filesystem
        #: "finished", "stopped", "failed", "preempted", or what the run is doing now; and why.
        self.state = state
        self.reason = reason
        #: Exactly the dict that rank 0 reported last; None when it never did.
        self.metrics = metrics
        #: What ``fit`` raised when training failed; None after any other end.
        self.error = error
        #: The pickled return value; None where only the run's directory may have it.
        self._value = value

    @classmethod
    def from_path(cls, path: str | os.PathLike[str], storage_filesystem: Any = None) -> Result:
        """The result of the run in this directory, whoever ran it and however it ended.

        ``path`` is a plain path or an address such as ``s3://bucket/runs/name``, or, with a pyarrow or fsspec file
        system, a path of that.
        """
        storage = open_storage(os.fspath(path), filesystem=storage_filesystem, timeout=_READ_WITHIN)
        events = _journal_of(storage, os.fspath(path))
        state = journal.replay(events)
        result = cls(
            path=os.fspath(path),
            state=state.state,
            reason=state.reason,
            metrics=metrics_store.last_of_rank(storage, state, 0),
            storage_filesystem=storage_filesystem,
        )
        if state.state == lifecycle.FAILED:
            result.error = failure(result, storage, _last_failures(events))
        return result

    @property
    def _storage(self) -> Storage:
        return open_storage(self.path, filesystem=self._given_filesystem, timeout=_READ_WITHIN)

    @cached_property
    def _facts(self) -> list[ev.Event]:
        return _journal_of(self._storage, self.path)

    @cached_property
    def _run_state(self) -> RunState:
        return journal.replay(self._facts)

    @cached_property
    def _manifests(self) -> list[Manifest]:
        """The oldest first, with the metrics of their validations."""
        return commit.with_validations(commit.committed(self._storage), commit.validations(self._storage))

    @cached_property
    def return_value(self) -> Any:
        """What rank 0's function returned; None after a failure. Opened here, when it is asked for, and nowhere else.

        In another process than the one that trained it comes from the run's directory, and only where this user wrote
        it on this machine; otherwise a :class:`~powertrain.errors.StorageError` says what to do.
        """
        return self.open_return_value()

    def open_return_value(self, *, trust: bool = False) -> Any:
        """As :attr:`return_value`; with ``trust`` also of a run that another user, or another machine, has trained.

        That is to run code from the run's directory: only do it if you trust everybody who can write there.
        """
        if self._value is None and not _returned_bytes(self._facts):
            return None
        data = return_value.load(self._storage, trust=trust) if self._value is None else self._value
        return return_value.opened(data)

    @property
    def metrics_dataframe(self) -> pd.DataFrame:
        """Every point of every rank that is part of the run's history, abandoned ones left out."""
        return metrics_store.dataframe(self._storage, self._run_state)

    @property
    def checkpoint(self) -> Checkpoint | None:
        """The newest committed checkpoint."""
        return commit.checkpoint_of(self._storage, self._manifests[-1]) if self._manifests else None

    @property
    def data_positions(self) -> dict[str, DataPosition]:
        """By dataset how far it had been read at the newest committed checkpoint, and so where the run would go on."""
        return readable(positions_in(self._manifests[-1].extras)) if self._manifests else {}

    @property
    def best_checkpoints(self) -> list[tuple[Checkpoint, dict[str, Any]]]:
        """Every checkpoint that was kept, with its metrics (those of its validation too), oldest first."""
        return [(commit.checkpoint_of(self._storage, m), dict(m.metrics)) for m in self._manifests]

    def get_best_checkpoint(self, metric: str, mode: str) -> Checkpoint | None:
        """The kept checkpoint with the greatest ("max") or smallest ("min") value of ``metric``."""
        if mode not in ("min", "max"):
            raise ConfigError(
                f"mode={mode!r} is neither 'min' nor 'max'. Say which values of {metric!r} are better."
            )
        best = retention.best(self._manifests, metric, mode)
        return commit.checkpoint_of(self._storage, best) if best is not None else None

    @cached_property
    def findings(self) -> tuple[Finding, ...]:
        """What is wrong with how the run spends its time, the weightiest first: what ``final_summary.json`` says, or
        what follows from its record where it did not come to an end. Empty where nothing was recorded."""
        from powertrain.diagnosis import final

        report = final.report_of(self._storage, self._run_state.name)
        return report.findings if report is not None else ()

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
        """The curves of ``metrics`` (all that are numbers), one below the other, as a matplotlib figure.

        Each is a line in the band from the smallest to the largest value; checkpoints are marked on it, the best with
        a star, and failures, restarts and changes of size as upright lines. ``x`` is "row" or "time", ``rank`` a number
        or "all". ``smooth``, from 0 up to 1, is the weight of what came before. ``ax`` draws one metric into axes of
        yours. ``path`` also saves the figure, in the form that its name says.

        Needs matplotlib: ``pip install 'powertrain[plot]'``.
        """
        plot = _matplotlib()
        picture = result_contents.picture_of(self._contents, metrics, x=x, rank=rank, smooth=smooth)
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
        """What notebooks show. Never raises: a part that cannot be read says so."""
        card = result_contents.card_of(
            self._contents,
            state=self.state,
            reason=self.reason,
            metrics=self.metrics,
            error=self.error,
        )
        return result_view.html(card)

    @property
    def _contents(self) -> result_contents.Contents:
        return result_contents.Contents(
            path=self.path,
            storage=lambda: self._storage,
            facts=lambda: self._facts,
            state=lambda: self._run_state,
            manifests=lambda: self._manifests,
            findings=lambda: self.findings,
        )

    @property
    def filesystem(self) -> FileSystem:
        """A pyarrow file system on which ``path``, and what lies below it, can be read as it stands."""
        return Checkpoint(self.path, self._given_filesystem).filesystem

    def __repr__(self) -> str:
        fields = [
            f"state={self.state!r}",
            f"metrics={self.metrics!r}",
            f"path={without_secrets(self.path)!r}",
        ]
        try:
            if self.checkpoint is not None:
                fields.append(f"checkpoint={self.checkpoint!r}")
        except (OSError, PowertrainError) as error:  # a result can be looked at when its storage is gone
            fields.append(f"checkpoint=<unread: {type(error).__name__}>")
        if self.error is not None:
            fields.append(f"error={str(self.error).splitlines()[0]!r}")
        return f"Result({', '.join(fields)})"


def _journal_of(storage: Storage, path: str) -> list[ev.Event]:
    """Its facts. Raises :class:`StorageError` where there are none: one that is gone is no run without metrics."""
    facts = journal.read(storage)
    if not facts:
        raise StorageError(
            f"{without_secrets(path)!r} holds no run, or not any more: there is no journal in it. Give "
            "Result.from_path the directory of one run, which is storage_path/name."
        )
    return facts


def failure(result: Result, storage: Storage, failures: Sequence[ev.WorkerFailure]) -> TrainingFailedError:
    """The error of a run that failed, the same for who waited for its end and for who reads of it later."""
    logs = os.path.join(storage.uri, "logs")
    return TrainingFailedError(
        failure_report(failures, result.reason, logs=logs if os.path.isdir(logs) else ""),
        {failure.rank: WorkerFailedError(failure) for failure in failures},
        result,
    )


def _matplotlib() -> Any:
    """The module that draws; raises :class:`ConfigError` where matplotlib is not installed."""
    try:
        from powertrain import result_plot
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != "matplotlib":
            raise
        raise ConfigError(
            "Result.plot() draws with matplotlib, which is not installed. Install it with: "
            "pip install 'powertrain[plot]'."
        ) from None
    return result_plot


def _last_failures(facts: Sequence[ev.Event]) -> tuple[ev.WorkerFailure, ...]:
    """Of the newest start's last attempt that failed; () where it failed before any worker did."""
    for fact in reversed(facts):
        if isinstance(fact, ev.Failed):
            return fact.failures
        if isinstance(fact, ev.RunStarted):
            break
    return ()


def _returned_bytes(facts: Sequence[ev.Event]) -> int:
    """How large the return value was when the run ended; 0 where it returned nothing, or goes on."""
    last = next((fact for fact in reversed(facts) if isinstance(fact, (ev.Ended, ev.RunStarted))), None)
    return last.returned if isinstance(last, ev.Ended) else 0
