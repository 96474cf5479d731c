"""One S3 server for a whole file of tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from tests.s3_server import Proxy, S3Server


@pytest.fixture(scope="module")
def s3() -> Iterator[S3Server]:
    with S3Server() as server:
        yield server


@pytest.fixture
def proxy(s3: S3Server) -> Iterator[Proxy]:
    with Proxy(s3.port) as proxy:
        yield proxy
