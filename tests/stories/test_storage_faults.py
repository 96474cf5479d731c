"""Storage that refuses, hangs or is damaged while a run goes on: training goes on, and nothing is lost in silence.

The storage is a real S3 server behind a proxy that can be told to misbehave. The run is in this process; its loop saves
when it is told to, so that every fault comes at a known place of the story.

The first plays on the cluster too, where other processes upload the files and every node has to prove that it sees the
bucket. The others look into the staging area or at what the controller makes of a fault: told on one machine.
"""

from __future__ import annotations

import shutil
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.s3_server import Proxy, S3Server
from tests.stories.engines import ON_BOTH

import powertrain
from powertrain import (
    Checkpoint,
    CheckpointConfig,
    DataParallelTrainer,
    RunConfig,
    ScalingConfig,
    SyncConfig,
    UserCallback,
)
from powertrain.checkpoint import committed
from powertrain.errors import CheckpointError
from powertrain.result.result import Result
from powertrain.run import events as ev
from powertrain.run.record import journal, lease, shipping
from powertrain.storage import Storage, open_storage

#: A story that does not get on within this time has hung.
PATIENCE = 40.0
SIZE = 100_000


@pytest.fixture
def spool(tmp_path: Path) -> Iterator[Path]:
    """Where runs of this test keep what storage has not taken yet."""
    place = tmp_path / "spool"
    place.mkdir()
    with pytest.MonkeyPatch.context() as patch:  # undone before the check for what the test left
        patch.setenv("TMPDIR", str(place))
        yield place


def save_when_told(config: dict[str, Any]) -> int:
    """Saves number 1, then each further one when its go-file appears, and says so when ``report`` has returned."""
    marks, rank = Path(config["marks"]), powertrain.get_context().get_world_rank()
    checkpoint = powertrain.get_checkpoint()
    start = 0
    if checkpoint is not None:
        with checkpoint.as_directory() as directory:
            start = int(Path(directory, "number").read_text())
    for number in range(start + 1, config["last"] + 1):
        if number > 1:
            await_mark(marks / f"go-{number}")
        with powertrain.checkpoint_dir() as directory:
            if rank == 0:
                Path(directory, "number").write_text(str(number))
            Path(directory, f"state-{rank}" if rank else "state").write_bytes(bytes([number]) * SIZE)
            # The first is waited for, so that what follows finds the staging area empty.
            mode = "SYNC" if number == 1 else "ASYNC"
            powertrain.report(
                {"number": number}, checkpoint=Checkpoint(directory), checkpoint_upload_mode=mode
            )
        (marks / f"reported-{number}").touch()
    await_mark(marks / "end")
    return start


def await_mark(mark: Path) -> None:
    deadline = time.monotonic() + PATIENCE
    while not mark.exists():
        if time.monotonic() > deadline:
            raise TimeoutError(f"nobody has told {mark.name}")
        time.sleep(0.005)


class Listener(UserCallback):
    """Keeps every event that is shown to the user."""

    def __init__(self) -> None:
        self.facts: list[Any] = []

    def on_event(self, run_context: Any, event: Any) -> None:
        self.facts.append(event)


