"""Datasets of other libraries with access by index: torch's map-style ones, Hugging Face's."""

from __future__ import annotations

import linecache
import os
import secrets
import threading
from collections.abc import Iterator, Sequence
from typing import Any

import pyarrow as pa
import xxhash

from powertrain.data.arguments import ODD, refused
from powertrain.data.operations.calls import defined_at, error_text, users_line
from powertrain.data.sources.base import BlockFacts, Source, SourceFacts
from powertrain.data.sources.content_hash import content_hash
from powertrain.data.sources.files.images import encoded_images, image_field, is_stored_image
from powertrain.data.sources.items import table_of_items
from powertrain.data.sources.plain import as_type, one_batch, plain_table, with_rows_only
from powertrain.data.sources.remembering import RememberingSource
from powertrain.errors import DataError

#: Most items of a torch dataset in a block: they are fetched one by one.
ITEMS_PER_BLOCK = 256
#: Most items of a dataset: the list of blocks is made beforehand.
_MOST_ITEMS = 2**34
#: Approximate bytes of a block of a Hugging Face dataset.
_BLOCK_BYTES = 32 << 20


class IndexedSource(RememberingSource):
    """A map-style dataset of torch: ``len(dataset)`` items, got by ``dataset[i]``.

    Items that are dicts give their keys as columns, all others the column "item". The first item fixes the types. The
    contents are unknown without fetching all items, so the fingerprint is the dataset's class and length.
    """

    def __init__(self, dataset: Any, items_per_block: int = ITEMS_PER_BLOCK) -> None:
        super().__init__()
        self._dataset, self._per_block = dataset, items_per_block
        self._kind = f"{type(dataset).__module__}.{type(dataset).__qualname__}"
        self._length = _length_of(dataset, self._kind)
        #: Distinguishes it from other datasets of this class and length, whose items may differ.
        self._token = secrets.token_hex(8)

    @property
    def cache_key(self) -> str:
        return f"{self.inspect().fingerprint}/{self._token}"

    def _inspect_data(self) -> SourceFacts:
        schema = self._table(0, 1).schema if self._length else pa.schema([])
        width = self._table(0, 1).nbytes if self._length else 0
        blocks = []
        for first in range(0, self._length, self._per_block):
            rows = min(self._per_block, self._length - first)
            blocks.append(BlockFacts(rows, rows * width))
        return SourceFacts(
            tuple(blocks), schema, xxhash.xxh3_128_hexdigest(f"{self._kind}\0{self._length}".encode())
        )

    def read(self, block: int, columns: Sequence[str] | None = None) -> Iterator[pa.RecordBatch]:
        schema = self.inspect().schema
        first = block * self._per_block
        table = self._table(first, min(first + self._per_block, self._length))
        names = schema.names if columns is None else list(columns)
        if not names:
            yield with_rows_only(table.num_rows)
            return
        arrays = [self._fitted(table, schema.field(name), first) for name in names]
        yield pa.RecordBatch.from_arrays(arrays, schema=pa.schema([schema.field(name) for name in names]))

    def _table(self, first: int, stop: int) -> pa.Table:
        dataset = self._dataset
        numbers = list(range(first, stop))
        if not hasattr(dataset, "__getitems__"):
            return self._made([self._item(dataset, number) for number in numbers], first)
        try:
            items = list(dataset.__getitems__(numbers))
        except (Exception, SystemExit) as error:
            raise self._failed("__getitems__", f"Items {first} to {stop - 1}", error) from error
        return self._made(items, first)

    def _made(self, items: list[Any], first: int) -> pa.Table:
        try:
            return table_of_items(items, "item", first)
        except DataError:
            raise
        except ODD as error:
            raise refused(
                f"The items of {self._kind} from number {first} on make no rows:", items, error
            ) from error

    def _item(self, dataset: Any, number: int) -> Any:
        try:
            return dataset[number]
        except (Exception, SystemExit) as error:
            raise self._failed("__getitem__", f"Item {number}", error) from error

    def _failed(self, method: str, items: str, error: BaseException) -> DataError:
        """Return the error for an exception of the user's code: names the items and the line."""
        file, _ = defined_at(getattr(self._dataset, method, None))
        file, line = users_line(error.__traceback__, file)
        source = linecache.getline(file, line).strip() if file else ""
        place = f" at {file}, line {line}" + (f" ({source})" if source else "") if file else ""
        return DataError(
            f"{items} of the dataset {self._kind} could not be had: {method} failed{place}: {error_text(error)}"
        )

    def _fitted(self, table: pa.Table, field: Any, first: int) -> Any:
        """Return a column of some items with the type fixed by the first item."""
        if field.name not in table.column_names:
            return pa.nulls(table.num_rows, field.type)
        column = table.column(field.name).combine_chunks()
        array = column.chunk(0) if isinstance(column, pa.ChunkedArray) else column
        try:
            return as_type(array, field.type)
        except (pa.ArrowException, ValueError) as error:
            raise DataError(
                f"Column {field.name!r} of {self._kind} is {field.type} in item 0 and {array.type} in the items from "
                f"{first} on, which does not fit: {error}. Give the items one type and shape."
            ) from error

    def name_row(self, block: int, row: int) -> str:
        return f"item {block * self._per_block + row}"

    def publish(self, directory: str) -> Source:
        """Write the pickled dataset to a file once for all processes."""
        import cloudpickle

        self.inspect()
        path = os.path.join(directory, f"dataset-{secrets.token_hex(8)}.pickle")
        temporary = f"{path}.tmp"
        try:
            os.makedirs(directory, exist_ok=True)
            with open(temporary, "wb") as file:
                cloudpickle.dump(self._dataset, file)
            os.replace(temporary, path)
        except Exception as error:
            raise DataError(
                f"The dataset {self._kind} cannot be handed to the workers: {type(error).__name__}: {error}. It must "
                "be possible to pickle it; open files and connections in __getitem__."
            ) from error
        finally:
            if os.path.exists(temporary):
                os.unlink(temporary)
        return _PickledSource(self, path)


