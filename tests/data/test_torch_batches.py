"""What iter_torch_batches cannot do is said when it is asked for, before a row is read."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from powertrain.data.rows.torch_batches import TorchConversion
from powertrain.errors import DataError


def conversion(**asked: Any) -> TorchConversion:
    given: dict[str, Any] = {
        "dtypes": None,
        "device": "cpu",
        "collate_fn": None,
        "pin_memory": False,
        "prefetch": 1,
    }
    return TorchConversion(**{**given, **asked})


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        ({"device": "cuda:99"}, "device='cuda:99' cannot be used in this process: "),
        ({"device": "nowhere"}, "device='nowhere' is not a device of torch"),
        ({"dtypes": "flot32"}, "dtypes='flot32' is not a tensor dtype"),
        ({"dtypes": {"x": int}}, r"dtypes\['x'\]=<class 'int'> is not a tensor dtype"),
        ({"collate_fn": 3}, "collate_fn=3 cannot be called"),
        ({"collate_fn": list, "dtypes": torch.int8}, "so dtypes would do nothing"),
    ],
)
def test_an_impossible_conversion_is_refused(asked: dict[str, Any], words: str) -> None:
    with pytest.raises(DataError, match=words):
        conversion(**asked)


def test_memory_is_pinned_only_where_a_cuda_device_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(DataError, match="pin_memory=True needs a CUDA device"):
        conversion(pin_memory=True)
