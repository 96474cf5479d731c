"""``powertrain metrics``: the metrics of a run as a table, curves, CSV or JSON."""

from __future__ import annotations

import difflib
import math
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

import typer

from powertrain.cli.common import arguments
from powertrain.cli.common.output import cell, print_json, print_line, print_lines, print_table, print_text
from powertrain.cli.common.ranks import parse_ranks
from powertrain.cli.metrics.chart import chart, sparkline
from powertrain.errors import ArgumentError, StorageError
from powertrain.lookup.finding import FoundRun, find_run
from powertrain.lookup.watching import RunWatch
from powertrain.run.lifecycle import RunState
from powertrain.run.metrics import curves
from powertrain.storage.addresses import without_secrets
from powertrain.terminal.text import number, one_line

#: Pixels of a curve in JSON, and characters of one in the table.
_JSON_PIXELS, _SPARK_WIDTH = 1000, 24
#: Characters of a metric's name in the table; the other forms have all of it.
_NAME_WIDTH = 48
#: Lines of a chart, and the widest.
_CHART_HEIGHT, _CHART_WIDTH = 10, 120


def metrics(
    run: arguments.Run,
    storage: arguments.Storage = "",
    metric: Annotated[
        list[str] | None,
        typer.Option("--metric", "-m", help="Only these metrics. May be repeated.", show_default=False),
    ] = None,
    rank: arguments.Ranks = None,
    plot: Annotated[bool, typer.Option("--plot", help="Draw each metric as a curve.")] = False,
    csv: Annotated[
        bool, typer.Option("--csv", help="Print every point as CSV; of all ranks without --rank.")
    ] = False,
    json: Annotated[bool, typer.Option("--json", help="Print the curves as JSON.")] = False,
) -> None:
    """Show the metrics of a run: last, lowest and highest values; with --plot as curves, with --csv every point."""
    if plot + csv + json > 1:
        raise typer.BadParameter("Choose one of --plot, --csv and --json.")
    ranks = parse_ranks(rank) if rank else None
    found = find_run(run, storage)
    watch = RunWatch(found)
    if not watch.look():
        raise StorageError(
            f"The run at {without_secrets(found.place.uri)} has no journal, so it has no metrics."
        )
    names = _chosen_names(found, watch.run, metric or [])
    if csv:
        from powertrain.cli.metrics.table import csv_lines

        for text in csv_lines(found.place, watch.run, metric or [], ranks):
            print_text(text, end="")
        return
    width = min(shutil.get_terminal_size((100, 24)).columns, _CHART_WIDTH)
    pixels = _JSON_PIXELS if json or not plot else 2 * width
    read = list(_read(found, watch.run, names, ranks or (0,), pixels))
    if json:
        print_json(
            {"run": found.name, "path": without_secrets(found.place.uri), "metrics": [*map(_as_json, read)]}
        )
    elif not read:
        print_line(f"The run {found.name!r} has reported no numbers yet.")
    elif plot:
        _print_charts(read, width)
    else:
        _print_table(read)


@dataclass(frozen=True)
class _RankCurve:
    name: str
    rank: int
    curve: curves.Curve

    @property
    def lowest(self) -> float:
        return min((value for value in self.curve.low.tolist() if not math.isnan(value)), default=math.nan)

    @property
    def highest(self) -> float:
        return max((value for value in self.curve.high.tolist() if not math.isnan(value)), default=math.nan)


def _chosen_names(found: FoundRun, state: RunState, wanted: Sequence[str]) -> list[str]:
    """Return the metrics to show; raises :class:`ArgumentError` for one that the run has not reported."""
    known = curves.metric_names(found.place, state)
    for name in wanted:
        # Metrics beyond the columns of a segment have a curve, and no name in the list.
        if name not in known and not len(curves.curve(found.place, state, name, pixels=1).rows):
            alike = difflib.get_close_matches(name, known, 3) or known[:10]
            raise ArgumentError(
                f"The run {found.name!r} has no metric {name!r} with numbers. "
                + (f"It has: {', '.join(alike)}." if alike else "It has reported none.")
            )
    return list(dict.fromkeys(wanted)) or known


def _read(
    found: FoundRun, state: RunState, names: Sequence[str], ranks: Sequence[int], pixels: int
) -> Iterator[_RankCurve]:
    for name in names:
        for rank in ranks:
            curve = curves.curve(found.place, state, name, pixels=pixels, rank=rank)
            if len(curve.rows):
                yield _RankCurve(name, rank, curve)


def _as_json(one: _RankCurve) -> dict[str, Any]:
    return {
        "name": one.name,
        "rank": one.rank,
        "points": one.curve.points,
        "lowest": one.lowest,
        "highest": one.highest,
        "rows": one.curve.rows.tolist(),
        "last": one.curve.last.tolist(),
    }


def _print_charts(read: Sequence[_RankCurve], width: int) -> None:
    for index, one in enumerate(read):
        if index:
            print_line("")
        last = number(float(one.curve.last[-1]))
        print_line(f"{one.name}, rank {one.rank}: {last} at row {one.curve.rows[-1]}")
        values = (one.curve.rows, one.curve.low, one.curve.high, one.curve.last)
        rows, low, high, course = (array.tolist() for array in values)
        print_lines(chart(rows, low, high, course, width=width, height=_CHART_HEIGHT))


def _print_table(read: Sequence[_RankCurve]) -> None:
    from rich.table import Table

    table = Table(box=None, pad_edge=False)
    table.add_column("metric", overflow="fold")
    for column in ("rank", "points", "last", "lowest", "highest"):
        table.add_column(column, justify="right")
    table.add_column("curve")
    for one in read:
        values = [number(value) for value in (float(one.curve.last[-1]), one.lowest, one.highest)]
        spark = sparkline(one.curve.last.tolist(), _SPARK_WIDTH)
        table.add_row(
            *map(
                cell, (one_line(one.name, _NAME_WIDTH), str(one.rank), str(one.curve.points), *values, spark)
            )
        )
    print_table(table)
