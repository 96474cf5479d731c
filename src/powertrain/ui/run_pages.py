"""Content of a run's page, as its requests ask for it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from powertrain.lookup.asking import how_it_stands
from powertrain.ui.listing import silence_of
from powertrain.ui.places import Places
from powertrain.ui.queries import BadQuery, number, whole
from powertrain.views import metrics, run_page
from powertrain.views.run_page import ShownRun


def view_of(places: Places, name: str) -> ShownRun:
    """Return a run for a page."""
    record = places.record(name)
    live = record.found.live
    return ShownRun(
        name,
        record.found.place,
        record.facts,
        lambda: places.telemetry(record),
        pid=live.card.pid if live is not None else 0,
    )


def run_overview(places: Places, name: str) -> dict[str, Any]:
    """Return the overview of a run, with its own answer about where it stands."""
    return run_page.run_page(current_view_of(places, name))


def current_view_of(places: Places, name: str) -> ShownRun:
    """Return a run for a page, with its own answer about where it stands and how long it was silent."""
    record, view = places.record(name), view_of(places, name)
    live = record.found.live
    stands = how_it_stands(live) if live is not None else None
    return ShownRun(
        name, view.storage, view.facts, view.telemetry, view.pid, stands, silent_since=silence_of(record)
    )


def run_lines(places: Places, name: str, query: Mapping[str, str], wanted: list[str]) -> dict[str, Any]:
    """Return the curves of metrics."""
    view = view_of(places, name)
    rank = query.get("rank", "0")
    ranks = metrics.chosen_ranks(view.world_size) if rank == "all" else [whole(rank, "rank")]
    first, last = query.get("first", ""), query.get("last", "")
    rows = (whole(first, "first"), whole(last, "last")) if first and last else None
    pixels = whole(query.get("pixels", "400"), "pixels")
    return run_page.run_lines(view, wanted, ranks=ranks, pixels=pixels, rows=rows)


def run_steps(places: Places, name: str, query: Mapping[str, str]) -> dict[str, Any] | None:
    """Return the step timeline; None if no steps were recorded."""
    columns = whole(query.get("columns", "400"), "columns")
    rows = whole(query.get("rows", "64"), "rows")
    window = None
    if query.get("begin") and query.get("end"):
        window = (number(query["begin"], "begin"), number(query["end"], "end"))
        if window[0] >= window[1]:
            raise BadQuery(f"begin={window[0]} is not before end={window[1]}")
    return run_page.run_steps(view_of(places, name), columns=columns, rows=rows, window=window)


def run_resources(places: Places, name: str, query: Mapping[str, str]) -> dict[str, Any] | None:
    """Return the resources of ranks; None if no samples were recorded."""
    columns = whole(query.get("columns", "200"), "columns")
    return run_page.run_resources(view_of(places, name), columns=columns)
