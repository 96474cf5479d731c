from __future__ import annotations

import os
import re
import stat
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.other_user import OtherUser
from tests.support.examples import scaled

from powertrain.errors import ConfigError, StorageError
from powertrain.result import return_value
from powertrain.storage import Storage, boundaries, open_storage, signed


@pytest.fixture
def storage(tmp_path: Path) -> Storage:
    return open_storage(tmp_path / "run")


def put(storage: Storage, data: bytes = b"value") -> None:
    signed.put(storage, signed.sign(storage, "a.pickle", data))


def test_what_was_put_comes_back_and_only_its_owner_can_read_it(storage: Storage) -> None:
    put(storage)
    assert signed.get(storage, "a.pickle") == b"value"
    path = storage.local_path("a.pickle")
    assert path is not None
    assert path.stat().st_mode & 0o077 == 0


@settings(max_examples=scaled(30))
@given(data=st.binary(max_size=64), position=st.integers(0, 63), change=st.integers(1, 255))
def test_no_changed_byte_passes(
    tmp_path_factory: pytest.TempPathFactory, data: bytes, position: int, change: int
) -> None:
    storage = open_storage(tmp_path_factory.mktemp("run"))
    put(storage, data)
    forged = bytearray(data or b"\0")
    forged[position % len(forged)] ^= change
    storage.put("a.pickle", bytes(forged))
    with pytest.raises(signed.NotOurs):
        signed.get(storage, "a.pickle")


def test_another_users_value_and_one_without_a_signature_are_not_ours(
    storage: Storage, tmp_path: Path
) -> None:
    put(storage)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CONFIG_HOME", str(tmp_path / "another"))
        with pytest.raises(signed.NotOurs):
            signed.get(storage, "a.pickle")
    storage.delete("a.signature")
    with pytest.raises(signed.NotOurs):
        signed.get(storage, "a.pickle")


def test_to_look_at_a_value_needs_no_key_and_makes_none(storage: Storage, tmp_path: Path) -> None:
    put(storage)
    for home in (tmp_path / "another", Path("/proc/none-can-be-made-here")):
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("XDG_CONFIG_HOME", str(home))
            with pytest.raises(signed.NotOurs):
                signed.get(storage, "a.pickle")
        assert not home.exists()


def test_what_was_deleted_is_not_there_and_leaves_nothing(storage: Storage) -> None:
    put(storage)
    signed.delete(storage, "a.pickle")
    signed.delete(storage, "a.pickle")
    with pytest.raises(FileNotFoundError):
        signed.get(storage, "a.pickle")
    assert storage.list() == []


def test_a_key_that_anybody_could_guess_is_refused(tmp_path: Path) -> None:
    key = tmp_path / "powertrain" / "signing.key"
    key.parent.mkdir()
    key.touch()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CONFIG_HOME", str(tmp_path))
        with pytest.raises(ConfigError, match=r"signing key .* is damaged"):
            signed.sign(open_storage("/tmp"), "a.pickle", b"value")


def test_a_key_that_other_users_may_know_is_refused(storage: Storage, tmp_path: Path) -> None:
    put(storage)
    key = tmp_path / "powertrain" / "signing.key"
    key.parent.mkdir()
    key.write_bytes(bytes(32))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CONFIG_HOME", str(tmp_path))
        key.chmod(0o644)
        with pytest.raises(ConfigError, match=r"signing key .* may be known to other users"):
            signed.get(storage, "a.pickle")
        key.chmod(0o600)
        os.chown(key, OtherUser.uid, -1) if os.geteuid() == 0 else key.parent.chmod(0o777)
        with pytest.raises(ConfigError, match=r"signing key .* may be known to other users"):
            signed.get(storage, "a.pickle")


def test_a_key_in_a_directory_of_others_is_refused_with_the_reason_and_the_cure(
    storage: Storage, tmp_path: Path
) -> None:
    home = tmp_path / "config"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CONFIG_HOME", str(home))
        put(storage)
        return_value.store(storage, b"value")
        home.chmod(0o777)
        reason = re.escape(f"{str(home)!r} can be written to by other users and has no sticky bit")
        with pytest.raises(ConfigError, match=reason) as caught:
            signed.get(storage, "a.pickle")
        assert "a new one is made" not in str(caught.value), "a new key would lie in the same directory"
        assert "XDG_CONFIG_HOME" in str(caught.value)
        with pytest.raises(StorageError, match=reason):
            return_value.load(storage)
        assert return_value.load(storage, trust=True) == b"value"
        home.chmod(0o755)
        assert signed.get(storage, "a.pickle") == b"value"


def test_a_value_of_another_run_or_of_another_name_is_not_ours(tmp_path: Path) -> None:
    first, second = open_storage(tmp_path / "first"), open_storage(tmp_path / "second")
    put(first)
    for ending in ("pickle", "signature"):
        second.put(f"a.{ending}", first.get(f"a.{ending}"))
        first.put(f"b.{ending}", first.get(f"a.{ending}"))
    with pytest.raises(signed.NotOurs):
        signed.get(second, "a.pickle")
    with pytest.raises(signed.NotOurs):
        signed.get(first, "b.pickle")
    (tmp_path / "elsewhere").mkdir()
    os.rename(tmp_path / "first", tmp_path / "elsewhere" / "first")
    assert signed.get(open_storage(tmp_path / "elsewhere" / "first"), "a.pickle") == b"value"


def test_a_value_is_never_readable_by_others_while_it_is_written(
    storage: Storage, monkeypatch: pytest.MonkeyPatch
) -> None:
    modes: list[int] = []

    def look(_: str, path: str) -> None:
        root = Path(storage.uri)
        modes.extend(stat.S_IMODE(one.stat().st_mode) for one in root.rglob("*") if one.is_file())

    boundaries.install(look)
    try:
        signed.put(storage, signed.sign(storage, "a.pickle", b"value")._replace(signature=b""))
    finally:
        boundaries.install(None)
    assert modes
    assert 0o600 in modes
    assert all(mode == 0o600 for mode in modes[:3])
