"""Devices of this worker, and settings of its training function."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import torch

from powertrain.torch.mixed_precision import LossScaler

if TYPE_CHECKING:
    from powertrain.worker.train_context import TrainContext


def device_of_loader() -> torch.device:
    """Return the device to which batches are moved; here, because that module exports ``prepare_data_loader`` too."""
    return get_device()


@dataclasses.dataclass
class _Settings:
    """The settings of this process's training function, and its resources."""

    #: GPUs of this worker: one, unless the run gave it more.
    gpus: int = 1
    #: The precision of ``accelerate(amp=True)`` on this device.
    amp: torch.dtype | None = None
    #: Scales the losses of ``backward``, where they are of float16.
    scaler: LossScaler | None = None
    #: True once ``prepare_optimizer`` has returned an optimizer without a scaler.
    has_plain_optimizer: bool = False
    #: The seed of ``enable_reproducibility``.
    seed: int | None = None


_settings = _Settings()


def settings() -> _Settings:
    """Return the settings of this process's training function."""
    return _settings


def reset_settings(gpus: int) -> None:
    """Reset the settings of an earlier training function in this process."""
    global _settings
    _settings = _Settings(gpus=gpus)


def context(caller: str) -> TrainContext:
    """Return the place of this worker; raises ``OutsideWorkerError``, naming ``caller``, elsewhere."""
    from powertrain.worker.session import current

    return current(caller).context


def get_device() -> torch.device:
    """Return the device of this worker: its (first) GPU, or the CPU when it was given none.

    Returns:
        The device.

    Raises:
        OutsideWorkerError: Called outside a training worker.

    Example::

        batch = batch.to(get_device())
    """
    return own_device("get_device")


def get_devices() -> list[torch.device]:
    """Return all devices of this worker: its GPUs, its current one first, or the CPU when it was given none.

    Returns:
        The devices.

    Raises:
        OutsideWorkerError: Called outside a training worker.

    Example::

        first, second = get_devices()
    """
    context("get_devices")
    return own_devices()


def own_device(caller: str) -> torch.device:
    """Return the first device of this worker; raises ``OutsideWorkerError``, naming ``caller``, elsewhere."""
    context(caller)
    return own_devices()[0]


def own_devices() -> list[torch.device]:
    """Return the devices of this process, a worker: in the driver, looking for CUDA would spoil later forks."""
    if _settings.gpus == 0 or not torch.cuda.is_available():
        return [torch.device("cpu")]
    first = torch.cuda.current_device()
    beyond = min(first + _settings.gpus, torch.cuda.device_count())
    return [torch.device("cuda", index) for index in range(first, beyond)]
