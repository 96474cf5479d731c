from __future__ import annotations

import json
import math
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from powertrain.checkpoint import manifest as mf
from powertrain.checkpoint.manifest import Manifest, ManifestFile
from powertrain.errors import CheckpointError, OtherVersionError

scalars = (
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**63 - 1)
    | st.floats(allow_nan=False)
    | st.text()
    | st.binary()
)
keys = st.text(max_size=6) | st.sampled_from(["$float", "$plain", "$pairs", "$bytes", "$"])
values: st.SearchStrategy[Any] = st.recursive(
    scalars,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(keys, inner, max_size=3)
        | st.dictionaries(st.integers(-9, 9), inner, min_size=1, max_size=3)
    ),
    max_leaves=10,
)


def manifest(**changes: Any) -> Manifest:
    file = ManifestFile(name="model.pt", size=3, xxh3="0" * 32, rank=0)
    fields: dict[str, Any] = {
        "name": "checkpoint_000001",
        "row": 1,
        "attempt": 0,
        "metrics": {},
        "world_size": 2,
        "lease": 1,
        "parent": "",
        "created": 5.0,
        "files": [file],
    }
    return Manifest(**{**fields, **changes})


@given(st.dictionaries(keys, values, max_size=4), st.dictionaries(keys, values, max_size=4))
def test_metrics_and_extras_come_back_exactly(metrics: dict[str, Any], extras: dict[str, Any]) -> None:
    original = manifest(metrics=metrics, extras=extras, metadata=metrics)
    again = mf.decode(mf.encode(original))
    assert again == original
    assert msgspec.msgpack.encode(again) == msgspec.msgpack.encode(
        original
    )  # 1, 1.0 and True are not the same


def test_nan_and_infinities_survive_in_plain_json() -> None:
    data = mf.encode(manifest(metrics={"a": math.nan, "b": [math.inf, -math.inf]}))
    assert json.loads(data)["metrics"]["a"] == {"$float": "nan"}
    metrics = mf.decode(data).metrics
    assert math.isnan(metrics["a"])
    assert metrics["b"] == [math.inf, -math.inf]


def test_another_schema_is_refused_with_both_numbers() -> None:
    fields = json.loads(mf.encode(manifest()))
    fields["schema"] = 99
    del fields["seal"]
    with pytest.raises(OtherVersionError, match=r"schema 99.*reads schema 1"):
        mf.decode(mf.seal(fields), "x/.powertrain-manifest.json")


def test_a_schema_number_that_was_damaged_is_no_other_version() -> None:
    data = mf.encode(manifest()).replace(b'"schema": 1', b'"schema": 3')
    with pytest.raises(CheckpointError, match="damaged") as caught:
        mf.decode(data)
    assert not isinstance(caught.value, OtherVersionError)


@pytest.mark.parametrize(
    ("field", "number"),
    [("row", -1), ("row", 2**60), ("attempt", -1), ("lease", -3), ("link", -1), ("world_size", -2)],
)
def test_numbers_that_no_run_counts_with_are_damage(field: str, number: int) -> None:
    with pytest.raises(CheckpointError, match=rf"it is damaged: Expected `int` .* at `\$\.{field}`"):
        mf.decode(mf.encode(manifest(**{field: number})), "it")


@pytest.mark.parametrize("name", ["../x", "/etc/passwd", "", "a/../../b", "a//b", "//"])
def test_file_names_that_climb_out_are_refused(name: str) -> None:
    bad = manifest(files=[ManifestFile(name=name, size=0, xxh3="", rank=0)])
    with pytest.raises(CheckpointError, match="leads out"):
        mf.decode(mf.encode(bad))


@given(st.data())
def test_a_cut_manifest_is_refused_and_never_half_read(data: st.DataObject) -> None:
    whole = mf.encode(manifest(metrics={"loss": 0.5}))
    cut = data.draw(st.integers(0, len(whole) - 3))
    with pytest.raises(CheckpointError, match="where it was"):
        mf.decode(whole[:cut], "where it was")


def test_any_changed_byte_is_found_and_the_damaged_manifest_is_still_known_as_ours() -> None:
    whole = mf.encode(manifest(metrics={"loss": math.nan, "a": 1}, metadata={"b": "text"}))
    for position in range(len(whole)):
        for bit in (1, 0x20, 0x80):
            changed = whole[:position] + bytes([whole[position] ^ bit]) + whole[position + 1 :]
            with pytest.raises(CheckpointError, match="where it was"):
                mf.decode(changed, "where it was")
            assert mf.is_manifest(changed)
            assert not mf.is_void(changed)
    for changed in (whole + b" ", whole + b"\n", b" " + whole):
        with pytest.raises(CheckpointError, match="where it was"):
            mf.decode(changed, "where it was")


def test_a_void_manifest_is_no_manifest_and_no_damage_makes_it_one() -> None:
    void = mf.void(7)
    assert mf.is_void(void)
    assert not mf.is_manifest(void)
    with pytest.raises(CheckpointError, match="void"):
        mf.decode(void)
    for position in range(len(void)):
        assert not mf.is_void(void[:position] + bytes([void[position] ^ 1]) + void[position + 1 :])
    assert not mf.is_void(mf.encode(manifest()))


@given(st.dictionaries(keys, values, max_size=4))
def test_what_a_validation_found_comes_back_exactly(metrics: dict[str, Any]) -> None:
    validation = mf.Validation(status="VALIDATED", metrics=metrics, error="ä", seconds=1.5)
    assert mf.decode_validation(mf.encode_validation(validation), "it") == validation


@pytest.mark.parametrize("content", [b"[]", b"{}", b'{"schema": 1}', b'"text"', b'{"schema":1,"metrics":3}'])
def test_other_json_is_refused(content: bytes) -> None:
    with pytest.raises(CheckpointError):
        mf.decode(content)
    assert not mf.is_manifest(content)
