"""What is particular to object stores: addresses, trouble on the line, refusals, processes."""

from __future__ import annotations

import functools
import http.server
import os
import pickle
import secrets
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from email.message import Message
from pathlib import Path
from typing import ClassVar

import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st
from tests.s3_server import PAGE, Proxy, S3Server, uri

from powertrain.errors import StorageError
from powertrain.storage import addresses, objects, open_storage, opening, probe
from powertrain.storage.addresses import Address, client_settings, parse, without_secrets
from powertrain.storage.base import TEMPORARY_PREFIX, host_in_names
from powertrain.storage.objects import ObjectStorage


class Retries(list[tuple[str, float]]):
    """Collects the calls of ``on_retry``, and does something at the one of that number."""

    at: tuple[int, Callable[[], None]] | None = None

    def __call__(self, reason: str, waited: float) -> None:
        self.append((reason, waited))
        if self.at is not None and len(self) == self.at[0]:
            self.at[1]()


@pytest.fixture
def retries() -> Retries:
    return Retries()


@pytest.fixture
def storage(proxy: Proxy, retries: Retries, monkeypatch: pytest.MonkeyPatch) -> ObjectStorage:
    """Through a proxy, in parts of 5 MiB, with a request's limit at 1 s and everything's at 20 s."""
    monkeypatch.setattr(objects, "PART_BYTES", 5 << 20)
    address = proxy.uri(f"runs/{secrets.token_hex(4)}")
    return ObjectStorage(address, timeout=20, request_timeout=1, on_retry=retries)


@contextmanager
def after(seconds: float, action: Callable[[], None]) -> Iterator[None]:
    timer = threading.Timer(seconds, action)
    timer.start()
    yield
    timer.join()


# --------------------------------------------------------------------------- trouble on the line


def test_a_refusing_server_is_tried_until_it_is_back(
    storage: ObjectStorage, proxy: Proxy, retries: Retries
) -> None:
    proxy.refuse()
    retries.at = (3, proxy.mend)
    storage.put("k", b"v")
    assert storage.get("k") == b"v"
    assert len(retries) >= 3
    assert all("refused" in reason for reason, _ in retries[:3])
    assert [waited for _, waited in retries[:3]] == sorted(waited for _, waited in retries[:3])


def test_a_hanging_server_is_noticed_and_tried_again(
    storage: ObjectStorage, proxy: Proxy, retries: Retries
) -> None:
    storage.put("k", b"v")
    proxy.hang()
    retries.at = (1, proxy.mend)
    assert storage.get("k") == b"v"
    assert "no answer" in retries[0][0]


def test_a_connection_cut_in_the_middle_of_a_file_does_no_harm(
    storage: ObjectStorage, proxy: Proxy, retries: Retries, tmp_path: Path
) -> None:
    data = os.urandom((11 << 20) + 3)
    (tmp_path / "f").write_bytes(data)
    proxy.cut(after=1 << 20)
    with after(0.5, proxy.mend):
        assert storage.put_file("f", tmp_path / "f") == (len(data), xxhash.xxh3_128_hexdigest(data))
    proxy.cut(after=0)
    with after(0.5, proxy.mend):
        storage.get_file("f", tmp_path / "back")
    assert (tmp_path / "back").read_bytes() == data
    assert any("broke off" in reason for reason, _ in retries)
    assert sorted(os.listdir(tmp_path)) == ["back", "f"]


def test_a_line_too_slow_for_the_first_limit_gets_the_file_through(
    storage: ObjectStorage, proxy: Proxy, tmp_path: Path
) -> None:
    (tmp_path / "f").write_bytes(os.urandom(2 << 20))
    proxy.throttle(1.5e6)  # 1.4 s where a request may take 1 s at first
    expected = storage.put_file("f", tmp_path / "f")
    proxy.mend()
    assert storage.digest("f") == expected


def test_a_lost_answer_does_not_make_the_winner_lose(
    storage: ObjectStorage, proxy: Proxy, retries: Retries
) -> None:
    for count in (1, 2):
        proxy.mute(count)
        assert storage.put_if_absent(f"k{count}", b"mine")
        assert storage.get(f"k{count}") == b"mine"
    assert len(retries) >= 2


