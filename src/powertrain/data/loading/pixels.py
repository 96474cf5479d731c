"""Decoded images, kept for the epochs that follow: each is decoded once per node.

One file of the node's cache for each column that is decoded::

    header             JSON: the shape and type of one image, fixed by the first decoded one
    one byte per row   1 where the pixels of that row are present
    pixels of row 0, pixels of row 1, …

Any number of ranks and threads read and write it at once. Pixels are written before their flag byte, by calls that
fail where the disk is full, and are read through a mapping. A process killed in between leaves an absent row; two
processes that write the same row write the same bytes. The file is sparse: it takes the disk of its rows, but counts
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

#: Version of the files' format; a process never reads files of another version.
_FORM = 1
#: Offset of the flag bytes; pixels begin at a multiple of it.
_PAGE = 4096


class RowsOfPart:
    """The rows of one part of a plan with numbers of their own: row numbers of a plan count over all parts."""

    def __init__(self, blocks: Sequence[Block], part: int) -> None:
        rows = np.array([block.rows for block in blocks], np.int64)
        own = np.array([block.part == part for block in blocks], bool)
        self._firsts = np.cumsum(rows) - rows
        self._own_firsts = np.cumsum(rows * own) - rows * own
        self._is_whole = bool(own.all())
        self.count = int((rows * own).sum())
        #: Text that identifies these rows of the source.
        self.key = str([(block.index, block.start, block.rows) for block in blocks if block.part == part])

    def places(self, numbers: Ints) -> Ints:
        """Return the place of each row, from 0 to ``count``, by its number among the rows of all parts."""
        if self._is_whole:
            return numbers
        blocks = np.searchsorted(self._firsts, numbers, side="right") - 1
        return np.asarray(numbers - self._firsts[blocks] + self._own_firsts[blocks], np.int64)


@dataclass(frozen=True)
class KeptColumn:
    """A column of the source and its decoding, which together identify its pixels."""

    name: str
    size: tuple[int, int] | None
    mode: str | None


@dataclass
class ImageCounters:
    """Counters of a part's images. Readable at any time, from any thread."""

    #: Images that this process has decoded, and images that it found decoded.
    decoded: int = 0
    found: int = 0


class PixelCache:
    """The pixels of one part of a plan, for one rank. Any thread may use it."""

    def __init__(
        self, directory: CacheDirectory | None, identity: str, blocks: Sequence[Block], part: int
    ) -> None:
        """``identity`` is the same for the same data (see ``BlockStore.identity``), ``blocks`` are those of the whole
        plan. Without a directory images are not kept."""
        self._directory, self._identity = directory, identity
        self._blocks, self._part = blocks, part
        self.counters = ImageCounters()
        self._all: list[KeptImages] = []

    def images(self, column: KeptColumn) -> KeptImages:
        """Return the images of one column, each of which is a row as stored in the source."""
        rows = RowsOfPart(self._blocks, self._part)
        key = repr((_FORM, rows.key, column, _pillow_version()))
        name = f"{self._identity}-{hashlib.blake2b(key.encode(), digest_size=16).hexdigest()}"
        images = KeptImages(self._directory, name, rows, self.counters)
        self._all.append(images)
        return images

    def close(self) -> None:
        """Close all files, which stay on disk."""
        for images in self._all:
            images.close()


class KeptImages:
    """The decoded images of one column."""

    def __init__(
        self, directory: CacheDirectory | None, name: str, rows: RowsOfPart, counters: ImageCounters
    ) -> None:
        self._directory, self._name, self._rows, self._counters = directory, name, rows, counters
        self._changing = threading.Lock()
        #: None until it is found or made, and permanently where there is no room for it.
        self._file: _PixelFile | None = None

    def of_rows(self, numbers: Ints) -> KeptRows:
        """Return the decoded images among the rows of these numbers."""
        file = self._file or self._opened(None)
        return KeptRows(self, file, self._rows.places(numbers))

    def count(self, *, decoded: int = 0, found: int = 0) -> None:
        with self._changing:
            self._counters.decoded += decoded
            self._counters.found += found

    def keep(self, place: int, image: npt.NDArray[Any]) -> None:
        """Write a decoded image, if there is room for it."""
        self.count(decoded=1)
        file = self._file or self._opened(image)
        if file is not None:
            file.write(place, image)

    def close(self) -> None:
        with self._changing:
            self._directory = self._file = None

    def _opened(self, first: npt.NDArray[Any] | None) -> _PixelFile | None:
        """Return the file; if absent, make it for images like ``first``, if one is given."""
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
    """The decoded images among some rows at one moment."""

    def __init__(self, images: KeptImages, file: _PixelFile | None, places: Ints) -> None:
        self._images, self._file, self._places = images, file, places
        present = np.zeros(len(places), bool) if file is None else file.present[places]
        #: Indices of the rows that are present, and of those that are not.
        self.there: Ints = np.flatnonzero(present)
        self.missing: Ints = np.flatnonzero(~present)
        images.count(found=len(self.there))

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of one image. Only where some are present."""
        assert self._file is not None
        return self._file.pixels.shape[1:]

    @property
    def dtype(self) -> np.dtype[Any]:
        """Type of one image. Only where some are present."""
        assert self._file is not None
        return self._file.pixels.dtype

    def copy(self, indices: Ints, into: npt.NDArray[Any]) -> None:
        """Copy rows that are present, at least one, to their indices in ``into``. ``indices`` are sorted."""
        assert self._file is not None
        pixels, places = self._file.pixels, self._places[indices]
        low, high = int(indices[0]), int(indices[-1]) + 1
        if high - low == len(indices):
            # Directly into place: numpy would copy once more with mode="raise".
            np.take(pixels, places, axis=0, out=into[low:high], mode="clip")
        else:
            into[indices] = pixels[places]

    def keep(self, index: int, image: npt.NDArray[Any]) -> None:
        """Keep the decoded image of one of the rows."""
        self._images.keep(int(self._places[index]), image)


@dataclass(frozen=True)
class _Form:
    """Layout of a file: its size, and the offsets of pixels."""

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
        """Read a header. Raises ValueError where it is not valid."""
        found = json.loads(header.rstrip(b"\0"))
        return cls(found["rows"], tuple(found["shape"]), np.dtype(found["dtype"]))


class _PixelFile:
    """An open file. Its descriptor is closed with the object, never while a thread may still write to it."""

    def __init__(self, descriptor: int, rows: int) -> None:
        """Raise ValueError or OSError where it cannot be used."""
        closing = weakref.finalize(self, os.close, descriptor)
        closing.atexit = False  # threads may still use it then
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
    except ImportError:  # reported on decoding, once there is an image to decode
        return ""
    return __version__
