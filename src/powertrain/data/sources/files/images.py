"""Images: files of them, and columns of other libraries. They stay encoded here."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any

import pyarrow as pa
import xxhash

from powertrain.data.sources.base import IMAGES, BlockFacts, SourceFacts
from powertrain.data.sources.content_sample import content_samples
from powertrain.data.sources.files.files import FilePaths, find_files, read_whole, unreadable
from powertrain.data.sources.remembering import RememberingSource
from powertrain.errors import DataError, StorageError

#: Extensions of image files: those of Ray Data, and webp.
IMAGE_EXTENSIONS = ("png", "jpg", "jpeg", "tif", "tiff", "bmp", "gif", "webp")
#: Most files of a block, and approximate bytes of its batches.
FILES_PER_BLOCK = 64
_BATCH_BYTES = 32 << 20
#: Most files of which bytes are hashed.
MOST_SAMPLED_FILES = 4096


def image_field(name: str, size: tuple[int, int] | None = None, mode: str | None = None) -> Any:
    """Return the field of a column of encoded images, to be decoded to ``size`` (height, width) and ``mode``."""
    wish = json.dumps({"size": list(size) if size else None, "mode": mode})
    return pa.field(name, pa.binary(), metadata={IMAGES: wish.encode()})


class ImageSource(RememberingSource):
    """Image files: the column "image", and with ``include_paths`` the column "path".

    The fingerprint is made of names, sizes and, on a disk of this machine, bytes of the files; of more than
    ``MOST_SAMPLED_FILES`` only those of some, evenly spaced.
    """

    _column = "image"

    def __init__(
        self,
        paths: FilePaths,
        *,
        size: tuple[int, int] | None = None,
        mode: str | None = None,
        include_paths: bool = False,
        files_per_block: int = FILES_PER_BLOCK,
    ) -> None:
        super().__init__()
        self._paths, self._per_block = paths, files_per_block
        fields = [self._field(size, mode)]
        self._schema = pa.schema([*fields, pa.field("path", pa.string())] if include_paths else fields)
        # A cache of the rows would hold the very bytes that are in the files.
        self.cheap_to_decode = paths.is_local

    def _field(self, size: tuple[int, int] | None, mode: str | None) -> Any:
        return image_field(self._column, size, mode)

    @property
    def cache_key(self) -> str:
        return f"{self.inspect().fingerprint}/{self._paths.cache_key}"

    def _inspect_data(self) -> SourceFacts:
        self._files = find_files(self._paths)
        earlier = xxhash.xxh3_128()
        for file in self._files:
            earlier.update(f"{file.name}\0{file.size}\0".encode())
        digest = earlier.copy()
        for sample in self._samples():
            digest.update(f"{sample}\0".encode())
        blocks = []
        for first in range(0, len(self._files), self._per_block):
            files = self._files[first : first + self._per_block]
            blocks.append(BlockFacts(len(files), sum(file.size for file in files)))
        return SourceFacts(tuple(blocks), self._schema, digest.hexdigest(), earlier.hexdigest())

    def _samples(self) -> list[str]:
        """Return hashes of bytes of the files: opening each of very many would take too long."""
        chosen = self._files[:: -(-len(self._files) // MOST_SAMPLED_FILES)]
        try:
            return content_samples(chosen, self._paths.filesystem)
        except OSError as error:
            raise unreadable(chosen[0], error) from error

    def read(self, block: int, columns: Sequence[str] | None = None) -> Iterator[pa.RecordBatch]:
        self.inspect()
        names = self._schema.names if columns is None else list(columns)
        schema = pa.schema([self._schema.field(name) for name in names])
        files = self._files[block * self._per_block : (block + 1) * self._per_block]
        values: dict[str, list[bytes | str]] = {name: [] for name in names}
        held = 0
        for number, file in enumerate(files):
            if self._column in values:
                try:
                    values[self._column].append(read_whole(file, self._paths.filesystem))
                except (OSError, StorageError) as error:
                    raise unreadable(file, error) from error
                held += file.size
            if "path" in values:
                values["path"].append(file.shown)
            if held > _BATCH_BYTES or number == len(files) - 1:
                yield pa.RecordBatch.from_pydict(values, schema=schema)
                values, held = {name: [] for name in names}, 0

    def name_row(self, block: int, row: int) -> str:
        self.inspect()
        return self._files[block * self._per_block + row].name


class BinaryFilesSource(ImageSource):
    """Files as they are: the column "bytes", and with ``include_paths`` the column "path"."""

    _column = "bytes"

    def _field(self, size: tuple[int, int] | None, mode: str | None) -> Any:
        return pa.field(self._column, pa.binary())


# --------------------------------------------------------------------------- Hugging Face's form


def is_stored_image(given: pa.DataType) -> bool:
    """Return True for the type in which Hugging Face's datasets keep images: the bytes, or the path of a file."""
    if isinstance(given, pa.BaseExtensionType):
        return is_stored_image(given.storage_type)
    return pa.types.is_struct(given) and {given.field(i).name for i in range(given.num_fields)} == {
        "bytes",
        "path",
    }


def encoded_images(array: Any) -> Any:
    """Return the bytes of each image, read from its file where there is only a path."""
    if isinstance(array, pa.ExtensionArray):
        array = array.storage
    # Flattened, so that an image that is null has null bytes.
    parts = dict(
        zip((array.type.field(i).name for i in range(array.type.num_fields)), array.flatten(), strict=True)
    )
    stored = parts["bytes"].cast(pa.binary())
    paths = parts["path"]
    if stored.null_count == 0 or paths.null_count == len(paths):
        return stored
    values = [
        data if data is not None or path is None else _read_path(path)
        for data, path in zip(stored.to_pylist(), paths.to_pylist(), strict=True)
    ]
    return pa.array(values, pa.binary())


def _read_path(path: str) -> bytes:
    try:
        with open(path, "rb") as file:
            return file.read()
    except OSError as error:
        raise DataError(
            f"The image {path!r}, which the dataset names by its path only, cannot be read: {error.strerror}. Restore "
            "the file, or save the dataset with the images in it."
        ) from error
