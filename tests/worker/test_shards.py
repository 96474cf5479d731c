"""A rank's data: which shard it gets, where it goes on after a restart, what checkpoints keep of it."""

from __future__ import annotations

import pickle
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import cloudpickle
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.data.small_source import numbered

import powertrain
from powertrain.checkpoint.checkpoint import Checkpoint
from powertrain.data.plan.prepared import Prepared
from powertrain.data.ray.shard import StreamedShard
from powertrain.data.shard import DataShard
from powertrain.engine.ray.feed import Feed
from powertrain.errors import ConfigError, OutsideWorkerError
from powertrain.storage import safety
from powertrain.wire.from_worker import FirstStep
from powertrain.worker import session
from powertrain.worker.checkpoints import saving
from powertrain.worker.data.batch_plan import gradient_weight
from powertrain.worker.data.shards import (
    DATA_EXTRA,
    DataPosition,
    FirstWaits,
    RecordedWaits,
    Shards,
    disk_budget,
    in_words,
    positions_in,
    readable,
)
from powertrain.worker.place import AttemptStart, DataSettings, Place, RankFiles
from powertrain.worker.progress import progress

ROWS = 40


def prepared(name: str) -> Prepared:
    inspected = numbered([10, 30]).inspected()
    return Prepared(name, inspected, 7, True, inspected.fingerprint)


class Rank:
    """A rank without a run: what it says is kept."""

    def __init__(
        self,
        directory: Path,
        names: tuple[str, ...] = ("train", "eval"),
        *,
        data_positions: dict[str, Any] | None = None,
        data_feeds: dict[str, str] | None = None,
        **place: Any,
    ) -> None:
        self.said: list[str] = []
        self.device = -1
        self.sees_newest = False
        self.iterators: dict[str, Iterator[Any]] = {}
        self.place = Place(
            data=DataSettings(cache=str(directory), cache_bytes=2**20),
            start=AttemptStart(data_positions=data_positions or {}),
            files=RankFiles(feeds=data_feeds or {}),
            **place,
        )
        self.service = SimpleNamespace(post=lambda message: self.said.append(message.message))
        datasets = {name: prepared(name) for name in names}
        self.data = Shards(self, cloudpickle.dumps(datasets) if names else b"")  # type: ignore[arg-type]

    def read(self, batches: int, name: str = "train") -> list[int]:
        """Rows of some batches of 8 rows of all ranks together, from where the shard stands."""
        rows: list[int] = []
        iterator: Any = iter(self.data.shard(name).iter_batches(global_batch_size=8, prefetch_batches=0))
        for _ in range(batches):
            rows += next(iterator)["id"].tolist()
        self.iterators[name] = iterator  # one that is dropped would give its epoch up
        return rows


@pytest.fixture
def ranks(tmp_path: Path) -> Iterator[Any]:
    made: list[Rank] = []

    def make(*names: str, **place: Any) -> Rank:
        made.append(Rank(tmp_path, names or ("train", "eval"), **place))
        return made[-1]

    yield make
    for rank in made:
        rank.data.close()
    gradient_weight.reset()
    progress.reset()


def state_after(ranks: Any, batches: int, name: str = "train") -> dict[str, Any]:
    rank = ranks()
    rank.read(batches, name)
    state: dict[str, Any] = rank.data.positions()[name]
    return state


# --------------------------------------------------------------------------- which shard


def test_a_name_that_the_trainer_was_not_given_is_refused_with_those_there_are(ranks: Any) -> None:
    with pytest.raises(ConfigError, match=r"no dataset 'test'.*'train', 'eval'"):
        ranks().data.shard("test")


def test_without_datasets_it_is_said_how_to_give_some(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"given no datasets.*datasets=\{'train': powertrain\.data"):
        Rank(tmp_path, ()).data.shard("train")


def test_outside_a_worker_there_are_no_shards() -> None:
    with pytest.raises(OutsideWorkerError, match=r"get_dataset_shard\(\) was called outside"):
        powertrain.get_dataset_shard("train")


