"""Decoded images, kept for the epochs that follow: each is decoded once per node.

One file of the node's cache for each column that is decoded::

    header             JSON: the shape and type of one image, which the first one to be decoded has settled
    one byte per row   1 where the pixels of that row are there
    pixels of row 0, pixels of row 1, …

Any number of ranks and threads read and write it at once. Pixels are written before the byte that says so, by calls
that fail where the disk is full, and are read through a mapping. Who is killed in between leaves a row that is not
there; two that write the same row write the same. The file is sparse: it takes the disk that its rows do, but counts
in full within the budget. It is made only if all rows fit. Without it, and for rows that do not fit into it (another
shape, no image at all), images are decoded whenever they are needed.
"""

from __future__ import annotations

import hashlib
import json
import math
import mmap
import os
import threading
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from powertrain.data.loading.cache_files import CacheDirectory, NoRoom
from powertrain.data.plan.order import Ints

if TYPE_CHECKING:
    from powertrain.data.plan.plan import Block

#: Changes with the form of the files, so that no version reads those of another.
_FORM = 1
#: Where the bytes of the rows begin; pixels begin at a multiple of it.
_PAGE = 4096


class RowsOfPart:
    """The rows of one part of a plan, counted by themselves: the numbers of rows count over all parts."""

    def __init__(self, blocks: Sequence[Block], part: int) -> None:
        rows = np.array([block.rows for block in blocks], np.int64)
        own = np.array([block.part == part for block in blocks], bool)
        self._firsts = np.cumsum(rows) - rows
        self._own_firsts = np.cumsum(rows * own) - rows * own
        self._is_whole = bool(own.all())
        self.count = int((rows * own).sum())
        #: Which rows of the source they are, as text.
        self.key = str([(block.index, block.start, block.rows) for block in blocks if block.part == part])

    def places(self, numbers: Ints) -> Ints:
        """The place of each row, from 0 to ``count``, by its number among the rows of all parts."""
        if self._is_whole:
            return numbers
        blocks = np.searchsorted(self._firsts, numbers, side="right") - 1
        return np.asarray(numbers - self._firsts[blocks] + self._own_firsts[blocks], np.int64)


@dataclass(frozen=True)
class KeptColumn:
    """What pixels are of: a column of the source, and what it is decoded to."""

    name: str
    size: tuple[int, int] | None
    mode: str | None


@dataclass
class ImageCounters:
    """What was done to the images of a part. Read at any time, from any thread."""

    #: How many this process has decoded, and how many it found decoded.
    decoded: int = 0
    found: int = 0


class PixelCache:
    """The pixels of one part of a plan, for one rank. Any thread may use it."""

    def __init__(
        self, directory: CacheDirectory | None, identity: str, blocks: Sequence[Block], part: int
    ) -> None:
        """``identity`` is the same for the same data (see ``BlockStore.identity``), ``blocks`` are those of the whole
        plan. Nothing is kept without a directory."""
        self._directory, self._identity = directory, identity
        self._blocks, self._part = blocks, part
        self.counters = ImageCounters()
        self._all: list[KeptImages] = []

    def images(self, column: KeptColumn) -> KeptImages:
        """The images of one column, each of which is a row of the source as it is stored there."""
        rows = RowsOfPart(self._blocks, self._part)
        key = repr((_FORM, rows.key, column, _pillow_version()))
        name = f"{self._identity}-{hashlib.blake2b(key.encode(), digest_size=16).hexdigest()}"
        images = KeptImages(self._directory, name, rows, self.counters)
        self._all.append(images)
        return images

    def close(self) -> None:
        """Let go of all files, which stay."""
        for images in self._all:
            images.close()


class KeptImages:
    """The images of one column, as far as they are decoded."""

    def __init__(
        self, directory: CacheDirectory | None, name: str, rows: RowsOfPart, counters: ImageCounters
    ) -> None:
        self._directory, self._name, self._rows, self._counters = directory, name, rows, counters
        self._changing = threading.Lock()
        #: None until it is found or made, and for good where there is no room for it.
        self._file: _PixelFile | None = None

    def of_rows(self, numbers: Ints) -> KeptRows:
        """What there is of the rows of these numbers."""
        file = self._file or self._opened(None)
        return KeptRows(self, file, self._rows.places(numbers))

    def count(self, *, decoded: int = 0, found: int = 0) -> None:
        with self._changing:
            self._counters.decoded += decoded
            self._counters.found += found

    def keep(self, place: int, image: npt.NDArray[Any]) -> None:
        """Write an image that was decoded, if there is room for it."""
        self.count(decoded=1)
        file = self._file or self._opened(image)
        if file is not None:
            file.write(place, image)

    def close(self) -> None:
        with self._changing:
            self._directory = self._file = None

    def _opened(self, first: npt.NDArray[Any] | None) -> _PixelFile | None:
        """The file; where there is none, it is made for images like ``first``, if that is one."""
        with self._changing:
            if self._file is not None or self._directory is None:
                return self._file
            try:
                descriptor = self._directory.open_pixels(self._name)
                if descriptor is None and first is not None:
                    form = _Form(self._rows.count, first.shape, first.dtype)
                    descriptor = self._directory.make_pixels(
                        self._name, form.header(), form.first_pixel, form.size
                    )
                self._file = None if descriptor is None else _PixelFile(descriptor, self._rows.count)
            except (NoRoom, OSError, ValueError):
                self._directory = None
            return self._file


