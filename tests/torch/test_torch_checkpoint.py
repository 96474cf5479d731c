"""TorchCheckpoint: a checkpoint that holds one model."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from powertrain import Checkpoint
from powertrain.errors import CheckpointError
from powertrain.torch import TorchCheckpoint


def test_a_state_dict_is_loaded_into_a_model_without_the_prefix_of_ddp() -> None:
    model = torch.nn.Linear(2, 1)
    wrapped = {f"module.{name}": value for name, value in model.state_dict().items()}
    checkpoint = TorchCheckpoint.from_state_dict(wrapped)

    loaded = checkpoint.get_model(torch.nn.Linear(2, 1))

    assert torch.equal(loaded.weight, model.weight)  # type: ignore[arg-type]
    assert isinstance(checkpoint, Checkpoint)
    with pytest.raises(CheckpointError, match="Pass the model"):
        checkpoint.get_model()


def test_a_whole_model_comes_back_and_elsewhere_only_where_it_is_trusted(tmp_path: Path) -> None:
    model = torch.nn.Linear(2, 1)
    checkpoint = TorchCheckpoint.from_model(model)
    assert torch.equal(checkpoint.get_model().weight, model.weight)  # type: ignore[arg-type]

    elsewhere = TorchCheckpoint(checkpoint.to_directory(tmp_path / "copy"))
    with pytest.raises(CheckpointError, match="trust=True"):
        elsewhere.get_model()
    assert torch.equal(elsewhere.get_model(trust=True).weight, model.weight)  # type: ignore[arg-type]


def test_what_holds_no_model_says_so(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"has no model\.pt"):
        TorchCheckpoint(tmp_path).get_model()


def test_a_preprocessor_is_refused() -> None:
    with pytest.raises(CheckpointError, match="update_metadata"):
        TorchCheckpoint.from_state_dict({}, preprocessor=object())  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["TorchftConfig", "TorchXLAConfig"])
def test_configs_that_are_not_supported_are_refused_by_name(name: str) -> None:
    import powertrain.torch

    with pytest.raises(ImportError, match=f"{name}.*not supported"):
        getattr(powertrain.torch, name)
