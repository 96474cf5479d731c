"""A DataConfig of the user's own: which rows its iterators divide, and divisions that no run can resume in."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pytest

from powertrain import data
from powertrain.config.data import DataConfig
from powertrain.data.iterators.configured import configured
from powertrain.errors import ConfigError

Divide = Callable[[Mapping[str, Any], int, Any], Any]


def config_of(divide: Divide) -> DataConfig:
    class Own(DataConfig):
        def configure(
            self,
            datasets: Any,
            world_size: int,
            worker_handles: Any = None,
            worker_node_ids: Any = None,
            **more: Any,
        ) -> Any:
            assert worker_handles is None
            return divide(datasets, world_size, worker_node_ids)

    return Own(memory_bytes=2**21)


def test_only_a_method_of_a_subclass_is_called() -> None:
    class Plain(DataConfig):
        pass

    assert not DataConfig().has_own_configure
    assert not Plain().has_own_configure
    assert config_of(lambda *_: []).has_own_configure


def test_the_rows_of_the_iterators_are_those_of_the_run_and_none_is_left_out() -> None:
    def divide(datasets: Any, world_size: int, nodes: Any) -> Any:
        ((name, dataset),) = datasets.items()  # one at a time, as in Ray Train
        if name == "val":
            return [{"val": dataset.iterator()} for _ in range(world_size)]
        changed = dataset.map(lambda row: {"id": row["id"] * 10})
        shards = changed.streaming_split(world_size, equal=True, locality_hints=nodes)
        return [{name: shard} for shard in shards]

    given = {"train": data.range(11), "val": lambda: data.range(3)}
    found, config = configured(config_of(divide), given, 4)
    assert [row["id"] for row in found["train"].take_all()] == [10 * number for number in range(11)]
    assert found["val"].count() == 3
    assert (config.is_split("train"), config.is_split("val"), config.memory_bytes) == (True, False, 2**21)
    assert type(config) is DataConfig


def test_the_method_of_the_base_can_be_called() -> None:
    class Own(DataConfig):
        def configure(self, datasets: Any, *args: Any, **more: Any) -> Any:
            (name,) = datasets
            return super().configure({name: datasets[name].limit(6)}, *args, **more)

    found, config = configured(Own(["train"]), {"train": data.range(9), "val": data.range(9)}, 2)
    assert (found["train"].count(), found["val"].count()) == (6, 6)
    assert (config.is_split("train"), config.is_split("val")) == (True, False)


def swapped(datasets: Any, world_size: int, nodes: Any) -> Any:
    return [{"train": shard} for shard in reversed(datasets["train"].streaming_split(world_size))]


def parts_of_their_own(datasets: Any, world_size: int, nodes: Any) -> Any:
    return [{"train": part.iterator()} for part in datasets["train"].split(world_size)]


def too_many(datasets: Any, world_size: int, nodes: Any) -> Any:
    return [{"train": shard} for shard in datasets["train"].streaming_split(world_size + 1)][:world_size]


@pytest.mark.parametrize(
    ("divide", "words"),
    [
        (swapped, "not one division of one dataset"),
        (parts_of_their_own, "of 2 datasets"),
        (too_many, r"\(0, 3\), \(1, 3\)"),
        (lambda datasets, *_: [datasets, datasets], "for the dataset 'train', returned a Dataset"),
        (lambda *_: None, "returned None for 2 ranks"),
        (lambda datasets, *_: [{}], "for 2 ranks"),
        (lambda datasets, *_: [{"train": datasets["train"].iterator()}, {}], "for 2 ranks"),
    ],
)
def test_divisions_that_no_run_can_resume_in_are_refused(divide: Divide, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        configured(config_of(divide), {"train": data.range(10)}, 2)


def test_datasets_of_others_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"Own\.configure\(\) cannot divide datasets\['train'\], a list"):
        configured(config_of(lambda *_: []), {"train": [1]}, 2)