class KeptRows:
    """What there is of some rows at one moment."""

    def __init__(self, images: KeptImages, file: _PixelFile | None, places: Ints) -> None:
        self._images, self._file, self._places = images, file, places
        present = np.zeros(len(places), bool) if file is None else file.present[places]
        #: Which of the rows are there, and which are not.
        self.there: Ints = np.flatnonzero(present)
        self.missing: Ints = np.flatnonzero(~present)
        images.count(found=len(self.there))

    @property
    def shape(self) -> tuple[int, ...]:
        """Of one image. Only where some are there."""
        assert self._file is not None
        return self._file.pixels.shape[1:]

    @property
    def dtype(self) -> np.dtype[Any]:
        """Only where some are there."""
        assert self._file is not None
        return self._file.pixels.dtype

    def copy(self, indices: Ints, into: npt.NDArray[Any]) -> None:
        """Copy these of the rows, at least one, which are there, to their indices in ``into``. They are sorted."""
        assert self._file is not None
        pixels, places = self._file.pixels, self._places[indices]
        low, high = int(indices[0]), int(indices[-1]) + 1
        if high - low == len(indices):
            # Straight into place: numpy would copy once more with mode="raise".
            np.take(pixels, places, axis=0, out=into[low:high], mode="clip")
        else:
            into[indices] = pixels[places]

    def keep(self, index: int, image: npt.NDArray[Any]) -> None:
        """Keep what one of the rows was decoded to."""
        self._images.keep(int(self._places[index]), image)


@dataclass(frozen=True)
class _Form:
    """How large a file is, and where in it pixels are."""

    rows: int
    shape: tuple[int, ...]
    dtype: np.dtype[Any]

    @property
    def image_bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    @property
    def first_pixel(self) -> int:
        return _PAGE + -(-self.rows // _PAGE) * _PAGE

    @property
    def size(self) -> int:
        return self.first_pixel + self.rows * self.image_bytes

    def header(self) -> bytes:
        return json.dumps({"rows": self.rows, "shape": self.shape, "dtype": self.dtype.str}).encode()

    @classmethod
    def read(cls, header: bytes) -> _Form:
        """Raises ValueError where it is no header."""
        found = json.loads(header.rstrip(b"\0"))
        return cls(found["rows"], tuple(found["shape"]), np.dtype(found["dtype"]))


class _PixelFile:
    """An open file. Its descriptor is closed with the object, never while a thread may still write to it."""

    def __init__(self, descriptor: int, rows: int) -> None:
        """Raises ValueError or OSError where it cannot be used."""
        closing = weakref.finalize(self, os.close, descriptor)
        closing.atexit = False  # threads may still be at it then
        self._descriptor = descriptor
        mapped = mmap.mmap(descriptor, 0, access=mmap.ACCESS_READ)
        self._form = form = _Form.read(mapped[:_PAGE])
        if (form.rows, form.size) != (rows, len(mapped)):
            raise ValueError("It is not a file of these rows.")
        self.present = np.frombuffer(mapped, bool, rows, _PAGE)
        pixels = np.frombuffer(mapped, form.dtype, rows * math.prod(form.shape), form.first_pixel)
        self.pixels = pixels.reshape(rows, *form.shape)
        self._is_full = False

    def write(self, place: int, image: npt.NDArray[Any]) -> None:
        """Write one image, if it has the shape and type of the others and the disk has room."""
        form = self._form
        if self._is_full or image.shape != form.shape or image.dtype != form.dtype:
            return
        try:
            data = np.ascontiguousarray(image).data
            written = os.pwrite(self._descriptor, data, form.first_pixel + place * form.image_bytes)
            if written == form.image_bytes:
                os.pwrite(self._descriptor, b"\1", _PAGE + place)
        except OSError:
            self._is_full = True


def _pillow_version() -> str:
    try:
        from PIL import __version__
    except ImportError:  # said by who decodes, once there is something to decode
        return ""
    return __version__