class Story:
    """One run on a thread, and its events."""

    def __init__(
        self,
        directory: Path,
        uri: str,
        last: int,
        workers: int = 1,
        engine: str = "local",
        **options: Any,
    ) -> None:
        self._marks = directory / "marks"
        self._marks.mkdir()
        self.uri, self._listener = uri, Listener()
        self._trainer = DataParallelTrainer(
            save_when_told,
            train_loop_config={"marks": str(self._marks), "last": last},
            scaling_config=ScalingConfig(num_workers=workers, engine=engine),
            run_config=RunConfig(name="run", storage_path=uri, callbacks=[self._listener], **options),
        )
        self._outcome: list[Any] = []
        self._thread = threading.Thread(target=self._fit, daemon=True)

    def _fit(self) -> None:
        try:
            self._outcome.append(self._trainer.fit())
        except BaseException as error:
            self._outcome.append(error)

    def __enter__(self) -> Story:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.let_it_end()
        self._thread.join(PATIENCE)

    def facts(self, kind: type[Any]) -> list[Any]:
        return [fact for fact in list(self._listener.facts) if isinstance(fact, kind)]

    def rows(self, kind: type[Any]) -> list[int]:
        return [fact.row for fact in self.facts(kind)]

    def go(self, *numbers: int) -> None:
        for number in numbers:
            (self._marks / f"go-{number}").touch()

    def let_it_end(self) -> None:
        (self._marks / "end").touch()

    def has_reported(self, number: int) -> bool:
        return (self._marks / f"reported-{number}").exists()

    def until(self, come: Callable[[], Any], what: str) -> None:
        deadline = time.monotonic() + PATIENCE
        while not come():
            if self._outcome and not come():
                pytest.fail(f"the run ended before this came: {what}; it ended with {self._outcome[0]!r}")
            if time.monotonic() > deadline:
                pytest.fail(f"not within {PATIENCE:g} s: {what}; told so far: {self._listener.facts}")
            time.sleep(0.01)

    def result(self) -> Result:
        """What ``fit`` returns, or raises, once the loop was let to its end."""
        self.let_it_end()
        self._thread.join(PATIENCE)
        if not self._outcome:
            pytest.fail(f"fit has not returned; told so far: {self._listener.facts}")
        (outcome,) = self._outcome
        if isinstance(outcome, BaseException):
            raise outcome
        assert isinstance(outcome, Result)
        return outcome


def storage_of(s3: S3Server, name: str) -> Storage:
    return open_storage(s3.uri(f"{name}/run"))


def verified_rows(storage: Storage) -> list[int]:
    """Rows of the committed checkpoints, each of which is proved to be whole."""
    manifests = committed.committed(storage)
    for manifest in manifests:
        committed.verify(storage, manifest)
    return [manifest.row for manifest in manifests]


def first_is_committed(story: Story) -> None:
    story.until(lambda: story.has_reported(1), "the commit of row 1")


# --------------------------------------------------------------------------- storage is away for a while


@ON_BOTH
def test_storage_that_refuses_delays_commits_and_nothing_else(
    s3: S3Server,
    proxy: Proxy,
    spool: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    engine: str,
) -> None:
    monkeypatch.setattr("powertrain.run.checkpoints.settling._LAG_INTERVAL_S", 1.0)
    with Story(tmp_path, proxy.uri(f"refuses-{engine}"), last=5, engine=engine) as story:
        first_is_committed(story)
        proxy.refuse()
        story.go(2, 3, 4, 5)
        story.until(lambda: story.has_reported(5), "all reports, while storage refuses")
        story.until(lambda: lag_of_all_four(story), "a warning about the lag of all four")
        assert story.rows(ev.Committed) == [1]
        proxy.mend()
        assert story.result().metrics == {"number": 5}

    lagged = lag_of_all_four(story)[0]
    assert lagged.seconds >= 1.0
    assert lagged.bytes >= 4 * SIZE
    assert "refused" in lagged.reason
    assert story.rows(ev.Committed) == [1, 2, 3, 4, 5]
    assert not story.facts(ev.CheckpointFailed)
    storage = storage_of(s3, f"refuses-{engine}")
    assert verified_rows(storage) == [1, 2, 3, 4, 5]
    kept = [fact.row for fact in journal.read(storage) if isinstance(fact, ev.Committed)]
    assert kept == [1, 2, 3, 4, 5]
    assert not [path for path in spool.rglob("*") if path.is_file()]


def lag_of_all_four(story: Story) -> list[Any]:
    """On a busy machine the first checkpoint may lag, too, and the others before all are reported."""
    return [fact for fact in story.facts(ev.UploadLagged) if (fact.row, fact.waiting) == (2, 4)]


