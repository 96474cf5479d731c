"""Datasets on their way from the driver to the workers."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from powertrain import functions
from powertrain.driver.checks import is_of_ray
from powertrain.errors import ConfigError, DataChangedError, DataError
from powertrain.text.errors import describe_error

if TYPE_CHECKING:
    from powertrain.checkpoint.manifest import Manifest
    from powertrain.config.data import DataConfig
    from powertrain.data.dataset import Dataset
    from powertrain.data.plan.prepared import Prepared
    from powertrain.driver.request import TrainRequest
    from powertrain.storage import Storage
    from powertrain.worker.place import Place


def about_stream(name: str, is_split: bool) -> str:
    rows = (
        "every rank gets the same number of rows, so an epoch may leave out up to one row fewer than there are ranks"
        if is_split
        else "every rank gets all rows, in an order of its own"
    )
    return (
        f"The Ray dataset {name!r} is streamed from Ray: {rows}, and a restart begins its epoch again. "
        "DataConfig(snapshot=True) writes it once into the run's storage instead: then every row comes exactly once "
        "per epoch, and a restart continues at the row where it was."
    )


def pickled_datasets(datasets: Mapping[str, Prepared]) -> bytes:
    """Pickle the datasets for the workers; raises :class:`ConfigError` naming one that cannot be pickled."""
    import cloudpickle

    plans = [found.inspected.plan for found in datasets.values()]
    operations = [operation for plan in plans for part in plan.parts for operation in part.operations]
    try:
        with functions.by_value_where_needed(*(fn for operation in operations for fn in operation.functions)):
            data: bytes = cloudpickle.dumps(dict(datasets))
            return data
    except Exception as error:  # the user's objects may raise anything when pickled
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
    """Return warnings about data that differ from the checkpoint's; raises :class:`DataChangedError` to refuse them."""
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


def prepare_data(
    request: TrainRequest, seed: int, cache: str, checkpoint: Manifest | None, storage: Storage
) -> dict[str, Prepared]:
    """Return the inspected datasets that ranks read themselves; Ray's as snapshots in the run.

    Raises :class:`DataError` for data that cannot be read, or differ from the run's newest checkpoint's.
    """
    if not request.datasets:
        return {}
    from powertrain.data.plan.prepare import prepare

    own = _configured(request)
    if own is not None:
        prepared = prepare(own[0], own[1], seed, os.path.join(cache, "rows"))
        if checkpoint is not None:
            request.remarks += about_changed_data(prepared, checkpoint, request.data.on_change)
        return prepared
    streamed = request.streamed_datasets
    request.remarks += [about_stream(name, request.data.is_split(name)) for name in streamed]
    read = {
        name: _in_storage(request, name, given, storage) if is_of_ray(given) else given
        for name, given in request.datasets.items()
        if name not in streamed
    }
    prepared = prepare(read, request.data, seed, os.path.join(cache, "rows"))
    if checkpoint is not None:
        request.remarks += about_changed_data(prepared, checkpoint, request.data.on_change)
    return prepared


def _configured(request: TrainRequest) -> tuple[dict[str, Dataset], DataConfig] | None:
    """Return the datasets as the user's own ``DataConfig.configure()`` divides them; None where there is none."""
    if not request.data.has_own_configure:
        return None
    from powertrain.data.iterators.configured import configured

    return configured(request.data, request.datasets, request.worker_bounds[1])


def _in_storage(request: TrainRequest, name: str, dataset: Any, storage: Storage) -> Dataset:
    """Return a dataset of Ray's, as it was written into the run."""
    from powertrain.data.ray.snapshot import snapshot

    written, remark = snapshot(name, dataset, storage)
    request.remarks.append(remark)
    return written


def prepare_like_rank_zero(request: TrainRequest, place: Place) -> dict[str, Prepared]:
    """Return this process's own copy of the datasets, for a rank that rank 0 cannot hand its own to."""
    from powertrain.data.plan.prepare import prepare
    from powertrain.run.record.directories import sweep_data_caches

    if place.local_rank == 0:
        sweep_data_caches(place.data.cache)
    own = os.path.join(place.data.cache, f"rows-{place.rank}")
    datasets, config = _configured(request) or (request.datasets, request.data)
    prepared = prepare(datasets, config, place.data.seed, own)
    for name, found in prepared.items():
        if found.fingerprint != place.data.fingerprints.get(name):
            raise DataError(
                f"The dataset {name!r} of rank {place.rank}, with {found.rows} rows, is not the one of rank 0. "
                "Under torchrun every process makes its datasets itself, and they must be the same: give all of "
                "them the same files in the same state, and make no random choice that is not seeded."
            )
    return prepared


def function_here(
    request: TrainRequest, datasets: Callable[[Place], Mapping[str, Prepared]]
) -> Callable[[], Any]:
    """Return the function for a rank that lives in this process, where its datasets are objects already."""
    from powertrain.worker import session as worker_session
    from powertrain.worker.main import bind

    function = bind(request.function, request.config)
    if not request.datasets:
        return function

    def with_datasets() -> Any:
        session = worker_session.current("fit")
        session.data.provide(lambda: datasets(session.place))
        return function()

    return with_datasets


def travelling_datasets(request: TrainRequest, datasets: Mapping[str, Prepared]) -> bytes:
    if not request.starts_processes or not datasets:
        return b""
    return pickled_datasets(datasets)
