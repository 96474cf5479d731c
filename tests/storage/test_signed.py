from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from powertrain.errors import ConfigError
from powertrain.storage import Storage, open_storage, signed


@pytest.fixture
def storage(tmp_path: Path) -> Storage:
    return open_storage(tmp_path / "run")


def put(storage: Storage, data: bytes = b"value") -> None:
    signed.put(storage, "a.pickle", signed.sign(data))


def test_what_was_put_comes_back_and_only_its_owner_can_read_it(storage: Storage) -> None:
    put(storage)
    assert signed.get(storage, "a.pickle") == b"value"
    path = storage.local_path("a.pickle")
    assert path is not None
    assert path.stat().st_mode & 0o077 == 0


@settings(max_examples=30)
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
            signed.sign(b"value")
