"""The order of claims: nothing given twice, no claim passed by one for the same, nothing idle without a reason."""

from __future__ import annotations

import os
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from tests.support.examples import scaled

from powertrain.engine.base import SlotShape
from powertrain.engine.local.waiting_line import (
    QueuePosition,
    ResourceRequest,
    contend,
    places,
    reason,
    room,
    shares,
)
from powertrain.engine.resources import Holding, Machine, missing

LICENSES = 3.0


def machine(gpus: str, cores: frozenset[int] = frozenset()) -> Machine:
    """One that sees the GPUs of these letters."""
    numbers = tuple(map(str, range(len(gpus))))
    return Machine(
        cpus=len(cores) or 4,
        gpus=("g",) * len(gpus),
        visible=numbers,
        uuids=tuple(gpus),
        custom={"license": LICENSES, "other": 1.0},
        cores=cores,
    )


ALL, LEFT, RIGHT = machine("abcd"), machine("ab"), machine("bcd")


def wish(seen: Machine = ALL, pid: int = 1, run: str = "run x", **wanted: float) -> ResourceRequest:
    return ResourceRequest(run=run, host="here", pid=pid, wanted=wanted, machine=seen)


def holding(run: str, pid: int, gpus: str = "", **amounts: float) -> Holding:
    return Holding(run=run, host="here", pid=pid, gpus=tuple(gpus), amounts=amounts)


@st.composite
def wishes(draw: Any) -> ResourceRequest:
    """What the machine could give if it were empty."""
    seen = draw(st.sampled_from([ALL, LEFT, RIGHT]))
    amounts = {
        "GPU": draw(st.integers(0, len(seen.gpus))),
        "license": draw(st.integers(0, int(LICENSES))),
        "other": draw(st.integers(0, 1)),
    }
    wanted = {name: float(amount) for name, amount in amounts.items() if amount} or {"GPU": 1.0}
    return ResourceRequest(run="run", host="here", pid=draw(st.integers(1, 3)), wanted=wanted, machine=seen)


class Line(RuleBasedStateMachine):
    """Three processes that come, take what is theirs whenever they look, and give back."""

    def __init__(self) -> None:
        super().__init__()
        self.held: list[Holding] = []
        self.line: list[ResourceRequest] = []

    @rule(new=wishes())
    def come(self, new: ResourceRequest) -> None:
        self.line.append(new)

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def give_back(self, data: Any) -> None:
        self.held.remove(data.draw(st.sampled_from(self.held)))

    @precondition(lambda self: self.line)
    @rule(data=st.data())
    def give_up(self, data: Any) -> None:
        self.line.remove(data.draw(st.sampled_from(self.line)))

    @rule(pid=st.integers(1, 3))
    def look(self, pid: int) -> None:
        """One process takes what is its own; the others have not looked yet."""
        found = shares(self.held, self.line)
        for index, (waiting, share) in enumerate(zip(self.line, found, strict=True)):
            if share and waiting.pid == pid:
                passed = [w for w, s in zip(self.line[:index], found, strict=False) if s is None]
                assert not any(contend(waiting, other) for other in passed), "an earlier one waits for it"
        taken = [bool(share) and waiting.pid == pid for waiting, share in zip(self.line, found, strict=True)]
        promised = [share for share, took in zip(found, taken, strict=True) if not took]
        self.held += [share for share, took in zip(found, taken, strict=True) if took and share]
        self.line = [waiting for waiting, took in zip(self.line, taken, strict=True) if not took]
        now = shares(self.held, self.line)
        assert [bool(share) for share in now] == [bool(share) for share in promised], (
            "what one took was another's"
        )

    @invariant()
    def nothing_is_held_twice(self) -> None:
        gpus = [gpu for holding in self.held for gpu in holding.gpus]
        assert len(gpus) == len(set(gpus))
        assert sum(holding.amounts.get("license", 0.0) for holding in self.held) <= LICENSES

    @invariant()
    def nothing_lies_idle(self) -> None:
        """A claim behind no other for the same is granted as soon as its resources are free."""
        found = shares(self.held, self.line)
        for index, (waiting, share) in enumerate(zip(self.line, found, strict=True)):
            alone = not any(contend(waiting, other) for other in self.line[:index])
            if alone and not missing(waiting.machine, self.held, waiting.wanted):
                assert share, waiting

    @invariant()
    def nobody_waits_for_ever(self) -> None:
        """If all give back what they have, the first is served, however many come after him; and so all are."""
        left = self.line
        for newcomer in self.line:
            found = shares([], [*left, newcomer])
            if left:
                assert found[0]
                left = [w for w, share in zip(left, found, strict=False) if share is None]
        assert not left


