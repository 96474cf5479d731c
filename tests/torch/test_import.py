"""The package and the driver's side of the backend cost no torch; every public name is there."""

from __future__ import annotations

import subprocess
import sys

import pytest

import powertrain.torch


@pytest.mark.parametrize("module", ["powertrain.torch", "powertrain.torch.backend"])
def test_importing_does_not_import_torch(module: str) -> None:
    code = f"import sys, {module}; print('torch' in sys.modules)"
    answer = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert answer.stdout == "False\n"


@pytest.mark.parametrize("name", powertrain.torch.__all__)
def test_every_public_name_can_be_had(name: str) -> None:
    assert callable(getattr(powertrain.torch, name))
    assert name in dir(powertrain.torch)


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="prepare_nothing"):
        powertrain.torch.prepare_nothing  # noqa: B018
