"""A secret at any credential position of any address never appears in what is shown or kept."""

from __future__ import annotations

import copy
import dataclasses
import errno
import pickle
import re
import string
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest
from hypothesis import HealthCheck, assume, example, given, settings
from hypothesis import strategies as st

from powertrain import (
    Checkpoint,
    CheckpointConfig,
    DataConfig,
    DataParallelTrainer,
    FailureConfig,
    Result,
    RunConfig,
    ScalingConfig,
)
from powertrain.errors import ConfigError, PowertrainError, StorageError
from powertrain.run import events as ev
from powertrain.run.remote import protocol as control
from powertrain.storage import open_storage
from powertrain.storage.addresses import Address, client_settings, parse
from powertrain.storage.failures import passing_reason
from powertrain.text import redaction
from powertrain.text.redaction import has_secrets, redact, strip_secrets, without_secrets
from powertrain.text.reprs import repr_without_secrets, short_repr

#: Addresses with a secret in each place where one can stand. "%s" is the secret as it should be written.
ADDRESSES = (
    "s3://AKIAKEY:%s@bucket/runs",
    "s3://AKIAKEY:%s@bucket/runs?region=eu-west-1",
    "S3://AKIAKEY:%s@bucket",
    "s3:/AKIAKEY:%s@bucket",
    "s3:AKIAKEY:%s@bucket",
    "s3a://%s@bucket/runs",
    "s3://bucket/runs?access_key=AKIAKEY&secret_key=%s",
    "s3://bucket/runs?region=x&session_token=%s&anonymous=false",
    "s3://bucket/runs?secret_access_key=%s",
    "s3://bucket/runs?X-Amz-Signature=%s&X-Amz-Credential=x",
    "s3://bucket/runs?endpoint_override=http://user:%s@127.0.0.1:9",
    "s3://bucket/runs?endpoint_override=https%%3A%%2F%%2Fuser%%3A%s%%40localhost",
    "s3://bucket/runs?endpoint_override=user:%s@localhost:9000",
    "gs://%s@bucket/runs",
    "gs://user:%s@bucket/runs",
    "gs://bucket/runs?access_token=%s",
    "az://container/runs?account_name=a&account_key=%s",
    "az://container/runs?account_name=a&sas_token=%s",
    "az://container/runs?account_name=a&sas_token=sv=2024&sp=rl&sig=%s",
    "az://container/runs?sv=2024&sig=%s",
    "abfss://container:%s@account.dfs.core.windows.net/runs",
    "abfs://container@account.dfs.core.windows.net/runs?sas_token=%s",
    "https://user:%s@proxy.example:3128/x",
    "https://%s@host/x",
    "https://%s:x-oauth-basic@host/x",
    "https://host/data.parquet?X-Amz-Algorithm=A&X-Amz-Signature=%s",
    "https://host/data.parquet?sig=%s",
    "https://host/x#access_token=%s",
    "simplecache::s3://KEY:%s@bucket/x",
    "hdfs://user:%s@namenode:8020/x",
    "git+https://%s@host/repository.git",
    "file://user:%s@host/x",
)
#: Addresses in which a secret that was not percent-encoded can still be separated from the rest.
RAW = tuple(address for address in ADDRESSES if ":%s@" in address and "=" not in address) + tuple(
    address for address in ADDRESSES if address.endswith("=%s")
)
#: Long enough that nothing else in a message is the same by chance.
_letters = st.text(string.ascii_letters + string.digits, min_size=12, max_size=40).map(
    lambda text: f"Qz7{text}"
)
_generated = st.text(string.ascii_letters + string.digits + "/+=", min_size=12, max_size=60).map(
    lambda t: f"Qz7{t}"
)


@given(st.sampled_from(ADDRESSES), st.text(min_size=6, max_size=40).map(lambda text: f"Qz7{text}"))
def test_a_secret_in_any_place_is_not_shown(address: str, secret: str) -> None:
    assume("Qz7" not in secret[3:])
    try:
        written = quote(secret, safe="")
    except UnicodeEncodeError:
        assume(False)
    uri = address % written
    assert "Qz7" not in without_secrets(uri)
    assert "Qz7" not in strip_secrets(uri)
    assert has_secrets(uri)
    assert without_secrets(without_secrets(uri)) == without_secrets(uri)


