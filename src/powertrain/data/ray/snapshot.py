"""A Ray dataset, written once into a run's storage and read from there like other datasets.

Ray's tasks write the files on the nodes that hold the rows. A marker file is written last: without it, the files of an
earlier start are removed and written again.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

from powertrain.data.ray.errors import ray_error_message
from powertrain.data.ray.tasks import connected_ray
from powertrain.errors import DataError
from powertrain.storage.addresses import without_secrets

if TYPE_CHECKING:
    import pyarrow as pa

    from powertrain.data.dataset import Dataset
    from powertrain.storage import Storage

_COMPLETE = "_COMPLETE"
#: Blocks of Ray are joined to files of about this many bytes, the unit of reading and shuffling.
_FILE_BYTES = 32 * 2**20


def snapshot(name: str, dataset: Any, run: Storage) -> tuple[Dataset, str]:
    """Return the rows of a ``ray.data.Dataset`` as a dataset, and a sentence on their location.

    They are written below ``data/`` of the run, unless an earlier start of the run has done so: its files are used
    then. Raises :class:`DataError` where Ray cannot compute them, or its nodes do not write where this process reads.
    """
    key = f"data/{quote(name, safe='')}"
    place = run.child(key)
    kept = _kept(place)
    is_new = kept is None
    if kept is None:
        run.delete_tree(key)
        try:
            kept = _written(name, dataset, place)
        except BaseException:
            run.delete_tree(key)
            raise
    verb = "was written once to" if is_new else "is read as an earlier start of this run has written it to"
    said = (
        f"The Ray dataset {name!r} {verb} data/ of the run ({_counted(kept['rows'], 'row')} in "
        f"{_counted(kept['files'], 'Parquet file')}): "
        "every row comes exactly once per epoch at any number of ranks, and a restart goes on at the row where it was."
    )
    return _reading(place), said


def _counted(count: int, what: str) -> str:
    return f"{count} {what}" if count == 1 else f"{count} {what}s"


def _kept(place: Storage) -> dict[str, int] | None:
    """Return the marker of an earlier start; None where it did not finish."""
    try:
        found: dict[str, int] = json.loads(place.get(_COMPLETE))
    except FileNotFoundError:
        return None
    return found


def _reading(place: Storage) -> Dataset:
    from powertrain.data.reading import read_parquet

    return read_parquet(place.uri, filesystem=getattr(place, "filesystem", None))


def _written(name: str, dataset: Any, place: Storage) -> dict[str, int]:
    """Write all rows, and the marker that they are complete."""
    ray = connected_ray(f"Writing the Ray dataset {name!r} into the run (DataConfig(snapshot=True))")
    try:
        receipts = list(_receipts(ray, dataset, place))
    except ray.exceptions.RayError as error:
        raise DataError(f"The Ray dataset {name!r} cannot be written. {ray_error_message(error)}") from error
    sizes = {entry.key: entry.size for entry in place.list()}
    missing = [key for key, _, size in receipts if sizes.get(key) != size]
    if missing:
        raise DataError(
            f"Ray has written {len(receipts)} files of the dataset {name!r} to {without_secrets(place.uri)}, and "
            f"{len(missing)} of them "
            f"are not there as this machine sees it, such as {missing[0]!r}: its nodes do not share that storage. "
            "Choose a storage_path that all of them see, such as a network file system or a bucket."
        )
    if not receipts:
        raise DataError(
            f"The Ray dataset {name!r} has no rows, so there is nothing to train on. Check its paths and filters."
        )
    kept = {"rows": sum(rows for _, rows, _ in receipts), "files": len(receipts)}
    place.put(_COMPLETE, json.dumps(kept).encode())
    return kept


def _receipts(ray: Any, dataset: Any, place: Storage) -> Iterator[tuple[str, int, int]]:
    """Yield name, rows and bytes of each file, in Ray's order of the rows. Few are under way at a time."""
    # Without a CPU of their own: actors that compute the dataset may hold all CPUs until it is finished.
    task = ray.remote(num_cpus=0, max_retries=3)(_write_file)
    most = max(2, int(ray.cluster_resources().get("CPU", 1)))
    under_way: deque[Any] = deque()
    for number, pieces in enumerate(_by_file(dataset)):
        if len(under_way) >= most:
            yield ray.get(under_way.popleft())
        stretches = [piece.stretch for piece in pieces]
        blocks = (piece.block for piece in pieces)  # as arguments of their own, or Ray would not fetch them
        under_way.append(task.remote(place, f"{number:06d}.parquet", stretches, *blocks))
    while under_way:
        yield ray.get(under_way.popleft())


@dataclass(frozen=True)
class _Piece:
    """Some rows of a block of Ray."""

    #: A reference to the block.
    block: Any
    #: First row and the one after the last; None for all rows.
    stretch: tuple[int, int] | None
    nbytes: int


def _pieces(bundle: Any) -> Iterator[_Piece]:
    """Yield the pieces of a ``RefBundle`` of Ray. A limit selects some rows of a block, which still holds all."""
    cuts = getattr(bundle, "slices", None) or [None] * len(bundle.blocks)
    for block, facts, cut in zip(bundle.block_refs, bundle.metadata, cuts, strict=True):
        stretch = None if cut is None else (cut.start_offset, cut.end_offset)
        if facts.num_rows != 0 and (stretch is None or stretch[0] < stretch[1]):
            yield _Piece(block, stretch, facts.size_bytes or 0)


def _by_file(dataset: Any) -> Iterator[list[_Piece]]:
    """Yield the pieces of a Ray dataset, grouped by file."""
    held: list[_Piece] = []
    for bundle in dataset.iter_internal_ref_bundles():
        for piece in _pieces(bundle):
            held.append(piece)
            if sum(each.nbytes for each in held) >= _FILE_BYTES:
                yield held
                held = []
    if held:
        yield held


def _write_file(
    place: Storage, key: str, stretches: list[tuple[int, int] | None], *blocks: Any
) -> tuple[str, int, int]:
    """Write these rows of ``blocks`` into one file, in a task of Ray."""
    from powertrain.data.output.writing import parquet_writer

    table = _table(stretches, blocks)
    with tempfile.TemporaryDirectory(prefix="powertrain-") as directory:
        path = os.path.join(directory, key)
        parquet_writer({})(table, path)
        place.put_file(key, path, digest=False)
        return key, table.num_rows, os.path.getsize(path)


def _table(stretches: list[tuple[int, int] | None], blocks: tuple[Any, ...]) -> pa.Table:
    import pyarrow as pa
    from ray.data.block import BlockAccessor

    from powertrain.data.ray.shard import refuse_ray_only_types
    from powertrain.data.sources.plain import plain_table

    tables = []
    for stretch, block in zip(stretches, blocks, strict=True):
        table = BlockAccessor.for_block(block).to_arrow()
        refuse_ray_only_types(table.schema)
        first, end = stretch or (0, table.num_rows)
        tables.append(plain_table(table.slice(first, end - first)))
    return pa.concat_tables(tables, promote_options="permissive")
