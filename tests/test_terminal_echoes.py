"""Warnings and tracebacks that ranks print alike are shown in full once."""

from __future__ import annotations

from powertrain.terminal.echoes import Echoes

WARNING = ["/lib/x.py:7: UserWarning: lr is high", "  warnings.warn('lr is high')"]
TRACEBACK = [
    "Traceback (most recent call last):",
    '  File "train.py", line 3, in loop',
    "    dist.all_reduce(x)",
    "RuntimeError: Connection closed by peer [127.0.0.1]:3131",
]


def test_a_warning_of_every_rank_is_shown_in_full_once() -> None:
    echoes = Echoes()
    assert echoes.fold(1, [*WARNING, "step 1"]) == [*WARNING, "step 1"]
    assert echoes.fold(0, [*WARNING, "step 1"]) == [
        "the same UserWarning as rank 1 (in full in the log of this rank)",
        "step 1",
    ]
    assert echoes.fold(1, WARNING) == WARNING, "a rank that repeats itself is shown as it is"


def test_a_warning_without_a_line_of_source_hides_nothing_else() -> None:
    echoes = Echoes()
    echoes.fold(0, WARNING[:1])
    assert echoes.fold(1, [WARNING[0], "step 1"])[1:] == ["step 1"]


def test_a_traceback_of_every_rank_is_shown_in_full_once_although_ports_differ() -> None:
    echoes = Echoes()
    assert echoes.fold(0, TRACEBACK[:2]) == [], "it is held until it is whole"
    assert echoes.fold(0, TRACEBACK[2:]) == TRACEBACK
    last = TRACEBACK[3].replace("3131", "4242")
    assert echoes.fold(1, [*TRACEBACK[:3], last]) == [
        f"{last} (same traceback as rank 0; in full in the log of this rank)"
    ]


def test_tracebacks_and_warnings_that_differ_are_shown() -> None:
    echoes = Echoes()
    echoes.fold(0, [*WARNING, *TRACEBACK])
    other = [TRACEBACK[0], '  File "train.py", line 4, in loop', *TRACEBACK[2:]]
    assert echoes.fold(1, other) == other
    different = [WARNING[0].replace("high", "low"), WARNING[1]]
    assert echoes.fold(1, different) == different


def test_what_was_held_is_shown_at_the_end() -> None:
    echoes = Echoes()
    assert echoes.fold(0, TRACEBACK[:3]) == []
    assert echoes.finish(0) == TRACEBACK[:3]
    assert echoes.finish(0) == []


def test_plain_lines_that_ranks_print_alike_are_all_shown() -> None:
    echoes = Echoes()
    assert [echoes.fold(rank, ["epoch 1 done"]) for rank in range(3)] == [["epoch 1 done"]] * 3


def test_memory_is_bounded() -> None:
    echoes = Echoes()
    for number in range(2000):
        echoes.fold(0, [f"/x.py:1: UserWarning: {number}"])
    assert len(echoes._first) <= 500
    echoes.fold(0, [TRACEBACK[0], *["  endless"] * 5000])
    assert len(echoes.finish(0)) <= 2000
