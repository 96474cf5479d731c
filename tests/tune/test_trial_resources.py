"""What a trial needs: every form of a request becomes the same sums."""

from __future__ import annotations

import logging
import pickle
from types import SimpleNamespace
from typing import Any

import cloudpickle
import pytest
from hypothesis import given
from hypothesis import strategies as st

from powertrain import DataParallelTrainer, ScalingConfig
from powertrain.config.checks import replace
from powertrain.driver.engines import shape
from powertrain.engine import resources
from powertrain.errors import ConfigError
from powertrain.run import events as ev
from powertrain.tune import trainable as t
from powertrain.tune.sweep import capacity, screen
from powertrain.tune.sweep.trial_run import TrialRun
from powertrain.tune.trainable.kept import scaling_of


def train_with(config: dict[str, Any]) -> None:
    """Do nothing."""


class Steps(t.Trainable):
    def step(self) -> dict[str, Any]:
        return {"done": True}


PACKED = t.PlacementGroupFactory([{"CPU": 1, "GPU": 0.5}, {"CPU": 2}, {"CPU": 2, "a": 1}])


@pytest.mark.parametrize("trainable", [train_with, Steps, Steps().step])
@pytest.mark.parametrize(
    ("resources", "expected"),
    [
        ({"cpu": 2, "gpu": 0.5, "my_resource": 1}, {"CPU": 2.0, "GPU": 0.5, "my_resource": 1.0}),
        ({"CPU": 2, "GPU": 0}, {"CPU": 2.0}),
        ({"cpu": 1, "custom_resources": {"a": 2}}, {"CPU": 1.0, "a": 2.0}),
        ({}, {"CPU": 1.0}),
        ([{"CPU": 1}, {"GPU": 2}], {"CPU": 1.0, "GPU": 2.0}),
        (PACKED, {"CPU": 5.0, "GPU": 0.5, "a": 1.0}),
        (ScalingConfig(num_workers=3, resources_per_worker={"CPU": 2}), {"CPU": 6}),
    ],
)
def test_resources_are_read_as_sums(trainable: Any, resources: Any, expected: dict[str, float]) -> None:
    bound = t.with_resources(trainable, resources)
    assert t.resources_of(bound) == expected
    assert t.resources_of(trainable) is None, "the one that was given stays as it is"
    assert bound.__name__ == trainable.__name__
    assert t.resources_of(cloudpickle.loads(cloudpickle.dumps(bound))) == expected


@pytest.mark.parametrize("trainable", [train_with, Steps])
def test_resources_may_depend_on_the_configuration(trainable: Any) -> None:
    def choose(config: dict[str, Any]) -> Any:
        return {1: {"gpu": 1}, 2: PACKED, 3: None, 4: choose}[config["size"]]

    amounts = t.resources_of(t.with_resources(trainable, choose))
    assert callable(amounts)
    assert amounts({"size": 1}) == {"GPU": 1.0}
    assert amounts({"size": 2}) == PACKED.required_resources
    assert amounts({"size": 3}) == {"CPU": 1.0}
    with pytest.raises(ConfigError, match="returned another function"):
        amounts({"size": 4})


def test_requests_are_kept_as_they_were_made() -> None:
    scaling = ScalingConfig(num_workers=2)
    assert t.request_of(t.with_resources(train_with, scaling)) == scaling
    assert t.request_of(t.with_resources(Steps, PACKED)) is PACKED
    assert t.request_of(train_with) is None


def test_a_class_can_say_itself_what_it_needs() -> None:
    class Hungry(Steps):
        @classmethod
        def default_resource_request(cls, config: dict[str, Any]) -> t.PlacementGroupFactory | None:
            return t.PlacementGroupFactory([{"CPU": config["cpus"]}])

    amounts = t.resources_of(Hungry)
    assert callable(amounts)
    assert amounts({"cpus": 4}) == {"CPU": 4.0}
    assert t.resources_of(t.with_resources(Hungry, {"cpu": 1})) == {"CPU": 1.0}
    assert t.resources_of(Steps) is None


