"""``powertrain logs``: output of the ranks of a run, also while they write."""

from __future__ import annotations

import re
import sys
import time
from collections.abc import Sequence
from contextlib import closing
from typing import Annotated

import typer

from powertrain.cli.common import arguments
from powertrain.cli.common.output import print_line
from powertrain.cli.common.ranks import parse_ranks
from powertrain.engine.registry import recorded_traits
from powertrain.errors import StorageError
from powertrain.lookup.finding import FoundRun, find_run
from powertrain.lookup.log_files import LogFile, LogFiles, Readings
from powertrain.lookup.log_lines import for_terminal
from powertrain.lookup.watching import RunWatch
from powertrain.terminal.text import rank_list

#: Seconds between two reads: of files of this machine, and of remote storage.
_LOCAL_POLL_INTERVAL_S = 0.2
_REMOTE_POLL_INTERVAL_S = 3.0


def logs(
    run: arguments.Run,
    storage: arguments.Storage = "",
    rank: arguments.Ranks = None,
    attempt: Annotated[
        int | None,
        typer.Option(help="Attempt to print; the newest when omitted.", show_default=False, min=0),
    ] = None,
    all_attempts: Annotated[
        bool, typer.Option("--all-attempts", help="Every attempt, oldest first.")
    ] = False,
    follow: Annotated[
        bool, typer.Option("--follow", "-f", help="Print new output until the run ends.")
    ] = False,
    grep: Annotated[
        str, typer.Option(help="Only lines that match this regular expression.", show_default=False)
    ] = "",
    lines: Annotated[
        int | None,
        typer.Option("--lines", "-n", help="Only the last N lines of each rank.", show_default=False, min=0),
    ] = None,
) -> None:
    """Print the output of the ranks of a run: the newest attempt, rank by rank."""
    if attempt is not None and all_attempts:
        raise typer.BadParameter("--attempt and --all-attempts exclude each other. Leave one of them out.")
    ranks, pattern = parse_ranks(rank or ()), _pattern(grep)
    found = find_run(run, storage)
    with closing(LogFiles(found)) as files:
        view = _View(found, files, ranks, pattern)
        try:
            if follow:
                view.follow(attempt, all_attempts=all_attempts, last=lines)
            else:
                view.print_all(attempt, all_attempts=all_attempts, last=lines)
        except KeyboardInterrupt:
            raise typer.Exit(130) from None


def _pattern(text: str) -> re.Pattern[str] | None:
    try:
        return re.compile(text) if text else None
    except re.error as error:
        raise typer.BadParameter(f"--grep {text!r} is not a regular expression: {error}.") from None


class _View:
    """The printed output of one run."""

    def __init__(
        self, found: FoundRun, files: LogFiles, ranks: Sequence[int], pattern: re.Pattern[str] | None
    ) -> None:
        self._found, self._files, self._ranks = found, files, ranks
        self._watch = RunWatch(found)
        self._readings = Readings(files, self._show, pattern)
        self._stream = typer.get_binary_stream("stdout")
        self._at_terminal = sys.stdout.isatty()
        #: The attempt that was printed last; -1 before the first.
        self._shown = -1

    def print_all(self, attempt: int | None, *, all_attempts: bool, last: int | None) -> None:
        """Print the current output."""
        self._watch.look()
        there = self._logs()
        if not all_attempts and attempt is None:
            attempt = max((log.attempt for log in there), default=None)
        chosen = [log for log in there if all_attempts or log.attempt == attempt]
        if not chosen:
            raise StorageError(self._explain_no_logs(attempt))
        self._read(chosen, last, is_over=True, headed=all_attempts)

    def _has_no_logs(self) -> bool:
        """Return whether ranks print to the terminal that they were started in."""
        return not recorded_traits(self._watch.engine).owns_processes

    def follow(self, attempt: int | None, *, all_attempts: bool, last: int | None) -> None:
        """Print current and new output until the run or the requested attempt has ended."""
        self._watch.look()
        if self._has_no_logs() and not self._files.list():
            raise StorageError(self._explain_no_logs(attempt))
        newest = attempt if attempt is not None else max(0, self._watch.run.attempt)
        number = 0 if all_attempts else newest
        while True:
            began = time.monotonic()
            self._watch.look()
            run_is_over, reached = self._watch.is_over, max(0, self._watch.run.attempt)
            over = run_is_over or number < reached
            self._read(self._logs(number), last if number <= newest else None, is_over=over, headed=True)
            if over and (number == attempt or number >= reached):
                break
            if over:
                number += 1
            else:
                self._pause(time.monotonic() - began)
        if run_is_over:
            print_line(self._watch.ending(), err=True)

    def _pause(self, took: float) -> None:
        """Sleep until the next read; longer if listing thousands of files takes long."""
        time.sleep(
            max(_LOCAL_POLL_INTERVAL_S, min(5 * took, _REMOTE_POLL_INTERVAL_S))
            if self._files.are_near
            else _REMOTE_POLL_INTERVAL_S
        )

    def _logs(self, attempt: int | None = None) -> list[LogFile]:
        return [log for log in self._files.list(attempt) if not self._ranks or log.rank in self._ranks]

    def _read(self, there: Sequence[LogFile], last: int | None, *, is_over: bool, headed: bool) -> None:
        for log in there:
            if headed and log.attempt != self._shown and (self._shown >= 0 or log.attempt > 0):
                self._stream.flush()
                print_line(f"--- attempt {log.attempt} ---", err=True)
            self._shown = log.attempt
            self._readings.read(log, last)
            if is_over:
                self._readings.finish(log)
        self._stream.flush()

    def _show(self, rank: int, lines: list[bytes]) -> None:
        prefix = b"" if len(self._ranks) == 1 else b"[rank %d] " % rank
        if self._at_terminal:
            lines = [for_terminal(line) for line in lines]
        self._stream.write(b"".join(prefix + line + b"\n" for line in lines))

    def _explain_no_logs(self, attempt: int | None) -> str:
        """Return the reason why there is nothing to print."""
        there = self._files.list()
        if not there:
            where = f"The run {self._found.name!r} has no log files"
            if self._has_no_logs():
                return (
                    f"{where}: with the engine {self._watch.engine!r} ranks print to the terminal that they "
                    "were started in."
                )
            return f"{where} yet: no rank has been started."
        has = [log for log in there if attempt is None or log.attempt == attempt]
        if not has:
            attempts = sorted({log.attempt for log in there})
            return f"The run {self._found.name!r} has no logs of attempt {attempt}, only of {attempts}."
        return (
            f"The run {self._found.name!r} has no logs of {rank_list(self._ranks)} in attempt {has[-1].attempt}, "
            f"only of {rank_list(log.rank for log in has)}."
        )
