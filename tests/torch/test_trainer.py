"""TorchTrainer is the data-parallel trainer with torch's backend."""

from __future__ import annotations

from typing import Any

import pytest

from powertrain.errors import ConfigError
from powertrain.torch import TorchTrainer
from powertrain.torch.backend import TorchBackend
from powertrain.torch.config import TorchConfig
from powertrain.trainer import DataParallelTrainer


def loop() -> None:
    """A training function."""


@pytest.fixture
def given(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What the data-parallel trainer was given."""
    seen: dict[str, Any] = {}

    def note(self: Any, function: Any, **arguments: Any) -> None:
        seen.update(arguments, function=function)

    monkeypatch.setattr(DataParallelTrainer, "__init__", note)
    return seen


def test_arguments_are_handed_on_and_the_default_backend_is_torchs(given: dict[str, Any]) -> None:
    TorchTrainer(loop, train_loop_config={"lr": 1}, metadata={"a": 1})
    assert (given["function"], given["train_loop_config"], given["metadata"]) == (loop, {"lr": 1}, {"a": 1})
    assert given["backend_config"] == TorchConfig()
    assert given["backend_config"].backend_cls is TorchBackend


def test_the_users_torch_config_is_used(given: dict[str, Any]) -> None:
    config = TorchConfig(backend="gloo", timeout_s=5)
    TorchTrainer(loop, torch_config=config)
    assert given["backend_config"] is config


def test_a_torch_config_of_another_kind_is_refused() -> None:
    with pytest.raises(ConfigError, match="torch_config is 'gloo'"):
        TorchTrainer(loop, torch_config="gloo")  # type: ignore[arg-type]
