"""A prepared loader that is left early or whose functions raise StopIteration: no epoch is lost without a word."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.torch.lone_rank import counting
from tests.torch.test_prepare_data_loader import place_of
from torch.utils.data import DataLoader, Dataset, IterableDataset, SequentialSampler, SubsetRandomSampler

from powertrain.errors import DataError
from powertrain.torch.data_loader.prepare import prepare_data_loader
from powertrain.worker.session import Session

AsRank = Callable[..., Session]


def test_one_look_at_a_batch_does_not_count_as_an_epoch(as_rank: AsRank) -> None:
    session: Any = as_rank(0, 1)
    loader: Any = prepare_data_loader(DataLoader(counting(10), batch_size=2, shuffle=True), seed=3)
    looked_at = next(iter(loader)).tolist()
    assert place_of(loader) == (0, 0)
    epoch = [batch.tolist() for batch in loader]
    assert epoch[0] == looked_at
    assert sorted(itertools.chain.from_iterable(epoch)) == list(range(10))
    assert session.service.said == []


def test_a_look_after_a_resume_does_not_cost_the_rest_of_the_epoch(as_rank: AsRank) -> None:
    as_rank(0, 1)
    loader: Any = prepare_data_loader(DataLoader(counting(10), batch_size=2))
    batches = iter(loader)
    next(batches), next(batches)
    state = loader.state_dict()
    resumed: Any = prepare_data_loader(DataLoader(counting(10), batch_size=2), name="resumed")
    resumed.load_state_dict(state)
    assert next(iter(resumed)).tolist() == [4, 5]
    for epoch in resumed.epochs(1):
        assert (epoch, [batch.tolist() for batch in resumed]) == (0, [[4, 5], [6, 7], [8, 9]])


def test_a_loop_that_takes_one_batch_of_each_iteration_gets_others_and_is_warned(as_rank: AsRank) -> None:
    session: Any = as_rank(0, 1)
    loader: Any = prepare_data_loader(DataLoader(counting(1000), batch_size=5, shuffle=True), seed=3)
    looks = [tuple(next(iter(loader)).tolist()) for _ in range(5)]
    assert looks[0] == looks[1]
    assert len(set(looks)) == 4, "from the second one on each is an epoch of its own"
    [said] = session.service.said
    assert "given up in epoch 0 after 1 batch, and the next one begins epoch 1" in said


def test_an_epoch_that_is_broken_off_is_warned_about_once(as_rank: AsRank) -> None:
    session: Any = as_rank(0, 1)
    loader: Any = prepare_data_loader(DataLoader(counting(10), batch_size=2))
    for _ in range(3):
        for number, _ in enumerate(loader):
            if number == 2:
                break
    assert place_of(loader) == (3, 0)
    [said] = session.service.said
    assert "'loader' was given up in epoch 0 after 3 batches" in said


# -- StopIteration


class Stopping(Dataset[int]):
    def __len__(self) -> int:
        return 100

    def __getitem__(self, index: int) -> int:
        if index == 30:
            raise StopIteration
        return index


class Rows(IterableDataset[int]):
    def __iter__(self) -> Any:
        return iter(range(100))


class StopsAt:
    def __init__(self, row: int) -> None:
        self.row = row

    def __call__(self, batch: list[Any]) -> Any:
        if self.row in batch:
            return next(iter(()))
        return torch.tensor(batch)


CASES: dict[str, tuple[Callable[..., DataLoader[Any]], str]] = {
    "getitem": (lambda **o: DataLoader(Stopping(), batch_size=10, **o), "__getitem__"),
    "collate": (
        lambda **o: DataLoader(counting(100), batch_size=10, collate_fn=StopsAt(30), **o),
        "__call__",
    ),
    "own sampler": (
        lambda **o: DataLoader(Stopping(), sampler=SubsetRandomSampler(range(100)), batch_size=10, **o),
        "__getitem__",
    ),
    "a stream": (
        lambda **o: DataLoader(Rows(), batch_size=10, collate_fn=StopsAt(30), **o),
        "collate_fn StopsAt",
    ),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("case", CASES)
def test_stop_iteration_of_a_function_is_an_error(as_rank: AsRank, case: str) -> None:
    as_rank(0, 1)
    make, words = CASES[case]
    with pytest.raises(DataError, match=words):
        list(prepare_data_loader(make()))


#: Torch takes ten seconds to end the process of a loader that has failed, so the errors are kept until all is over.
IN_PROCESSES = """
import warnings; warnings.simplefilter("ignore")
from tests.torch.test_loader_early_ends import CASES, prepare_data_loader
from tests.torch.lone_rank import session_of
from powertrain.worker import session
session._session = session_of(0, 1)
kept = []
for case, (make, words) in CASES.items():
    try:
        list(prepare_data_loader(make(num_workers=1)))
        print(case, "no error")
    except Exception as error:
        kept.append(error)
        print(case, type(error).__name__, words in str(error), flush=True)
import multiprocessing, os, signal
signal.signal(signal.SIGCHLD, signal.SIG_DFL)
for child in multiprocessing.active_children():
    child.kill()
os._exit(0)
"""


def test_stop_iteration_in_a_loaders_process_is_an_error(tmp_path: Path) -> None:
    # The processes of loaders are killed, and cannot remove the directories that multiprocessing makes for them.
    environment = {**os.environ, "TMPDIR": str(tmp_path)}
    ended = subprocess.run(
        [sys.executable, "-c", IN_PROCESSES], env=environment, capture_output=True, text=True, timeout=120
    )
    assert ended.stdout.splitlines() == [f"{case} DataError True" for case in CASES], ended


@pytest.mark.filterwarnings("ignore")
def test_epochs_still_end_where_they_should(as_rank: AsRank) -> None:
    as_rank(0, 1)
    stream: Any = prepare_data_loader(DataLoader(Rows(), batch_size=10, collate_fn=StopsAt(-1)))
    assert [len(list(stream)) for _ in range(2)] == [10, 10]
    plain: Any = prepare_data_loader(
        DataLoader(counting(10), sampler=SequentialSampler(range(10)), num_workers=1)
    )
    assert [len(list(plain)) for _ in range(2)] == [10, 10]
