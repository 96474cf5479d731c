"""Images as arrays of pixels, and columns that hold them as numpy arrays."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from PIL.Image import Image


def as_numpy(value: Any) -> Any:
    """A torch tensor as numpy, on the CPU; an image of Pillow's as its pixels; anything else unchanged."""
    pillow = sys.modules.get("PIL.Image")
    if pillow is not None and isinstance(value, pillow.Image):
        return pixels_of(value)
    torch = sys.modules.get("torch")
    if torch is None or not isinstance(value, torch.Tensor):
        return value
    value = value.detach().cpu()
    return (value.float() if value.dtype == torch.bfloat16 else value).numpy()  # numpy has no bfloat16


#: What pixels mean without a palette or a conversion table: kept unless another mode is asked for.
_PLAIN_MODES = frozenset({"L", "LA", "RGB", "RGBA", "I", "F", "I;16", "I;16L", "I;16B"})
#: Of those the ones whose pixels have more than 8 bits for each channel.
_DEEP_MODES = frozenset({"I", "F", "I;16", "I;16L", "I;16B"})


def pixels_of(image: Image) -> npt.NDArray[Any]:
    """An image of Pillow's as :func:`decode` would give it."""
    wanted = usual_mode(image)
    return np.array(image if image.mode == wanted else image.convert(wanted))


def convert_mode(image: Image, mode: str) -> Image:
    """``image`` in another mode. Pixels of 16 bits are scaled to 8: Pillow would cut off all above 255."""
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
