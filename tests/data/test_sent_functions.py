"""Functions in expressions reach processes that cannot import their module."""

from __future__ import annotations

import importlib.util
import pickle
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from powertrain import DataConfig, data
from powertrain.data import Dataset
from powertrain.data.consuming import PlanReader
from powertrain.data.expressions import col, udf
from powertrain.data.plan.prepare import prepare
from powertrain.data.plan.prepared import Prepared, prepare_alone
from powertrain.data.ray.tasks import _pickled
from powertrain.driver.datasets import pickled_datasets

NAME = "functions_not_on_the_path"


@pytest.fixture
def module(tmp_path: Path) -> Iterator[ModuleType]:
    """A module that was loaded from a place which is not on the path."""
    path = tmp_path / f"{NAME}.py"
    path.write_text("import pyarrow.compute as pc\ndef twice(values):\n    return pc.multiply(values, 2)\n")
    spec = importlib.util.spec_from_file_location(NAME, path)
    assert spec is not None
    assert spec.loader is not None
    loaded = importlib.util.module_from_spec(spec)
    sys.modules[NAME] = loaded
    spec.loader.exec_module(loaded)
    yield loaded
    sys.modules.pop(NAME, None)


def to_ranks(dataset: Dataset, directory: Path) -> Prepared:
    sent = pickled_datasets(prepare({"train": dataset}, DataConfig(), 0, str(directory)))
    sys.modules.pop(NAME)
    found: Prepared = pickle.loads(sent)["train"]
    return found


def to_tasks(dataset: Dataset, directory: Path) -> Prepared:
    sent = _pickled(prepare_alone(dataset.plan))
    sys.modules.pop(NAME)
    found: Prepared = pickle.loads(sent)
    return found


@pytest.mark.parametrize("send", [to_ranks, to_tasks])
@pytest.mark.parametrize("verb", ["with_column", "filter"])
def test_functions_in_expressions_travel_by_value(
    tmp_path: Path, module: ModuleType, send: Callable[..., Prepared], verb: str
) -> None:
    twice: Any = udf()(module.twice)(col("id"))
    rows = data.range(4)
    made = rows.with_column("v", twice) if verb == "with_column" else rows.filter(expr=twice > 2)
    arrived = send(made, tmp_path / "rows")
    found = PlanReader(arrived.inspected.plan).take_all(None)
    assert [row["id"] for row in found] == ([0, 1, 2, 3] if verb == "with_column" else [2, 3])
