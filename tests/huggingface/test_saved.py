"""Directories that a Trainer has saved: only whole ones count."""

from __future__ import annotations

from pathlib import Path

from powertrain.checkpoint.checkpoint import Checkpoint
from powertrain.huggingface.transformers import saved


def save(directory: Path, step: int, is_whole: bool = True) -> Path:
    made = directory / f"checkpoint-{step}"
    (made / "shards").mkdir(parents=True)
    (made / "shards" / "0").write_text(f"weights of {step}")
    if is_whole:
        (made / "trainer_state.json").write_text(f'{{"global_step": {step}}}')
    return made


def test_the_newest_whole_one_is_found_by_its_step(tmp_path: Path) -> None:
    assert saved.newest_whole(str(tmp_path / "absent")) is None
    assert saved.newest_whole(str(tmp_path)) is None
    save(tmp_path, 9)
    save(tmp_path, 10)
    save(tmp_path, 11, is_whole=False)  # its process was killed meanwhile
    (tmp_path / "checkpoint-latest").mkdir()
    assert saved.newest_whole(str(tmp_path)) == str(tmp_path / "checkpoint-10")


def test_what_was_saved_at_a_step_is_not_what_an_earlier_training_has_left(tmp_path: Path) -> None:
    save(tmp_path, 500)
    assert saved.saved_at(str(tmp_path), 3) is None
    mine = save(tmp_path, 3)
    assert saved.saved_at(str(tmp_path), 3) == str(mine)


def test_a_copy_replaces_what_is_there_with_all_of_it(tmp_path: Path) -> None:
    source = save(tmp_path, 5)
    target = save(tmp_path / "other", 5, is_whole=False)
    (target / "left").write_text("")
    saved.copy_directory(str(source), str(target))
    assert (target / "shards" / "0").read_text() == "weights of 5"
    assert saved.is_whole(str(target))
    assert not (target / "left").exists()
    assert [path.name for path in target.parent.iterdir()] == ["checkpoint-5"]


def test_a_path_may_be_that_of_the_checkpoint_or_of_what_the_trainer_saved(tmp_path: Path) -> None:
    made = save(tmp_path, 5)
    assert saved.inside(str(made)) == str(made)
    made.rename(tmp_path / "checkpoint")
    assert saved.inside(str(tmp_path)) == str(tmp_path / "checkpoint")
    with saved.opened(Checkpoint.from_directory(tmp_path)) as directory:
        assert directory is not None
        assert saved.read_state(directory) == {"global_step": 5}


def test_a_checkpoint_without_a_trainers_files_is_none(tmp_path: Path) -> None:
    (tmp_path / "model.pt").write_text("")
    with saved.opened(Checkpoint.from_directory(tmp_path)) as directory:
        assert directory is None
    assert saved.read_state(str(tmp_path)) == {}
