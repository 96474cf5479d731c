"""What may be reported: everything becomes plain data at once, and what cannot is refused by name."""

from __future__ import annotations

import datetime
import enum
import math
from types import MappingProxyType
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from powertrain.errors import ReportError
from powertrain.worker import values
from powertrain.worker.values import normalise


class Colour(str, enum.Enum):
    RED = "red"


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


@pytest.mark.parametrize(
    ("metrics", "words"),
    [
        ({"a": {"b": [0, object()]}}, r"'a/b\[1\]'"),
        ({"logits": torch.zeros(2, 3)}, r"'logits' is a tensor of shape \(2, 3\)"),
        ({"when": datetime.datetime.now()}, "'when' is a datetime.datetime"),
        ({"z": 1 + 2j}, "'z' is a builtins.complex"),
        ({"z": np.array([object()])}, "'z'"),
        ({"z": np.datetime64("2020-01-01")}, "'z'"),
        ({"raw": b"bytes"}, "'raw'"),
        ({"set": {1}}, "'set'"),
        ({(1, 2): 3}, "name must be a string, not tuple"),
        ({"hash": 2**64}, "'hash' is a whole number of 65 bits"),
        ({"hash": -(2**63) - 1}, "64 can be kept"),
        ({"count": torch.nn.Linear(1, 1)}, "'count'"),
        (3.0, "takes a dict of metrics, not float"),
        (None, "not NoneType"),
        ([("loss", 1)], "not list"),
    ],
)
def test_what_cannot_be_kept_is_refused_and_named(metrics: Any, words: str) -> None:
    with pytest.raises(ReportError, match=words):
        normalise(metrics)


def test_metrics_that_contain_themselves_are_refused() -> None:
    metrics: dict[str, Any] = {}
    metrics["me"] = metrics
    with pytest.raises(ReportError, match="contain themselves"):
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


class _OnItsWay(values.Pending):
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