@given(st.sampled_from(RAW), _generated)
@example(RAW[0], "Qz7wJalrXUtnFEMI/K7MDENG/bPxRfiCYEXAMPLEKEY")
@example(RAW[0], "Qz7a/b@c/d?e=f@g")
def test_a_secret_that_was_not_percent_encoded_is_not_shown(address: str, secret: str) -> None:
    uri = address % secret
    assert "Qz7" not in without_secrets(uri)
    tail = secret[-6:]
    assume(len(set(tail)) > 3)
    assert tail not in without_secrets(uri)


@given(
    st.sampled_from(ADDRESSES),
    _letters,
    st.sampled_from(["%s", "at '%s'.", "(%s): refused", "x %s, y", '"%s"']),
)
def test_a_text_that_quotes_an_address_loses_its_secret(address: str, secret: str, frame: str) -> None:
    assume("://" in address)
    assert secret not in redact(frame % (address % secret))


@pytest.mark.parametrize(
    "address",
    ["s3://bucket/a@b/c", "s3://bucket/x?region=eu&endpoint_override=http://host:9000", "/plain/path@x?y=z",
     "abfss://container@account.dfs.core.windows.net/runs", "http://host:8080/x", "http://[::1]:8080/x", "ray://h:10001",
     "file:///a/b?c", "gs://bucket", "tcp://10.0.0.1:29500", "relative/path", "https://host:port"],
)  # fmt: skip
def test_an_address_without_secrets_stays_as_it_is(address: str) -> None:
    assert without_secrets(address) == address == strip_secrets(address)
    assert redact(f"at {address!r}.") == f"at {address!r}."


def test_stripped_addresses_lead_to_the_same_place() -> None:
    whole = "s3://KEY:secret@bucket/runs?region=x&session_token=t&endpoint_override=http://u:p@host:9"
    assert strip_secrets(whole) == "s3://bucket/runs?region=x&endpoint_override=http://host:9"
    azure = "abfss://c:secret@account.dfs.core.windows.net/r?sas_token=x&account_name=a"
    assert strip_secrets(azure) == "abfss://c@account.dfs.core.windows.net/r?account_name=a"


# --------------------------------------------------------------------------- texts


@pytest.mark.parametrize("text", [
    "s3://a/b;s3://K:%s@c",
    "s3://a,s3://K:%s@b",
    "s3://a/b,s3://c/d|s3://K:%s@e",
    "s3://K:x@a/b;gs://c/d?access_token=%s",
    "at s3://a/b;https://h/x?sig=%s, and s3://c",
    "s3://b/x?endpoint_override=http://h:9&secret_key=%s",
    "s3://b/x?endpoint_override=http://h:9/a;s3://K:%s@c&region=x",
    "simplecache::s3://a/b::s3://K:%s@c",
])  # fmt: skip
@given(secret=_letters)
def test_every_address_of_a_run_of_characters_loses_its_secret(text: str, secret: str) -> None:
    whole = text % secret
    assert secret not in redact(whole)
    assert secret not in without_secrets(whole)
    assert secret not in strip_secrets(whole)


_QUOTED = (
    "'%s'", '"%s"', "b'%s'", 'r"%s"', "'''%s'''", '"""%s"""', r"\'%s\'", r"\"%s\"", r"\\\"%s\\\"", "%s",
)  # fmt: skip
_NAMES = (
    "aws_secret_access_key", "secret_key", "AWS_SECRET_ACCESS_KEY", "aws_session_token", "account_key", "AccountKey",
    "sas_token", "password", "PGPASSWORD", "db_password", "passwd", "api_key", "client_secret", "access_token",
)  # fmt: skip


@pytest.mark.parametrize("frame", [
    "%s=%s", "%s = %s", "{'%s': %s}", '{"%s": %s}', "{'a': 1, '%s': %s, 'b': 2}", "%s: %s", "f(x, %s=%s)", "'%s':%s",
    r"{\'%s\': %s}", r'"{\"%s\": %s}"', "x\n  %s: %s\ny",
])  # fmt: skip
@given(name=st.sampled_from(_NAMES), quotes=st.sampled_from(_QUOTED), secret=_letters)
def test_an_assigned_secret_is_not_shown_however_it_is_written(
    frame: str, name: str, quotes: str, secret: str
) -> None:
    shown = redact(frame % (name, quotes % secret))
    assert secret not in shown
    assert name in shown
    assert redact(shown) == shown


