"""A StopIteration raised by a user's code inside a torch DataLoader: an error, not the end of the epoch."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from types import TracebackType
from typing import Any

from torch.utils.data import IterableDataset
from torch.utils.data._utils import fetch

from powertrain.data.operations.calls import call_collate
from powertrain.errors import DataError

#: Torch gets the rows of a batch and collates them in here; the end of its sampler never passes through it.
_FETCHING = os.path.normcase(fetch.__file__)
#: How torch begins the text of an error that one of its loader processes raised.
_FROM_A_PROCESS = "Caught StopIteration in DataLoader worker process"


class WholeEpoch:
    """The batches of a loader's iterator. No generator, which would keep the newest batch until the next one."""

    def __init__(self, batches: Iterator[Any], dataset: Any) -> None:
        self._batches: Iterator[Any] | None = batches
        #: The rows of other datasets end where their own iterator does.
        self._is_checked = not isinstance(dataset, IterableDataset)
        self._dataset = type(dataset).__name__

    def __iter__(self) -> WholeEpoch:
        return self

    def __next__(self) -> Any:
        if self._batches is None:
            raise StopIteration
        try:
            return next(self._batches)
        except StopIteration as end:
            if self._is_checked and (raised_by := _function_that_raised(end)):
                raise DataError(
                    f"{raised_by} raised StopIteration while a batch of {self._dataset} was made, which would end the "
                    "epoch although rows are left. Let it return a value for every row, or raise another error; a "
                    "next() in it that may find nothing needs a default."
                ) from end
            self._batches = None
            raise


class CheckedCollate:
    """The ``collate_fn`` of a loader over an IterableDataset, whose StopIteration torch takes for the data's end."""

    def __init__(self, collate_fn: Callable[[Any], Any]) -> None:
        self.collate_fn = collate_fn

    def __call__(self, batch: Any) -> Any:
        return call_collate(self.collate_fn, batch)


def _function_that_raised(end: StopIteration) -> str:
    """Name the function that raised ``end`` while a batch was made; "" where the sampler has come to its end."""
    text = str(end.value) if end.args else ""
    if text.startswith(_FROM_A_PROCESS):
        last = [line.strip() for line in text.splitlines() if line.strip().startswith("File ")]
        return (
            f"A function of the dataset or its collate_fn ({last[-1]})"
            if last
            else "A function of the dataset"
        )
    names = _names_of(end.__traceback__)
    return f"{names[-1]}()" if any(file == _FETCHING for file, _ in _frames(end.__traceback__)) else ""


def _names_of(traceback: TracebackType | None) -> list[str]:
    return [name for _, name in _frames(traceback)]


def _frames(traceback: TracebackType | None) -> list[tuple[str, str]]:
    found = []
    while traceback is not None:
        code = traceback.tb_frame.f_code
        found.append((os.path.normcase(code.co_filename), getattr(code, "co_qualname", code.co_name)))
        traceback = traceback.tb_next
    return found
