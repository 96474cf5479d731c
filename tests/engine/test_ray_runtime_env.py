"""``engine_options={"runtime_env": ...}``: what Ray sets up on a node is there for the workers, or refused at once."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
from tests.ray_nodes import RayNodes

import powertrain
from powertrain import DataParallelTrainer, ScalingConfig
from powertrain.errors import ConfigError

pytest.importorskip("ray")
pytestmark = pytest.mark.usefixtures("ray_cluster")


def test_workers_have_its_modules_and_variables(ray_cluster: RayNodes, tmp_path: Path) -> None:
    (tmp_path / "only_there.py").write_text("ANSWER = 42\n")

    def loop() -> None:
        import only_there  # type: ignore[import-not-found]

        powertrain.report({"answer": only_there.ANSWER, "variable": os.environ["ONLY_THERE"]})

    environment = {"working_dir": str(tmp_path), "env_vars": {"ONLY_THERE": "set"}}
    scaling_config = ScalingConfig(engine="ray", engine_options={"runtime_env": environment})
    result = DataParallelTrainer(loop, scaling_config=scaling_config).fit()
    assert result.metrics == {"answer": 42, "variable": "set"}


def test_ranks_start_in_the_working_dir_of_a_runtime_env(ray_cluster: RayNodes, tmp_path: Path) -> None:
    (tmp_path / "words.txt").write_text("only there")

    def loop() -> None:
        launch = powertrain.get_context().launch_dir
        powertrain.report({"words": Path("words.txt").read_text(), "launch": launch, "cwd": os.getcwd()})

    environment = {"working_dir": str(tmp_path)}
    scaling_config = ScalingConfig(engine="ray", engine_options={"runtime_env": environment})
    result = DataParallelTrainer(loop, scaling_config=scaling_config).fit()
    assert result.metrics is not None
    assert result.metrics["words"] == "only there"
    assert result.metrics["launch"] != str(tmp_path), "it is Ray's copy on the node"
    assert result.metrics["cwd"] == result.metrics["launch"]


def test_directories_of_this_machine_are_uploaded_and_the_rest_stays(tmp_path: Path) -> None:
    from powertrain.engine.ray.client import uploaded

    (tmp_path / "module.py").touch()
    given = {"working_dir": str(tmp_path), "excludes": ["*.bin"], "env_vars": {"A": "b"}}
    env = uploaded(given)
    assert env["working_dir"].startswith("gcs://")
    assert env["env_vars"] == {"A": "b"}
    assert "excludes" not in env, "Ray takes it for uploads only"
    assert given["working_dir"] == str(tmp_path), "what the user gave is as it was"
    assert uploaded(env) == env
    assert uploaded({}) == {}


@pytest.mark.parametrize(
    "environment",
    [{"working_dir": "/no/such/directory"}, {"env_vars": {"A": 1}}, {"py_modules": "m"}],
    ids=str,
)
def test_what_ray_would_not_take_is_one_error(environment: dict[str, Any]) -> None:
    scaling_config = ScalingConfig(engine="ray", engine_options={"runtime_env": environment})
    with pytest.raises(
        ConfigError, match=r"'runtime_env': \.\.\.}\) cannot be used: .+\. See Ray's documentation"
    ):
        DataParallelTrainer(lambda: None, scaling_config=scaling_config).fit()


def test_a_field_that_ray_does_not_have_is_refused_with_what_was_meant() -> None:
    """Ray would take no notice of it, and the workers be without the variables."""
    scaling_config = ScalingConfig(
        engine="ray", engine_options={"runtime_env": {"envvars": {"ONLY_THERE": "set"}}}
    )
    with pytest.raises(
        ConfigError, match=r"'runtime_env': \.\.\.}\) has the field 'envvars'.*Did you mean 'env_vars'\?"
    ):
        DataParallelTrainer(lambda: None, scaling_config=scaling_config).fit()


@pytest.mark.parametrize("field", ["nsight", "_nsight", "config", "image_uri"])
def test_fields_that_ray_has_are_not_refused(field: str) -> None:
    from powertrain.engine.ray.client import _refuse_unknown_fields

    _refuse_unknown_fields({field: "value"}, "here")
