"""``run.json``: sealed, and never a raw error or other seeds without a word."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import powertrain
from powertrain.run.record import run_json
from powertrain.storage import Storage, open_storage
from powertrain.storage.sealed import DamagedError

RECORD = {"name": "run", "run_config": {"name": "run"}, "seed": 5, "data_seed": 7, "metadata": {"a": [1, 2]}}


@pytest.fixture
def storage(tmp_path: Path) -> Storage:
    return open_storage(tmp_path / "run")


def test_a_record_comes_back_as_it_was(storage: Storage) -> None:
    storage.put("run.json", run_json.encode(RECORD))
    assert run_json.read(storage) == RECORD
    assert json.loads(storage.get("run.json"))["seed"] == 5


def test_a_record_of_an_earlier_version_is_read(storage: Storage) -> None:
    storage.put("run.json", json.dumps(RECORD, indent=2).encode())
    assert run_json.read(storage) == RECORD


def test_no_flipped_byte_gives_another_record(storage: Storage) -> None:
    data = run_json.encode(RECORD)
    for place in range(len(data)):
        storage.put("run.json", data[:place] + bytes([data[place] ^ 1]) + data[place + 1 :])
        try:
            found = run_json.read(storage)
        except DamagedError:
            continue
        found = {name: value for name, value in found.items() if name in RECORD}
        assert found == RECORD, place


@pytest.mark.parametrize("content", [
    [], "text", 5, None, {"seed": "five"}, {"seed": -1}, {"seed": 1 << 70}, {"data_seed": [1]}, {"run_config": 5},
    {"scaling_config": []}, {"run_config": {"checkpoint_config": 3}},
])  # fmt: skip
def test_a_record_of_another_form_is_damaged(storage: Storage, content: Any) -> None:
    storage.put("run.json", json.dumps(content).encode())
    with pytest.raises(DamagedError, match=r"run\.json of the run at"):
        run_json.read(storage)


@pytest.mark.parametrize("content", [b"[]", b'{"seed": "five"}', b'{"run_config": 5}', b"{", b"\xff"])
def test_a_run_goes_on_with_a_damaged_record_and_says_so(
    tmp_path: Path, content: bytes, capsys: pytest.CaptureFixture[str]
) -> None:
    config = powertrain.RunConfig(name="run", storage_path=str(tmp_path))
    scaling = powertrain.ScalingConfig(num_workers=0)

    def fit() -> None:
        powertrain.DataParallelTrainer(lambda: None, scaling_config=scaling, run_config=config).fit()

    fit()
    (tmp_path / "run" / "run.json").write_bytes(content)
    capsys.readouterr()
    fit()
    captured = capsys.readouterr()
    assert "run.json of the run at" in captured.out + captured.err
    assert "new seeds" in captured.out + captured.err
    fit()
    captured = capsys.readouterr()
    assert "run.json" not in captured.out + captured.err
