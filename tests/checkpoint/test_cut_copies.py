"""Copies into memory that was pinned in pieces do not cross from one piece into the next."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from powertrain.checkpoint.state.files import cut_copy


@given(
    rows=st.integers(1, 40),
    is_transposed=st.booleans(),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.uint8]),
    places=st.lists(st.integers(-20, 1000), unique=True, max_size=8),
)
def test_a_cut_copy_has_every_byte_and_crosses_no_cut(
    rows: int, is_transposed: bool, dtype: torch.dtype, places: list[int]
) -> None:
    source = torch.arange(rows * 6).view(rows, 6).to(dtype)
    source = source.t() if is_transposed else source
    view = torch.zeros(source.shape, dtype=dtype)
    cuts = [view.data_ptr() + place for place in sorted(places)]
    for part, part_of_source in cut_copy(view, source, cuts):
        first, end = part.data_ptr(), part.data_ptr() + part.nbytes
        assert not any(first < cut < end for cut in cuts)
        part.copy_(part_of_source)
    assert torch.equal(view, source)
