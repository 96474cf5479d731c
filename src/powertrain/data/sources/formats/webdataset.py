"""WebDatasets: tar files of samples. A row is a sample, a column one ending of its members."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pyarrow as pa

from powertrain.data.sources.base import SourceFacts
from powertrain.data.sources.files.files import DataFile, FilePaths
from powertrain.data.sources.files.images import image_field
from powertrain.data.sources.files.text import BLOCK_BYTES, TextSource, key_of
from powertrain.data.sources.files.text_types import wider
from powertrain.data.sources.formats.tar_samples import (
    IMAGES,
    TarMember,
    TarSelection,
    decoded,
    has_broken_header,
    samples,
    whole_members,
)
from powertrain.data.sources.items import table_of_columns
from powertrain.errors import DataError

KEY, URL = "__key__", "__url__"


class WebDatasetSource(TextSource):
    """Samples of tar files, also of compressed ones: the columns "__key__" and "__url__", and one for each ending.

    Args:
        paths: The tar files.
        selection: Which members are read.
        decodes: Whether members are decoded by their endings; otherwise they are bytes.
        expands_json: Whether the keys of a member "json" are columns as well.
        include_paths: Whether to add the column "path".
        block_bytes: Approximate bytes of the file in a block.
    """

    _kind = "tar"
    _text_fits_all = False

    def __init__(
        self,
        paths: FilePaths,
        *,
        selection: TarSelection,
        decodes: bool = True,
        expands_json: bool = False,
        include_paths: bool = False,
        block_bytes: int = BLOCK_BYTES,
    ) -> None:
        super().__init__(paths, include_paths=include_paths, block_bytes=block_bytes)
        self._selection, self._decodes, self._expands = selection, decodes, expands_json
        chosen = (selection.fileselect, selection.filerename, selection.suffixes)
        self._options_key = f"{key_of(*chosen)}/{decodes}/{expands_json}"
        self._names: tuple[str, ...] = ()
        #: While inspecting: the file and the keys of its samples so far, which must not come again.
        self._seen: tuple[int, set[str]] = (-1, set())

    def _inspect_data(self) -> SourceFacts:
        self._names, self._seen = (), (-1, set())
        facts = super()._inspect_data()
        self._seen = (-1, set())
        fields = [image_field(field.name) if self._is_image(field.name) else field for field in facts.schema]
        return SourceFacts(facts.blocks, pa.schema(fields), facts.fingerprint)

    def _is_image(self, name: str) -> bool:
        return self._decodes and name in self._names and _ending(name) in IMAGES

    def _start_of_data(self, number: int, head: bytes) -> int:
        return 0

    def _last_end(self, data: bytes) -> int:
        members, _, problem = whole_members(data, self._selection)
        if has_broken_header(problem):
            return len(data)  # refused when it is parsed; reading on would not mend it
        # The last sample may go on behind the data.
        return _start_of_last(members) if members else 0

    def _parsed(self, data: bytes, number: int, schema: pa.Schema | None) -> pa.Table:
        members, end, problem = whole_members(data, self._selection)
        if problem:
            where = f"the member after {members[-1].key!r}" if members else "the first member"
            raise ValueError(f"{where}, at byte {end} of this part, {problem}")
        rows = samples(members, self._selection)
        if schema is None:
            self._check_keys(number, [key for key, _ in rows])
        values = [self._values(key, contents) for key, contents in rows]
        names = dict.fromkeys(name for row in values for name in row)
        if schema is None:
            self._names = tuple(dict.fromkeys((*self._names, KEY, URL, *names)))
        columns: dict[str, list[Any]] = {
            KEY: [key for key, _ in rows],
            URL: [self._files[number].shown] * len(rows),
            **{name: [row.get(name) for row in values] for name in names},
        }
        if schema is not None:
            fitting = {field.name: _typed(columns.get(field.name), field.type, len(rows)) for field in schema}
            return pa.table(fitting)
        try:
            return table_of_columns(columns, "sample") if rows else pa.schema([]).empty_table()
        except DataError as error:
            raise ValueError(str(error).rstrip(".")) from error

    def _declared(self) -> pa.Schema:
        return pa.schema([(KEY, pa.string()), (URL, pa.string())])

    def _check_keys(self, number: int, keys: Sequence[str]) -> None:
        seen = self._seen[1] if self._seen[0] == number else set()
        for key in keys:
            if key in seen:
                raise ValueError(
                    f"the members of the sample {key!r} are not one after the other; write the archive sorted by name "
                    "(tar --sort=name)"
                )
            seen.add(key)
        self._seen = (number, seen)

    def _values(self, key: str, contents: dict[str, bytes]) -> dict[str, Any]:
        if not self._decodes and not self._expands:
            return dict(contents)
        found: dict[str, Any] = {}
        for name, content in contents.items():
            try:
                is_wanted = self._decodes or (self._expands and name == "json")
                found[name] = decoded(name, content) if is_wanted else content
            except (ValueError, EOFError, OSError) as error:
                raise ValueError(
                    f"the member {name!r} of the sample {key!r} cannot be decoded: {error}"
                ) from error
        if self._expands:
            document = found.get("json")
            if not isinstance(document, dict):
                raise ValueError(
                    f"expand_json=True: the sample {key!r} has no member 'json' with a JSON object"
                )
            found = {**document, **found}
            if not self._decodes:
                found["json"] = contents["json"]
        return found

    def _advice(self, data: bytes) -> str:
        return "Copy the file again or write it anew; or leave it out."

    def _widened(self, schema: pa.Schema, found: pa.Schema, file: DataFile) -> pa.Schema:
        fields = {field.name: field.type for field in schema}
        for field in found:
            one, other = fields.get(field.name, pa.null()), field.type
            if not one.equals(other) and not pa.types.is_null(one):
                one, other = _as_lists(one), _as_lists(other)
            fitting = wider(one, other, text_fits_all=False)
            if fitting is None:
                raise DataError(
                    f"The members {field.name!r} of the tar files have the type {one} in what comes first and {other} "
                    f"in {file.shown!r}, and no type fits both. Give decoder=None, and decode them in map()."
                )
            fields[field.name] = fitting
        return pa.schema(list(fields.items()))

    def _has(self, name: str) -> bool:
        return name in self._names


def _ending(name: str) -> str:
    return name.rpartition(".")[2]


def _start_of_last(members: Sequence[TarMember]) -> int:
    """Return the offset of the first member of the last sample."""
    place = len(members) - 1
    while place > 0 and members[place - 1].key == members[-1].key:
        place -= 1
    return members[place].offset


def _as_lists(given: Any) -> Any:
    """Return lists in place of a tensor of one shape: other shapes fit them as well."""
    if not isinstance(given, pa.FixedShapeTensorType):
        return given
    found = given.value_type
    for _ in given.shape:
        found = pa.list_(found)
    return found


def _typed(values: list[Any] | None, kind: Any, rows: int) -> Any:
    """Return a column of a type that is known."""
    if values is None:
        return pa.nulls(rows, kind)
    if isinstance(kind, pa.FixedShapeTensorType):
        return table_of_columns({"": values}).column(0)
    return pa.array([each.tolist() if isinstance(each, np.ndarray) else each for each in values], kind)
