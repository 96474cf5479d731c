"""``prepare_data_loader``."""

from __future__ import annotations

import copy
import weakref
from typing import TYPE_CHECKING, Any, Literal

from torch.utils.data import DataLoader, IterableDataset

from powertrain.errors import ConfigError
from powertrain.torch.data_loader.loader import PreparedDataLoader, RankSeeded
from powertrain.torch.data_loader.names import end_processes_at_exit, free, free_name
from powertrain.torch.data_loader.options import checked_wishes
from powertrain.torch.data_loader.sharing import share_out
from powertrain.torch.data_loader.whole_epoch import CheckedCollate
from powertrain.torch.device import device_of_loader
from powertrain.values.arguments import as_flag, shorten

if TYPE_CHECKING:
    from powertrain.torch.data_loader.options import Tail


def prepare_data_loader(
    data_loader: DataLoader[Any],
    add_dist_sampler: bool = True,
    move_to_device: bool = True,
    auto_transfer: bool = True,
    *,
    global_batch_size: int | None = None,
    tail: Tail | None = None,
    name: str | None = None,
    seed: int | None = None,
    resume: Literal["batch", "epoch"] | None = None,
) -> DataLoader[Any]:
    """The loader, giving this worker its part of every step, on its device. Prepare it once, before the epochs.

    All options of the loader are kept. A step takes ``batch_size`` rows for each worker, or ``global_batch_size`` rows
    for all of them together, at any number of workers. Every row comes once per epoch. What is left for the last step
    makes a smaller one (``tail="partial"``), is left out (``"drop"``; both by the loader's ``drop_last``), or
    begins the next epoch (``"carry"``). A worker that has no row in a small step gets one that counts nothing. Models
    from ``prepare_model`` weigh each worker's gradient by its rows, so the step is the mean over all rows.

    Each iteration is a new epoch with a new order, which follows from ``seed`` (else from the loader's generator,
    ``enable_reproducibility``, or torch's seed where there is one worker) and the epoch, never from the number of
    workers. ``loader.sampler.set_epoch(n)`` is honoured and counting goes on from ``n``. ``loader.epoch`` and
    ``loader.epochs(n)`` tell the loop where it is.

    The position goes into every checkpoint under ``name`` ("loader", "loader-2", ... in the order of preparation).
    After a restart the first iteration goes on behind the last batch that was handed out before the checkpoint, with
    any number of workers; a finished or abandoned epoch is followed by the next. ``resume="epoch"`` begins the epoch
    again instead, for a loop that skips batches by itself; None is what ``DataConfig(resume=...)`` says. A look at the
    first batch (``next(iter(loader))``) does not count as an epoch, unless another one follows it.

    All this holds for map-style datasets with the usual samplers (``shuffle=True`` or not). Otherwise:

    - A custom sampler or batch sampler is drawn from alike on every worker, and each takes its share; some rows come
      twice where they do not divide evenly. After a restart the epoch begins again from its start. The same holds for
      a DistributedSampler of the user's, and with ``add_dist_sampler=False``, which gives every worker all rows.
    - An IterableDataset cannot be shared out: every worker reads all of it, and begins its epoch again after a restart.
    - With ``in_order=False`` batches come in any order, so an epoch begins again too.

    On a GPU, ``auto_transfer`` copies the next batch on a stream of its own while the current one is computed on.
    """
    from powertrain.worker.session import current

    session = current("prepare_data_loader")
    if not isinstance(data_loader, DataLoader):
        raise ConfigError(
            f"prepare_data_loader was given a {type(data_loader).__name__}; it takes a torch DataLoader. "
            "Wrap a dataset as torch.utils.data.DataLoader(dataset, batch_size=...)."
        )
    if isinstance(data_loader, PreparedDataLoader):
        return data_loader
    add_dist_sampler = as_flag(add_dist_sampler, "prepare_data_loader(add_dist_sampler=...)")
    move_to_device = as_flag(move_to_device, "prepare_data_loader(move_to_device=...)")
    auto_transfer = as_flag(auto_transfer, "prepare_data_loader(auto_transfer=...)")
    if name is not None and not isinstance(name, str):
        raise ConfigError(f"prepare_data_loader(name={shorten(name)}) is not a name. Give a string.")
    if resume not in (None, "batch", "epoch"):
        raise ConfigError(f"prepare_data_loader(resume={shorten(resume)}) must be 'batch', 'epoch' or None.")
    wishes = checked_wishes(global_batch_size, tail, seed)
    # A copy has every option, also those of a subclass; only what differs per rank is replaced in it.
    loader = copy.copy(data_loader)
    loader.__dict__["_iterator"] = None
    sharing = share_out(loader, add_dist_sampler, wishes, session)
    kept_as = free_name(session, name, sharing.course.fingerprint)
    at_epoch = (resume or session.place.data.resume) == "epoch"
    sharing.course.keep_with(session.data, kept_as, at_epoch)
    if isinstance(loader.dataset, IterableDataset):
        loader.__dict__["collate_fn"] = CheckedCollate(loader.collate_fn)
    if loader.num_workers > 0:
        loader.worker_init_fn = RankSeeded(session.place.rank, loader.worker_init_fn)
        end_processes_at_exit()
    prepared = PreparedDataLoader(
        loader, sharing, device_of_loader() if move_to_device else None, auto_transfer
    )
    # A loop that prepares its loader anew in each epoch goes on with the next epoch, under the same name.
    weakref.finalize(prepared, free, session, kept_as).atexit = False
    return prepared