def _length_of(dataset: Any, kind: str) -> int:
    try:
        length = len(dataset)
    except (Exception, SystemExit) as error:
        raise DataError(
            f"The length of the dataset {kind} is not available: __len__ failed: {error_text(error)}"
        ) from error
    if length > _MOST_ITEMS:
        raise DataError(
            f"The dataset {kind} says that it has {length} items, and at most {_MOST_ITEMS} can be put in an order."
        )
    return length


class _PickledSource(IndexedSource):
    """The same dataset, loaded from a file by each process that reads an item."""

    def __init__(self, source: IndexedSource, path: str) -> None:
        self.__dict__.update({name: value for name, value in source.__dict__.items() if name != "_dataset"})
        self._path = path
        self._loaded: Any = None
        self._guard = threading.Lock()

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name not in ("_loaded", "_guard")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state, _loaded=None, _guard=threading.Lock())

    @property
    def _dataset(self) -> Any:
        with self._guard:
            if self._loaded is None:
                import cloudpickle

                with open(self._path, "rb") as file:
                    self._loaded = cloudpickle.load(file)
            return self._loaded

    def publish(self, directory: str) -> Source:
        return self


# --------------------------------------------------------------------------- Hugging Face


class HuggingFaceSource(RememberingSource):
    """A ``datasets.Dataset`` stored in files, in the order left by select, shuffle or sort.

    The fingerprint is made of rows, columns, the sizes of the files, the order and the first and last row.
    """

    cheap_to_decode = True

    def __init__(self, dataset: Any, block_bytes: int = _BLOCK_BYTES) -> None:
        super().__init__()
        self._dataset, self._block_bytes = dataset.with_format("arrow"), block_bytes
        self._rows_per_block = 1

    @property
    def cache_key(self) -> str:
        files = [file["filename"] for file in self._dataset.cache_files]
        return f"{self.inspect().fingerprint}/{files}"

    def _inspect_data(self) -> SourceFacts:
        dataset, rows = self._dataset, len(self._dataset)
        width = max(1, dataset.data.nbytes // max(1, dataset.data.num_rows))
        self._rows_per_block = max(1, min(self._block_bytes // width, 1 << 20))
        blocks = []
        for first in range(0, rows, self._rows_per_block):
            count = min(self._rows_per_block, rows - first)
            blocks.append(BlockFacts(count, count * width))
        digest = xxhash.xxh3_128(f"{rows}\0{dataset.features}".encode())
        for file in dataset.cache_files:
            size = os.path.getsize(file["filename"])
            digest.update(f"\0{os.path.basename(file['filename'])}\0{size}".encode())
        if dataset._indices is not None:
            digest.update(content_hash(_contents(dataset._indices)).encode())
        ends = [
            plain_hugging_face(dataset[place : place + 1], dataset.features)
            for place in {0, max(0, rows - 1)}
        ]
        for end in ends:
            digest.update(content_hash(end).encode())
        return SourceFacts(tuple(blocks), ends[0].schema, digest.hexdigest())

    def read(self, block: int, columns: Sequence[str] | None = None) -> Iterator[pa.RecordBatch]:
        schema = self.inspect().schema
        first = block * self._rows_per_block
        dataset = self._dataset if columns is None else self._dataset.select_columns(list(columns))
        rows = min(self._rows_per_block, len(self._dataset) - first)
        if columns is not None and not columns:
            yield with_rows_only(rows)
            return
        table = plain_hugging_face(dataset[first : first + rows], dataset.features)
        names = schema.names if columns is None else list(columns)
        yield one_batch(table.select(names).to_batches())

    def name_row(self, block: int, row: int) -> str:
        return f"row {block * self._rows_per_block + row}"


def _contents(table: Any) -> pa.Table:
    """Return the Arrow table in one of Hugging Face's."""
    found: pa.Table = table.table
    return found


def plain_hugging_face(table: pa.Table, features: Any) -> pa.Table:
    """Return rows of a Hugging Face dataset in plain form; images as their bytes, marked."""
    images = {}
    for name, feature in features.items():
        if type(feature).__name__ == "Image" and is_stored_image(table.schema.field(name).type):
            chunks = [encoded_images(chunk) for chunk in table.column(name).chunks]
            images[name] = pa.chunked_array(chunks, type=pa.binary())
            table = table.set_column(
                table.schema.get_field_index(name), pa.field(name, pa.binary()), images[name]
            )
    table = plain_table(table)
    for name, column in images.items():
        mode = getattr(features[name], "mode", None)
        table = table.set_column(table.schema.get_field_index(name), image_field(name, mode=mode), column)
    return table