def test_storage_that_hangs_past_the_deadline_fails_checkpoints_and_not_the_run(
    s3: S3Server, proxy: Proxy, spool: Path, tmp_path: Path
) -> None:
    with Story(tmp_path, proxy.uri("hangs"), last=3, sync_config=SyncConfig(sync_timeout=3)) as story:
        first_is_committed(story)
        proxy.hang()
        story.go(2)
        story.until(lambda: story.rows(ev.CheckpointFailed) == [2], "the failure of row 2")
        proxy.mend()
        story.go(3)
        assert story.result().metrics == {"number": 3}

    (failed,) = story.facts(ev.CheckpointFailed)
    assert "no success within 3 s" in failed.reason
    assert "no answer" in failed.reason
    assert story.rows(ev.Committed) == [1, 3]
    assert verified_rows(storage_of(s3, "hangs")) == [1, 3]


# --------------------------------------------------------------------------- the staging area is full


def test_while_storage_is_down_the_oldest_checkpoint_yields_to_the_newest_and_it_is_reported(
    s3: S3Server, proxy: Proxy, spool: Path, tmp_path: Path
) -> None:
    config = CheckpointConfig(staging_bytes=int(2.5 * SIZE), on_full="replace")
    with Story(tmp_path, proxy.uri("yields"), last=6, checkpoint_config=config) as story:
        first_is_committed(story)
        proxy.refuse()
        story.go(2, 3, 4, 5, 6)
        story.until(lambda: story.has_reported(6), "all reports, while storage refuses")
        assert story.rows(ev.CheckpointFailed) == [2, 3, 4]
        staged = sum(path.stat().st_size for path in spool.rglob("state"))
        assert staged <= 2.5 * SIZE
        proxy.mend()
        assert story.result().metrics == {"number": 6}

    for failed in story.facts(ev.CheckpointFailed):
        assert "the staging area is full" in failed.reason
        assert f"row {failed.row + 2} takes its place" in failed.reason
    assert story.rows(ev.Committed) == [1, 5, 6]
    assert verified_rows(storage_of(s3, "yields")) == [1, 5, 6]


def test_ranks_that_are_full_at_the_same_time_make_one_checkpoint_yield(
    proxy: Proxy, spool: Path, tmp_path: Path
) -> None:
    config = CheckpointConfig(staging_bytes=int(2 * 3.5 * SIZE), on_full="replace")
    with Story(tmp_path, proxy.uri("ranks"), last=6, workers=2, checkpoint_config=config) as story:
        first_is_committed(story)
        proxy.refuse()
        story.go(2, 3, 4, 5, 6)
        story.until(lambda: story.has_reported(6), "all reports, while storage refuses")
        proxy.mend()
        story.result()

    assert story.rows(ev.CheckpointFailed) == [2, 3]
    assert story.rows(ev.Committed) == [1, 4, 5, 6]


def test_with_on_full_wait_report_waits_for_storage_and_nothing_is_given_up(
    s3: S3Server, proxy: Proxy, spool: Path, tmp_path: Path
) -> None:
    config = CheckpointConfig(staging_bytes=int(2.5 * SIZE), on_full="wait")
    with Story(tmp_path, proxy.uri("waits"), last=4, checkpoint_config=config) as story:
        first_is_committed(story)
        proxy.refuse()
        story.go(2, 3, 4)
        story.until(
            lambda: any("staging area" in fact.message for fact in story.facts(ev.Warned)),
            "a word about the full staging area",
        )
        assert story.has_reported(3)
        assert not story.has_reported(4)
        proxy.mend()
        assert story.result().metrics == {"number": 4}

    assert not story.facts(ev.CheckpointFailed)
    assert story.rows(ev.Committed) == [1, 2, 3, 4]
    assert verified_rows(storage_of(s3, "waits")) == [1, 2, 3, 4]


# --------------------------------------------------------------------------- storage is gone for good


def be_brief_at_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """The end of a run tries storage several more times."""
    monkeypatch.setattr(lease, "_RELEASE_SECONDS", 1.0)
    monkeypatch.setattr(lease, "BEAT_INTERVAL_S", 1.0)
    monkeypatch.setattr(shipping, "_PUT_TIMEOUT_S", 1.0)


