"""All public names and arguments of ray.data 2.60: each works, is accepted, or is refused with a sentence."""

from __future__ import annotations

import ast
import functools
import importlib.util
import inspect
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from powertrain import data
from powertrain.data.dataset import Dataset
from powertrain.data.options import noting
from powertrain.data.options.files import FILE_ARGUMENTS
from powertrain.data.options.refused import (
    CLASSES,
    DATASOURCE_CLASSES,
    EXPRESSION_CLASSES,
    EXPRESSION_FUNCTIONS,
    EXPRESSION_METHODS,
    FUNCTIONS,
    ITERATOR_METHODS,
    METHODS,
)
from powertrain.data.options.scheduling import REFUSED, SCHEDULING, WRITER_ARGUMENTS
from powertrain.data.options.strategies import processes_of
from powertrain.data.shard import DataShard
from powertrain.errors import ArgumentError, DataError, MissingMemberError, NotSupportedError, PowertrainError

#: Methods of the TensorFlow and torch datasets, which hand their arguments on to those of an iterator.
HANDED_ON = {"to_tf", "iter_tf_batches"}

#: Arguments of methods that run functions, which are numbers of processes here.
IN_PROCESSES = {"concurrency", "compute", "name"}


@functools.cache
def source(module: str) -> ast.Module:
    """A module of Ray Data, read and not imported: Ray changes the environment."""
    found = importlib.util.find_spec("ray")
    if found is None or found.origin is None:
        pytest.skip("Ray is not installed")
    return ast.parse(Path(found.origin).with_name("data").joinpath(module).read_text("utf-8"))


def public_names(module: str = "__init__.py") -> list[str]:
    (exported,) = (
        node.value
        for node in source(module).body
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__"
    )
    return list(ast.literal_eval(exported))


def functions(module: str, owner: str | None = None) -> dict[str, ast.arguments]:
    body: list[ast.stmt] = source(module).body
    if owner is not None:
        body = next(node.body for node in body if isinstance(node, ast.ClassDef) and node.name == owner)
    return {
        node.name: node.args for node in body if isinstance(node, ast.FunctionDef) and node.name[0] != "_"
    }


def arguments_of(theirs: ast.arguments) -> list[str]:
    names = [each.arg for each in (*theirs.args, *theirs.kwonlyargs)]
    return [name for name in names if name not in ("self", "ds") and name[0] != "_"]


def state_of(owner: Any, name: str, argument: str) -> str:
    """ "works", "accepted" or "refused" for an argument; "" where nothing is known of it."""
    ours = inspect.signature(getattr(owner, name)).parameters
    if argument in ours:
        is_io = name.startswith(("read_", "from_", "range", "write_"))
        return "accepted" if argument in SCHEDULING and (is_io or argument not in IN_PROCESSES) else "works"
    if not any(found.kind is found.VAR_KEYWORD for found in ours.values()):
        return ""
    if argument in FILE_ARGUMENTS or argument in WRITER_ARGUMENTS or name in HANDED_ON:
        return "works"
    return "accepted" if argument in SCHEDULING else "refused" if argument in REFUSED else ""


def table() -> Iterator[tuple[str, str]]:
    """(name or argument, its state) of everything."""
    readers = functions("read_api.py")
    for name in public_names():
        state = "refused" if name in FUNCTIONS or name in CLASSES else "works"
        yield name, state
        if state == "works" and name in readers:
            for argument in arguments_of(readers[name]):
                yield f"{name}({argument})", state_of(data, name, argument)
    for owner, module, theirs, refused in (
        (Dataset, "dataset.py", "Dataset", METHODS),
        (DataShard, "iterator.py", "DataIterator", ITERATOR_METHODS),
    ):
        for name, given in functions(module, theirs).items():
            state = "refused" if name in refused else "works"
            yield f"{theirs}.{name}", state
            if state == "works" and callable(inspect.getattr_static(owner, name, None)):
                for argument in arguments_of(given):
                    yield f"{theirs}.{name}({argument})", state_of(owner, name, argument)


def test_every_name_and_argument_works_is_accepted_or_is_refused() -> None:
    found = dict(table())
    assert len(found) > 650
    assert [name for name, state in found.items() if not state] == []
    assert {"works", "accepted", "refused"} == set(found.values())


def test_every_public_name_can_be_imported_and_refused_ones_explain_themselves() -> None:
    for name in public_names():
        value = getattr(data, name)
        if name in FUNCTIONS or name in CLASSES:
            with pytest.raises(
                NotSupportedError, match=rf"{name}.*of Ray Data has no counterpart here: .{{10,}}\.$"
            ):
                value()
            with pytest.raises(NotImplementedError):
                value("anything", more=1)
    with pytest.raises(NotSupportedError, match="register it for read_source"):
        type("Own", (data.Datasource,), {})


