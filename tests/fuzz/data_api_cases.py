"""The public API of the data package as calls with hostile arguments: one numbered call each, the same for a seed."""

from __future__ import annotations

import inspect
import itertools
import os
import random
import types
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import torch
from tests.fuzz.data_api_values import HOSTILE, FromAFunction

from powertrain import data
from powertrain.data import collate_fn, expressions
from powertrain.data.dataset import Dataset
from powertrain.data.epochs import Batches, EpochIterator
from powertrain.data.loading.loader import budgets_alone
from powertrain.data.loading.scratch import Scratch
from powertrain.data.plan.prepared import prepare_alone
from powertrain.data.ray import protocol
from powertrain.data.ray.shard import StreamedBatches, StreamedShard
from powertrain.data.shard import DataShard
from powertrain.errors import PowertrainError

ROWS = 7
#: Rows and batches that are read of what a call has returned.
_FEW = 3


def files(directory: str) -> None:
    """Write the files that valid arguments name into a directory, which becomes the working directory."""
    os.makedirs(directory, exist_ok=True)
    os.chdir(directory)
    protocol._CONNECT_TIMEOUT_S = (
        0.05  # seconds in which a shard of Ray's waits for a feed, of which there is none
    )
    whole = data.from_items([{"id": n, "x": n / 2, "t": f"row {n}", "l": [n] * (n % 3)} for n in range(ROWS)])
    whole.write_parquet("parquet")
    whole.drop_columns("l").write_csv("csv")
    whole.write_json("json")
    from PIL import Image

    os.makedirs("images", exist_ok=True)
    Image.new("RGB", (4, 3)).save("images/a.png")


def dataset(chance: random.Random) -> Dataset:
    """A small dataset that works."""
    made = chance.choice(
        [
            lambda: data.range(ROWS),
            lambda: data.read_parquet("parquet"),
            lambda: data.from_items([{"id": n, "l": [n] * (n % 3), "t": "x"} for n in range(ROWS)]),
            lambda: data.range(ROWS).map(lambda row: row),
            lambda: data.range(ROWS).filter(lambda row: row["id"] % 2 == 0),
            lambda: data.range(ROWS).random_shuffle(),
            lambda: data.from_items([]),
            lambda: data.range(ROWS).limit(5).union(data.range(3)),
        ]
    )
    return made()


def _of_numbers() -> dict[str, Any]:
    return {"id": np.arange(3), "l": np.arange(6).reshape(3, 2)}


#: Values that an argument of this name takes.
GOOD: dict[str, list[Callable[[], Any]]] = {
    "paths": [lambda: "parquet", lambda: ["parquet"], lambda: "csv", lambda: "json", lambda: "images"],
    "path": [lambda: "written"],
    "columns": [lambda: ["id"], lambda: "id"],
    "cols": [lambda: ["id"], lambda: "id"],
    "names": [lambda: {"id": "number"}],
    "fn": [lambda: lambda row: row, lambda: lambda row: True],
    "expr": [lambda: None, lambda: "id > 3"],
    "limit": [lambda: 3, lambda: np.int32(2)],
    "n": [lambda: 3],
    "indices": [lambda: [1, 3]],
    "proportions": [lambda: [0.5]],
    "test_size": [lambda: 0.5, lambda: 2],
    "seed": [lambda: 1],
    "batch_size": [lambda: 2, lambda: torch.tensor(2)],
    "batch_format": [lambda: "numpy", lambda: "pandas", lambda: "pyarrow"],
    "total": [lambda: 2],
    "items": [lambda: [{"a": 1}], lambda: [1, 2]],
    "dfs": [lambda: pd.DataFrame({"a": [1, 2]})],
    "ndarrays": [lambda: np.arange(4), lambda: _of_numbers()],
    "tables": [lambda: pa.table({"a": [1, 2]})],
    "dataset": [lambda: [1, 2, 3]],
    "other": [lambda: data.range(2)],
    "text": [lambda: "id > 3"],
    "name": [lambda: "id"],
    "value": [lambda: 1],
    "size": [lambda: (2, 2)],
    "mode": [lambda: "append", lambda: "RGB"],
    "batch": [lambda: _of_numbers(), lambda: pa.table({"l": [[1], [2, 3]]})],
    "num_blocks": [lambda: 2],
    "state": [lambda: data.range(ROWS)._reader.epochs().state_dict()],
}


