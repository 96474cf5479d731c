"""Rows as tensors on a device: made on the reading threads, handed out on the training thread."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from powertrain.data.arguments import ODD, flag, shown, whole
from powertrain.data.rows.rows import Rows
from powertrain.errors import DataError

if TYPE_CHECKING:
    import torch

    from powertrain.data.rows.device import DeviceFeed

#: Copies under way beside those that wait to be handed out: one in use, one being made.
_SLOTS_BEYOND = 2


def _present_device(device: Any) -> torch.device:
    """Return the device; raises :class:`DataError` where it does not exist."""
    import torch

    try:
        found = torch.device(device)
    except ODD as error:
        raise DataError(
            f"device={shown(device)} is not a device of torch. Give one such as 'cpu' or 'cuda:0', or leave it out."
        ) from error
    if found.type != "cpu":
        try:
            torch.empty(0, device=found)
        except (RuntimeError, AssertionError, NotImplementedError) as error:
            reason = str(error).partition("\n")[0].rstrip(".")
            raise DataError(
                f"device={shown(device)} cannot be used in this process: {reason}. Give a device that is there, or "
                "leave it out to get tensors on the CPU."
            ) from error
    return found


class TorchConversion:
    """The conversion of rows requested by ``iter_torch_batches``."""

    def __init__(
        self,
        dtypes: torch.dtype | Mapping[str, torch.dtype] | None,
        device: str | torch.device,
        collate_fn: Callable[[Any], Any] | None,
        pin_memory: bool,
        prefetch: int,
    ) -> None:
        import torch

        from powertrain.data.rows.formats import checked_dtypes

        if collate_fn is not None and dtypes is not None:
            raise DataError(
                "collate_fn makes the tensors itself, so dtypes would do nothing. Leave one of them out."
            )
        if collate_fn is not None and not callable(collate_fn):
            raise DataError(
                f"collate_fn={shown(collate_fn)} cannot be called. Give a function that takes a batch."
            )
        self._dtypes, self._collate = checked_dtypes(dtypes), collate_fn
        self._pin = flag("pin_memory", pin_memory)
        self._device = _present_device(device)
        if self._pin and not torch.cuda.is_available():
            raise DataError(
                "pin_memory=True needs a CUDA device, whose copies are faster from pinned memory, and this process "
                "sees none. Leave it out, or give pin_memory=torch.cuda.is_available()."
            )
        self._feed: DeviceFeed | None = None
        if self._device.type == "cuda":
            from powertrain.data.rows.device import DeviceFeed

            # Resolved here: prefetching threads have a current device of their own.
            index = torch.cuda.current_device() if self._device.index is None else self._device.index
            slots = whole("prefetch_batches", prefetch, 0) + _SLOTS_BEYOND
            self._feed = DeviceFeed(torch.device("cuda", index), slots)

    def make(self, rows: Rows) -> Any:
        """Return the batch, with its copy to the device begun. Any thread."""
        from powertrain.data.rows import collate, formats

        if self._collate is not None:
            batch = collate.collate(rows, self._collate)
        else:
            batch = formats.to_torch(rows, self._dtypes)
        if self._feed is not None:
            return self._feed.put(batch)
        return self._moved(batch)

    def _moved(self, batch: Any) -> Any:
        from powertrain.data.rows.device import map_tensors

        if self._pin:
            return map_tensors(batch, lambda tensor: tensor.pin_memory())
        if self._device.type != "cpu":
            return map_tensors(batch, lambda tensor: tensor.to(self._device))
        return batch

    def hand_out(self, made: Any) -> Any:
        """Return the batch of :meth:`make`, ready for computation. Training thread."""
        return made if self._feed is None else self._feed.take(made)
