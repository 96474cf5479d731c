from __future__ import annotations

import secrets
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from tests.s3_server import Proxy, S3Server

from powertrain.errors import RunInUseError, StorageError
from powertrain.run import events as ev
from powertrain.run.metrics import reading
from powertrain.run.metrics.points import PointRecord
from powertrain.run.metrics.store import MetricsStore
from powertrain.run.record import journal, shipping
from powertrain.run.record import lease as lease_module
from powertrain.run.record.journal import Journal
from powertrain.run.record.lease import Lease
from powertrain.run.record.shipping import Shipped, is_spooled
from powertrain.storage import Storage, open_storage


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shipping, "SHIP_INTERVAL_S", 0.05)
    monkeypatch.setattr(shipping, "_REST_FACTOR", 0.0)
    monkeypatch.setattr(lease_module, "BEAT_INTERVAL_S", 0.2)


@pytest.fixture
def plain(s3: S3Server) -> Storage:
    return open_storage(s3.uri(f"runs/{secrets.token_hex(4)}"), timeout=20)


@pytest.fixture
def shipped(plain: Storage, tmp_path: Path) -> Iterator[Shipped]:
    storage = Shipped(plain, tmp_path / "spool")
    yield storage
    storage.close()


def until(condition: Callable[[], bool], seconds: float = 20.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not come to pass"
        time.sleep(0.01)


def append(storage: Storage, key: str, text: bytes) -> None:
    path = storage.local_path(key)
    assert path is not None
    with open(path, "ab") as file:
        file.write(text)


def value(storage: Storage, key: str) -> bytes | None:
    try:
        return storage.get(key)
    except FileNotFoundError:
        return None


def test_only_what_is_appended_to_is_spooled(shipped: Shipped) -> None:
    assert is_spooled("journal/0001-000001.jsonl")
    assert is_spooled("metrics/0001.open")
    assert is_spooled("logs/attempt-1/rank-0.log")
    for key in (
        "metrics/0001-000001.arrow",
        "lease/0001",
        "checkpoints/c/.powertrain-manifest.json",
        "journal",
    ):
        assert not is_spooled(key)
        assert shipped.local_path(key) is None


def test_appended_files_reach_storage_while_they_grow(shipped: Shipped, plain: Storage) -> None:
    append(shipped, "logs/a.log", b"one\n")
    until(lambda: value(plain, "logs/a.log") == b"one\n")
    append(shipped, "logs/a.log", b"two\n")
    assert shipped.get("logs/a.log") == b"one\ntwo\n"
    assert shipped.list("logs") == [("logs/a.log", 8)]
    until(lambda: value(plain, "logs/a.log") == b"one\ntwo\n")


def test_an_unchanged_file_is_not_put_again(
    shipped: Shipped, plain: Storage, monkeypatch: pytest.MonkeyPatch
) -> None:
    puts: list[str] = []
    put_file = type(plain).put_file
    monkeypatch.setattr(
        type(plain),
        "put_file",
        lambda self, key, path, **more: puts.append(key) or put_file(self, key, path, **more),
    )
    append(shipped, "logs/a.log", b"one\n")
    until(lambda: value(plain, "logs/a.log") == b"one\n")
    append(shipped, "logs/b.log", b"two\n")
    until(lambda: value(plain, "logs/b.log") == b"two\n")
    shipped.close()
    assert puts == ["logs/a.log", "logs/b.log"]


def test_other_keys_go_to_storage_at_once(shipped: Shipped, plain: Storage) -> None:
    shipped.put("lease/0001", b"x")
    assert plain.get("lease/0001") == b"x"
    assert not shipped.put_if_absent("lease/0001", b"y")
    assert [entry.key for entry in shipped.list()] == ["lease/0001"]


def test_values_of_earlier_starts_are_read_from_storage(plain: Storage, tmp_path: Path) -> None:
    plain.put("journal/0001-000001.jsonl", b"old\n")
    shipped = Shipped(plain, tmp_path / "spool")
    assert shipped.get("journal/0001-000001.jsonl") == b"old\n"
    append(shipped, "journal/0002-000001.jsonl", b"new\n")
    assert shipped.list("journal") == [("journal/0001-000001.jsonl", 4), ("journal/0002-000001.jsonl", 4)]
    shipped.close()
    assert plain.get("journal/0002-000001.jsonl") == b"new\n"


def test_a_file_that_is_deleted_here_is_soon_deleted_there(shipped: Shipped, plain: Storage) -> None:
    append(shipped, "metrics/0001.open", b"points")
    until(lambda: value(plain, "metrics/0001.open") == b"points")
    path = shipped.local_path("metrics/0001.open")
    assert path is not None
    path.unlink()
    assert shipped.list() == []
    assert value(shipped, "metrics/0001.open") is None
    until(lambda: plain.list() == [])


def test_close_ships_the_rest_and_removes_the_spool(plain: Storage, tmp_path: Path) -> None:
    shipped = Shipped(plain, tmp_path / "spool")
    append(shipped, "logs/deep/a.log", b"last words\n")
    shipped.close()
    shipped.close()
    assert plain.get("logs/deep/a.log") == b"last words\n"
    assert shipped.get("logs/deep/a.log") == b"last words\n"
    assert not (tmp_path / "spool").exists()


def test_what_a_dead_process_left_in_the_spool_is_shipped_by_the_next(plain: Storage, tmp_path: Path) -> None:
    (tmp_path / "spool" / "journal").mkdir(parents=True)
    (tmp_path / "spool" / "journal" / "0001-000001.jsonl").write_bytes(b"left\n")
    Shipped(plain, tmp_path / "spool").close()
    assert plain.get("journal/0001-000001.jsonl") == b"left\n"


def test_close_names_what_could_not_be_shipped_and_where_it_is(s3: S3Server, tmp_path: Path) -> None:
    with Proxy(s3.port) as proxy:
        storage = open_storage(proxy.uri("runs/unreachable"), timeout=20)
        shipped = Shipped(storage, tmp_path / "spool")
        proxy.refuse()
        append(shipped, "logs/a.log", b"kept\n")
        began = time.monotonic()
        with pytest.raises(StorageError, match=r"logs/a\.log") as caught:
            shipped.close(timeout=1.0)
        assert time.monotonic() - began < 10
        assert str(tmp_path / "spool") in str(caught.value)
        assert (tmp_path / "spool" / "logs" / "a.log").read_bytes() == b"kept\n"
        proxy.mend()
        shipped.close()
        assert storage.get("logs/a.log") == b"kept\n"


def test_trouble_is_seen_and_passes(s3: S3Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shipping, "_PUT_TIMEOUT_S", 0.5)
    with Proxy(s3.port) as proxy:
        storage = open_storage(proxy.uri(f"runs/{secrets.token_hex(4)}"), timeout=20)
        shipped = Shipped(storage, tmp_path / "spool")
        proxy.refuse()
        append(shipped, "logs/a.log", b"1\n")
        until(lambda: "refused" in shipped.problem)
        append(shipped, "logs/a.log", b"2\n")  # writing goes on meanwhile
        proxy.mend()
        until(lambda: not shipped.problem and value(storage, "logs/a.log") == b"1\n2\n")
        shipped.close()


FACTS: list[ev.Event] = [
    ev.RunStarted(time=1.0, name="r", lease=1, host="h", pid=1, version="0", engine="local"),
    ev.Committed(time=5.0, attempt=0, row=3, checkpoint="checkpoint_000003"),
    ev.Ended(time=6.0, state="finished", reason="done", rows=3),
]


def test_a_journal_works_on_it(shipped: Shipped, plain: Storage) -> None:
    log = Journal(shipped, 1)
    for fact in FACTS:
        log.append(fact)
    assert journal.read(shipped) == FACTS
    until(lambda: journal.read(plain) == FACTS)
    log.close()
    shipped.close()
    assert journal.read(plain) == FACTS
    assert journal.read(shipped) == FACTS


def points(first: int, last: int) -> list[PointRecord]:
    return [
        PointRecord(rank=0, attempt=1, row=row, at=float(row), solo=False, metrics={"loss": row / 10})
        for row in range(first, last + 1)
    ]


def test_metrics_work_on_it(shipped: Shipped, plain: Storage) -> None:
    store = MetricsStore(shipped, 1)
    store.add(points(1, 50))
    assert store.wait_spooled(10)
    assert reading.read_table(shipped).num_rows == 50
    until(lambda: value(plain, "metrics/0001.open") is not None)
    assert reading.read_table(plain).num_rows == 50
    store.close()
    shipped.close()
    assert reading.read_table(plain).num_rows == 50
    assert [entry.key for entry in plain.list("metrics")] == ["metrics/0001-000001.arrow"]


def test_points_of_a_dead_machine_are_rescued_by_the_next_start(plain: Storage, tmp_path: Path) -> None:
    first = Shipped(plain, tmp_path / "one")
    store = MetricsStore(first, 1)
    store.add(points(1, 50))
    assert store.wait_spooled(10)
    until(lambda: reading.read_table(plain).num_rows == 50)
    copy = plain.get("metrics/0001.open")
    store.close()
    first.close()
    plain.delete("metrics/0001-000001.arrow")
    plain.put("metrics/0001.open", copy)  # as the machine's death would have left it

    second = Shipped(plain, tmp_path / "two")
    store = MetricsStore(second, 2)
    store.add(points(51, 60))
    store.close()
    second.close()
    assert reading.read_table(plain)["row"].to_pylist() == list(range(1, 61))
    assert not [entry.key for entry in plain.list("metrics") if entry.key.endswith(".open")]


def test_many_threads_may_use_it_while_it_ships(shipped: Shipped, plain: Storage) -> None:
    def write(number: int) -> None:
        for line in range(50):
            append(shipped, f"logs/{number}.log", b"%d\n" % line)
            shipped.get(f"logs/{number}.log")
            shipped.list("logs")

    threads = [threading.Thread(target=write, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    shipped.close()
    whole = b"".join(b"%d\n" % line for line in range(50))
    assert {entry.key: plain.get(entry.key) for entry in plain.list("logs")} == {
        f"logs/{number}.log": whole for number in range(4)
    }


def test_a_lease_of_such_a_run_beats(shipped: Shipped, plain: Storage) -> None:
    with Lease.take(shipped) as lease:
        assert lease.number == 1
        with pytest.raises(RunInUseError):
            Lease.take(plain)