def test_a_lost_answer_does_not_make_the_loser_win(storage: ObjectStorage, proxy: Proxy) -> None:
    storage.put("k", b"same")
    proxy.mute(1)
    assert not storage.put_if_absent("k", b"same")


def test_nothing_works_within_the_deadline_is_a_timeout_with_the_last_reason(
    proxy: Proxy, tmp_path: Path
) -> None:
    storage = ObjectStorage(proxy.uri("x"), timeout=0.3)
    proxy.refuse()
    (tmp_path / "f").write_bytes(b"1")
    operations: list[Callable[[], object]] = [
        lambda: storage.put("k", b"v"),
        lambda: storage.put_if_absent("k", b"v"),
        lambda: storage.put_file("k", tmp_path / "f"),
        lambda: storage.get("k"),
        lambda: storage.digest("k"),
        lambda: storage.list(),
        lambda: storage.delete("k"),
    ]
    for operation in operations:
        began = time.monotonic()
        with pytest.raises(TimeoutError, match=r"within 0\.3 s \(no connection to .*refused"):
            operation()
        assert time.monotonic() - began < 20


def test_a_source_that_cannot_be_read_is_reported_at_once(storage: ObjectStorage, tmp_path: Path) -> None:
    with pytest.raises(IsADirectoryError):
        storage.put_file("k", tmp_path)
    assert storage.list() == []


# --------------------------------------------------------------------------- refusals


class Answering(http.server.BaseHTTPRequestHandler):
    """Gives the server's next answer to everything."""

    seen: ClassVar[list[Message]] = []

    def _answer(self) -> None:
        self.seen.append(self.headers)
        self.rfile.read(int(self.headers.get("content-length") or 0))
        status, body = self.server.answers[0]  # type: ignore[attr-defined]
        if len(self.server.answers) > 1:  # type: ignore[attr-defined]
            del self.server.answers[0]  # type: ignore[attr-defined]
        self.send_response(status)
        self.send_header("content-length", str(len(body)))
        self.send_header("etag", '"x"')
        self.end_headers()
        self.wfile.write(body)

    do_GET = do_PUT = do_POST = do_DELETE = _answer

    def log_message(self, *_: object) -> None:
        pass


@contextmanager
def answering(*answers: tuple[int, bytes]) -> Iterator[str]:
    """The address of a store that gives these answers in turn, the last of them for ever."""
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Answering)
    server.answers = list(answers)  # type: ignore[attr-defined]
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    try:
        yield uri(server.server_address[1], "runs")
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


@pytest.mark.parametrize(
    ("status", "body", "says"),
    [
        (403, b"<Error><Code>InvalidAccessKeyId</Code></Error>", r"InvalidAccessKeyId.*AWS_ACCESS_KEY_ID"),
        (403, b"<Error><Code>AccessDenied</Code></Error>", "may read, write, list and delete"),
        (401, b"", "AWS_SECRET_ACCESS_KEY"),
        (400, b"<Error><Code>ExpiredToken</Code></Error>", "ExpiredToken.*AWS_PROFILE"),
        (301, b"", "wrong region.*AWS_REGION"),
        (404, b"<Error><Code>NoSuchBucket</Code></Error>", "bucket 'bucket'.*does not exist.*Create it"),
        (
            400,
            b"<Error><Code>InvalidRequest</Code></Error>",
            "cannot be used: 400 Bad Request .InvalidRequest",
        ),
        (501, b"<Error><Code>NotImplemented</Code></Error>", "NotImplemented"),
    ],
)
def test_a_permanent_error_is_reported_at_once(status: int, body: bytes, says: str) -> None:
    with answering((status, body)) as address:
        storage = ObjectStorage(address, timeout=60)
        began = time.monotonic()
        for operation in (lambda: storage.put("k", b"v"), lambda: storage.list(), lambda: probe(storage)):
            with pytest.raises(StorageError, match=says) as caught:
                operation()
            assert "secret_key=testing" not in str(caught.value)
        assert time.monotonic() - began < 30


