"""Data that differ from those of a saved position: the cause, and the remedy."""

from __future__ import annotations

from typing import TYPE_CHECKING

from powertrain.data.sources.base import layers_of

if TYPE_CHECKING:
    from powertrain.data.plan.plan import Plan
    from powertrain.data.plan.position import Position
    from powertrain.data.plan.prepared import Prepared


def changed_message(prepared: Prepared, saved: Position) -> str:
    """Return the message for data that a saved position does not belong to."""
    named = f"The dataset {prepared.name!r}" if prepared.name else "The dataset"
    rows = (
        f"it had {saved.rows} rows then and has {prepared.rows} now"
        if saved.rows != prepared.rows
        else f"it has {prepared.rows} rows as before, but not the same ones"
    )
    return (
        f"{named} is not what it was when the position in it (epoch {saved.epoch}, row {max(saved.position, 0)}) "
        f"was saved: {rows}. Going on would lose rows or repeat some. {_cause_and_remedy(prepared.inspected.plan)}"
    )


def mixing_warning(prepared: Prepared) -> str:
    """Return the addition to the warning that an epoch restarts with changed data; "" where no rows are held out."""
    if not _is_sampled(prepared.inspected.plan):
        return ""
    return (
        " The dataset is a part of other data that was drawn at random, so that rows which were held out before may be "
        "among those that are trained on now."
    )


def _cause_and_remedy(plan: Plan) -> str:
    if _is_sampled(plan):
        return (
            "It is a part of other data that was drawn at random (by train_test_split(), or by limit() of a shuffled "
            "dataset), and other rows are drawn now: the data that it is drawn from, the size or the seed is another "
            "one, or an older version of Powertrain, which drew anew at each start, began this run. Give the data, "
            'size and seed of that time. DataConfig(on_change="restart_epoch") would train on rows that were held out '
            "for testing: to accept other rows, begin a run under another name."
        )
    if _is_kept(plan):
        return (
            "Its rows are computed at each start of the program and kept (by materialize(), or by a split or limit "
            "that needs it), and other rows came out: a function draws random numbers that are not those of its "
            "parameter rng, or it depends on something else that has changed, or the data that it reads has. Give the "
            "data and functions of that time; or compute the rows once, with write_parquet(), and read them from "
            'there. DataConfig(on_change="restart_epoch") starts the epoch again, and a split then mixes rows for '
            "training and testing."
        )
    return (
        "Files were added, removed or written anew, or another dataset was given under this name. Give the data of "
        'that time, or start its epoch again with DataConfig(on_change="restart_epoch").'
    )


def _is_sampled(plan: Plan) -> bool:
    from powertrain.data.sources.filtered import SampledSource

    return any(isinstance(layer, SampledSource) for part in plan.parts for layer in layers_of(part.source))


def _is_kept(plan: Plan) -> bool:
    from powertrain.data.output.materialized import MaterializedSource

    return any(
        isinstance(layer, MaterializedSource) for part in plan.parts for layer in layers_of(part.source)
    )