TestLine = Line.TestCase
TestLine.settings = settings(max_examples=scaled(40), stateful_step_count=25)


# --------------------------------------------------------------------------- who wants the same


def test_only_gpus_that_both_may_get_are_contended_for() -> None:
    assert contend(wish(LEFT, GPU=1), wish(RIGHT, GPU=1))
    assert not contend(wish(machine("ab"), GPU=1), wish(machine("cd"), GPU=1))
    assert not contend(wish(GPU=1), wish(license=1))


def test_cpus_are_contended_for_unless_the_cores_are_known_to_be_others() -> None:
    low, high, unknown = (machine("", frozenset(cores)) for cores in ({0, 1}, {2, 3}, ()))
    assert not contend(wish(low, CPU=1), wish(high, CPU=1))
    assert contend(wish(low, CPU=1), wish(low, CPU=1))
    assert contend(wish(low, CPU=1), wish(unknown, CPU=1))


def test_which_claim_may_take_the_rest_beside_an_earlier_one_that_has_not_looked_yet() -> None:
    first, second = shares([], [wish(pid=1, GPU=1), wish(pid=2, GPU=3)])
    assert first is not None
    assert second is not None
    assert (first.gpus, second.gpus) == (("a",), ("b", "c", "d"))


# --------------------------------------------------------------------------- how much room there is


def test_free_room_is_neither_held_nor_wanted_by_a_waiting_claim() -> None:
    shape = SlotShape(gpus=1)
    assert room(ALL, shape, [holding("run a", 1, "a")], []) == 3
    assert room(ALL, shape, [holding("run a", 1, "a")], [wish(GPU=2), wish(license=3)]) == 1
    assert room(machine("cd"), shape, [], [wish(machine("ab"), GPU=2)]) == 2, "of others it may have none"


# --------------------------------------------------------------------------- in words


@pytest.mark.parametrize(
    ("wanted", "held", "place", "words"),
    [
        (
            {"GPU": 4.0},
            [holding("run a", 7, "abc"), holding("run b", 8, license=2)],
            QueuePosition(1),
            "waiting for 4 GPUs (1 free) held by run a (pid 7 on here); 1st in line",
        ),
        (
            {"license": 2.0, "other": 1.0},
            [holding("run a", 7, license=3.0), holding("run b", 8, other=1.0)],
            QueuePosition(2, wish(pid=9, run="run c")),
            "waiting for 2 license and 1 other held by run a (pid 7 on here), run b (pid 8 on here); "
            "2nd in line, behind run c (pid 9 on here)",
        ),
        (
            {"GPU": 1.0},
            [],
            QueuePosition(11, wish()),
            "waiting for 1 GPU; 11th in line, behind run x (pid 1 on here)",
        ),
        (
            {"license": 3.0},
            [holding(f"run {n}", n, license=0.5) for n in range(5)],
            QueuePosition(3, wish()),
            "waiting for 3 license (0.5 free) held by run 0 (pid 0 on here), run 1 (pid 1 on here), "
            "run 2 (pid 2 on here) and 2 more; 3rd in line, behind run x (pid 1 on here)",
        ),
    ],
)
def test_a_waiting_claim_learns_for_which_resources_and_which_holder(
    wanted: dict[str, Any], held: list[Holding], place: QueuePosition, words: str
) -> None:
    assert reason(wish(**wanted), held, place) == words


def test_a_holder_on_other_cores_is_not_said_to_be_in_the_way() -> None:
    seen = machine("", cores=frozenset({0}))
    far, near = (
        Holding(run=f"run {n}", host="here", pid=n, amounts={"CPU": 1.0}, cores=(n,)) for n in (5, 0)
    )
    words = reason(wish(seen, CPU=1), [far, near], QueuePosition(1))
    assert words == "waiting for 1 CPU held by run 0 (pid 0 on here); 1st in line"


def test_the_place_in_line_counts_claims_that_want_the_same() -> None:
    line = [wish(pid=1, GPU=1), wish(pid=2, license=1), wish(pid=3, GPU=2), wish(pid=4, GPU=1, license=1)]
    found = [(place.number, place.behind.pid if place.behind else None) for place in places(line)]
    assert found == [(1, None), (1, None), (2, 1), (4, 3)]


def test_a_line_of_a_thousand_is_gone_through_in_no_time() -> None:
    line = [wish(pid=os.getpid(), GPU=1) for _ in range(1000)]
    assert sum(share is not None for share in shares([], line)) == 4
    assert places(line)[-1].number == 1000
