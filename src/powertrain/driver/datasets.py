"""Datasets on their way from the driver to the workers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from powertrain import functions
from powertrain.errors import ConfigError, DataChangedError
from powertrain.text.errors import describe_error

if TYPE_CHECKING:
    from powertrain.checkpoint.manifest import Manifest
    from powertrain.data.plan.prepared import Prepared


def is_of_ray(dataset: Any) -> bool:
    """True for a ``ray.data.Dataset``, without importing Ray."""
    return type(dataset).__module__.partition(".")[0] == "ray" and hasattr(dataset, "streaming_split")


def about_stream(name: str, is_split: bool) -> str:
    rows = (
        "every rank gets the same number of rows, so an epoch may leave out up to one row fewer than there are ranks"
        if is_split
        else "every rank gets all rows, in an order of its own"
    )
    return (
        f"The Ray dataset {name!r} is streamed from Ray: {rows}, and a restart begins its epoch again. "
        "DataConfig(snapshot=True) writes it once into the run's storage instead: then every row comes exactly once "
        "per epoch, and a restart goes on at the row where it was."
    )


def pickled_datasets(datasets: Mapping[str, Prepared]) -> bytes:
    """The datasets on their way to workers; raises :class:`ConfigError` naming one that cannot travel."""
    import cloudpickle

    plans = [found.inspected.plan for found in datasets.values()]
    used = [getattr(op, "fn", None) for plan in plans for part in plan.parts for op in part.operations]
    try:
        with functions.by_value_where_needed(*(function for function in used if function is not None)):
            data: bytes = cloudpickle.dumps(dict(datasets))
            return data
    except Exception as error:  # whatever the user's objects do when they are pickled
        culprits = [name for name, found in datasets.items() if not _can_be_pickled(found)]
        raise ConfigError(
            f"The dataset {', '.join(map(repr, culprits))} cannot be sent to the workers: something that it reads or "
            f"maps with cannot be pickled ({describe_error(error)}). Make that inside the function, or give a "
            "class to map_batches, which is made in the worker."
        ) from error


def _can_be_pickled(value: Any) -> bool:
    import cloudpickle

    try:
        cloudpickle.dumps(value)
    except Exception:
        return False
    return True


def about_changed_data(datasets: Mapping[str, Prepared], checkpoint: Manifest, on_change: str) -> list[str]:
    """What to say of data that are not those of the checkpoint; raises :class:`DataChangedError` to refuse them."""
    from powertrain.data.plan.changes import changed_message, mixing_warning
    from powertrain.data.plan.position import Position
    from powertrain.worker.data.shards import is_of_stream, positions_in

    remarks = []
    for name, state in positions_in(checkpoint.extras).items():
        if name not in datasets or is_of_stream(state):
            continue
        now, saved = datasets[name], Position.from_dict(state, name)
        if now.is_of(saved.fingerprint):
            continue
        if on_change == "refuse":
            raise DataChangedError(changed_message(now, saved))
        remarks.append(
            f"The dataset {name!r} is not what it was at {checkpoint.name} ({saved.rows} rows then, {now.rows} now): "
            f"its epoch {saved.epoch} starts again with the data as they are now.{mixing_warning(now)}"
        )
    return remarks
