"""Which shares are uploaded, what is ready to be committed, and what yields: pure."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from powertrain.run.checkpoints.pending import (
    PendingCheckpoint,
    next_to_drop,
    next_to_upload,
    ready_to_commit,
    shares_to_upload,
)
from powertrain.wire.from_worker import ShareUploaded
from powertrain.wire.values import CheckpointPart, FilePart

names = st.sampled_from(["a", "b", "c", "d/e", "f/"])
parts = st.builds(
    CheckpointPart,
    checkpoint=st.just(""),
    files=st.lists(names, unique=True, max_size=4).map(
        lambda chosen: [FilePart(name=name, size=0 if name.endswith("/") else 1) for name in chosen]
    ),
    staged=st.just("/staged"),
    pending=st.booleans(),
)
by_rank = st.dictionaries(st.integers(0, 5), parts, max_size=4)


def pending(
    row: int, *, awaited: set[int] | None = None, committing: bool = False, ordered: bool = True
) -> PendingCheckpoint:
    part = CheckpointPart(checkpoint="", files=[FilePart(name="a", size=3)], staged="/staged")
    return PendingCheckpoint(0, row, f"c{row}", {}, 2, {0: part}, 0.0, awaited or set(), ordered, committing)


@given(by_rank)
def test_every_name_is_uploaded_once_by_the_lowest_rank_that_brought_it(
    brought: dict[int, CheckpointPart],
) -> None:
    uploading = shares_to_upload(brought)
    files = {
        name: min(r for r, part in brought.items() if any(f.name == name for f in part.files))
        for part in brought.values()
        for name in (f.name for f in part.files)
        if not name.endswith("/")
    }
    expected = {
        rank: sorted(name for name, owner in files.items() if owner == rank)
        for rank, part in brought.items()
        if not part.pending
    }
    assert uploading == expected


def test_nothing_is_uploaded_where_the_user_has_put_the_files_there() -> None:
    there = CheckpointPart(checkpoint="", files=[FilePart(name="a", size=1)], elsewhere="s3://b/c")
    staged = CheckpointPart(checkpoint="", files=[FilePart(name="b", size=1)], staged="/staged")
    assert shares_to_upload({0: there, 1: staged}) == {1: []}


@given(st.lists(st.tuples(st.booleans(), st.booleans(), st.booleans()), max_size=6))
def test_only_the_oldest_is_uploaded_and_committed(states: list[tuple[bool, bool, bool]]) -> None:
    table = {
        (0, row): pending(row, awaited={0} if awaits else set(), committing=committing, ordered=ordered)
        for row, (ordered, awaits, committing) in enumerate(states, start=1)
    }
    uploading, ready = next_to_upload(table), ready_to_commit(table)
    assert (uploading is not None) == bool(states and not states[0][0])
    assert (ready is not None) == (states[:1] == [(True, False, False)])
    assert all(chosen.row == 1 for chosen in (uploading, ready) if chosen is not None)


def test_the_oldest_that_is_not_being_committed_yields_to_a_newer_one() -> None:
    table = {(0, row): pending(row, awaited={0}, committing=row == 1) for row in (1, 2, 3)}
    chosen = next_to_drop(table, 4)
    assert chosen is not None
    assert chosen.row == 2
    assert next_to_drop(table, 2) is None


def test_an_arrived_share_has_hashes_and_is_no_longer_awaited() -> None:
    checkpoint = pending(1, awaited={0})
    checkpoint.arrived(ShareUploaded(attempt=0, row=1, rank=0, files=[FilePart(name="a", size=3, xxh3="ff")]))
    assert checkpoint.awaited == set()
    assert [file.xxh3 for file in checkpoint.merged().files] == ["ff"]


def test_a_share_that_the_users_function_uploaded_lies_where_it_says() -> None:
    checkpoint = pending(1, awaited={0})
    checkpoint.arrived(
        ShareUploaded(attempt=0, row=1, rank=0, files=[FilePart(name="z", size=9)], elsewhere="s3://b/c")
    )
    merged = checkpoint.merged()
    assert merged.elsewhere == "s3://b/c"
    assert [file.name for file in merged.files] == ["z"]
