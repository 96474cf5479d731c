"""powertrain.data: what it has, where it comes from, and that it costs nothing to import."""

from __future__ import annotations

import ast
import importlib.util
import inspect
import subprocess
import sys
from pathlib import Path

import pytest

import powertrain
from powertrain import data

#: Ray Data's arguments that say where Ray runs a task, or that Ray itself calls deprecated or experimental.
PLACEMENT = {
    "compute", "num_cpus", "num_gpus", "memory", "label_selector", "fallback_strategy", "max_calls", "resources",
    "accelerator_type", "runtime_env", "ray_remote_args_fn", "ray_remote_args", "locality_hints",
}  # fmt: skip
#: What else Ray Data's methods take and ours do not, and why: tests/data/test_api_table.py has all of them.
LEFT_OUT = {
    "select_columns": {"concurrency"},
    "drop_columns": {"concurrency"},
    "rename_columns": {"concurrency"},
    "iter_batches": {"_collate_fn"},
    "write_parquet": {
        "partition_cols", "catalog", "try_create_dir", "arrow_open_stream_args", "filename_provider",
        "arrow_parquet_args_fn", "min_bytes_per_file", "concurrency", "num_rows_per_file",
    },
    "write_csv": {
        "try_create_dir", "arrow_open_stream_args", "filename_provider", "arrow_csv_args_fn", "concurrency",
        "num_rows_per_file",
    },
    "write_json": {
        "try_create_dir", "arrow_open_stream_args", "filename_provider", "pandas_json_args_fn", "concurrency",
        "num_rows_per_file", "pandas_json_args",
    },
}  # fmt: skip
METHODS = [
    "map", "map_batches", "flat_map", "filter", "select_columns", "drop_columns", "rename_columns", "random_shuffle",
    "limit", "union", "train_test_split", "split", "split_at_indices", "split_proportionately", "repartition",
    "materialize", "count", "schema", "columns", "take", "take_all", "take_batch", "show", "iter_rows", "iter_batches",
    "random_sample", "randomize_block_order", "streaming_split", "zip", "unique", "sum", "min", "max", "mean", "std",
    "summary", "set_name", "iterator", "add_column", "with_column", "iter_torch_batches", "to_pandas",
    "write_parquet", "write_csv", "write_json", "stats", "num_blocks", "size_bytes",
    "sort", "groupby", "aggregate", "join",
]  # fmt: skip


@pytest.mark.parametrize("name", data.__all__)
def test_every_public_name_can_be_had(name: str) -> None:
    assert getattr(data, name) is not None
    assert name in dir(data)


def test_what_is_not_there_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="read_everything"):
        _ = data.read_everything


def test_rays_names_of_classes_are_known() -> None:
    assert data.DataIterator is data.DataShard
    assert data.MaterializedDataset is data.Dataset


def test_range_is_ours_and_the_builtin_is_left_alone() -> None:
    ours: object = data.range
    assert ours is not range
    assert list(range(2)) == [0, 1]


def _loaded(statement: str, modules: set[str]) -> set[str]:
    script = f"{statement}\nimport sys; print(*({modules!r} & sys.modules.keys()))"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    return set(done.stdout.split())


def test_importing_it_imports_nothing_heavy() -> None:
    heavy = {"torch", "pandas", "pyarrow", "numpy", "ray", "rich", "PIL", "obstore", "datasets"}
    assert _loaded("import powertrain.data", heavy) == set()


def test_making_and_reading_a_dataset_imports_neither_torch_nor_pandas() -> None:
    statement = "import powertrain\nassert powertrain.data.range(5).map(lambda row: row).count() == 5"
    assert _loaded(statement, {"torch", "pandas", "ray"}) == set()


def test_it_is_there_after_a_bare_import_of_the_package() -> None:
    assert "powertrain.data" in _loaded("import powertrain\npowertrain.data", {"powertrain.data"})
    assert "data" in dir(powertrain)


def test_a_star_import_leaves_the_torch_and_the_data_of_a_script_alone() -> None:
    names: dict[str, object] = {}
    exec("from powertrain import *", names)
    assert {"Checkpoint", "RunConfig", "report"} <= names.keys()
    assert not {"torch", "data", "trace"} & names.keys()


@pytest.fixture(scope="module")
def rays_methods() -> dict[str, ast.arguments]:
    """The arguments of ray.data.Dataset's methods, read and not imported: Ray changes the environment."""
    ray = importlib.util.find_spec("ray")
    if ray is None or ray.origin is None:
        pytest.skip("Ray is not installed")
    module = ast.parse(Path(ray.origin).with_name("data").joinpath("dataset.py").read_text("utf-8"))
    dataset = next(node for node in module.body if isinstance(node, ast.ClassDef) and node.name == "Dataset")
    return {node.name: node.args for node in dataset.body if isinstance(node, ast.FunctionDef)}


@pytest.mark.parametrize("method", METHODS)
def test_methods_have_the_arguments_of_ray_data_in_their_order(
    method: str, rays_methods: dict[str, ast.arguments]
) -> None:
    theirs = rays_methods[method]
    left_out = PLACEMENT | LEFT_OUT.get(method, set())
    ours = inspect.signature(getattr(data.Dataset, method)).parameters
    by_position = [name for name, found in ours.items() if found.kind is found.POSITIONAL_OR_KEYWORD]
    assert by_position == [argument.arg for argument in theirs.args if argument.arg not in left_out]
    by_name = [argument.arg for argument in theirs.kwonlyargs if argument.arg not in left_out]
    assert [name for name in ours if name in by_name] == by_name
