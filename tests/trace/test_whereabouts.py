"""Where a rank mostly is, in the user's own terms."""

from __future__ import annotations

from powertrain.trace.devices import peak_flops
from powertrain.trace.whereabouts import Whereabouts, in_words
from powertrain.wire import Frame, Where


def test_the_place_most_often_seen_in_a_phase_is_told_when_it_changes() -> None:
    places = Whereabouts()
    assert places.news() == {}
    places.note("outside", "train.py:3 in a")
    places.note("input", "train.py:9 in b")
    assert places.news() == {"outside": "train.py:3 in a", "input": "train.py:9 in b"}
    places.note("outside", "train.py:3 in a")
    assert places.news() == {}
    for _ in range(3):
        places.note("outside", "train.py:4 in c")
    assert places.news()["outside"] == "train.py:4 in c"


def test_places_seen_once_do_not_pile_up() -> None:
    places = Whereabouts()
    for _ in range(5):
        places.note("outside", "train.py:1 in often")
    for number in range(10_000):
        places.note("outside", f"train.py:{number + 2} in once")
    assert len(places._found["outside"]) <= 200
    assert places.news() == {"outside": "train.py:1 in often"}


def test_a_look_finds_the_line_that_runs_now() -> None:
    places = Whereabouts()
    places.look("inside")
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
