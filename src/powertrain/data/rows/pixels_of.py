"""Images as arrays of pixels, and columns that hold them as numpy arrays."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from PIL.Image import Image


def as_numpy(value: Any) -> Any:
    """Return a torch tensor as numpy, on the CPU; a Pillow image as its pixels; other values unchanged."""
    pillow = sys.modules.get("PIL.Image")
    if pillow is not None and isinstance(value, pillow.Image):
        return pixels_of(value)
    torch = sys.modules.get("torch")
    if torch is None or not isinstance(value, torch.Tensor):
        return value
    value = value.detach().cpu()
    return (value.float() if value.dtype == torch.bfloat16 else value).numpy()  # numpy has no bfloat16


#: Modes without a palette or a conversion table: kept unless another mode is requested.
_PLAIN_MODES = frozenset({"L", "LA", "RGB", "RGBA", "I", "F", "I;16", "I;16L", "I;16B"})
#: Modes with more than 8 bits for each channel.
_DEEP_MODES = frozenset({"I", "F", "I;16", "I;16L", "I;16B"})


def pixels_of(image: Image) -> npt.NDArray[Any]:
    """Return a Pillow image as :func:`decode` would."""
    wanted = usual_mode(image)
    return np.array(image if image.mode == wanted else image.convert(wanted))


def convert_mode(image: Image, mode: str) -> Image:
    """Return ``image`` in another mode. Pixels of 16 bits are scaled to 8: Pillow would clip all above 255."""
    from PIL import Image as pillow

    if image.mode not in _DEEP_MODES or mode in _DEEP_MODES:
        return image.convert(mode)
    # Pillow before 11.3 opens PNG files of 16 bits as "I".
    if not image.mode.startswith("I;16") and image.format != "PNG":
        raise ValueError(
            f"its pixels are of mode {image.mode!r}, and how large these can be is not known, so they cannot be made "
            f"{mode!r}: decode it without a mode, and scale it in map()"
        )
    pixels = np.asarray(image)
    return pillow.fromarray((pixels >> 8).astype(np.uint8)).convert(mode)


def usual_mode(image: Image) -> str:
    if image.mode in _PLAIN_MODES:
        return image.mode
    if image.mode == "1":
        return "L"
    return "RGBA" if image.mode == "PA" or "transparency" in image.info else "RGB"