def test_fit_returns_at_the_deadline_and_says_where_the_files_are(
    s3: S3Server,
    proxy: Proxy,
    spool: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    be_brief_at_the_end(monkeypatch)
    with Story(
        tmp_path,
        proxy.uri("gone"),
        last=3,
        sync_config=SyncConfig(sync_timeout=3),
        checkpoint_config=CheckpointConfig(on_lost="warn"),
    ) as story:
        first_is_committed(story)
        proxy.refuse()
        story.go(2, 3)
        story.until(lambda: story.has_reported(3), "all reports, while storage refuses")
        began = time.monotonic()
        assert story.result().metrics == {"number": 3}
        assert time.monotonic() - began < 60

    assert story.rows(ev.Committed) == [1]
    assert story.rows(ev.CheckpointFailed) == [2, 3]
    for failed in story.facts(ev.CheckpointFailed):
        check_files_stayed(spool, failed)
    assert "journal/" in "".join(capfd.readouterr())


def test_what_storage_has_not_taken_at_the_end_stays_although_it_was_tried_long_enough(
    proxy: Proxy, spool: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was reported some time before the end, so that the time to try it is over before that of ``fit``."""
    be_brief_at_the_end(monkeypatch)
    monkeypatch.setattr("powertrain.run.checkpoints.settling._LAG_INTERVAL_S", 1.5)
    with Story(tmp_path, proxy.uri("last"), last=2, sync_config=SyncConfig(sync_timeout=3)) as story:
        first_is_committed(story)
        proxy.refuse()
        story.go(2)
        story.until(lambda: story.facts(ev.UploadLagged), "a word about the lag")
        with pytest.raises(CheckpointError, match="refused"):
            story.result()

    (failed,) = story.facts(ev.CheckpointFailed)
    check_files_stayed(spool, failed)


def check_files_stayed(spool: Path, failed: ev.CheckpointFailed) -> None:
    """The files of a checkpoint that was left are where its failure says."""
    staged = [path.parent for path in spool.rglob("state") if str(path.parent.parent) in failed.reason]
    assert len(staged) == 1, failed.reason
    assert (staged[0] / "number").read_text() == str(failed.row)
    assert (staged[0] / "state").read_bytes() == bytes([failed.row]) * SIZE


# --------------------------------------------------------------------------- starting again


def fit_again(tmp_path: Path, uri: str, last: int) -> tuple[Result, Story]:
    shutil.rmtree(tmp_path / "marks", ignore_errors=True)
    with Story(tmp_path, uri, last) as story:
        story.go(*range(2, last + 1))
        return story.result(), story


@pytest.mark.smoke
def test_a_second_start_goes_on_from_what_is_in_the_bucket(
    s3: S3Server, proxy: Proxy, spool: Path, tmp_path: Path
) -> None:
    first, _ = fit_again(tmp_path, proxy.uri("again"), last=2)
    second, story = fit_again(tmp_path, proxy.uri("again"), last=3)

    assert (first.return_value, second.return_value) == (0, 2)
    assert story.rows(ev.Committed) == [3]
    assert verified_rows(storage_of(s3, "again")) == [1, 2, 3]


def test_a_checkpoint_damaged_in_the_bucket_is_noticed_and_the_older_one_is_taken(
    s3: S3Server, proxy: Proxy, spool: Path, tmp_path: Path
) -> None:
    fit_again(tmp_path, proxy.uri("damaged"), last=2)
    storage = storage_of(s3, "damaged")
    newest = committed.newest(storage)
    assert newest is not None
    flip_one_byte(storage, f"checkpoints/{newest.name}/state")

    second, story = fit_again(tmp_path, proxy.uri("damaged"), last=2)

    assert second.return_value == 1
    told = [fact.message for fact in story.facts(ev.Warned)]
    assert any(newest.name in message and "state" in message for message in told), told
    assert story.rows(ev.Committed) == [2]
    assert verified_rows(storage) == [1, 2]


def flip_one_byte(storage: Storage, key: str) -> None:
    content = bytearray(storage.get(key))
    content[len(content) // 2] ^= 1
    storage.put(key, bytes(content))
