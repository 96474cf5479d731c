"""What may be reported: everything becomes plain data at once, and what cannot is dropped with a warning."""

from __future__ import annotations

import dataclasses
import datetime
import decimal
import enum
import math
import re
from pathlib import Path
from types import MappingProxyType
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from powertrain.errors import ReportError
from powertrain.values import kinds
from powertrain.worker import values
from powertrain.worker.values import normalise


class Colour(str, enum.Enum):
    RED = "red"


class Shade(enum.Enum):
    DARK = 1


class Level(enum.IntEnum):
    HIGH = 3


@pytest.mark.parametrize(
    ("given_value", "plain"),
    [
        (1, 1),
        (True, True),
        (None, None),
        ("text", "text"),
        (np.float64(0.5), 0.5),
        (np.float32(0.5), 0.5),
        (np.float16(0.5), 0.5),
        (np.longdouble(0.5), 0.5),
        (np.int64(7), 7),
        (np.uint64(2**64 - 1), 2**64 - 1),
        (np.bool_(True), True),
        (np.str_("word"), "word"),
        (np.array(3), 3),
        (np.array([[2.5]]), 2.5),
        (np.array([1, 2]), [1, 2]),
        (np.array([["a"], ["b"]]), [["a"], ["b"]]),
        (torch.tensor(1.5), 1.5),
        (torch.tensor([4]), 4),
        (torch.tensor(True), True),
        (torch.tensor(0.5, dtype=torch.bfloat16), 0.5),
        (torch.tensor(2.0, requires_grad=True), 2.0),
        (Colour.RED, "red"),
        (Level.HIGH, 3),
        ((1, (2, [np.int8(3)])), [1, [2, [3]]]),
        ({"a": {"b": torch.tensor(1)}}, {"a": {"b": 1}}),
    ],
)
def test_a_value_becomes_plain(given_value: Any, plain: Any) -> None:
    result = normalise({"x": given_value})["x"]
    assert result == plain
    assert type(result) is type(plain)
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(result)) == plain


def test_not_a_number_stays_not_a_number() -> None:
    result = normalise({"a": math.nan, "b": np.float32("nan"), "c": torch.tensor(math.nan), "d": -math.inf})
    assert all(math.isnan(result[key]) for key in "abc")
    assert result["d"] == -math.inf


def test_later_changes_by_the_caller_are_not_seen() -> None:
    inner, array, tensor = [1, 2], np.array([1, 2]), torch.tensor(1.0)
    metrics: dict[str, Any] = {"list": inner, "array": array, "tensor": tensor, "dict": {"a": inner}}
    plain = normalise(metrics)
    inner.append(3)
    array[0] = 9
    tensor.add_(1)
    metrics["new"] = 1
    assert plain == {"list": [1, 2], "array": [1, 2], "tensor": 1.0, "dict": {"a": [1, 2]}}


def test_a_plain_dict_is_copied() -> None:
    metrics = {"loss": 1.0}
    plain = normalise(metrics)
    metrics["loss"] = 2.0
    assert plain == {"loss": 1.0}


@dataclasses.dataclass
class Score:
    name: str
    value: Any


@pytest.mark.parametrize(
    ("given_value", "plain"),
    [
        (datetime.datetime(2026, 1, 2, 3, 4, 5), "2026-01-02T03:04:05"),
        (datetime.date(2026, 1, 2), "2026-01-02"),
        (datetime.timedelta(minutes=1, microseconds=500_000), 60.5),
        (Shade.DARK, 1),
        (Path("a/b"), "a/b"),
        (Path("half\udcff"), "half\\udcff"),
        (decimal.Decimal("0.25"), 0.25),
        (decimal.Decimal("1e999"), "1E+999"),
        (b"\x00\xff", "AP8="),
        ({3, 1, 2}, [1, 2, 3]),
        (frozenset({"b", 1}), ["b", 1]),
        (Score("f1", torch.tensor(0.5)), {"name": "f1", "value": 0.5}),
        (2**64, str(2**64)),
        (-(2**63) - 1, str(-(2**63) - 1)),
        (1 + 2j, "(1+2j)"),
        (np.datetime64("2020-01-01"), "2020-01-01"),
        (np.timedelta64(2, "m"), 120.0),
        (np.array([Path("a")]), ["a"]),
        (torch.zeros(2, 3), [[0.0] * 3] * 2),
        (torch.tensor([1, 2]), [1, 2]),
        (torch.tensor([]), []),
    ],
)
def test_an_object_has_a_plain_form_and_comes_back_as_it_was(given_value: Any, plain: Any) -> None:
    dropped: list[str] = []
    kept, originals = values.read(
        {"x": given_value}, lambda where, _: dropped.append(where), with_originals=True
    )
    assert (kept, dropped) == ({"x": plain}, [])
    assert type(kept["x"]) is type(plain)
    msgspec.msgpack.encode(kept)
    whole = kinds.with_originals(kept, originals)
    assert whole is not None
    if isinstance(given_value, (torch.Tensor, np.generic, np.ndarray)):
        assert whole == kept
    else:
        assert whole == {"x": given_value}
        assert type(whole["x"]) is type(given_value)


