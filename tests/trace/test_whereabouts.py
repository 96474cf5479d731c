"""Where a rank mostly is, in the user's own terms."""

from __future__ import annotations

from powertrain.trace.machine.devices import peak_flops
from powertrain.trace.stacks.whereabouts import PlaceCounts, in_words
from powertrain.wire.values import Frame, Where


def test_the_place_most_often_seen_in_a_phase_is_reported_when_it_changes() -> None:
    places = PlaceCounts()
    assert places.news() == {}
    places.note("outside", "train.py:3 in a", 1)
    places.note("input", "train.py:9 in b", 2)
    places.note("input", "train.py:9 in b", 3)
    assert places.news() == {"outside": "train.py:3 in a", "input": "train.py:9 in b"}
    places.note("outside", "train.py:3 in a", 4)
    assert places.news() == {}
    for step in range(5, 10):
        places.note("outside", "train.py:4 in c", step)
    assert places.news()["outside"] == "train.py:4 in c"


def test_what_is_seen_before_the_first_step_and_after_the_last_does_not_count() -> None:
    places = PlaceCounts()
    for _ in range(9):
        places.note("outside", "train.py:1 in load_the_model", 0)
    places.note("outside", "train.py:5 in log", 1)
    places.note("outside", "train.py:5 in log", 2)
    for _ in range(9):
        places.note("outside", "train.py:9 in export", 2)
    assert places.news() == {"outside": "train.py:5 in log"}


def test_places_seen_once_do_not_pile_up() -> None:
    places = PlaceCounts()
    for step in range(5):
        places.note("outside", "train.py:1 in often", step + 1)
    for number in range(10_000):
        places.note("outside", f"train.py:{number + 2} in once", number + 6)
    assert len(places._found["outside"]) <= 200
    assert places.news() == {"outside": "train.py:1 in often"}


def test_a_look_finds_the_line_that_runs_now() -> None:
    places = PlaceCounts()
    places.look("inside", 1)
    places.look("outside", 2)
    assert "test_whereabouts.py" in places.news()["inside"]


def test_a_library_that_the_line_has_called_is_named() -> None:
    frame = Frame(file="/home/me/train.py", line=31, function="evaluate")
    assert in_words(Where(frame=frame)) == "train.py:31 in evaluate"
    assert (
        in_words(Where(frame=frame, call="all_reduce")) == "train.py:31 in evaluate, which calls all_reduce"
    )


def test_kinds_of_gpus_are_known_by_their_names() -> None:
    assert peak_flops("NVIDIA H200") == peak_flops("NVIDIA H100 80GB HBM3") == 989e12
    assert peak_flops("NVIDIA H100 PCIe") == 756e12
    assert peak_flops("Tesla T4") == 65e12
    assert peak_flops("NVIDIA L40S") > peak_flops("NVIDIA L40") > peak_flops("NVIDIA L4") > 0
    assert peak_flops("a toaster") == 0.0
