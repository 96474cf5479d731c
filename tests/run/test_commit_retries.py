"""Tries of one commit, when the storage's answer was lost."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from powertrain import CheckpointConfig
from powertrain.checkpoint.chain import Chain
from powertrain.checkpoint.manifest import Manifest
from powertrain.run.checkpoints.committer import Committer
from powertrain.run.checkpoints.manager import CheckpointManager
from powertrain.run.checkpoints.uploads import Uploaders
from powertrain.storage import open_storage
from powertrain.wire.values import CheckpointPart, FilePart


class _OneRetry:
    """A committer that does work at once, and once more after an ``OSError``."""

    def submit(self, do: Callable[[], Any], then: Callable[..., None], *_: Any, **__: Any) -> None:
        try:
            result = do()
        except OSError:
            result = do()
        then(result, None)


def _share(place: Path, **sizes: int) -> CheckpointPart:
    files = [FilePart(name=name, size=size) for name, size in sizes.items()]
    return CheckpointPart(checkpoint="", files=files, elsewhere=str(place))


def test_a_commit_whose_answer_was_lost_is_recognised_although_its_place_has_changed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = tmp_path / "place"
    place.mkdir()
    (place / "rank0").write_text("1234")
    storage = open_storage(tmp_path / "run")
    put_if_absent = type(storage).put_if_absent

    def lose_the_answer(self: Any, key: str, data: bytes) -> bool:
        made = put_if_absent(self, key, data)
        if key.startswith("checkpoints/") and not (place / "later").exists():
            (place / "later").write_text("of the next epoch")
            raise TimeoutError("the answer was lost")
        return made

    monkeypatch.setattr(type(storage), "put_if_absent", lose_the_answer)
    settled: list[Any] = []
    warnings: list[str] = []
    manager = CheckpointManager(
        storage, Chain.take_over(storage, 1), CheckpointConfig(), None, tag="",
        committer=cast(Committer, _OneRetry()), before_commit=lambda: None,
        settled=lambda pending, manifest, reason: settled.append(manifest or reason),
        unstaged=lambda *_: None, warn=warnings.append,
    )  # fmt: skip
    manager.use_uploaders(cast(Uploaders, SimpleNamespace()))  # nothing is left to upload
    parts = {0: _share(place, rank0=2), 1: _share(place, rank0=4)}
    attempt = SimpleNamespace(number=0, world_size=2, members=dict.fromkeys(parts))
    row = SimpleNamespace(number=1, parts=parts, metrics=[{}, {}], late={})
    manager.begin(cast(Any, attempt), cast(Any, row))
    assert (place / "later").exists(), "no try of the commit has reached its manifest"
    assert isinstance(settled[0], Manifest), settled
    assert [file.name for file in settled[0].files] == ["rank0"]
    assert settled[0].files[0].size == 4