def test_objects_within_lists_and_dicts_come_back_too() -> None:
    metrics = {"loss": 1.0, "a": {"b": [Path("p"), (1, {2})]}, "t": torch.tensor(3)}
    kept, originals = values.read(metrics, values.warn_of_dropped, with_originals=True)
    assert kept == {"loss": 1.0, "a": {"b": ["p", [1, [2]]]}, "t": 3}
    assert kinds.with_originals(kept, originals) == {**metrics, "t": 3}


def test_an_object_whose_class_the_driver_does_not_have_stays_plain() -> None:
    local = dataclasses.make_dataclass("Local", ["x"])
    kept, originals = values.read(
        {"a": local(1), "b": Path("p")}, values.warn_of_dropped, with_originals=True
    )
    assert kinds.with_originals(kept, originals) == {"a": {"x": 1}, "b": Path("p")}


@pytest.mark.parametrize(
    "tree",
    [
        ["enum", ["os", "system", "x"]],
        ["dataclass", ["subprocess", "Popen", []]],
        ["dataclass", ["not_loaded_anywhere", "Popen", []]],
        ["call", ["os.system", "true"]],
        "text",
    ],
)
def test_forged_objects_are_not_rebuilt(tree: Any) -> None:
    assert kinds.with_originals({"x": "plain"}, {"x": msgspec.msgpack.encode(tree)}) == {"x": "plain"}


class Fails:
    """Raises whatever is asked of it."""

    def __getattribute__(self, name: str) -> Any:
        if name in ("__class__", "__dict__"):
            return object.__getattribute__(self, name)
        raise RuntimeError("not today")


containing_itself: dict[str, Any] = {"ok": 1}
containing_itself["me"] = containing_itself


@pytest.mark.parametrize(
    ("metrics", "kept", "where", "words"),
    [
        ({"x": 1, "o": object()}, {"x": 1}, "o", "is a builtins.object"),
        ({"a": {"b": [0, object()], "c": 1}}, {"a": {"c": 1}}, "a/b", "is a builtins.object"),
        ({"s": Score("f1", object())}, {"s": {"name": "f1"}}, "s/value", "is a builtins.object"),
        ({"logits": torch.zeros(200, 300)}, {}, "logits", r"shape \(200, 300\); at most 10,000 elements"),
        ({"meta": torch.zeros(2, device="meta")}, {}, "meta", "could not be read"),
        ({"count": torch.nn.Linear(1, 1)}, {}, "count", "Linear"),
        ({(1, 2): 3, "x": 1}, {"x": 1}, "(1, 2)", "a name of type tuple"),
        ({"f": Fails(), "x": 1}, {"x": 1}, "f", "could not be read|is a "),
        (containing_itself, {"ok": 1}, "me", "contains itself"),
    ],
)
def test_what_cannot_be_kept_is_dropped_and_named(metrics: Any, kept: Any, where: str, words: str) -> None:
    dropped: list[tuple[str, str]] = []
    assert normalise(metrics, lambda *what: dropped.append(what)) == kept
    ((named, why),) = dropped
    assert named == where
    assert re.search(words, why)


def test_each_metric_is_warned_about_once_and_not_without_end() -> None:
    warnings: list[str] = []
    drop = values.DroppedValues(warnings.append)
    for step in range(values.MOST_WARNINGS + 5):
        normalise({"model": object(), f"model/{step}": object()}, drop)
    assert len(warnings) == values.MOST_WARNINGS + 1
    assert sum("'model'" in warning for warning in warnings) == 1
    assert "without a warning for each" in warnings[-1]


@pytest.mark.parametrize(
    ("metrics", "words"),
    [
        (3.0, "takes a dict of metrics, not float"),
        (None, "not NoneType"),
        ([("loss", 1)], "not list"),
    ],
)
def test_metrics_that_are_not_a_dict_are_refused(metrics: Any, words: str) -> None:
    with pytest.raises(ReportError, match=words):
        normalise(metrics)


def test_any_mapping_will_do_and_numbers_as_names_become_text() -> None:
    assert normalise(MappingProxyType({"a": 1, 2: 3})) == {"a": 1, "2": 3}


def test_half_characters_are_written_out_so_that_the_wire_can_carry_them() -> None:
    plain = normalise({"na\udcffme": "fi\udcffle", "ok": "äöü"})
    assert plain == {"na\\udcffme": "fi\\udcffle", "ok": "äöü"}
    msgspec.msgpack.encode(plain)


json_like = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=10,
)


@given(st.dictionaries(st.text(), json_like, max_size=5))
def test_everything_like_json_travels_unchanged(metrics: dict[str, Any]) -> None:
    plain = normalise(metrics)
    assert repr(msgspec.msgpack.decode(msgspec.msgpack.encode(plain))) == repr(plain) == repr(metrics)


class _OnItsWay(values.PendingValues):
    """A pending number without a GPU."""

    __slots__ = ("waited",)

    def __init__(self) -> None:
        self.waited = False

    def wait(self) -> float:
        self.waited = True
        return 2.5


def test_numbers_on_their_way_from_a_gpu_are_waited_for_only_when_resolved() -> None:
    pending = _OnItsWay()
    metrics = values.PendingMetrics({"a": [pending, 1], "b": {"c": pending}})
    assert values.is_pending(metrics)
    assert not pending.waited
    assert values.resolve(metrics) == {"a": [2.5, 1], "b": {"c": 2.5}}
    assert not values.is_pending(normalise({"a": torch.tensor(1.0)}))