def test_every_method_exists_or_explains_itself() -> None:
    shard = data.range(3).iterator()
    for thing, module, owner, refused in (
        (data.range(3), "dataset.py", "Dataset", METHODS),
        (shard, "iterator.py", "DataIterator", ITERATOR_METHODS),
    ):
        for name in functions(module, owner):
            if name in refused:
                assert not hasattr(thing, name)
                with pytest.raises(MissingMemberError, match=r"no counterpart here: .{5,}\.$"):
                    getattr(thing, name)
                with pytest.raises(NotImplementedError):
                    getattr(type(thing), name)
            else:
                assert hasattr(thing, name), name
    shard.close()


def test_every_name_of_datasources_exists_or_explains_itself() -> None:
    names = [name for name in public_names("datasource/__init__.py") if not name.startswith("_")]
    assert len(names) > 20
    for name in names:
        value = getattr(data.datasource, name)
        if name in DATASOURCE_CLASSES or name in CLASSES:
            with pytest.raises(NotSupportedError, match=rf"{name}.*no counterpart here: .{{10,}}\.$"):
                value()
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = data.datasource.nothing


def test_names_are_where_programs_import_them_from() -> None:
    from powertrain.data.context import DataContext, DatasetContext
    from powertrain.data.iterator import DataIterator

    assert DataContext is DatasetContext is data.DataContext
    assert DataIterator is data.DataIterator


def test_every_name_of_expressions_exists_or_explains_itself() -> None:
    for name in public_names("expressions.py"):
        if name.startswith("_"):
            continue
        value = getattr(data.expressions, name)
        if name in EXPRESSION_FUNCTIONS or name in EXPRESSION_CLASSES:
            with pytest.raises(NotSupportedError, match=rf"{name}.*no counterpart here: .{{10,}}\.$"):
                value("anything")
    assert isinstance(data.expressions.col("x"), data.expressions.ColumnExpr)
    assert isinstance(data.expressions.lit(1), data.expressions.LiteralExpr)
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = data.expressions.nothing


def test_every_method_of_an_expression_exists_or_explains_itself() -> None:
    column = data.expressions.col("x")
    for name, theirs in functions("expressions.py", "Expr").items():
        if name in EXPRESSION_METHODS:
            assert not hasattr(column, name)
            with pytest.raises(
                MissingMemberError, match=rf"{name} of Ray Data has no counterpart here: .{{10,}}\.$"
            ):
                getattr(column, name)
            continue
        ours = getattr(type(column), name)
        if not isinstance(ours, property):
            assert set(arguments_of(theirs)) <= set(inspect.signature(ours).parameters), name
    with pytest.raises(AttributeError, match="Did you mean 'is_null'"):
        _ = column.is_nul


def test_functions_of_expressions_take_their_arguments() -> None:
    for name, theirs in functions("expressions.py").items():
        if name in public_names("expressions.py") and name not in EXPRESSION_FUNCTIONS:
            ours = inspect.signature(getattr(data.expressions, name)).parameters
            assert set(arguments_of(theirs)) <= set(ours), name


def test_groups_of_settings_keep_what_is_set(notes: pytest.LogCaptureFixture) -> None:
    context = data.DataContext()
    context.autoscaling_config.actor_pool_util_upscaling_threshold = 2.0
    assert context.autoscaling_config.actor_pool_util_upscaling_threshold == 2.0
    assert context.copy().autoscaling_config.actor_pool_util_upscaling_threshold == 2.0
    assert context.lance_config.nothing is None
    assert "DataContext.autoscaling_config(actor_pool_util_upscaling_threshold=2.0)" in notes.text


def test_an_unknown_attribute_is_an_attribute_error_with_a_similar_name() -> None:
    with pytest.raises(AttributeError, match="Did you mean 'map_batches'"):
        _ = data.range(3).map_batch
    assert getattr(data.range(3), "nothing", None) is None