@pytest.mark.parametrize(
    ("resources", "message"),
    [
        ("one", "takes a dict"),
        ({"cpu": -1}, "-1 is no amount"),
        ({"cpu": "2"}, "'2' is no amount"),
        ({"cpu": float("inf")}, "is no amount"),
        ({1: 2}, "is no amount"),
        ({"cpu": 1, "CPU": 2}, "names CPU twice"),
        ({"cpu": 0}, "asks for nothing"),
        ({"custom_resources": 3}, "takes a dict"),
        ([], "at least one dict"),
        ([3], "is no dict"),
        (ScalingConfig, "takes a dict"),
    ],
)
def test_resources_that_make_no_sense_are_refused(resources: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        t.with_resources(train_with, resources)


def test_resources_are_for_trainables() -> None:
    with pytest.raises(ConfigError, match="takes a function of the configuration"):
        t.with_resources(DataParallelTrainer(train_with), {"cpu": 1})  # type: ignore[type-var]


AMOUNTS = st.dictionaries(st.sampled_from(["CPU", "GPU", "a"]), st.integers(0, 8))


@given(bundles=st.lists(AMOUNTS, min_size=1, max_size=5))
def test_bundles_are_summed(bundles: list[dict[str, float]]) -> None:
    total = {name: sum(bundle.get(name, 0) for bundle in bundles) for name in ("CPU", "GPU", "a")}
    if not any(total.values()):
        with pytest.raises(ConfigError, match="asks for nothing"):
            t.PlacementGroupFactory(bundles)
        return
    factory = t.PlacementGroupFactory(bundles)
    assert factory.required_resources == {name: amount for name, amount in total.items() if amount}
    assert factory.head_bundle_is_empty == (not any(bundles[0].values()))
    assert factory.head_cpus == bundles[0].get("CPU", 0)
    assert factory == t.PlacementGroupFactory(bundles)
    assert hash(factory) == hash(pickle.loads(pickle.dumps(factory)))
    assert repr(factory).startswith("PlacementGroupFactory([{")


def test_factories_are_values() -> None:
    assert t.PlacementGroupFactory(PACKED.bundles, strategy="SPREAD") != PACKED
    assert PACKED.strategy == "PACK"
    PACKED.bundles[0]["CPU"] = 100
    assert PACKED.required_resources["CPU"] == 5.0
    assert PACKED != 3
    with pytest.raises(ConfigError, match="none of PACK, SPREAD"):
        t.PlacementGroupFactory([{"CPU": 1}], strategy="HEAP")


def test_arguments_of_ray_are_accepted_without_effect(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "powertrain"):
        t.PlacementGroupFactory([{"CPU": 1}], "PACK", "name", lifetime="detached")
    assert "without effect here" in caplog.text
    assert "lifetime='detached'" in caplog.text


def test_a_function_without_a_request_holds_nothing_that_another_sweep_waits_for() -> None:
    plain, asked = scaling_of(train_with, {}), scaling_of(t.with_resources(train_with, {"cpu": 1}), {})
    assert resources.counted(shape(plain), 1) == {}
    assert resources.counted(shape(asked), 1) == {"CPU": 1}
    assert plain.resources["CPU"] == 1, "on a cluster it has one CPU"


@pytest.mark.parametrize(
    ("request_", "count"),
    [(None, 2), ({"cpu": 0.25}, 8), ({"cpu": 2}, 1), ({"custom": 0.1}, 2)],
    ids=["none", "quarters", "all", "other"],
)
def test_as_many_trials_run_as_their_cpus_allow(
    request_: Any, count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine = resources.Machine(cpus=2, gpus=(), visible=(), custom={"custom": 9.0})
    monkeypatch.setattr(resources, "detect", lambda custom: machine)
    function = train_with if request_ is None else t.with_resources(train_with, request_)
    scaling = replace(scaling_of(function), engine="local")
    assert (
        capacity.count_concurrent_trials(DataParallelTrainer(train_with, scaling_config=scaling), None)
        == count
    )


def test_a_trial_that_waits_for_slots_says_so_once(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [100.0]
    monkeypatch.setattr(screen, "time", SimpleNamespace(monotonic=lambda: now[0]))
    shown = screen.SweepScreen("sweep", "/runs", metric=None, mode=None, total=1, verbose=1)
    observer = screen.TrialObserver(shown, "train_1", lambda _: None)
    observer.event(ev.SlotsRequested(time=1.0, attempt=1, count=1))
    for missing in ("2 CPUs", "1 CPU"):
        observer.event(ev.SlotsWaited(time=1.0, attempt=1, granted=0, count=1, reason=f"{missing} held by r"))
    now[0] += 7
    observer.event(ev.AttemptStarted(time=1.0, attempt=1, world_size=1, first_row=1, checkpoint="", hosts=()))
    lines = [line for line in capsys.readouterr().out.splitlines() if "waits" in line]
    assert lines == ["[sweep] train_1 waits to start: 2 CPUs held by r"]
    reported: list[float] = []
    trainer = DataParallelTrainer(train_with, scaling_config=ScalingConfig(num_workers=0))

    def note(row: int, metrics: Any, seconds: float, is_saved: bool) -> str:
        reported.append(seconds)
        return ""

    run = TrialRun(trainer, observer, note, None)
    run._stop("train_1", {"training_iteration": 1, "time_total_s": 10.0}, False)
    assert reported == [3.0], "the wait is not part of time_total_s"
