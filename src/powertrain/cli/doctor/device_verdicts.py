"""Verdicts of the doctor about GPUs, collectives and the start of processes. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from powertrain.cli.doctor.verdicts import Check


@dataclass(frozen=True)
class GpuFacts:
    """GPUs as the driver and as torch see them.

    Attributes:
        has_device_files: True when the kernel has NVIDIA's devices (/dev/nvidiactl).
        driver: The version of the driver; "" where NVML cannot be used.
        driver_error: Why NVML cannot be used.
        driver_cuda: The newest CUDA version of the driver.
        names: The names of the driver's GPUs.
        torch_cuda: The CUDA version that torch is built for; None for a build without it.
        torch_count: The number of GPUs that torch can use.
        torch_error: Why torch cannot use them.
        visible: CUDA_VISIBLE_DEVICES; None where it is not set.
    """

    has_device_files: bool = False
    driver: str = ""
    driver_error: str = ""
    driver_cuda: tuple[int, int] = (0, 0)
    names: Sequence[str] = ()
    torch_cuda: tuple[int, int] | None = None
    torch_count: int = 0
    torch_error: str = ""
    visible: str | None = None


def check_gpus(facts: GpuFacts) -> Check:
    """Check that the driver, NVML and torch agree about the GPUs of this machine."""
    if not facts.has_device_files and not facts.names:
        return Check("gpu", "ok", "This machine has no NVIDIA GPU, so training uses CPUs.")
    if not facts.names:
        reason = facts.driver_error or "it lists no GPU"
        return Check(
            "gpu",
            "fail",
            f"The kernel has an NVIDIA device, but the driver's library cannot use it: {reason}.",
            "After an update of the driver, restart the machine; in a container, pass the GPUs ('docker run --gpus "
            "all') with the driver's own libraries.",
        )
    found = f"{len(facts.names)} x {facts.names[0]}, driver {facts.driver}"
    if facts.torch_cuda is None:
        return Check(
            "gpu",
            "warn",
            f"This machine has {found}, and the installed torch is a build without CUDA.",
            "Install a CUDA build of torch: see https://pytorch.org/get-started/locally.",
        )
    if facts.torch_count == 0:
        return _unusable_gpus(facts, found)
    if facts.visible is None and facts.torch_count != len(facts.names):
        return Check(
            "gpu",
            "warn",
            f"The driver lists {len(facts.names)} GPUs, and torch can use {facts.torch_count}.",
            "Look at 'nvidia-smi' for GPUs in an error state or split by MIG.",
        )
    return Check("gpu", "ok", f"{found}; torch is built for CUDA {_dotted(facts.torch_cuda)}.")


def _unusable_gpus(facts: GpuFacts, found: str) -> Check:
    if facts.visible is not None:
        return Check(
            "gpu",
            "warn",
            f"This machine has {found}, and CUDA_VISIBLE_DEVICES={facts.visible!r} hides every GPU from torch.",
            "Unset CUDA_VISIBLE_DEVICES, or name GPUs that exist.",
        )
    assert facts.torch_cuda is not None
    if facts.driver_cuda and facts.torch_cuda[0] > facts.driver_cuda[0]:
        return Check(
            "gpu",
            "fail",
            f"The driver {facts.driver} supports CUDA up to {_dotted(facts.driver_cuda)}, and torch is built for "
            f"{_dotted(facts.torch_cuda)}.",
            f"Update the driver, or install a build of torch for CUDA {facts.driver_cuda[0]}.",
        )
    return Check(
        "gpu",
        "fail",
        f"This machine has {found}, and torch can use none of them: {facts.torch_error or 'it lists none'}.",
        "Run 'python -c \"import torch; torch.zeros(1).cuda()\"' for torch's own message; a reboot ends most of them.",
    )


@dataclass(frozen=True)
class CollectiveFacts:
    """A real all_reduce of two processes: its backend, processes, and why it failed ("" where it did not)."""

    backend: str
    processes: int = 2
    error: str = ""
    seconds: float = 0.0


def check_collective(facts: CollectiveFacts) -> Check:
    """Check that processes of this machine can form a process group and reduce a tensor."""
    name, count = facts.backend, facts.processes
    if not facts.error:
        plural = "processes" if count > 1 else "process"
        return Check(
            name, "ok", f"An all_reduce of {count} {plural} took {facts.seconds:.1f} s with its start."
        )
    if name == "nccl":
        fix = (
            "Set NCCL_DEBUG=INFO and run it again for NCCL's own message; see also the checks of GPUs and shared "
            "memory."
        )
    else:
        fix = (
            "Allow TCP connections on the loopback interface, and see the check of the host name; "
            "GLOO_SOCKET_IFNAME=lo picks the interface."
        )
    return Check(name, "fail", f"An all_reduce of {count} processes failed: {facts.error}.", fix)


@dataclass(frozen=True)
class StartFacts:
    """How workers start: the platform, why a fork is unsafe ("" where it is safe), and an error of the probe."""

    platform: str
    unsafe: str = ""
    error: str = ""


def check_start_method(facts: StartFacts) -> Check:
    """Check that a process which has imported torch can be forked, as workers are."""
    if facts.platform != "linux":
        return Check(
            "start_method",
            "fail",
            f"The platform is {facts.platform}; runs need Linux.",
            "Use Linux, WSL 2 or a container.",
        )
    if facts.error:
        return Check(
            "start_method",
            "fail",
            f"A new Python process cannot import torch: {facts.error}.",
            "Repair the installation: python -m pip install --force-reinstall torch",
        )
    if facts.unsafe:
        return Check(
            "start_method",
            "warn",
            f"A process that has only imported torch cannot be forked safely: {facts.unsafe}. Workers then start "
            "as new processes, seconds later.",
            "Look for a sitecustomize, a .pth file or an LD_PRELOAD that starts threads.",
        )
    return Check("start_method", "ok", "Workers can be forked from a warm process.")


def _dotted(version: tuple[int, int]) -> str:
    return ".".join(map(str, version))
