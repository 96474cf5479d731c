"""Decoding of images to arrays of pixels with Pillow, which releases the GIL meanwhile."""

from __future__ import annotations

import io
import operator
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from powertrain.data.arguments import ODD, shown
from powertrain.data.rows.pixels_of import convert_mode, usual_mode
from powertrain.errors import DataError

if TYPE_CHECKING:
    from powertrain.data.loading.pixels import KeptRows


#: Images that a thread takes at a time: dispatching them costs little beside the work, and none waits long.
_DECODED_TOGETHER, _COPIED_TOGETHER = 4, 64

#: Pillow's names of modes.
MODES = (
    *("1", "L", "LA", "La", "P", "PA", "RGB", "RGBA", "RGBa", "RGBX", "CMYK", "YCbCr", "LAB", "HSV"),
    *("I", "F", "I;16", "I;16L", "I;16B"),
)


def checked_mode(mode: Any) -> str | None:
    """Return ``mode`` where it is one of Pillow's; raises :class:`DataError` otherwise."""
    if mode is not None and not (isinstance(mode, str) and mode in MODES):
        raise DataError(
            f"mode={shown(mode)} is not an image mode. Give a mode of Pillow: {', '.join(map(repr, MODES))}. Most "
            "images are wanted as 'RGB' or, grey, as 'L'."
        )
    return None if mode is None else str(mode)


def checked_size(size: Any) -> tuple[int, int] | None:
    """Return ``size`` as two integers; raises :class:`DataError` for anything else."""
    if size is None:
        return None
    try:
        height, width = map(operator.index, size)
    except ODD:
        height = width = 0
    if not (0 < height < 2**31 and 0 < width < 2**31):
        raise DataError(
            f"size={shown(size)} is not an image size. Give (height, width) in pixels, such as (224, 224)."
        )
    return height, width


class BadImage(Exception):
    """The value at ``index`` of a column is not a decodable image."""

    def __init__(self, index: int, problem: str) -> None:
        super().__init__(index, problem)
        self.index, self.problem = index, problem


def require_pillow() -> None:
    """Raise :class:`DataError` where Pillow is missing."""
    try:
        import PIL.Image  # noqa: F401
    except ImportError as error:
        raise DataError(
            "Images are decoded by Pillow, which is not installed. Install it with: pip install 'powertrain[images]'."
        ) from error


def decode_column(
    column: Any,
    size: tuple[int, int] | None,
    mode: str | None,
    over: Callable[[Callable[[Any], Any], Iterable[Any]], list[Any]],
    kept: KeptRows | None = None,
) -> npt.NDArray[Any]:
    """Return the images of a column: one array (rows, height, width[, channels]) where all have one shape, else an
    object array of arrays, with None where the column has a null.

    ``column`` holds encoded images: binary values, or structs of "bytes" and "path" as Hugging Face has them. ``over``
    applies a function to each of many items, in order. Images in the cache ``kept`` are not decoded, and decoded ones
    are added to it; the result is the same with and without it. Raises :class:`BadImage`.
    """
    made = _Pixels(len(column))
    missing: Sequence[int] = range(len(column))

    def decode_some(indices: Sequence[int]) -> None:
        for index in indices:
            image = _decoded(column, index, size, mode)
            if kept is not None and image is not None:
                kept.keep(index, image)
            made.put(index, image)

    if kept is not None and len(kept.there):
        stacked = made.begin(kept.shape, kept.dtype)
        over(lambda some: kept.copy(some, stacked), _cut(kept.there, _COPIED_TOGETHER))
        missing = kept.missing.tolist()
    else:  # the first by itself: its shape is most likely that of all
        over(decode_some, _cut(missing[:1], 1))
        missing = missing[1:]
    over(decode_some, _cut(missing, _DECODED_TOGETHER))
    return made.column()


def _cut(indices: Any, size: int) -> list[Any]:
    return [indices[at : at + size] for at in range(0, len(indices), size)]


class _Pixels:
    """Collects decoded images: written directly into one array while all have one shape. Any thread may put."""

    def __init__(self, count: int) -> None:
        self._stacked: npt.NDArray[Any] | None = None
        #: By index the images that do not fit into the array: of another shape or type, or null.
        self._others: dict[int, npt.NDArray[Any] | None] = {}
        self._count = count

    def begin(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> npt.NDArray[Any]:
        """Allocate and return the array for images of this shape."""
        self._stacked = np.empty((self._count, *shape), dtype)
        return self._stacked

    def put(self, index: int, image: npt.NDArray[Any] | None) -> None:
        if index == 0 and image is not None and self._stacked is None:
            self.begin(image.shape, image.dtype)
        stacked = self._stacked
        if image is not None and stacked is not None and self._fits(image, stacked):
            stacked[index] = image
        else:
            self._others[index] = (
                None if image is None else image.copy()
            )  # Pillow's own arrays are not writable

    @staticmethod
    def _fits(image: npt.NDArray[Any], stacked: npt.NDArray[Any]) -> bool:
        return image.shape == stacked.shape[1:] and image.dtype == stacked.dtype

    def column(self) -> npt.NDArray[Any]:
        """Return all images: see :func:`decode_column`."""
        if self._stacked is not None and not self._others:
            return self._stacked
        column = np.empty(self._count, object)
        for index in range(self._count):
            stacked = None if self._stacked is None else self._stacked[index].copy()
            column[index] = self._others.get(index, stacked)
        return column


def decode(data: bytes, size: tuple[int, int] | None = None, mode: str | None = None) -> npt.NDArray[Any]:
    """Return one image as (height, width) or (height, width, channels), uint8 unless it has more than 8 bits.

    ``size`` is (height, width) to scale it to. ``mode`` is Pillow's; without one, palettes and odd colour spaces
    become RGB (RGBA where there is transparency), and black-and-white becomes grey.
    """
    from PIL import Image

    with Image.open(io.BytesIO(data)) as image:
        wanted = mode or usual_mode(image)
        converted = image if image.mode == wanted else convert_mode(image, wanted)
        if size is not None and (converted.height, converted.width) != tuple(size):
            converted = converted.resize((size[1], size[0]), Image.Resampling.BILINEAR)
        return np.asarray(converted)


def _encoded(column: Any, index: int) -> Any:
    """Return the bytes of one image, or the value in their place."""
    value = column[index].as_py() if isinstance(column, pa.Array) else column[index]
    if not isinstance(column, pa.StructArray) or value is None:
        return value
    if value.get("bytes") is not None or not value.get("path"):
        return value.get("bytes")
    try:
        with open(value["path"], "rb") as file:
            return file.read()
    except OSError as error:
        raise BadImage(index, f"its file {value['path']!r} cannot be read: {error.strerror}") from error


def _decoded(
    column: Any, index: int, size: tuple[int, int] | None, mode: str | None
) -> npt.NDArray[Any] | None:
    data = _encoded(column, index)
    if data is None:
        return None
    if not isinstance(data, (bytes, bytearray, memoryview)):
        raise BadImage(index, f"it is of type {type(data).__name__}, and an encoded image is bytes")
    try:
        return decode(bytes(data), size, mode)
    except Exception as error:  # Pillow raises any exception on broken files
        kind = "" if type(error).__name__ == "UnidentifiedImageError" else f"{type(error).__name__}: {error}"
        problem = kind or "its bytes are of no image format that Pillow knows"
        raise BadImage(index, f"{problem} ({len(data)} bytes, beginning {bytes(data[:8])!r})") from error
