"""The stories under torchrun, which starts, ends and restarts the processes itself: no engine of ours places any."""

from __future__ import annotations

import json
import math
import socket
import sys
from pathlib import Path
from typing import Any

import loops
import pytest

from powertrain.result.result import Result
from powertrain.run import events as ev


@pytest.fixture
def torchrun(stories: Any) -> Any:
    def start(scenario: str, *options: str) -> Any:
        return stories.start(scenario, "torchrun", options)

    return start


def test_good_runs_one_after_another(torchrun: Any, stories: Any) -> None:
    driver = torchrun("several_good_runs")
    leader, follower = driver.outcome(0), driver.outcome(1)

    assert driver.process.returncode == 0
    both_in_order = [[rank, 0, row] for row in (1, 2, 3) for rank in (0, 1)]
    improved = leader["improve"]
    assert (improved["raised"], improved["state"]) == ("", "finished")
    assert improved["metrics"] == {"epoch": 2, "rank_plus_epoch": 2}
    assert improved["return_value"] == {"rank": 0, "world_size": 2}
    assert improved["points"] == both_in_order
    assert improved["path"] == str(stories.storage / "improve")
    assert {p.name for p in Path(improved["checkpoint"]).glob("rank-*")} == {"rank-0", "rank-1"}
    assert follower["improve"]["raised"] == ""
    assert follower["improve"]["metrics"] == improved["metrics"], "every rank sees what rank 0 reported last"
    assert leader["meet"]["return_value"] == {"received": {"from": 0, "at": [1, 2]}, "rows_met": True}
    assert leader["place"]["return_value"]["hook"] == "set", "worker_runtime_env reaches the process"
    assert math.isnan(leader["oddities"]["metrics"]["nan"])
    (start,) = (fact for fact in stories.facts("improve") if isinstance(fact, ev.StartupMeasured))
    assert (start.ranks, start.unfinished, "process group" in start.path) == ((0, 1), (), True)
    assert (leader["stop"]["raised"], leader["stop"]["state"]) == ("", "finished")
    assert leader["stop"]["metrics"]["step"] in (5, 6, 7)
    assert follower["stop"]["raised"] == ""


def test_two_agents_on_one_host_keep_the_ranks_that_torchrun_gave(stories: Any) -> None:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    agents = [
        stories.start(
            "compare_places",
            "torchrun",
            torchrun=[
                *(
                    sys.executable,
                    "-m",
                    "torch.distributed.run",
                    "--nnodes=2",
                    f"--nproc-per-node={processes}",
                ),
                *("--rdzv-backend=c10d", f"--rdzv-endpoint=127.0.0.1:{port}", "--rdzv-id=job"),
                *("--local-addr=127.0.0.1", "--max-restarts=0"),
            ],
        )
        for processes in (1, 2)
    ]
    assert [agent.ended() for agent in agents] == [0, 0], [agent.output for agent in agents]

    places = [json.loads((stories.root / f"place-{rank}").read_text()) for rank in range(3)]
    told = [place["told"] for place in places]
    assert told == [place["launcher"] for place in places]
    assert sorted(place["LOCAL_WORLD_SIZE"] for place in told) == [1, 2, 2]
    assert {place["GROUP_RANK"] for place in told} == {0, 1}


def test_an_exception_beside_a_collective_names_the_users_line(torchrun: Any, stories: Any) -> None:
    driver = torchrun("raise_beside_a_collective")
    assert driver.ended() != 0

    line = next(n for n, t in enumerate(Path(loops.__file__).read_text().splitlines(), 1) if "shard 7" in t)
    (failed,) = (fact for fact in stories.facts("raises") if isinstance(fact, ev.Failed))
    first = failed.failures[0]
    assert (first.rank, first.error_type, first.message) == (1, "ValueError", "shard 7 is empty")
    assert (first.file, first.line) == (loops.__file__, line)
    assert "WorkerGroupError: Rank 1 raised ValueError: shard 7 is empty" in driver.output
    assert Result.from_path(stories.storage / "raises").state == "failed"


def test_sys_exit_3_in_a_rank_fails_the_run(torchrun: Any, stories: Any) -> None:
    driver = torchrun("exit_3")
    assert driver.ended() != 0
    (failed,) = (fact for fact in stories.facts("exits") if isinstance(fact, ev.Failed))
    assert (failed.failures[0].rank, failed.failures[0].kind) == (1, "exit")


def test_attempts_follow_torchruns_restarts(torchrun: Any, stories: Any) -> None:
    driver = torchrun("recover_from_sigkill", "--max-restarts=1")
    outcome = driver.outcome()

    assert driver.process.returncode == 0
    assert outcome["return_value"] == "attempt 1 began at epoch 2"
    before = [[rank, 0, row] for row in (1, 2) for rank in (0, 1)]
    after = [[rank, 1, row] for row in (3, 4, 5) for rank in (0, 1)]
    assert outcome["points"] == before + after


def test_a_restart_goes_on_with_a_run_that_was_given_no_name(torchrun: Any, stories: Any) -> None:
    outcome = torchrun("recover_without_a_name", "--max-restarts=1").outcome()

    assert outcome["return_value"] == "attempt 1 began at epoch 2"
    assert [str(run) for run in stories.storage.iterdir()] == [outcome["path"]]


def test_ranks_end_with_an_agent_that_is_killed(torchrun: Any) -> None:
    driver = torchrun("never_at_a_boundary")
    driver.await_told("rank 0 trains", "rank 1 trains")
    driver.kill()  # that nothing is left is checked after every story


def test_ctrl_c_lets_the_loop_save(torchrun: Any, stories: Any) -> None:
    driver = torchrun("save_when_asked")
    driver.await_told("rank 0 trains", "rank 1 trains")
    driver.interrupt()

    assert [driver.outcome(rank)["raised"] for rank in (0, 1)] == ["KeyboardInterrupt"] * 2
    last = stories.facts("interrupted")[-1]
    assert isinstance(last, ev.Ended)
    assert last.state == "stopped"
    result = Result.from_path(stories.storage / "interrupted")
    assert result.metrics is not None
    assert result.metrics["saved"] is True
    assert result.checkpoint is not None
    assert {p.name for p in Path(result.checkpoint.path).glob("rank-*")} == {"rank-0", "rank-1"}