@pytest.mark.parametrize("status", [408, 429, 500, 502, 503, 504])
def test_what_may_pass_is_tried_again(status: int, retries: Retries) -> None:
    with answering((status, b"<Error><Code>SlowDown</Code></Error>"), (status, b""), (200, b"")) as address:
        ObjectStorage(address, timeout=60, on_retry=retries).put("k", b"v")
    assert len(retries) == 2
    assert f"{status} " in retries[0][0]
    assert "SlowDown" in retries[0][0]


def test_a_missing_bucket_is_named_by_the_probe(s3: S3Server) -> None:
    storage = open_storage(uri(s3.port, "runs", bucket="no-such-bucket"))
    with pytest.raises(StorageError, match=r"bucket 'no-such-bucket'.*does not exist.*Create it"):
        probe(storage)
    with pytest.raises(StorageError, match="does not exist"):
        storage.list()
    with pytest.raises(StorageError, match="does not exist"):
        storage.get("k")


@pytest.mark.parametrize(("spoil", "says"), [(Proxy.refuse, "refused"), (Proxy.hang, "no answer")])
def test_the_probe_of_an_unreachable_endpoint_gives_up_soon(
    proxy: Proxy, spoil: Callable[[Proxy], None], says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert opening.PROBE_TIMEOUT_S <= 10  # whatever sync_timeout is
    monkeypatch.setattr(opening, "PROBE_TIMEOUT_S", 1.5)
    spoil(proxy)
    began = time.monotonic()
    with pytest.raises(StorageError, match=rf"cannot be written: .*{says}.*Check the endpoint"):
        probe(open_storage(proxy.uri("runs"), timeout=1800))
    assert time.monotonic() - began < 30


# --------------------------------------------------------------------------- unfinished writes


def test_unfinished_writes_are_not_listed_and_those_of_the_dead_are_swept(s3: S3Server) -> None:
    storage = ObjectStorage(s3.uri(f"runs/{secrets.token_hex(4)}"))
    storage.put("d/k", b"v")
    dead = subprocess.Popen(["true"])
    dead.wait()
    for pid in (dead.pid, os.getpid()):
        name = f"{storage._address.prefix}/d/{TEMPORARY_PREFIX}{host_in_names()}.{pid}.00"
        storage._persist(functools.partial(_put_raw, name=name))
    assert storage.list() == [("d/k", 1)]
    assert storage.sweep() == 1
    assert storage.sweep() == 0
    storage.delete_tree("d")
    assert storage._listing("") == []


def _put_raw(client: object, name: str) -> None:
    import obstore

    obstore.put(client, name, b"half")  # type: ignore[arg-type]


def test_long_listings_come_whole(s3: S3Server) -> None:
    storage = ObjectStorage(s3.uri(f"runs/{secrets.token_hex(4)}"))
    keys = [f"m/{number:03d}" for number in range(2 * PAGE + 3)]
    for key in keys:
        storage.put(key, b"")
    assert [entry.key for entry in storage.list("m")] == keys
    storage.delete_tree("m")
    assert storage.list() == []


# --------------------------------------------------------------------------- processes

_THREADS = """
import os, pickle, sys
from powertrain.storage import open_storage
storage = open_storage(sys.argv[1])
copy = pickle.loads(pickle.dumps(storage.child("x")))
print(len(os.listdir("/proc/self/task")), "obstore" in sys.modules)
child = os.fork()
if child == 0:
    copy.put("k", b"from a fork")
    os._exit(0)
assert os.waitpid(child, 0)[1] == 0
print(storage.get("x/k"))
child = os.fork()
if child == 0:
    try:
        storage.get("x/k")
    except Exception as error:
        print(type(error).__name__, error, flush=True)
    os._exit(0)
os.waitpid(child, 0)
"""


def test_an_unused_storage_may_be_forked_and_a_used_one_says_what_to_do(s3: S3Server) -> None:
    command = [sys.executable, "-c", _THREADS, s3.uri(f"runs/{secrets.token_hex(4)}")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    lines = done.stdout.splitlines()
    assert lines[:2] == ["1 False", "b'from a fork'"]
    assert lines[2].startswith("StorageError")
    assert "spawn" in lines[2]


def test_a_pickled_storage_keeps_its_limits_and_leaves_the_callback(retries: Retries) -> None:
    storage = ObjectStorage("s3://b/x?region=r", timeout=7, request_timeout=3, on_retry=retries)
    copy = pickle.loads(pickle.dumps(storage))
    assert (copy.uri, copy._timeout, copy._request_timeout, copy.on_retry) == (storage.uri, 7, 3, None)
    assert storage.child("y").on_retry is retries


# --------------------------------------------------------------------------- addresses


def test_credentials_and_endpoint_come_from_the_environment(
    s3: S3Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        for name, value in s3.environment.items():
            patch.setenv(name, value)
        storage = open_storage(f"s3://bucket/runs/{secrets.token_hex(4)}")
        storage.put("k", b"v")
        assert open_storage(storage.uri).get("k") == b"v"


def test_keys_in_the_address_are_not_mixed_with_the_environment(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A session token belongs to the keys beside it, an endpoint to the place that set it."""
    with answering((200, b"")) as address, monkeypatch.context() as patch:
        patch.setenv("AWS_SESSION_TOKEN", "of other keys")
        patch.setenv("AWS_ENDPOINT_URL_S3", "http://127.0.0.1:1")
        Answering.seen = []
        ObjectStorage(address, timeout=5).put("k", b"v")
        assert [headers.get("x-amz-security-token") for headers in Answering.seen] == [None]


def settings(address: str, **environ: str) -> dict[str, str | bool]:
    return dict(client_settings(parse(address), {"HOME": "/nowhere", **environ}).config)


def test_the_query_goes_before_the_environment() -> None:
    environ = {"AWS_REGION": "there", "AWS_ENDPOINT_URL": "https://env:1", "AWS_ACCESS_KEY_ID": "env"}
    assert settings("s3://b", **environ)["endpoint"] == "https://env:1"
    assert settings("s3://b", AWS_ENDPOINT_URL_S3="https://s3:2", **environ)["endpoint"] == "https://s3:2"
    said = settings("s3://b?region=here&endpoint_override=host:9&access_key=k&secret_key=s", **environ)
    assert (said["region"], said["endpoint"]) == ("here", "https://host:9")
    assert (said["access_key_id"], said["secret_access_key"]) == ("k", "s")
    assert settings("s3://key:sec%2Fret@b")["secret_access_key"] == "sec/ret"
    assert settings("s3://b?anonymous=true")["skip_signature"] is True
    assert settings("s3://b?endpoint_override=h&scheme=http")["endpoint"] == "http://h"
    assert client_settings(parse("s3://b?endpoint_override=h&scheme=http"), {}).allow_http
    assert not client_settings(parse("s3://b"), {}).allow_http
    virtual = settings("s3://b?endpoint_override=h&force_virtual_addressing=true")
    assert virtual["endpoint"] == "https://b.h"


def test_aws_profiles_are_read_where_the_environment_has_no_key(tmp_path: Path) -> None:
    (tmp_path / ".aws").mkdir()
    (tmp_path / ".aws" / "credentials").write_text(
        "[team]\naws_access_key_id = K\naws_secret_access_key = S\n"
    )
    (tmp_path / ".aws" / "config").write_text("[profile team]\nregion = eu-north-1\n")
    team = settings("s3://b", HOME=str(tmp_path), AWS_PROFILE="team")
    assert (team["access_key_id"], team["secret_access_key"], team["region"]) == ("K", "S", "eu-north-1")
    assert "access_key_id" not in settings("s3://b", HOME=str(tmp_path))
    assert "access_key_id" not in settings(
        "s3://b", HOME=str(tmp_path), AWS_PROFILE="team", AWS_ACCESS_KEY_ID="E"
    )


def test_other_clouds_are_understood() -> None:
    assert settings("gs://b", STORAGE_EMULATOR_HOST="localhost:4443")["base_url"] == "http://localhost:4443"
    assert settings("az://c/x", AZURE_STORAGE_ACCOUNT_NAME="a") == {"account_name": "a"}
    assert settings("abfs://c@acct.dfs.core.windows.net/x")["account_name"] == "acct"
    assert parse("abfs://c@acct.dfs.core.windows.net/x").bucket == "c"
    assert parse("abfs://c@acct.dfs.core.windows.net/x").uri == "abfs://c@acct.dfs.core.windows.net/x"
    for address in ("gs://b/x", "gcs://b/x", "az://b/x?account_name=a", "abfss://b@a.dfs.core.windows.net/x"):
        assert open_storage(address).uri == address


@pytest.mark.parametrize(
    ("address", "says"),
    [
        ("s3://", "names no bucket"),
        ("s3:///x", "names no bucket"),
        ("s3://b/x?endpoint=y", "unknown parameter 'endpoint'.*endpoint_override"),
        ("s3://b/x?scheme=ftp", "must be http or https"),
        ("s3://b/x?anonymous=maybe", "must be true or false"),
        ("s3://b/x?endpoint_override=not a url", "not the address of a server"),
        ("s3://b/x?endpoint_override=http://h:port", "not the address of a server"),
        ("s3://b/../x", "may not have"),
        ("az://c/x", "names no storage account"),
    ],
)
def test_addresses_that_mean_nothing_are_refused(
    address: str, says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("AZURE_STORAGE_ACCOUNT_NAME", raising=False)
    with pytest.raises(StorageError, match=says):
        open_storage(address)


def test_secrets_are_not_shown() -> None:
    shown = without_secrets("s3://key:hidden@b/x?secret_key=hidden&region=r&session_token=hidden")
    assert "hidden" not in shown
    assert shown == "s3://key:...@b/x?secret_key=...&region=r&session_token=..."
    storage = open_storage("s3://b/x?access_key=a&secret_key=hidden")
    assert "hidden" not in repr(storage)
    assert "hidden" in storage.uri  # without it the place could not be opened again


_parts = st.text(st.characters(exclude_characters="/\0", exclude_categories=["Cs"]), min_size=1, max_size=8)
_keys = st.lists(_parts.filter(lambda part: part not in (".", "..")), min_size=1, max_size=3).map("/".join)


@given(_keys, _keys)
def test_an_address_with_any_prefix_reads_back(prefix: str, below: str) -> None:
    address = Address("s3", "bucket", prefix, "region=r")
    assert parse(address.uri) == address
    assert parse(address.child(below).uri).prefix == f"{prefix}/{below}"


@given(_keys)
def test_names_of_objects_read_back_and_carry_nothing_unfit(key: str) -> None:
    name = objects._encoded(key)
    assert objects._decoded(name) == key
    assert not any(ord(character) < 32 or character in "\x7f\\\ufffe\uffff" for character in name)


@given(_keys, _keys)
def test_no_two_keys_share_an_object(one: str, other: str) -> None:
    assert (objects._encoded(one) == objects._encoded(other)) == (one == other)


def test_every_parameter_that_is_understood_is_used() -> None:
    for kind, known in addresses.PARAMETERS.items():
        scheme = {"s3": "s3", "gcs": "gs", "azure": "az"}[kind]
        bare = client_settings(parse(f"{scheme}://b?{'account_name=a' if kind == 'azure' else ''}"), {})
        for name in known:
            if name in ("access_key", "scheme"):
                continue  # they come with a second one
            value = (
                "true" if name in addresses._BOOLEANS else "https://host:1" if "endpoint" in name else "value"
            )
            also = "&access_key=k" if name in ("secret_key", "session_token") else ""
            also += "&account_name=a" if kind == "azure" and name != "account_name" else ""
            assert client_settings(parse(f"{scheme}://b?{name}={value}{also}"), {}) != bare, name
