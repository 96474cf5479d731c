"""Where ``train(resume_from_checkpoint=...)`` begins: by what it is given, and by what the function has asked for."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tests.huggingface.test_saved import save
from tests.torch.lone_rank import session_of

from powertrain.checkpoint.checkpoint import Checkpoint
from powertrain.huggingface.transformers.resume import resumed
from powertrain.worker import session as worker_session

pytest.importorskip("transformers")


class Places:
    """A run's checkpoint of step 8, an output directory up to step 9, and a directory of step 3 elsewhere."""

    def __init__(self, root: Path) -> None:
        self.checkpoint, self.output, self.elsewhere = (
            root / name for name in ("run", "output", "elsewhere")
        )
        save(self.checkpoint, 8).rename(self.checkpoint / "checkpoint")
        save(self.output, 9)
        save(self.output, 10, is_whole=False)
        save(self.elsewhere, 3)
        self.given: dict[Any, Any] = {"path": str(self.elsewhere / "checkpoint-3")}

    def trainer(self, output: Path | None = None) -> Any:
        return SimpleNamespace(
            args=SimpleNamespace(output_dir=str(output or self.output), load_best_model_at_end=False)
        )


@pytest.fixture
def places(tmp_path: Path) -> Places:
    return Places(tmp_path)


def begin(monkeypatch: pytest.MonkeyPatch, checkpoint: Path | None) -> Any:
    """Be the only rank of an attempt that starts from this checkpoint."""
    session = session_of(0, 1, checkpoint=str(checkpoint or ""))
    monkeypatch.setattr(worker_session, "_session", session)
    return session


@pytest.mark.parametrize(
    ("given", "has_asked", "begins_at"),
    [
        (None, False, "run"),
        (None, True, None),
        (True, False, "run"),
        (True, True, "run"),
        ("path", False, "run"),
        ("path", True, "path"),
        (False, False, None),
        (False, True, None),
    ],
)
def test_after_a_restart(
    monkeypatch: pytest.MonkeyPatch, places: Places, given: Any, has_asked: bool, begins_at: str | None
) -> None:
    session = begin(monkeypatch, places.checkpoint)
    if has_asked:
        session.data.on_checkpoint_requested()
    expected = {"run": str(places.checkpoint / "checkpoint"), None: None, **places.given}[begins_at]
    trainer = places.trainer()
    with resumed(trainer, places.given.get(given, given)) as directory:
        assert directory == expected
        assert trainer.has_resumed is (begins_at is not None)
    # The data move on with the checkpoint, and only with it.
    assert session.data.has_requested_checkpoint is (has_asked or begins_at == "run")


@pytest.mark.parametrize(("given", "step"), [(None, None), (True, 9), ("path", 3), (False, None)])
def test_at_the_first_start(
    monkeypatch: pytest.MonkeyPatch, places: Places, given: Any, step: int | None
) -> None:
    session = begin(monkeypatch, None)
    with resumed(places.trainer(), places.given.get(given, given)) as directory:
        assert directory is None if step is None else Path(str(directory)).name == f"checkpoint-{step}"
    assert not session.data.has_requested_checkpoint


def test_true_with_nothing_to_resume_from_begins_anew_and_says_so(
    monkeypatch: pytest.MonkeyPatch, places: Places, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    begin(monkeypatch, None)
    with resumed(places.trainer(tmp_path / "empty"), True) as directory:
        assert directory is None
    assert "there is no checkpoint yet, so training begins at step 0" in capsys.readouterr().out


def test_a_checkpoint_of_a_run_can_be_given_by_its_path_and_as_a_value(
    monkeypatch: pytest.MonkeyPatch, places: Places
) -> None:
    begin(monkeypatch, None)
    inside = str(places.checkpoint / "checkpoint")
    for given in (str(places.checkpoint), inside, Checkpoint.from_directory(places.checkpoint)):
        with resumed(places.trainer(), given) as directory:
            assert directory == inside


def test_a_checkpoint_without_a_trainers_files_is_left_to_the_function(
    monkeypatch: pytest.MonkeyPatch, places: Places, tmp_path: Path
) -> None:
    (tmp_path / "other").mkdir()
    session = begin(monkeypatch, tmp_path / "other")
    with resumed(places.trainer(), None) as directory:
        assert directory is None
    assert not session.data.has_requested_checkpoint
