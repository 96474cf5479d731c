"""Whole runs that report more than numbers: objects come back, storage has plain forms, no value ends the training."""

from __future__ import annotations

import dataclasses
import datetime
import decimal
import enum
from pathlib import Path
from typing import Any

from tests.stories.engines import on

import powertrain
from powertrain import Result


class Phase(enum.Enum):
    WARM_UP = "warm-up"


@dataclasses.dataclass(frozen=True)
class Scores:
    precision: float
    seen: frozenset[str]


REPORTED: dict[str, Any] = {
    "loss": 0.5,
    "at": datetime.datetime(2026, 11, 17, 12, 30),
    "took": datetime.timedelta(seconds=90),
    "phase": Phase.WARM_UP,
    "file": Path("weights/best.pt"),
    "price": decimal.Decimal("12.50"),
    "digest": b"\x00\x01",
    "labels": {"cat", "dog"},
    "scores": Scores(0.25, frozenset({"a"})),
    "tokens": 2**80,
}
PLAIN: dict[str, Any] = {
    "loss": 0.5,
    "at": "2026-11-17T12:30:00",
    "took": 90.0,
    "phase": "warm-up",
    "file": "weights/best.pt",
    "price": 12.5,
    "digest": "AAE=",
    "labels": ["cat", "dog"],
    "scores": {"precision": 0.25, "seen": ["a"]},
    "tokens": str(2**80),
}


def report_objects() -> None:
    for _ in range(2):
        powertrain.report({**REPORTED, "model": object()})


def report_a_tensor() -> None:
    import torch

    powertrain.report({"per_class": torch.tensor([0.5, 0.25]), "logits": torch.zeros(200, 200)})


@on("local", "inline", "ray", smoke=["local"])
def test_reported_objects_come_back_and_storage_keeps_plain_forms(fits: Any, engine: str, capfd: Any) -> None:
    result = fits.trainer(report_objects).fit()

    assert result.state == "finished"
    assert result.metrics == REPORTED
    later = Result.from_path(result.path)
    assert later.metrics == PLAIN
    frame = later.metrics_dataframe
    assert list(frame["took"]) == [90.0] * len(frame)
    shown = " ".join(capfd.readouterr().out.split())
    assert shown.count("The metric 'model' is a builtins.object, so it was left out") == 1


def test_small_tensors_are_kept_as_lists_and_large_ones_are_left_out(fits: Any) -> None:
    result = fits.trainer(report_a_tensor, workers=1).fit()

    assert result.metrics == {"per_class": [0.5, 0.25]}