@pytest.fixture
def notes(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> pytest.LogCaptureFixture:
    monkeypatch.setattr(noting, "_noted", set())
    caplog.set_level(logging.WARNING)
    return caplog


def test_arguments_about_scheduling_are_accepted_and_mentioned_once(notes: pytest.LogCaptureFixture) -> None:
    for _ in range(2):
        rows = data.range(3, override_num_blocks=2).map(lambda row: row, num_cpus=2, memory=2**30)
        assert rows.count() == 3
    data.range(3).map_batches(lambda batch: batch, batch_size="auto", zero_copy_batch=True, num_gpus=None)
    said = [record.getMessage() for record in notes.records]
    assert said == [
        "Accepted as in Ray Data, but without effect here: range(override_num_blocks=2).",
        "Accepted as in Ray Data, but without effect here: map(num_cpus=2, memory=1073741824).",
    ]


@pytest.mark.parametrize(
    ("concurrency", "compute", "processes"),
    [
        (None, None, 0),
        (4, None, 4),
        ((2, 8), None, 8),
        ((2, 8, 3), None, 8),
        (None, data.ActorPoolStrategy(size=3), 3),
        (None, data.ActorPoolStrategy(min_size=2, max_size=5), 5),
        (None, data.ActorPoolStrategy(min_size=2, max_size=float("inf")), 2),  # type: ignore[arg-type]
        (None, data.TaskPoolStrategy(), 0),
        (None, data.TaskPoolStrategy(2), 2),
        (None, "actors", 1),
    ],
)
def test_strategies_are_numbers_of_processes(concurrency: Any, compute: Any, processes: int) -> None:
    assert processes_of("map", concurrency, compute) == processes


@pytest.mark.parametrize(
    ("call", "kind", "words"),
    [
        (lambda: data.range(3).map(str, compute=3), DataError, "compute=3 is not a strategy"),
        (
            lambda: data.range(3).map(str, compute=data.ActorPoolStrategy(size=1), concurrency=2),
            DataError,
            "Leave one",
        ),
        (lambda: data.range(3).map(str, concurrency=(1, 2, 3, 4)), DataError, "not a range"),
        (lambda: data.ActorPoolStrategy(size=2, min_size=1), DataError, "Give size, or the others"),
        (lambda: data.ActorPoolStrategy(min_size=3, max_size=2), DataError, "cannot be"),
        (lambda: data.range(3).map(str, num_cpu=1), ArgumentError, "Did you mean 'num_cpus'"),
        (
            lambda: data.range(3).map(str, runtime_env={"pip": ["x"]}),
            NotSupportedError,
            "only Ray can install packages",
        ),
        (
            lambda: data.read_csv("x", arrow_open_stream_args={}),
            NotSupportedError,
            "detected by their ending",
        ),
        (lambda: data.range(3).write_parquet("x", filename_provider=3), NotSupportedError, "rename them"),
        (lambda: data.range(3).write_parquet("x", arrow_parquet_args_fn=3), DataError, "cannot be called"),
        (lambda: data.range(3).write_json("x", orient="records"), ArgumentError, "unexpected keyword"),
        (lambda: data.range(3).train_test_split(0.5, stratify="id"), NotSupportedError, "union"),
        (lambda: data.read_csv("x", shuffle="rows"), DataError, "shuffle='rows' is unknown|is unknown"),
        (lambda: data.read_csv("x", partitioning="hive"), DataError, "Partitioning"),
        (lambda: data.read_csv("x", partition_filter=3), DataError, "cannot be called"),
        (lambda: data.RandomSeedConfig("x"), DataError, "seed"),  # type: ignore[arg-type]
        (lambda: data.range(3).set_name(3), DataError, "takes text"),  # type: ignore[arg-type]
    ],
)
def test_what_cannot_be_accepted_is_said(call: Any, kind: type[PowertrainError], words: str) -> None:
    with pytest.raises(kind, match=words):
        call()


def test_the_memory_limit_of_the_context_holds_for_reading(monkeypatch: pytest.MonkeyPatch) -> None:
    from powertrain.data.options.context import DataContext, memory_limit

    monkeypatch.setattr(DataContext, "_current", None)
    assert memory_limit(2**28) == 2**28
    context = data.DataContext.get_current()
    assert context is data.DatasetContext.get_current() is data.range(3).context
    context.execution_options.resource_limits.object_store_memory = 2**22
    assert memory_limit(2**28) == 2**22
    context.execution_options.resource_limits.object_store_memory = 2**30
    assert memory_limit(2**28) == 2**30  # a higher one holds as well
    context.execution_options = data.ExecutionOptions(
        resource_limits=data.ExecutionResources.for_limits(object_store_memory=1)
    )
    assert memory_limit(2**28) == 2**20  # a little is always needed
    assert data.range(1000).count() == len(data.range(1000).take_all())
    context.target_max_block_size = 5
    assert (context.target_max_block_size, context.copy().target_max_block_size) == (5, 5)
    assert context.eager_free is None
    with pytest.raises(DataError, match="ExecutionOptions"):
        context.execution_options = 3
    context.set_config("key", 1)
    assert context.get_config("key") == 1
    context.remove_config("key")
    assert context.get_config("key", 7) == 7