@given(st.text(string.printable, min_size=8, max_size=40).map(lambda text: f"Qz7{text}Qz7"))
def test_the_repr_of_a_secret_with_any_character_is_not_shown(secret: str) -> None:
    assume("Qz7" not in secret[3:-3])
    quote_mark = repr(secret)[0]
    assert "Qz7" not in redact(f"connect(password={secret!r}, port=5)")
    shown = redact(repr({"secret_key": secret, "region": "x"}))
    assert shown == f"{{'secret_key': {quote_mark}...{quote_mark}, 'region': 'x'}}"


_pieces = st.sampled_from([
    "s3", "http", "://", "a", "b.c", ":", "@", "/", "?", "&", "=", ";", ",", " ", "'", '"', "\\", "#", "%3A", "...",
    ".", "region", "password", "secret_key", "sig", "endpoint_override", "[", "]", "(", ")", "\n", "file", "abfs",
    "arn:", "9",
])  # fmt: skip


@settings(max_examples=500)
@given(st.one_of(st.text(max_size=60), st.lists(_pieces, max_size=24).map("".join)))
@example("HTTP://#x")
@example("https://h/x?sig=x")
def test_a_redacted_text_stays_as_it_is(text: str) -> None:
    once = redact(text)
    assert redact(once) == once


@given(st.text(max_size=200))
def test_a_text_without_addresses_and_assignments_stays_as_it_is(text: str) -> None:
    assume("=" not in text and ":" not in text)
    assert redact(text) == text


@pytest.mark.parametrize("text", [
    "a=b and c://d", "{'lr': 0.1, 'path': '/a/b'}", "max_tokens: 5, tokenizer='gpt'", "The password is wrong.",
    "tokens=[1, 2]", "key: value", "signature: (x, y)", "design=3", "password=''", "{'password': ''}", "12:30:01 a: b",
    "copy s3://a/b to s3://c/d;s3://e/f,gs://g.", "passwords: two", "File 'x.py', line 3: secret_keys",
])  # fmt: skip
def test_a_text_without_secrets_stays_as_it_is(text: str) -> None:
    assert redact(text) == text


_MEGABYTE = 1 << 20


