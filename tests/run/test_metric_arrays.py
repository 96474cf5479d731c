"""Arrow arrays of plain values, made without pandas."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from powertrain.run.metrics.arrays import array_of, array_of_numpy, floats_of, numpy_of, validity_of

KINDS: dict[pa.DataType, st.SearchStrategy[Any]] = {
    pa.int32(): st.integers(-(2**31), 2**31 - 1),
    pa.int64(): st.integers(-(2**63), 2**63 - 1),
    pa.float64(): st.floats(allow_nan=False),
    pa.bool_(): st.booleans(),
    pa.string(): st.text(st.characters(exclude_categories=["Cs"])),
}

PROGRAM = """
import sys
import powertrain
from powertrain import DataParallelTrainer, RunConfig, ScalingConfig

def train():
    for number in range(100):
        powertrain.report({"loss": 1 / (number + 1), "number": number, "name": "x", "good": True, "deep": {"a": None}})

if __name__ == "__main__":
    run = RunConfig(storage_path=sys.argv[1], name="run", verbose=0)
    result = DataParallelTrainer(train, scaling_config=ScalingConfig(num_workers=1), run_config=run).fit()
    assert result.metrics["number"] == 99
    print("pandas" in sys.modules)
"""


@st.composite
def columns(draw: st.DrawFn) -> tuple[list[Any], pa.DataType]:
    kind = draw(st.sampled_from([*KINDS]))
    return draw(st.lists(st.none() | KINDS[kind], max_size=70)), kind


@given(columns())
def test_an_array_is_the_one_that_pyarrow_makes(column: tuple[list[Any], pa.DataType]) -> None:
    values, kind = column
    made = array_of(values, kind)
    made.validate(full=True)
    assert made.equals(pa.array(values, kind))


@given(columns(), st.integers(0, 70))
def test_values_of_any_slice_are_read_back(column: tuple[list[Any], pa.DataType], begin: int) -> None:
    values, kind = column
    part = pa.array(values, kind)[begin:]
    assert validity_of(part).tolist() == [value is not None for value in values[begin:]]
    if kind != pa.string():
        read = numpy_of(part).tolist()
        assert [one for one, value in zip(read, values[begin:], strict=True) if value is not None] == [
            value for value in values[begin:] if value is not None
        ]


@given(columns())
def test_nulls_are_nan_among_floats(column: tuple[list[Any], pa.DataType]) -> None:
    values, _ = column
    numbers = [None if value is None else 0.5 for value in values]
    assert np.array_equal(
        np.isnan(floats_of(pa.array(numbers, pa.float64()))), [one is None for one in numbers]
    )


@pytest.mark.parametrize("kind", [np.int32, np.int64, np.float64])
def test_numbers_of_numpy_become_an_array(kind: type) -> None:
    values: Any = np.arange(10, dtype=kind)[::3]
    assert array_of_numpy(values).equals(pa.array(values))


def test_an_integer_beyond_its_type_is_refused() -> None:
    with pytest.raises(OverflowError):
        array_of([2**63], pa.int64())


def test_a_run_that_stores_metrics_and_writes_its_report_does_not_import_pandas(tmp_path: Any) -> None:
    (tmp_path / "program.py").write_text(PROGRAM)
    command = [sys.executable, str(tmp_path / "program.py"), str(tmp_path / "storage")]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.split()[-1] == "False"
    assert list(tmp_path.glob("storage/run/report.html"))
