"""Shards that are fed through a socket."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.data.fed import Opened

from powertrain.data.ray.shard import StreamedShard
from powertrain.engine.ray.feed import Feed


@pytest.fixture
def opened(tmp_path: Path) -> Iterator[Opened]:
    """Gives the shard of a rank that is fed by an iterator."""
    feeds: list[Feed] = []
    shards: list[StreamedShard] = []

    def open_shard(iterator: Any, **options: Any) -> StreamedShard:
        path = str(tmp_path / f"{len(feeds)}.sock")
        feeds.append(Feed(iterator, path))
        shards.append(StreamedShard("train", path, **options))
        return shards[-1]

    yield open_shard
    for shard in shards:
        shard.close()
    for feed in feeds:
        feed.close()
        feed.close()
    assert list(tmp_path.glob("*.sock")) == []
