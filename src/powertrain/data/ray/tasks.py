"""The rows of a dataset, computed by tasks on all nodes of a Ray cluster.

A row's result depends on the dataset, its seed and the row's place, never on the process that computes it. So an epoch
is cut into stretches of steps, each task computes one stretch, and the rows come back in order: the same rows, in the
same order, with the same random numbers as when one process reads them.
"""

from __future__ import annotations

import dataclasses
import itertools
import pickle
import secrets
from collections import deque
from collections.abc import Generator, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from powertrain import functions
from powertrain.data.operations.operation import Apply, Operation
from powertrain.data.output.tables import batch_rows, table_of
from powertrain.data.plan.plan import Inspected, Plan
from powertrain.data.plan.prepared import Prepared, prepare_alone
from powertrain.errors import ConfigError, DataError

if TYPE_CHECKING:
    import pyarrow as pa

#: Most steps of a task, of about 8 MiB each, unless a block of the source has more.
_MOST_STEPS = 8
#: Tasks for each CPU of the cluster: small enough that all end at about the same time.
_TASKS_PER_CPU = 4
#: Tasks for each CPU that have begun and whose rows have not been fetched, which are in the cluster's memory.
_AHEAD_PER_CPU = 2


@dataclass(frozen=True)
class _Failed:
    """The error of a task that could not compute its rows."""

    message: str
    cause: BaseException | None


def tables_by_tasks(plan: Plan) -> Generator[pa.Table, None, None]:
    """Yield all rows of ``plan`` in its order, as tables.

    Its files must exist on every node. Raises :class:`ConfigError` where this process is not connected to Ray,
    :class:`DataError` for errors of a user's function.
    """
    ray = connected_ray('on="ray"')
    prepared = prepare_alone(plan)
    size = batch_rows(prepared.inspected)
    cpus = max(1, int(ray.cluster_resources().get("CPU", 1)))
    steps = -(-prepared.rows // size)
    each = _steps_of_task(prepared.inspected, size, steps, cpus)
    # Opened once per process for all its tasks; the name distinguishes datasets.
    job, shared = secrets.token_hex(8), ray.put(_pickled(prepared))
    task = ray.remote(num_cpus=1, max_retries=3)(_tables)
    begun = (
        task.remote(shared, job, size, first, min(each, steps - first)) for first in range(0, steps, each)
    )
    # A reader that stops early leaves these few to end by themselves. Cancelling them could end the driver: Ray's core
    # aborts the process when the reply of a task arrives while it is being cancelled (its issue 54846).
    under_way: deque[Any] = deque(itertools.islice(begun, _AHEAD_PER_CPU * cpus))
    while under_way:
        yield from _fetched(ray, under_way[0])
        under_way.popleft()
        under_way.extend(itertools.islice(begun, 1))


def connected_ray(what: str) -> Any:
    """Return the module ``ray``. Raises :class:`ConfigError` where this process is not connected to a cluster."""
    try:
        import ray
    except ImportError as error:
        raise ConfigError(
            f"{what} needs Ray, which is not installed here. Install it: pip install 'powertrain[ray]'."
        ) from error
    if not ray.is_initialized():
        raise ConfigError(
            f"{what} needs a Ray cluster, and this process is not connected to one. Call "
            'powertrain.init(address="auto") or ray.init() first.'
        )
    return ray


def _steps_of_task(inspected: Inspected, size: int, steps: int, cpus: int) -> int:
    """Return the steps of ``size`` rows of one task. A block that is expensive to decode belongs to one task."""
    wanted = max(1, min(_MOST_STEPS, steps // (_TASKS_PER_CPU * cpus)))
    if all(part.source.in_memory or part.source.cheap_to_decode for part in inspected.plan.parts):
        return wanted
    return max(wanted, -(-int(inspected.block_rows.max(initial=1)) // size))


def _pickled(prepared: Prepared) -> bytes:
    import cloudpickle

    operations = [op for part in prepared.inspected.plan.parts for op in part.operations]
    used = [function for op in operations for function in op.functions]
    try:
        with functions.by_value_where_needed(*used):
            data: bytes = cloudpickle.dumps(prepared)
            return data
    except Exception as error:  # any error of the user's objects while they are pickled
        raise DataError(
            f"The dataset cannot be sent to Ray's tasks: something that it reads or maps with cannot be pickled "
            f"({type(error).__name__}: {error}). Make that inside the function, or give a class to map_batches, which "
            "is made where it is used."
        ) from error


def _fetched(ray: Any, reference: Any) -> Iterator[pa.Table]:
    try:
        made = ray.get(reference)
    except ray.exceptions.RayError as error:
        raise DataError(f"A Ray task that computes rows has failed: {error}") from error
    if isinstance(made, _Failed):
        raise DataError(made.message) from made.cause
    yield from made


# --------------------------------------------------------------------------- in a task


class _Resident(Operation):
    """An operation with a user's function in a process of Ray: begun once for all tasks there."""

    def __init__(self, operation: Operation) -> None:
        self._operation = operation
        self._apply: Apply | None = None

    @property
    def name(self) -> str:
        return self._operation.name

    @property
    def keeps_count(self) -> bool:
        return self._operation.keeps_count

    @property
    def batch_size(self) -> int | None:
        return self._operation.batch_size

    def begin(self) -> Apply:
        if self._apply is None:
            self._apply = self._operation.begin()
        apply = self._apply
        # The process does one call at a time, as those of a pool do: global generators are seeded as there.
        alone = self._operation.concurrency > 0
        return lambda piece, setting: apply(piece, dataclasses.replace(setting, own_process=alone))


#: The newest dataset of this process, and its name.
_opened: tuple[str, Prepared] | None = None


def _open(data: bytes, job: str) -> Prepared:
    global _opened
    if _opened is None or _opened[0] != job:
        prepared: Prepared = pickle.loads(data)
        inspected = prepared.inspected
        parts = tuple(
            dataclasses.replace(
                part,
                operations=tuple(_Resident(op) if op.functions else op for op in part.operations),
            )
            for part in inspected.plan.parts
        )
        inspected = dataclasses.replace(inspected, plan=dataclasses.replace(inspected.plan, parts=parts))
        _opened = (job, dataclasses.replace(prepared, inspected=inspected))
    return _opened[1]


def _tables(data: bytes, job: str, size: int, first: int, steps: int) -> list[pa.Table] | _Failed:
    """Return the rows of ``steps`` steps of ``size`` rows from the step ``first`` on, or the error."""
    from powertrain.data.operations.pool import picklable_error

    try:
        return list(_computed(_open(data, job), size, first, steps))
    except DataError as error:
        cause = error.__cause__
        return _Failed(str(error), None if cause is None else picklable_error(cause))


def _computed(prepared: Prepared, size: int, first: int, steps: int) -> Iterator[pa.Table]:
    from powertrain.data.loading.loader import MEMORY_ALONE, Cut, Loader
    from powertrain.data.loading.scratch import scratch_directory

    with scratch_directory() as directory:
        loader = Loader(prepared, cache_directory=directory, disk_bytes=0, memory_bytes=MEMORY_ALONE)
        try:
            # Without prefetch: rows beyond this stretch belong to another task.
            cut = Cut(size, "partial", table_of, prefetch=0, in_step=False)
            for group in itertools.islice(loader.epoch(0, first * size, cut), steps):
                yield from (ready.batch for ready in group)
        finally:
            loader.close()