@pytest.mark.parametrize("piece", [
    "a://", "s3://a:b@", "s3://a/b;", "s3://a?scheme=", "s3://a?scheme=x&", "a" * 31, "password=", "password='",
    "password=\\", "password='\\", "password=\\'\\\\", "password\t\t\t", "secret_", "\\", "password='''",
    "s3://?scheme=s3%3A%2F%2F",
])  # fmt: skip
def test_work_grows_with_the_length_of_a_hostile_text_alone(
    piece: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Count the characters that are cleaned as addresses; a regular expression that backtracks would never end."""
    seen = 0
    clean_one = redaction._clean_one

    def counting(address: str, *rest: Any) -> str:
        nonlocal seen
        seen += len(address)
        return clean_one(address, *rest)

    monkeypatch.setattr(redaction, "_clean_one", counting)
    text = (piece * (_MEGABYTE // len(piece) + 1))[:_MEGABYTE]
    redact(text)
    redact(f"s3://K:b@c/{text}")
    assert seen <= 40 * len(text)


# --------------------------------------------------------------------------- reprs


class _Callback:
    token = "hunter2hunter2"

    def on_event(self, event: Any) -> None: ...

    def __repr__(self) -> str:
        return f"_Callback({self.token!r})"


def _filesystem(secret: str) -> Any:
    from fsspec.implementations.memory import MemoryFileSystem

    class Secretive(MemoryFileSystem):
        def __repr__(self) -> str:
            return f"Secretive(token={secret!r})"

    return Secretive()


@given(st.sampled_from(ADDRESSES), _letters)
@settings(suppress_health_check=[HealthCheck.too_slow])
def test_no_repr_of_ours_shows_a_secret(address: str, secret: str) -> None:
    uri = address % secret
    assume("://" in uri)
    shown = [
        repr(RunConfig(storage_path=uri)),
        repr(RunConfig(storage_path="x", storage_filesystem=_filesystem(secret))),
        repr(RunConfig(worker_runtime_env={"env_vars": {"TOKEN": secret}})),
        repr(
            ScalingConfig(
                engine="ray", engine_options={"runtime_env": {"env_vars": {"T": secret}, "pip": [uri]}}
            )
        ),
        repr(Checkpoint(uri)),
        repr_without_secrets({"a": [uri, (uri,)], "env_vars": {"T": secret}}),
        short_repr({"a": [uri], "env_vars": {"T": secret}}),
        repr(Result(path=uri, state="finished", storage_filesystem=_filesystem(secret))),
        repr(control.card_of("run", uri, "/files", 1)),
    ]
    config = RunConfig(storage_path=uri, worker_runtime_env={"env_vars": {"TOKEN": secret}})
    shown += [repr(copy.copy(config)), repr(dataclasses.replace(config, name="x"))]
    try:
        trainer = DataParallelTrainer(lambda: None, run_config=config)
        shown += [repr(trainer), str(trainer)]
    except PowertrainError as error:
        shown.append(_everything_of(error))
    if uri.partition("://")[0].lower() in ("s3", "s3a", "gs", "az", "abfs", "abfss"):
        try:
            storage = open_storage(uri)
        except StorageError as error:
            shown.append(_everything_of(error))
        else:
            parsed = parse(uri)
            shown += [
                repr(storage),
                repr(storage.child("x")),
                repr(parsed),
                repr(client_settings(parsed, {})),
            ]
            shown += [str(vars(storage))]
    for text in shown:
        assert secret not in text, text


def test_a_callback_is_named_by_its_class() -> None:
    assert _Callback.token not in repr(RunConfig(callbacks=[_Callback()]))


@pytest.mark.parametrize(
    "make",
    [  # types are ignored where what is refused is wrong by its type already
        lambda s: RunConfig(storage_path=f"s3:/KEY:{s}@bucket"),
        lambda s: RunConfig(storage_path=f"s3://KEY:{s}@bucket", storage_filesystem=_filesystem(s)),
        lambda s: RunConfig(storage_path=f"s3://KEY:{s}@bucket", max_failures=3),  # type: ignore[call-arg]
        lambda s: RunConfig(local_dir=f"s3://KEY:{s}@bucket"),  # type: ignore[call-arg]
        lambda s: RunConfig(working_dir=f"s3://KEY:{s}@bucket"),
        lambda s: RunConfig(worker_runtime_env={"env_vars": {"TOKEN": s.encode()}}),
        lambda s: RunConfig(worker_runtime_env={"TOKEN": s}),
        lambda s: RunConfig(worker_runtime_env=[f"TOKEN={s}"]),  # type: ignore[arg-type]
        lambda s: RunConfig(storage_filesystem=type("Odd", (), {"__repr__": lambda _: s})()),
        lambda s: RunConfig(callbacks=[type("Odd", (), {"__repr__": lambda _: s})()]),
        lambda s: ScalingConfig(engine="ray", engine_options={"runtime_env": {"env_vars": {"T": s}}, "x": 1}),
        lambda s: RunConfig(env_vars={"HF_TOKEN": s}),  # type: ignore[call-arg]
        lambda s: RunConfig(environment={"deep": [{"HF_TOKEN": s}]}),  # type: ignore[call-arg]
        lambda s: ScalingConfig(hf_token=s),  # type: ignore[call-arg]
        lambda s: CheckpointConfig(password=s),  # type: ignore[call-arg]
        lambda s: FailureConfig(env={"A": s}),  # type: ignore[call-arg]
        lambda s: DataConfig(options=[s]),  # type: ignore[call-arg]
        lambda s: RunConfig(*[{"env_vars": {"HF_TOKEN": s}}] * 60),  # type: ignore[arg-type]
        lambda s: RunConfig("run", name={"HF_TOKEN": s}),  # type: ignore[arg-type, misc]
        lambda s: DataParallelTrainer(lambda: None, run_config={"HF_TOKEN": s}),  # type: ignore[arg-type]
        lambda s: DataParallelTrainer(lambda: None, run_config=[{"auth": {"client_secret": [s]}}]),  # type: ignore[arg-type]
        lambda s: open_storage(f"ftp://user:{s}@host/x"),
        lambda s: open_storage(f"file://user:{s}@host/x"),
        lambda s: Checkpoint(f"s3://KEY:{s}/x@bucket").to_directory(),
    ],
)
def test_no_refusal_shows_a_secret(make: Callable[[str], Any]) -> None:
    secret = "Qz7abcdefghijkl"
    with pytest.raises(PowertrainError) as caught:
        make(secret)
    assert secret not in _everything_of(caught.value)


def test_a_storage_path_of_the_environment_is_not_shown_either() -> None:
    with pytest.MonkeyPatch.context() as patch, pytest.raises(ConfigError) as caught:
        patch.setenv("POWERTRAIN_STORAGE", "s3:/KEY:Qz7abcdefghijkl@bucket")
        _ = RunConfig().storage_root
    assert "Qz7" not in _everything_of(caught.value)


# --------------------------------------------------------------------------- errors

_FAILING = tuple(
    f"{address}{'&' if '?' in address else '?'}endpoint_override=http://127.0.0.1:9"
    for address in ADDRESSES
    if address.startswith(("s3://", "az", "abfs")) and "endpoint_override" not in address
) + tuple(address for address in ADDRESSES if "127.0.0.1" in address)


@pytest.mark.parametrize("address", _FAILING)
def test_no_error_of_a_store_that_cannot_be_reached_shows_a_secret(address: str) -> None:
    secret = "Qz7" + "c2VjcmV0c2VjcmV0"
    with pytest.raises((StorageError, OSError)) as caught:
        open_storage(address % secret, timeout=0.05).put("key", b"")
    assert secret not in _everything_of(caught.value)


@pytest.mark.parametrize(
    "text",
    [
        "Generic S3 error: status code: 400 Bad Request at http://u:%s@h/b?X-Amz-Signature=%s",
        "Generic MicrosoftAzure error: error sending request for url (http://h/c?sv=1&sig=%s)",
        "Some words with %s in the middle",
    ],
)
def test_what_a_library_says_is_quoted_without_the_secrets_of_the_address(text: str) -> None:
    secret = "Qz7/abc+def=ghij"
    address = parse(f"s3://KEY:{quote(secret, safe='')}@bucket/x")
    said = text.replace("%s", secret)
    try:
        shown = passing_reason(ValueError(said), "key", address)
    except StorageError as error:
        shown = _everything_of(error)
    assert secret not in shown
    assert quote(secret, safe="") not in shown


def test_a_file_system_that_quotes_its_token_is_not_quoted(tmp_path: Path) -> None:
    from fsspec.implementations.memory import MemoryFileSystem

    from powertrain.storage import probe

    class Failing(MemoryFileSystem):
        protocol = "failing"
        cachable = False

        def _open(self, *_: Any, **__: Any) -> Any:
            raise RuntimeError("GET https://user:Qz7abcdefghijkl@host/x?sig=Qz7abcdefghijkl failed")

    with pytest.raises(StorageError) as caught:
        probe(open_storage("bucket/runs", filesystem=Failing()))
    assert "Qz7" not in _everything_of(caught.value)


@given(st.sampled_from(ADDRESSES), _letters)
def test_no_error_and_no_fact_keeps_a_secret(address: str, secret: str) -> None:
    assume("://" in address)
    uri = address % secret
    error = StorageError(f"The storage path {uri!r} cannot be used: {uri}.")
    assert secret not in _everything_of(error)
    assert secret not in repr(error)
    assert secret not in str(pickle.loads(pickle.dumps(error)))
    failure = ev.WorkerFailure(
        rank=0, kind="raised", summary=uri, message=f"no {uri}!", traceback=f"x\n  {uri}\n"
    )
    fact = ev.Failed(time=1.0, attempt=0, failures=(failure,), decision="retry", reason=f"at {uri}")
    line = ev.encode(fact)
    assert secret.encode() not in line
    assert isinstance(ev.decode(line), ev.Failed)


def test_a_fact_without_addresses_is_kept_as_it_is() -> None:
    fact = ev.Warned(time=1.0, message="a=b and c://d", attempt=1)
    assert ev.decode(ev.encode(fact)) == fact
    assert re.search(rb'"time":1.0', ev.encode(fact))


def test_secrets_of_an_address_are_known_as_written_and_as_sent() -> None:
    address = parse("s3://KEY:a%2Fb%2Bc@bucket/x?session_token=t%26u")
    assert {"a%2Fb%2Bc", "a/b+c", "t&u", "t%26u"} <= address.secrets
    assert isinstance(address, Address)
    assert "KEY" not in address.secrets


def test_a_bucket_with_a_colon_is_a_key_that_was_not_encoded() -> None:
    with pytest.raises(StorageError, match="%2F"):
        parse("s3://KEY:ab/cd@bucket/x")


def _everything_of(error: BaseException) -> str:
    """What a person sees of an error that nothing catches."""
    lines = traceback.format_exception(error)
    return (
        "".join(line for line in lines if not line.lstrip().startswith("File "))
        + repr(error.args)
        + str(error)
    )


def test_an_os_error_names_the_place_without_its_secret() -> None:
    storage = open_storage(
        "s3://KEY:Qz7abcdefghijkl@bucket/x?endpoint_override=http://127.0.0.1:9", timeout=0.01
    )
    with pytest.raises(OSError) as caught:
        storage.get("key")
    assert caught.value.errno == errno.ETIMEDOUT
    assert "Qz7" not in str(caught.value)
