"""Addresses that a file names lead to no other server than the user's own."""

from __future__ import annotations

import pytest

from powertrain.errors import StorageError
from powertrain.storage.servers import require_known_server

MINIO = {"AWS_ENDPOINT_URL": "https://minio.example:9000"}
AZURE = {"AZURE_STORAGE_ACCOUNT_NAME": "ours"}


@pytest.mark.parametrize(("named", "own", "environ"), [
    ("/data/uploads", "/runs/one", {}),
    ("file:///data/uploads", "s3://bucket/run", {}),
    ("s3://other/prefix", "/runs/one", {}),
    ("s3://other/prefix?region=eu-west-1", "s3://bucket/run", {}),
    ("s3://other/prefix", "s3://bucket/run", MINIO),
    ("s3://other/p?endpoint_override=https://minio.example:9000", "s3://bucket/run", MINIO),
    ("s3://o/p?endpoint_override=http://m:9", "s3://bucket/run?endpoint_override=http://m:9", {}),
    ("gs://other/prefix", "/runs/one", {}),
    ("az://container/prefix", "/runs/one", AZURE),
    ("abfs://container@ours.dfs.core.windows.net/p", "abfs://c@ours.dfs.core.windows.net/run", {}),
])  # fmt: skip
def test_buckets_of_known_servers_may_be_named(named: str, own: str, environ: dict[str, str]) -> None:
    require_known_server(named, own, environ)


@pytest.mark.parametrize(("named", "own", "environ"), [
    ("s3://b/p?endpoint_override=http://attacker.example", "/runs/one", {}),
    ("s3://b/p?endpoint_override=attacker.example", "s3://b/run", {}),
    ("s3://b/p?endpoint_override=http://m:10", "s3://bucket/run?endpoint_override=http://m:9", {}),
    ("s3://b/p?allow_http=true", "s3://b/run", {}),
    ("s3://b/p?tls_ca_file_path=/tmp/ca.pem", "s3://b/run", {}),
    ("s3://b/p?region=x.attacker.example/", "s3://b/run", {}),
    ("s3://attacker.example:443#/p?force_virtual_addressing=true", "s3://b/run", {}),
    ("gs://b/p?endpoint_override=https://attacker.example", "gs://b/run", {}),
    ("az://c/p?account_name=theirs", "az://c/run", AZURE),
    ("abfs://c@theirs.dfs.core.windows.net/p", "abfs://c@ours.dfs.core.windows.net/run", {}),
    ("az://c/p?use_emulator=true", "az://c/run", AZURE),
    ("http://attacker.example/p", "/runs/one", {}),
    ("s3://", "/runs/one", {}),
    ("s3://A:B@b/x", "s3://b/run", {}),
    ("s3://A@b/x", "s3://b/run", {}),
    ("s3://A:...@b/x", "s3://b/run", {}),
    ("s3://A:B@b/x", "s3://A:B@b/run", {}),
    ("s3://b/x?secret_key=B", "s3://b/run", {}),
    ("s3://b/x?access_key=A&secret_key=...", "s3://b/run", {}),
    ("s3://b/x?session_token=T", "s3://b/run", {}),
    ("gs://token@b/x", "gs://b/run", {}),
    ("az://c/p?account_key=K", "az://c/run", AZURE),
    ("az://c/p?sas_token=S", "az://c/run", AZURE),
])  # fmt: skip
def test_other_servers_and_accounts_are_refused(named: str, own: str, environ: dict[str, str]) -> None:
    with pytest.raises(StorageError):
        require_known_server(named, own, environ)


def test_credentials_in_a_named_address_are_refused_and_not_shown() -> None:
    with pytest.raises(StorageError, match="has credentials") as caught:
        require_known_server("s3://A:SEKRET@b/x", "s3://b/run", {})
    assert "SEKRET" not in str(caught.value)
