"""Directories of a run, on this machine and in storage."""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

from powertrain.driver.messages import warn
from powertrain.errors import StorageError

if TYPE_CHECKING:
    from powertrain.driver.request import TrainRequest
    from powertrain.storage import Storage


@contextlib.contextmanager
def naming_run(storage: Storage) -> Iterator[None]:
    """Turn an ``OSError`` about a file of the run into a :class:`StorageError` that names both."""
    from powertrain.storage.addresses import without_secrets

    try:
        yield
    except OSError as error:
        which = f" ({str(error.filename)!r})" if error.filename else ""
        raise StorageError(
            f"The run at {without_secrets(storage.uri)!r} cannot be opened: {error.strerror or error}{which}. Repair "
            "or move the named file, or choose another run name."
        ) from error


def directory_of(storage: Storage, name: str) -> str:
    """Return the local path of a directory of the run."""
    inside = storage.local_path(f"{name}/x")
    assert inside is not None
    return str(inside.parent)


def open_run(request: TrainRequest, name: str) -> Storage:
    """Return the run's own storage, proved to be writable."""
    from powertrain.storage import open_storage, probe
    from powertrain.storage.files.run_directory import refuse_links, refuse_other_owners

    run = request.run
    root = open_storage(
        run.storage_root, filesystem=run.storage_filesystem, timeout=run.sync_config.sync_timeout
    )
    storage = root.child(name)
    refuse_links(storage)
    if request.trial is None:  # a sweep has proved it for all of its trials
        probe(storage)
    if not run.shared_storage:
        refuse_other_owners(storage)
    return storage


def make_directories(
    request: TrainRequest, name: str, storage: Storage, left: Sequence[str], stack: ExitStack
) -> tuple[Path, tuple[str, str, str]]:
    """Make the run's runtime directory and its places (:meth:`_make_places`). All are removed at any end of the run,
    except the paths in ``left`` by then."""
    from powertrain.engine.local import runtime_directories
    from powertrain.run.record.directories import remove_data_cache, remove_unless_needed
    from powertrain.storage.files.private_roots import roots_of_one_run

    runtime = _make_runtime_directory(request, name, stack)
    places = _make_places(request, storage, runtime, stack)
    stack.callback(remove_unless_needed, places[0], left)
    stack.callback(remove_data_cache, places[2])
    if request.traits.removes_directories:
        stack.callback(
            runtime_directories.remove_runtime_directory, runtime
        )  # should we be killed, the server does it
    else:
        roots = map(str, roots_of_one_run([str(runtime), *places]))
        stack.enter_context(runtime_directories.removed_at_the_end(runtime, *places, *roots))
    return runtime, places


def _make_runtime_directory(request: TrainRequest, name: str, stack: ExitStack) -> Path:
    """Return a runtime directory. On a cluster each node has it under the same path, so its name is random."""
    from powertrain.engine.local import runtime_directories
    from powertrain.storage.files.private_roots import root_of_one_run, runtime_root

    if not request.traits.spans_nodes:
        return runtime_directories.make_runtime_directory(name)
    return runtime_directories.make_directory_of_run(
        name, stack.enter_context(root_of_one_run(runtime_root()))
    )


def _make_places(
    request: TrainRequest, storage: Storage, runtime: Path, stack: ExitStack
) -> tuple[str, str, str]:
    """Make the staging area, the directory for shared memory and that for blocks of data, all empty; "" for an
    unavailable one."""
    from powertrain.engine.local import runtime_directories
    from powertrain.run.record import directories as places
    from powertrain.storage.files.private_roots import (
        holding_root,
        lasting_root,
        root_of_one_run,
        shared_memory_root,
    )

    for kept in places.sweep_staging(storage):
        request.remarks.append(
            f"Checkpoints that an earlier start could not bring into the storage are still in {kept}. Remove that "
            "directory when you no longer need them."
        )
    is_on_nodes = request.traits.spans_nodes
    root: Callable[[], Path] = lasting_root
    if is_on_nodes:  # made when a directory in it is needed, and once
        root = functools.cache(lambda: stack.enter_context(root_of_one_run(lasting_root())))
    staging = places.staging_directory(storage, request.run.checkpoint_config, runtime.name, root)
    if not is_on_nodes:
        stack.enter_context(holding_root(staging))
    blocks = ""
    if request.datasets:
        blocks = places.data_cache_directory(storage, request.data, runtime.name, root)
        stack.callback(os.close, places.own_data_cache(blocks))
    memory = shared_memory_root()
    if memory is None:
        return staging, "", blocks
    name = runtime.name.rsplit("-", 2)[0]
    if is_on_nodes:
        segments = runtime_directories.make_directory_of_run(
            name, stack.enter_context(root_of_one_run(memory))
        )
    else:
        segments = runtime_directories.make_runtime_directory(name, memory)
    stack.callback(runtime_directories.remove_runtime_directory, segments)
    return staging, str(segments), blocks


def with_real_files(request: TrainRequest, storage: Storage, stack: ExitStack, terminal: Any) -> Storage:
    """Return storage that journal and metrics can append to: where there are no real files, by way of a spool."""
    if storage.local_path("journal") is not None:
        return storage
    from powertrain.run.record.directories import spool_directory
    from powertrain.run.record.shipping import Shipped, spools_below

    patient = request.storage_patience_s
    own, abandoned = stack.enter_context(spools_below(spool_directory(storage)))

    def close(shipped: Shipped) -> None:
        try:
            shipped.close(patient)
        except StorageError as error:
            warn(terminal, str(error))

    for spool in abandoned:
        close(Shipped(storage.within(patient), spool))
    shipped = Shipped(storage.within(patient), own)
    stack.callback(close, shipped)
    return shipped
