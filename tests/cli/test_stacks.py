"""``powertrain stacks``: where ranks are in words, those at the same place together; and of runs that are over."""

from __future__ import annotations

import json
import os

import pytest
from tests.cli.test_logs import invoke, write

from powertrain.lookup.stacks import stack_lines as page
from powertrain.run.health.hang_report import where_in_words
from powertrain.run.remote.protocol import Description, RankSeen
from powertrain.storage import Storage, open_storage
from powertrain.wire.values import Frame, ProcessStack, ThreadStack, Where

_LINE = Frame(file="/home/me/train.py", line=31, function="loop", source="dist.all_reduce(total)")


@pytest.fixture
def run() -> Storage:
    return open_storage(os.environ["POWERTRAIN_STORAGE"]).child("run")


def seen(
    rank: int, inside: str = "", call: str = "", state: str = "sleeping", line: Frame = _LINE
) -> RankSeen:
    thread = ThreadStack(name="MainThread", main=True, frames=[line])
    process = ProcessStack(pid=100 + rank, title=f"rank {rank}", state=state, threads=[thread])
    return RankSeen(rank=rank, processes=[process], where=Where(frame=line, inside=inside, call=call), row=4)


def test_ranks_at_the_same_place_are_reported_together_and_one_of_each_with_its_threads() -> None:
    asleep = Frame(file="/home/me/data.py", line=12, function="load", source="time.sleep(100)")
    ranks = [*(seen(rank, "collective", "all_reduce") for rank in range(7)), seen(7, line=asleep)]
    stands = Description(state="training", attempt=1, workers=8)
    lines = page("digits", stands, ranks, each=False)
    assert lines[:3] == [
        "digits: training, attempt 1, 8 ranks, at row 4",
        "ranks 0-6: waiting in the all_reduce at /home/me/train.py:31 in loop: dist.all_reduce(total)",
        "rank 7: at /home/me/data.py:12 in load: time.sleep(100)",
    ]
    assert [line for line in lines if "(process" in line] == [
        "rank 0 (process 100, sleeping); same for ranks 1-6",
        "rank 7 (process 107, sleeping)",
    ]


def test_ranks_that_were_named_are_all_shown() -> None:
    lines = page("digits", None, [seen(0), seen(1)], each=True)
    assert [line for line in lines if "(process" in line] == [
        "rank 0 (process 100, sleeping)",
        "rank 1 (process 101, sleeping)",
    ]


@pytest.mark.parametrize(
    ("inside", "awaits", "state", "debugged", "said"),
    [
        ("", "", "running", False, "at /home/me/train.py:31 in loop"),
        ("loader", "", "running", False, "waiting for the DataLoader at /home/me/train.py:31"),
        ("run", "row 3", "sleeping", False, "waiting for the run (row 3) at /home/me/train.py:31"),
        ("run", "", "sleeping", False, "waiting for the run at /home/me/train.py:31"),
        ("", "", "stopped", False, "stopped (SIGSTOP) at /home/me/train.py:31"),
        ("", "", "sleeping", True, "held by a debugger at /home/me/train.py:31"),
    ],
)
def test_a_hang_notice_says_what_a_rank_does_before_where(
    inside: str, awaits: str, state: str, debugged: bool, said: str
) -> None:
    words = where_in_words(Where(frame=_LINE, inside=inside, call=""), awaits, state, debugged=debugged)
    assert words.startswith(said)


def test_a_rank_of_which_nothing_is_known_is_reported_too() -> None:
    assert where_in_words(None, state="gone") == "gone"
    assert where_in_words(None, state="running") == "running no Python that could be seen"


def test_of_a_run_that_is_over_the_newest_that_were_kept_are_shown(run: Storage) -> None:
    write(run, attempts=2)
    for name in ("attempt-0-hang-9", "attempt-1-hang-2", "attempt-1-hang-10"):
        run.put(f"stacks/{name}.txt", f"those of {name}\n".encode())
    shown = invoke("stacks", "run")
    assert (shown.exit_code, shown.stdout) == (0, "those of attempt-1-hang-10\n")
    assert shown.stderr.startswith("The run 'run' has finished after 3.00 s")
    assert "in stacks/attempt-1-hang-10.txt:" in shown.stderr
    told = json.loads(invoke("stacks", "run", "--json").stdout)
    assert (told["kept_in"], told["kept"]) == ("stacks/attempt-1-hang-10.txt", shown.stdout)


def test_a_run_that_is_over_and_never_hung_has_none(run: Storage) -> None:
    write(run)
    shown = invoke("stacks", "run")
    assert shown.exit_code == 1
    assert "It has no saved stacks" in shown.stderr