@dataclass(frozen=True)
class Target:
    """Something to call: ``make`` gives the callable, by which its arguments are known."""

    name: str
    make: Callable[[random.Random], Callable[..., Any]]
    #: A user's own error may come out as it is.
    passes_errors: bool = False


def _bound(
    make: Callable[[random.Random], Any], method: str
) -> Callable[[random.Random], Callable[..., Any]]:
    return lambda chance: getattr(make(chance), method)


def _shard(chance: random.Random) -> DataShard:
    prepared, scratch = prepare_alone(dataset(chance).plan), Scratch()
    shard = DataShard(prepared, cache_directory=scratch.path, **budgets_alone(prepared, scratch.path))
    weakref.finalize(shard, scratch.close)
    return shard


def _batches(chance: random.Random) -> Any:
    shard = dataset(chance)
    return (
        shard.iter_batches(batch_size=2) if chance.random() < 0.5 else shard.iter_torch_batches(batch_size=2)
    )


def _public(kind: type) -> list[str]:
    return [
        name
        for name, value in inspect.getmembers(kind)
        if not name.startswith("_") and isinstance(value, types.FunctionType)
    ]


#: Not the user's to call, or no part of the API.
_LEFT_OUT = {"EpochIterator.give_up"}


def _member(owner: Any, name: str) -> Callable[[random.Random], Any]:
    return lambda chance: getattr(owner, name)


def targets() -> list[Target]:
    """Every public callable and method of the package."""
    functions = [name for name in data.__all__ if name.startswith(("read_", "from_")) or name == "range"]
    found = [Target(name, _member(data, name)) for name in functions]
    owners: list[tuple[str, type, Callable[[random.Random], Any]]] = [
        ("Dataset", Dataset, dataset),
        ("DataShard", DataShard, _shard),
        ("Batches", Batches, _batches),
        ("EpochIterator", EpochIterator, lambda chance: iter(_batches(chance))),
        ("StreamedShard", StreamedShard, lambda chance: StreamedShard("rays", "/nowhere/feed.sock")),
    ]
    for owner, kind, make in owners:
        found += [
            Target(f"{owner}.{name}", _bound(make, name), "torch_batches" in name or name == "peek")
            for name in _public(kind)
            if f"{owner}.{name}" not in _LEFT_OUT
        ]
    found += [Target(f"collate_fn.{name}", _member(collate_fn, name)) for name in ("pad", "ragged", "Ragged")]
    found += [
        Target("pad()()", lambda chance: collate_fn.pad().__call__),
        Target("ragged()()", lambda chance: collate_fn.ragged().__call__),
    ]
    return found + [
        Target(f"expressions.{name}", _member(expressions, name)) for name in ("col", "lit", "parse")
    ]


# --------------------------------------------------------------------------- one call


def call(target: Target, chance: random.Random) -> str:
    """Call it once with at least one hostile argument, and read some of what it returns. Returns what was done."""
    function = target.make(chance)
    keywords, positional = arguments(function, chance)
    said = f"{target.name}({', '.join([*map(_shown, positional), *(f'{k}={_shown(v)}' for k, v in keywords.items())])})"
    DONE.append(said)
    returned = function(*positional, **keywords)
    consume(returned, chance, said)
    return said


#: The newest calls, for the report of one that has failed.
DONE: list[str] = []