def test_the_public_function_reads_the_session(ranks: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    rank = ranks()
    monkeypatch.setattr(session, "_session", rank)
    assert powertrain.get_dataset_shard() is rank.data.shard("train")


def test_a_shard_is_one_object_and_a_state_puts_it_elsewhere(ranks: Any) -> None:
    state = state_after(ranks, 2)
    rank = ranks()
    shard = rank.data.shard("train")
    assert rank.data.shard("train") is shard
    assert rank.data.shard("train", state_dict=state) is shard
    assert (shard.state_dict()["epoch"], shard.state_dict()["position"]) == (0, 16)


def test_datasets_of_this_process_are_used_as_they_are_and_only_when_they_are_needed(ranks: Any) -> None:
    rank, own, asked = ranks(), prepared("train"), []
    rank.data.provide(lambda: asked.append(1) or {"train": own})
    assert asked == []
    rank.read(1)
    rank.data.shard("train")
    assert asked == [1]
    with pytest.raises(ConfigError, match="no dataset 'eval'"):
        rank.data.shard("eval")


def test_waits_before_the_first_batch_are_a_part_of_the_start_and_later_ones_are_not(
    ranks: Any,
) -> None:
    told: list[FirstStep] = []
    progress.reset()
    progress.startup.begin(told.append)
    shard = ranks().data.shard("train")
    batches = iter(shard.iter_batches(batch_size=4))
    assert isinstance(shard.watch, FirstWaits)
    next(batches)
    assert type(shard.watch) is RecordedWaits
    progress.startup.stepped()
    assert told[0].data > 0


def test_each_batch_sets_the_weight_of_its_rank_and_counts(ranks: Any) -> None:
    rank = ranks(rank=0, world_size=3)
    before = progress.batches
    assert len(rank.read(1)) == 2  # of 8 rows for 3 ranks
    assert gradient_weight.value == pytest.approx(2 * 3 / 8)
    rank.read(2)
    assert progress.batches == before + 3


# --------------------------------------------------------------------------- after a restart


def test_a_loop_that_loads_its_checkpoint_goes_on_where_that_was(
    ranks: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = ranks().read(5)
    rank = ranks(data_positions={"train": state_after(ranks, 2)})
    monkeypatch.setattr(session, "_session", rank)
    assert powertrain.get_checkpoint() is None  # there is no file to it in this test
    assert rank.read(3) == whole[16:]
    assert rank.said == []


def test_a_loop_that_does_not_ask_begins_anew_which_rank_zero_says_once(ranks: Any) -> None:
    saved = {"train": state_after(ranks, 2), "eval": state_after(ranks, 1, "eval")}
    first, second = ranks(data_positions=saved), ranks(rank=1, world_size=2, data_positions=saved)
    for rank in (first, second):
        rank.read(1)
        rank.read(1, "eval")
        assert rank.data.positions()["train"]["position"] == 8
    (warning,) = first.said
    assert "train: epoch 0, 40 %" in warning
    assert "training data starts at epoch 0" in warning
    assert second.said == []


def test_looking_at_a_shard_before_the_checkpoint_is_asked_for_decides_nothing(ranks: Any) -> None:
    rank = ranks(data_positions={"train": state_after(ranks, 2)})
    shard = rank.data.shard("train")
    assert (shard.epoch, shard.state_dict()["position"], rank.said) == (0, 0, [])
    rank.data.on_checkpoint_requested()
    assert shard.state_dict()["position"] == 16
    assert rank.said == []


def test_a_place_that_the_user_has_chosen_is_no_reason_to_warn(ranks: Any) -> None:
    state = state_after(ranks, 2)
    rank = ranks(data_positions={"train": state})
    rank.data.shard("train", state_dict=state)
    rank.read(1)
    assert rank.said == []


# --------------------------------------------------------------------------- what checkpoints keep


def test_datasets_not_touched_yet_keep_their_place_if_the_checkpoint_counts(ranks: Any) -> None:
    saved = {"train": state_after(ranks, 2), "eval": state_after(ranks, 1, "eval")}
    going_on, anew = ranks(data_positions=saved), ranks(data_positions=saved)
    going_on.data.on_checkpoint_requested()
    going_on.read(1)
    anew.read(1)
    assert going_on.data.positions()["eval"] == saved["eval"]
    assert going_on.data.positions()["train"]["position"] == 24
    assert set(anew.data.positions()) == {"train"}


def test_a_checkpoint_keeps_where_data_stood_when_it_was_made(ranks: Any, tmp_path: Path) -> None:
    rank = ranks()
    rank.read(1)
    made_now = Checkpoint(tmp_path)
    rank.data.capture(made_now)
    next(rank.iterators["train"])
    plain = Checkpoint(tmp_path / "plain")
    assert rank.data.extras_of(made_now)[DATA_EXTRA]["train"]["position"] == 8
    assert rank.data.extras_of(plain)[DATA_EXTRA]["train"]["position"] == 16
    assert rank.data.extras_of(object())[DATA_EXTRA]["train"]["position"] == 16


def test_a_rank_that_reads_nothing_adds_nothing_to_a_checkpoint(ranks: Any, tmp_path: Path) -> None:
    assert ranks().data.extras_of(Checkpoint(tmp_path)) == {}


def test_the_share_of_a_reported_checkpoint_has_the_positions(ranks: Any, tmp_path: Path) -> None:
    (tmp_path / "model").write_text("weights")
    rank = ranks()
    rank.read(2)
    how = saving.options(None, "NO_UPLOAD", None, None, False)
    part = saving.share(rank, Checkpoint(tmp_path), how, 1)
    state = part.extras[DATA_EXTRA]["train"]
    assert (state["epoch"], state["position"], state["rows"]) == (0, 16, ROWS)
    assert positions_in(part.extras) == {"train": state}


def test_something_else_that_reads_keeps_its_place_under_its_own_name(ranks: Any) -> None:
    saved = {"loader-0": {"epoch": 2, "position": 5, "rows": 10}}
    rank = ranks(data_positions=saved)
    resume = rank.data.adopt("loader-0", lambda: {"epoch": 2, "position": 6, "rows": 10})
    assert resume() is None
    assert "loader-0: epoch 2, 50 %" in rank.said[0]
    rank.data.on_checkpoint_requested()
    assert resume() == saved["loader-0"]
    assert rank.data.positions()["loader-0"]["position"] == 6
    assert rank.data.described() == "loader-0: epoch 2, 60 %"


# --------------------------------------------------------------------------- in words


def test_another_thread_can_describe_shards_once_they_give_batches(ranks: Any) -> None:
    rank, heard = ranks(), []
    rank.data.shard("train")
    assert rank.data.described() == ""
    rank.read(2)
    rank.read(3)
    told = rank.data.describe_now()
    thread = threading.Thread(target=lambda: heard.append(rank.data.described()))
    thread.start()
    thread.join()
    assert heard == [told] == ["train: epoch 1, 60 %"]


@given(st.integers(0, 10**6), st.integers(-100, 10**9), st.integers(0, 10**9))
def test_a_position_in_words_never_has_less_than_nothing(epoch: int, position: int, rows: int) -> None:
    words = in_words({"train": {"epoch": epoch, "position": position, "rows": rows, "seed": 1}, "odd": {}})
    is_at_the_end_of_another = position <= 0 < epoch
    assert words.startswith(f"train: epoch {epoch - is_at_the_end_of_another}, ")
    assert words.endswith(" %")
    assert "-" not in words
    assert "odd" not in words


def test_the_beginning_of_an_epoch_is_reported_as_the_end_of_the_one_before() -> None:
    places = [(0, 0), (0, 45), (3, 0), (3, -2)]
    words = [str(DataPosition(epoch, position, 100)) for epoch, position in places]
    assert words == ["epoch 0, 0 %", "epoch 0, 45 %", "epoch 2, 100 %", "epoch 2, 100 %"]


def test_positions_are_reported_by_name() -> None:
    states: Mapping[str, Any] = {"train": {"v": 1, "epoch": 3, "position": 45, "rows": 100}}
    assert readable(states) == {"train": DataPosition(3, 45, 100)}
    assert in_words(states) == "train: epoch 3, 45 %"
    assert positions_in({}) == {}
    assert pickle.loads(pickle.dumps(readable(states))) == readable(states)


# --------------------------------------------------------------------------- disk


def test_a_quarter_of_the_disk_counts_what_the_cache_holds_already(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(safety, "free_bytes", lambda path: 1000)
    (tmp_path / "inner").mkdir()
    (tmp_path / "inner" / "block").write_bytes(b"x" * 200)
    assert disk_budget(str(tmp_path), -1) == 300
    assert disk_budget(str(tmp_path), 0) == 0
    assert disk_budget(str(tmp_path), 7) == 7
    assert disk_budget(str(tmp_path / "absent"), -1) == 250


# --------------------------------------------------------------------------- datasets of Ray's, which are streamed


class Numbers:
    """What a ``ray.data.DataIterator`` is to a feed."""

    def iter_batches(self, **options: Any) -> Iterator[pa.Table]:
        yield pa.table({"id": list(range(ROWS))})


@pytest.fixture
def feed(tmp_path: Path) -> Iterator[str]:
    path = str(tmp_path / "feed.sock")
    serving = Feed(Numbers(), path)
    yield path
    serving.close()


def test_a_dataset_with_a_feed_is_streamed_and_the_others_are_read(ranks: Any, feed: str) -> None:
    rank = ranks("eval", data_feeds={"train": feed}, world_size=2)
    assert isinstance(rank.data.shard("train"), StreamedShard)
    assert isinstance(rank.data.shard("eval"), DataShard)
    assert rank.read(2) == list(range(8)), "four rows of eight are this rank's"
    with pytest.raises(ConfigError, match=r"no dataset 'test'.*'eval', 'train'"):
        rank.data.shard("test")


def test_a_checkpoint_keeps_the_epoch_of_a_stream_which_begins_again(ranks: Any, feed: str) -> None:
    rank = ranks("eval", data_feeds={"train": feed})
    assert len(list(rank.data.shard("train").iter_batches(batch_size=8))) == 5
    rank.read(2)
    kept = rank.data.positions()
    assert kept["train"] == {"epoch": 1}
    again = ranks("eval", data_feeds={"train": feed}, data_positions=kept)
    again.data.on_checkpoint_requested()
    assert again.data.shard("train").epoch == 1
    assert again.read(1) == list(range(8))


def test_a_stream_whose_checkpoint_was_not_loaded_is_reported(ranks: Any, feed: str) -> None:
    rank = ranks("eval", data_feeds={"train": feed}, data_positions={"train": {"epoch": 3}})
    rank.read(1)
    assert "train: epoch 3" in rank.said[0]


def test_what_was_streamed_and_is_now_read_begins_its_epoch_again(ranks: Any) -> None:
    rank = ranks(data_positions={"train": {"epoch": 2}})
    rank.data.on_checkpoint_requested()
    shard = rank.data.shard("train")
    assert shard.epoch == 2
    assert len(rank.read(5)) == ROWS
