"""An engine of another package: found by its entry point, keeps the contract, and runs ``fit()``."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

if sys.version_info >= (3, 11):
    import tomllib

from tests.support.installed import install

import powertrain
from powertrain import DataParallelTrainer, RunConfig, ScalingConfig
from powertrain.engine import registry
from powertrain.engine.base import Engine
from powertrain.errors import ConfigError
from powertrain.testing.engine_contract import ProcessContract

EXAMPLE = Path(__file__).parents[2] / "examples" / "engines" / "subprocess_engine"
ENTRY_POINTS = {"powertrain.engines": {"subprocess": "powertrain_subprocess:PROVIDER"}}


@pytest.fixture
def _installed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(registry, "_loaded", {})
    install(monkeypatch, tmp_path / "site", "powertrain_subprocess", ENTRY_POINTS, EXAMPLE)


@pytest.mark.usefixtures("_installed")
class TestSubprocessEngine(ProcessContract):
    @pytest.fixture
    def engine(self, tmp_path: Path) -> Iterator[Engine]:
        runtime = tmp_path / "runtime"
        runtime.mkdir()
        engine = registry.provider_of("subprocess").make(registry.EngineRun("contract", str(runtime)))
        yield engine
        engine.close()


def train(config: dict[str, Any]) -> str:
    context = powertrain.get_context()
    for step in range(3):
        powertrain.report({"step": step, "size": context.get_world_size()})
    return "done"


@pytest.mark.usefixtures("_installed")
def test_fit_runs_on_an_engine_of_another_package(tmp_path: Path) -> None:
    trainer = DataParallelTrainer(
        train,
        train_loop_config={},
        scaling_config=ScalingConfig(num_workers=2, engine="subprocess"),
        run_config=RunConfig(name="third", storage_path=str(tmp_path / "runs")),
    )
    result = trainer.fit()
    assert result.metrics is not None
    assert (result.metrics["step"], result.metrics["size"]) == (2, 2)
    assert sorted(path.name for path in (tmp_path / "runs" / "third" / "logs").rglob("*.log"))


@pytest.mark.usefixtures("_installed")
def test_an_option_that_the_engine_does_not_know_is_refused() -> None:
    scaling = ScalingConfig(engine="subprocess", engine_options={"color": "red"})
    with pytest.raises(ConfigError, match=r"'subprocess' has no option 'color'.*options are: none"):
        DataParallelTrainer(train, train_loop_config={}, scaling_config=scaling)


@pytest.mark.usefixtures("_installed")
def test_the_error_for_an_unknown_engine_names_the_known_ones_and_the_group() -> None:
    with pytest.raises(ConfigError) as raised:
        ScalingConfig(engine="subproces")
    for part in ("engine='subproces'", "mean 'subprocess'", "'local'", "'torchrun'", "powertrain.engines"):
        assert part in str(raised.value)


def test_an_engine_that_cannot_be_imported_is_named_with_the_cause(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    install(monkeypatch, tmp_path, "broken", {"powertrain.engines": {"broken": "no_such_module_here:ENGINE"}})
    with pytest.raises(ConfigError, match=r"'broken'.*cannot be imported.*no_such_module_here"):
        DataParallelTrainer(train, train_loop_config={}, scaling_config=ScalingConfig(engine="broken"))


def test_an_entry_point_that_is_not_a_provider_is_refused(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    install(monkeypatch, tmp_path, "odd", {"powertrain.engines": {"odd": "math:pi"}})
    with pytest.raises(ConfigError, match=r"must name an EngineProvider.*docs/engines\.md"):
        DataParallelTrainer(train, train_loop_config={}, scaling_config=ScalingConfig(engine="odd"))


def test_entry_points_are_not_read_for_the_engines_of_this_package(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(**_: Any) -> None:
        raise AssertionError("entry points were read")

    monkeypatch.setattr("importlib.metadata.entry_points", refuse)
    for name, workers in (("local", 1), ("ray", 1), ("torchrun", 1), ("inline", 0), ("auto", 1)):
        assert ScalingConfig(engine=name, num_workers=workers).engine == name
    assert registry.traits_of("local").owns_processes


@pytest.mark.skipif(sys.version_info < (3, 11), reason="tomllib")
def test_the_example_registers_what_this_test_installs() -> None:
    project = tomllib.loads((EXAMPLE / "pyproject.toml").read_text("utf-8"))["project"]
    assert project["entry-points"] == ENTRY_POINTS
