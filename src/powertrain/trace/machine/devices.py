"""Peak FLOPs of GPU models, from their vendors."""

from __future__ import annotations

import sys

#: Floating-point operations per second of 16-bit matrix products, without sparsity; by a part of the device's name,
#: more specific names first.
_PEAK = (
    ("GB200", 2.5e15),
    ("B200", 2.25e15),
    ("B100", 1.75e15),
    ("H200", 989e12),
    ("H100 PCIe", 756e12),
    ("H100 NVL", 835e12),
    ("H100", 989e12),
    ("A100", 312e12),
    ("A800", 312e12),
    ("L40S", 362e12),
    ("L40", 181e12),
    ("L4", 121e12),
    ("A40", 150e12),
    ("A10G", 70e12),
    ("A10", 125e12),
    ("A30", 165e12),
    ("V100", 125e12),
    ("T4", 65e12),
    ("RTX 4090", 165e12),
    ("RTX 3090", 71e12),
    ("MI300X", 1307e12),
    ("MI250X", 383e12),
)


def peak_flops(name: str) -> float:
    """Return the peak FLOPs of a device by its name in torch; 0 for an unknown one."""
    return next((flops for part, flops in _PEAK if part.lower() in name.lower()), 0.0)


#: The same of 32-bit floats without tensor cores, and of their shortened form (TF32) with them.
_FLOAT_PEAKS = (
    ("GB200", (80e12, 1.25e15)),
    ("B200", (75e12, 1.1e15)),
    ("B100", (60e12, 0.9e15)),
    ("H200", (67e12, 494e12)),
    ("H100 PCIe", (51e12, 378e12)),
    ("H100 NVL", (60e12, 418e12)),
    ("H100", (67e12, 494e12)),
    ("A100", (19.5e12, 156e12)),
    ("A800", (19.5e12, 156e12)),
    ("L40S", (91.6e12, 183e12)),
    ("A40", (37.4e12, 74.8e12)),
    ("A10", (31.2e12, 62.5e12)),
    ("A30", (10.3e12, 82e12)),
)


def float_peaks(name: str) -> tuple[float, float]:
    """Return the peaks of products of 32-bit floats, in full and as TF32, by the device's name; zeros if unknown."""
    return next((peaks for part, peaks in _FLOAT_PEAKS if part.lower() in name.lower()), (0.0, 0.0))


def device_name(gpu: int | None) -> str:
    """Return the name in torch of the process's GPU; "" while none is open, or it is not known which.

    Args:
        gpu: The GPU that the process trains on; None if unknown.
    """
    cuda = getattr(sys.modules.get("torch"), "cuda", None)
    if cuda is None or not cuda.is_initialized() or (gpu is None and cuda.device_count() > 1):
        return ""
    return str(cuda.get_device_name(gpu or 0))
