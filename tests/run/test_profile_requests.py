"""Requests for profiles: the client's messages while ranks make them, and what is kept."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from powertrain.run.record import profiles as records
from powertrain.run.remote.profiles import RANKS_LIMIT, Profiles
from powertrain.run.remote.protocol import (
    Answer,
    ControlClient,
    ProfileSteps,
    RankProfiled,
    Reply,
    StillWaiting,
)
from powertrain.storage import open_storage
from powertrain.wire.from_controller import Profile
from powertrain.wire.from_worker import Profiled


@dataclass
class Rank:
    rank: int
    attempt: Any
    exited: bool = False


@dataclass
class Ranks:
    number: int = 0
    world_size: int = 2
    members: list[Rank] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.members = [Rank(rank, self) for rank in range(self.world_size)]


class Run:
    def __init__(self, path: Path, world_size: int = 2) -> None:
        self.now, self.sent, self.shown = 0.0, list[tuple[int, Any]](), list[str]()
        self.storage, self.attempt = open_storage(path), Ranks(world_size=world_size)
        self.fails: Exception | None = None
        self.profiles = Profiles(
            self.storage,
            lambda member, message: self.sent.append((member.rank, message)),
            self._submit,
            self.shown.append,
            lambda: self.now,
        )

    def _submit(self, do: Callable[[], Any], then: Callable[[Any, BaseException | None], None]) -> None:
        if self.fails is not None:
            then(None, self.fails)
        else:
            then(do(), None)

    def request(self, **options: Any) -> ControlClient:
        client = ControlClient()
        attempt: Any = self.attempt
        self.profiles.begin(attempt, ProfileSteps(**options), client)
        return client

    def answer(self, rank: int, **fields: Any) -> None:
        member: Any = self.attempt.members[rank]
        message = Profiled(
            **{"ask": self.sent[-1][1].ask, "steps": 3, "first_step": 9, "trace": b"t", **fields}
        )
        self.profiles.on_profiled(member, message)

    def wait(self, seconds: float) -> None:
        self.now += seconds
        self.profiles.poll(self.now)


@pytest.fixture
def run(tmp_path: Path) -> Run:
    return Run(tmp_path)


def replies(client: ControlClient) -> list[Reply]:
    client.answer("cut off by the test", False)  # where the run has not answered
    return list(client.replies())


def test_each_rank_is_asked_and_its_profile_is_kept_before_the_client_is_notified_of_it(run: Run) -> None:
    client = run.request(ranks=(0, 1), steps=3, memory=True)
    assert [(rank, type(message), message.steps, message.memory) for rank, message in run.sent] == [
        (0, Profile, 3, True),
        (1, Profile, 3, True),
    ]
    run.answer(1, memory=b"m")
    run.answer(0)
    first, second, answer = replies(client)
    assert isinstance(first, RankProfiled)
    assert isinstance(second, RankProfiled)
    assert (first.rank, second.rank, answer) == (1, 0, Answer(ok=True))
    assert records.kept(run.storage) == [second.key, first.key]
    record = records.read(run.storage, first.key)
    assert (record.rank, record.steps, record.first_step) == (1, 3, 9)
    assert (run.storage.get(record.trace), run.storage.get(record.memory)) == (b"t", b"m")
    assert records.read(run.storage, second.key).memory == ""


def test_a_client_is_notified_every_few_seconds_which_ranks_are_missing(run: Run) -> None:
    client = run.request(ranks=(0, 1), within=60.0)
    run.answer(0)
    run.wait(5.0)
    run.wait(5.0)
    parts = replies(client)
    assert [part for part in parts if isinstance(part, StillWaiting)] == [
        StillWaiting(ranks=[1], seconds=5.0),
        StillWaiting(ranks=[1], seconds=10.0),
    ]


def test_ranks_that_are_late_are_named_and_what_they_send_is_kept_all_the_same(run: Run) -> None:
    client = run.request(ranks=(0, 1), within=7.0)
    run.wait(7.0)
    *_, answer = [
        part for part in replies(client) if isinstance(part, Answer) and "cut off" not in part.message
    ]
    assert answer.message.startswith("Ranks 0 and 1 did not finish the steps within 7 s.")
    assert not answer.ok
    assert run.profiles.due() == float("inf")
    run.answer(0)
    assert len(records.kept(run.storage)) == 1


def test_a_rank_that_has_ended_is_not_waited_for(run: Run) -> None:
    client = run.request(ranks=(0, 1))
    run.attempt.members[0].exited = True
    run.wait(5.0)
    run.answer(1)
    parts = replies(client)
    assert RankProfiled(rank=0, error="it has ended") in parts
    assert parts[-1] == Answer(ok=True)


def test_a_refusal_and_a_full_disk_are_passed_on(run: Run) -> None:
    client = run.request(ranks=(0, 1))
    run.answer(0, error="the training function has not imported torch")
    run.fails = OSError(28, "No space left on device")
    run.answer(1)
    refused, unstored, _ = replies(client)
    assert refused == RankProfiled(rank=0, error="the training function has not imported torch")
    assert isinstance(unstored, RankProfiled)
    assert "it could not be stored" in unstored.error
    assert "No space left" in unstored.error


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"ranks": (0, 7)}, "There is no rank 7 in attempt 0: its last is rank 1."),
        ({"ranks": ()}, f"One request profiles 1 to {RANKS_LIMIT} ranks, not 0"),
        ({"steps": 0}, "0 steps cannot be profiled"),
    ],
)
def test_a_request_that_cannot_be_served_gets_one_sentence(
    run: Run, options: dict[str, Any], said: str
) -> None:
    client = run.request(**options)
    (answer,) = replies(client)[:1]
    assert isinstance(answer, Answer)
    assert said in answer.message
    assert not answer.ok
    assert not run.sent


def test_the_end_of_the_run_answers_waiting_clients(run: Run) -> None:
    client = run.request()
    run.profiles.close()
    assert replies(client)[0] == Answer(ok=False, message="The run has ended.")


def test_a_configured_profile_is_kept_and_shown(run: Run) -> None:
    member: Any = run.attempt.members[0]
    run.profiles.on_profiled(member, Profiled(ask=0, steps=3, first_step=20, trace=b"t"))
    run.profiles.on_profiled(member, Profiled(ask=0, error="the function ended before step 20"))
    kept, missing = run.shown
    assert "The profile of rank 0 is in profiles/attempt-0-rank-00000-step-20.json" in kept
    assert missing.endswith("rank 0 was not profiled: the function ended before step 20.")
