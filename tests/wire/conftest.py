"""Hubs and links that are gone after the test, however it ends."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator

import pytest
from tests.wire.ears import Ear, links


@pytest.fixture
def directory() -> Iterator[str]:
    with tempfile.TemporaryDirectory(prefix="pt-") as path:
        yield path


@pytest.fixture
def ear(directory: str) -> Iterator[Ear]:
    ear = Ear(directory)
    yield ear
    ear.reads.set()
    ear.hub.close()


@pytest.fixture(autouse=True)
def _links_are_closed() -> Iterator[None]:
    yield
    while links:
        link = links.pop()
        if not link._socket.closed:
            link.close()
