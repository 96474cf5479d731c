"""Arrays of numbers as short JSON. Pure."""

from __future__ import annotations

import base64
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

#: Significant digits of a value that is drawn: more than any screen has pixels.
_DIGITS = 5


def compact(values: NDArray[Any]) -> list[float | None]:
    """Return numbers with few digits; None for NaN and infinities, which JSON lacks."""
    import numpy as np

    floats = np.asarray(values, np.float64)
    is_finite = np.isfinite(floats)
    size = np.abs(np.where(is_finite & (floats != 0), floats, 1.0))
    # Numbers near the limits of floats overflow or vanish when they are scaled, and stay as they are.
    digits = np.clip(_DIGITS - 1 - np.floor(np.log10(size)), -290, 290)
    scale = 10.0**digits
    rounded = np.where((size < 1e280) & (size > 1e-280), np.round(floats * scale) / scale, floats)
    shown = np.where(np.isfinite(rounded), rounded, floats)
    return [value if known else None for value, known in zip(shown.tolist(), is_finite.tolist(), strict=True)]


def packed(cells: NDArray[np.uint8]) -> str:
    """Return bytes as base64 text."""
    return base64.b64encode(cells.tobytes()).decode()
