"""The expected size of a rank's state file is at least that of its file, and hardly more."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from powertrain.checkpoint.state import expected_size
from powertrain.checkpoint.state.saver import StateSaver


def trained(
    width: int, optimizer_class: type[torch.optim.Optimizer]
) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = nn.Sequential(nn.Linear(width, width), nn.BatchNorm1d(width), nn.Linear(width, 1))
    optimizer = optimizer_class(model.parameters(), lr=1e-3)  # type: ignore[call-arg]
    model(torch.randn(4, width)).sum().backward()
    optimizer.step()
    return model, optimizer


@pytest.mark.parametrize("optimizer_class", [torch.optim.AdamW, torch.optim.SGD])
def test_the_file_of_a_save_has_about_the_expected_size(
    tmp_path: Path, optimizer_class: type[torch.optim.Optimizer]
) -> None:
    model, optimizer = trained(1500, optimizer_class)
    saver = StateSaver(0, 1)
    saver.save({"model": model, "optimizer": optimizer}, str(tmp_path))
    (file,) = (tmp_path / "state").glob("*.safetensors")
    expected = expected_size.of([model, optimizer], 1)
    assert file.stat().st_size <= expected.bytes <= 1.1 * file.stat().st_size + 2 * 2**20
    assert expected.gpu is None


def test_ranks_share_what_they_have_alike() -> None:
    model, optimizer = trained(1000, torch.optim.AdamW)
    alone, shared = (expected_size.of([model, optimizer], count).bytes for count in (1, 4))
    assert alone / 4 < shared < alone / 3


def test_tensors_count_once_and_those_without_plain_memory_not_at_all() -> None:
    layer = nn.Linear(1000, 1000)
    tied = nn.Sequential(layer, layer)
    assert expected_size.of([tied], 1) == expected_size.of([layer], 1)
    graph = nn.Module()
    graph.register_buffer("edges", torch.eye(1000).to_sparse(), persistent=False)
    assert expected_size.of([graph], 1) == expected_size.of([nn.Module()], 1)
    assert expected_size.of([nn.Linear(10**6, 10**6, device="meta")], 1).bytes < 2 * 2**20
