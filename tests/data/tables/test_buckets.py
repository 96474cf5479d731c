"""Tables in an object store: their libraries read them with the credentials of ``storage_options``."""

from __future__ import annotations

import secrets

import lance
import pyarrow as pa
import pytest
from deltalake import write_deltalake
from tests.data.formats.reading_all import everything, ids_of_ranks, source_of
from tests.s3_server import S3Server

from powertrain import data
from powertrain.errors import DataError

TABLE = pa.table({"id": list(range(50)), "word": ["a b", "c"] * 25})


@pytest.fixture
def access(s3: S3Server) -> dict[str, str]:
    return {
        "aws_access_key_id": "somebody",
        "aws_secret_access_key": "hidden-key",
        "aws_endpoint": s3.endpoint,
        "aws_region": "us-east-1",
        "aws_allow_http": "true",
        "allow_http": "true",
        "aws_conditional_put": "etag",
    }


def test_lance_reads_a_bucket(access: dict[str, str]) -> None:
    address = f"s3://bucket/{secrets.token_hex(4)}.lance"
    lance.write_dataset(TABLE, address, storage_options=access, max_rows_per_file=20)
    dataset = data.read_lance(address, storage_options=access)
    assert everything(source_of(dataset)) == TABLE.to_pylist()
    assert sorted(ids_of_ranks(dataset.random_shuffle(seed=1), 2, "id")) == list(range(50))


def test_delta_reads_a_bucket(access: dict[str, str]) -> None:
    address = f"s3://bucket/{secrets.token_hex(4)}"
    write_deltalake(address, TABLE, partition_by=["word"], storage_options=access)
    dataset = data.read_delta(address, storage_options=access)
    rows = everything(source_of(dataset))
    assert sorted(rows, key=lambda row: row["id"]) == TABLE.to_pylist()
    assert sorted(ids_of_ranks(dataset.random_shuffle(seed=1), 2, "id")) == list(range(50))


@pytest.mark.parametrize("read", [data.read_lance, data.read_delta])
def test_credentials_are_not_shown(access: dict[str, str], read: object) -> None:
    assert callable(read)
    with pytest.raises(DataError, match=r"'s3://bucket/nothing' cannot be opened.*storage_options") as raised:
        read("s3://bucket/nothing", storage_options=access)
    assert "hidden-key" not in str(raised.value)