def arguments(function: Any, chance: random.Random) -> tuple[dict[str, Any], list[Any]]:
    """Arguments for a callable, of which at least one is hostile where it takes any."""
    parameters = [p for p in inspect.signature(function).parameters.values() if p.name != "self"]
    if not parameters:
        return {}, []
    hostile = {parameter.name for parameter in parameters if chance.random() < 0.15}
    hostile.add(chance.choice(parameters).name)
    keywords: dict[str, Any] = {}
    positional: list[Any] = []
    for parameter in parameters:
        if parameter.name in hostile:
            value = chance.choice(HOSTILE)()
        elif parameter.default is parameter.empty or chance.random() < 0.2:
            value = chance.choice(GOOD.get(parameter.name, [lambda: None]))()
        else:
            continue
        if parameter.kind is parameter.VAR_POSITIONAL:
            positional.append(value)
        elif parameter.kind is parameter.VAR_KEYWORD:
            keywords[chance.choice(["compression", "batch_size", "write_options", "unknown_option"])] = value
        elif parameter.kind is parameter.POSITIONAL_ONLY:
            positional.append(value)
        else:
            keywords[parameter.name] = value
    if positional:  # what comes before it has to be given by place too
        keywords = {k: v for k, v in keywords.items() if k not in ("self",)}
    return keywords, positional


def consume(returned: Any, chance: random.Random, said: str) -> None:
    """Read a little of what a call has returned, as a program would."""
    if isinstance(returned, Dataset):
        use = chance.choice(_USES)
        DONE[-1] = f"{said}, then {use.__name__}"
        use(returned)
    elif (
        isinstance(returned, (list, tuple)) and returned and all(isinstance(one, Dataset) for one in returned)
    ):
        chance.choice(returned[:_FEW]).take(_FEW)
    elif isinstance(returned, (Batches, StreamedBatches, Iterator)):
        DONE[-1] = f"{said}, then reads"
        for _ in itertools.islice(returned, _FEW):
            pass
    elif isinstance(returned, collate_fn.RowsCollateFn):
        returned(GOOD["batch"][0]())
    elif isinstance(returned, pa.compute.Expression):
        data.range(ROWS).filter(returned).take(_FEW)


def count(made: Dataset) -> Any:
    return made.count()


def take(made: Dataset) -> Any:
    return made.take(_FEW)


def schema(made: Dataset) -> Any:
    return (made.schema(), repr(made), made.stats())


def read_tensors(made: Dataset) -> Any:
    return list(itertools.islice(made.iter_torch_batches(batch_size=2), _FEW))


def read_arrays(made: Dataset) -> Any:
    return list(itertools.islice(made.iter_batches(batch_size=2, prefetch_batches=0), _FEW))


def read_frames(made: Dataset) -> Any:
    return made.take_batch(_FEW, batch_format="pandas")


def fingerprint(made: Dataset) -> Any:
    return made.plan.inspected().fingerprint


_USES = [count, take, schema, read_tensors, read_arrays, read_frames, fingerprint]


def _shown(value: Any) -> str:
    try:
        text = repr(value)
    except BaseException:
        text = f"<{type(value).__name__}>"
    return text if len(text) <= 80 else f"{text[:60]}... of {type(value).__name__}"


# --------------------------------------------------------------------------- what may come of it


def verdict(error: BaseException, target: Target) -> str:
    """ "" for an outcome that is allowed, else what was raised."""
    if isinstance(error, PowertrainError):
        text = str(error)  # which must be possible, and be readable
        return "" if text.strip() and len(text) < 20_000 else f"an error with {len(text)} characters of text"
    if isinstance(error, FromAFunction) and target.passes_errors:
        return ""
    if isinstance(error, TypeError) and _is_of_the_signature(error):
        return ""
    return f"{type(error).__module__}.{type(error).__name__}"


def _is_of_the_signature(error: TypeError) -> bool:
    """True where Python itself found that the call does not fit the signature: no frame of the package was entered, or
    only that of a method which hands its options on."""
    words = (
        "unexpected keyword argument",
        "missing",
        "positional argument",
        "multiple values",
        "keywords must be",
    )
    return any(word in str(error) for word in words)
