"""Content of a run's page: overview, curves, steps and resources."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from powertrain.lookup.asking import how_it_stands
from powertrain.lookup.summaries import INTERRUPTED, summarize
from powertrain.run import events as ev
from powertrain.run.metrics import curves, reading
from powertrain.storage.addresses import without_secrets
from powertrain.terminal.text import metric_pairs
from powertrain.ui.listing import silence_of
from powertrain.ui.places import Places, RunRecord, id_of
from powertrain.ui.queries import BadQuery, number, whole
from powertrain.views import history, machine, metrics, overview, timeline

#: Bounds of what a page may ask for.
_MOST_PIXELS, _MOST_COLUMNS, _MOST_ROWS = 2000, 800, 256
#: Curves that one reply has at most, and events.
MOST_CURVES = 64
_MOST_EVENTS = 300


def run_page(places: Places, name: str) -> dict[str, Any]:
    """Return the overview of a run. A part that cannot be read has the reason in ``unread``."""
    record = places.record(name)
    found, facts, place = record.found, record.facts, record.found.place
    stands = how_it_stands(found.live) if found.live is not None else None
    summary = summarize(name, facts, stands.row if stands is not None else 0)
    silent = silence_of(record)
    parts = history.spans(facts, silent or _known_until(record, summary.state))
    start = next((fact for fact in reversed(facts) if isinstance(fact, ev.RunStarted)), None)
    unread: dict[str, str] = {}

    def read(what: str, make: Any, default: Any) -> Any:
        try:
            return make()
        except Exception as error:  # storage may be gone, and files damaged: the rest of the page is shown
            unread[what] = f"{type(error).__name__}: {error}"
            return default

    last = read("metrics", lambda: reading.last_of_rank(place, record.state, 0) or {}, {})
    return {
        **asdict(summary),
        "id": id_of(name),
        "path": without_secrets(place.uri),
        "reason": record.state.reason,
        "silent_since": silent,
        "is_live": found.live is not None,
        "pid": found.live.card.pid if found.live is not None else 0,
        "host": start.host if start is not None else "",
        "engine": start.engine if start is not None else "",
        "ranks": record.world_size,
        "stands": stands,
        "most_curves": MOST_CURVES,
        "metrics": read("metrics", lambda: curves.metric_names(place, record.state), []),
        "last": metric_pairs(last, limit=60),
        "spans": [asdict(span) for span in parts],
        "goodput": history.goodput(parts),
        "marks": history.marks(facts),
        "events": history.happenings(facts, _MOST_EVENTS),
        "checkpoints": read("checkpoints", lambda: overview.checkpoints(place, facts, record.state), None),
        "diagnosis": read(
            "diagnosis", lambda: overview.diagnosis(place, name, lambda: places.telemetry(record)), None
        ),
        "unread": unread,
    }


def _known_until(record: RunRecord, state: str) -> float:
    """Return until when the run was certainly there: now, or its last fact if its process is gone."""
    return record.facts[-1].time if state == INTERRUPTED else time.time()


def run_lines(places: Places, name: str, query: Mapping[str, str], wanted: list[str]) -> dict[str, Any]:
    """Return the curves of metrics."""
    record = places.record(name)
    rank = query.get("rank", "0")
    ranks = metrics.chosen_ranks(record.world_size) if rank == "all" else [whole(rank, "rank")]
    first, last = query.get("first", ""), query.get("last", "")
    rows = (whole(first, "first"), whole(last, "last")) if first and last else None
    pixels = min(max(1, whole(query.get("pixels", "400"), "pixels")), _MOST_PIXELS)
    content = metrics.metric_lines(
        record.found.place,
        record.state,
        wanted[: max(1, MOST_CURVES // len(ranks))],
        ranks=ranks,
        pixels=pixels,
        rows=rows,
    )
    return {"id": id_of(name), **content}


def run_steps(places: Places, name: str, query: Mapping[str, str]) -> dict[str, Any] | None:
    """Return the step timeline; None if no steps were recorded."""
    record = places.record(name)
    telemetry = places.telemetry(record)
    columns = min(max(1, whole(query.get("columns", "400"), "columns")), _MOST_COLUMNS)
    rows = min(max(1, whole(query.get("rows", "64"), "rows")), _MOST_ROWS)
    window = timeline.full_window(telemetry.steps, columns)
    if window is None:
        return None
    if query.get("begin") and query.get("end"):
        begin, end = number(query["begin"], "begin"), number(query["end"], "end")
        if begin >= end:
            raise BadQuery(f"begin={begin} is not before end={end}")
        window = timeline.Window(begin, end, columns)
    return timeline.timeline(telemetry.steps, window, most_rows=rows, is_thinned=telemetry.level > 0)


def run_resources(places: Places, name: str, query: Mapping[str, str]) -> dict[str, Any] | None:
    """Return the resources of ranks; None if no samples were recorded."""
    telemetry = places.telemetry(places.record(name))
    columns = min(max(1, whole(query.get("columns", "200"), "columns")), _MOST_COLUMNS)
    window = machine.sample_window(telemetry.samples, columns)
    return machine.resources(telemetry.samples, window) if window is not None else None
