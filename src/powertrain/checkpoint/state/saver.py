"""Saving a rank's state at memory speed, and loading a state at any world size.

The first save of a structure plans the writer and the file position of each tensor. Later saves of the same structure
only copy the bytes to their places in a shared-memory segment (``powertrain.checkpoint.state.segments``), which is the
rank's file already, and write a small JSON file with the other values.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch

from powertrain.checkpoint.parallel.fitting import StateView, claimed_elsewhere, fitted, takes_only_a_part
from powertrain.checkpoint.parallel.holdings import (
    Agreement,
    Holdings,
    form_of,
    gather_of,
    needs_agreement,
)
from powertrain.checkpoint.state import capture, encoding, expected_size, random_state, restore
from powertrain.checkpoint.state.dcp import StateReader, read_into
from powertrain.checkpoint.state.encoding import Captured
from powertrain.checkpoint.state.files import FileLayout, copy_all, write_file
from powertrain.checkpoint.state.pieces import SCHEMA, STATE_DIRECTORY, SharePlanner, file_name
from powertrain.checkpoint.state.restore import StoredState
from powertrain.checkpoint.state.segments import Segments
from powertrain.checkpoint.state.shared_memory import SharedMemorySegment
from powertrain.errors import CheckpointError
from powertrain.storage.files.descriptors import open_below


def values_name(rank: int) -> str:
    """Return the name of a rank's values inside the state's directory."""
    return f"rank-{rank:05d}.json"


#: Memory for a state that is expected to be smaller is made ready by the save itself.
_WORTH_A_THREAD = 4 * 2**20
#: In a rank's values: the ranks' holdings differ, so the values of all of them make up the state.
_BY_RANK = "by rank"


def own_name(name: str, rank: int) -> str:
    """Under which name a tensor of the rank's own is stored. Rank 0's keep theirs: they stand for all."""
    return f"rank-{rank:05d}/{name}" if rank else name


# --------------------------------------------------------------------------- saving


class StateSaver:
    """Saves the states of one rank. Plans and segments are kept between saves; :meth:`close` gives them up."""

    def __init__(
        self,
        rank: int,
        world_size: int,
        segments: str = "",
        staging: str = "",
        threads: int = 1,
        warn: Callable[[str], None] = lambda _message: None,
    ) -> None:
        """Create a saver. ``segments`` is the directory for shared memory, "" for none; ``staging`` that of all staged
        directories, "" if not known. ``threads`` copy together. ``warn`` is called once with each warning for the
        user."""
        self._rank, self._world_size, self._warn = rank, world_size, warn
        self._segments = Segments(segments, f"rank-{rank:05d}", staging) if segments else None
        self._agreement: Agreement | None = None
        self._signature: object = None
        self._layout = FileLayout([], rank, world_size)
        self._threads = threads
        self._warned: set[str] = set()

    def expect(self, objects: Iterable[Any]) -> None:
        """Begin to make memory ready in the background for a save of these objects, where they are on a GPU.

        Otherwise the first save would allocate and pin all of it before it could copy: seconds for some gigabytes.
        """
        if self._segments is None:
            return
        expected = expected_size.of(objects, self._world_size)
        if expected.gpu is not None and expected.bytes >= _WORTH_A_THREAD:
            self._segments.expect(expected.bytes, expected.gpu)

    def save(self, objects: Mapping[str, Any], directory: str) -> None:
        """Put the state of ``objects`` into ``directory``. Afterwards the objects may change.

        All ranks save at once, each into a directory of its own. Parts that ranks have alike have the same names on all
        of them. Where shared memory has no room, the tensors are written to a plain file, which takes longer.
        """
        captured = capture.capture(objects)
        holdings = self._agree(objects, captured)
        tensors = self._to_write(captured, holdings)
        self._plan(tensors, captured, holdings)
        place = os.path.join(directory, STATE_DIRECTORY)
        os.mkdir(place)
        with torch.no_grad():
            sources = [piece.of(tensors[piece.name]) for piece in self._layout.pieces]
        path = os.path.join(place, file_name(self._rank))
        if (segment := self._segment()) is None:
            write_file(path, self._layout, sources)
        else:
            gpu = next((source.device.index for source in sources if source.is_cuda), None)
            self._fill(segment, sources, gpu)
            segment.link_at(path)
            assert self._segments is not None
            self._segments.make_one_ahead(segment.size, gpu)
        content = {"schema": SCHEMA, "rank": self._rank, "world_size": self._world_size, **captured.values}
        if not holdings.alike:
            content["layout"] = _BY_RANK
        Path(place, values_name(self._rank)).write_text(json.dumps(content), encoding="utf-8")

    def close(self) -> None:
        """Release the segments; those with a pending upload stay until it is done."""
        if self._segments is not None:
            self._segments.close()

    def _agree(self, objects: Mapping[str, Any], captured: Captured) -> Holdings:
        """Return which ranks hold which tensors; exchange messages only where a rank cannot derive it."""
        gather = gather_of(self._rank, self._world_size)
        if gather is None or not needs_agreement(objects, self._world_size):
            return Holdings()
        if self._agreement is None:
            self._agreement = Agreement(gather)
        return self._agreement.reach(objects, captured)

    def _to_write(self, captured: Captured, holdings: Holdings) -> dict[str, torch.Tensor]:
        """Return the tensors this rank takes part in writing, by the names they are stored under."""
        others = {
            name
            for name in captured.of_first
            if holdings.first_holder(name, captured.tensors[name]) != self._rank
        }
        return {
            own_name(name, self._rank) if name in captured.own else name: tensor
            for name, tensor in captured.tensors.items()
            if name not in others
        }

    def _plan(self, tensors: dict[str, torch.Tensor], captured: Captured, holdings: Holdings) -> None:
        signature = holdings, [form_of(name, tensor) for name, tensor in tensors.items()]
        if signature == self._signature:
            return
        alone = {own_name(name, self._rank) for name in captured.own} | captured.of_first
        planner = SharePlanner(self._rank, self._world_size, alone, holdings.holders)
        planner.set_up_planner(tensors, None, self._rank == 0)
        planner.create_local_plan()
        self._layout = FileLayout(planner.pieces.values(), self._rank, self._world_size)
        self._signature = signature

    def _segment(self) -> SharedMemorySegment | None:
        """Return a segment for this layout, ``None`` where there is no shared memory for it."""
        if self._segments is None:
            self._warn_once("shared memory for staging cannot be had")
            return None
        try:
            return self._segments.take(self._layout.size)
        except OSError as error:
            self._warn_once(f"shared memory for staging is too small ({error.strerror or error})")
            return None

    def _warn_once(self, why: str) -> None:
        if "slow" not in self._warned:
            self._warned.add("slow")
            self._warn(
                f"save_state writes to a plain file instead of shared memory, which blocks training longer: {why}. "
                "In a container, start it with a larger /dev/shm (docker run --shm-size=...)."
            )

    def _fill(self, segment: SharedMemorySegment, sources: list[torch.Tensor], gpu: int | None) -> None:
        while gpu is not None and segment.ready < segment.size:
            segment.make_ready(segment.size, pinned=True)
        if gpu is not None and not segment.pin() and "pin" not in self._warned:
            self._warned.add("pin")
            self._warn("save_state copies slower than it could: CUDA refuses to pin shared memory.")
        if segment.layout is not self._layout:
            content = torch.frombuffer(segment.map, dtype=torch.uint8)
            content[: len(self._layout.header)] = torch.frombuffer(
                bytearray(self._layout.header), dtype=torch.uint8
            )
            segment.views = list(self._layout.views(content))
            segment.layout = self._layout
        copy_all(segment.views, sources, self._threads, segment.cuts)
        segment.ready = segment.size  # every page was written to


# --------------------------------------------------------------------------- loading


class StateLoader:
    """A saved state in ``directory`` (that of a checkpoint), as one rank of ``world_size`` sees it."""

    def __init__(self, directory: str, rank: int, world_size: int) -> None:
        """Raises :class:`CheckpointError` where ``directory`` has no whole state."""
        place = Path(directory, STATE_DIRECTORY)
        if not place.is_dir():
            raise CheckpointError(
                f"{directory} has no {STATE_DIRECTORY!r} directory, so powertrain.save_state did not write it. "
                "Load its files the way they were saved, from checkpoint.as_directory()."
            )
        self._reader = StateReader(place)
        files = self._reader.files
        #: How many ranks have saved it.
        self.world_size = files.world_size
        #: True where each rank restores its own values, random generators included.
        self.same_world = files.world_size == world_size
        self._rank, self._now_world_size, self._where = rank, world_size, directory
        self._source = rank if self.same_world else 0
        values = _read_values(place, self._source)
        by_rank = values.get("layout") == _BY_RANK
        self._by_rank = {
            one: values if one == self._source else _read_values(place, one)
            for one in (range(files.world_size) if by_rank else [self._source])
        }
        self._view = StateView(values, _seen_by(self._source, files.shapes))

    def load(self, objects: Mapping[str, Any], *, generators: bool = True) -> dict[str, Any]:
        """Load the objects in place; returns the plain values that were saved beside them.

        Nothing is changed where something does not fit. With ``generators`` the random generators of this process
        are restored as well, where the world size is that of the save. Ranks that take a part each load at once.
        """
        view = self._fitted(objects)
        saved = self._saved(view)
        parts = restore.restoring(objects, saved)
        extras, give_extras = restore.extras_of(saved)
        rng = saved.values.get("rng", {}) if self.same_world and generators else {}
        of_rng = {
            name: torch.empty(saved.shapes[name], dtype=saved.dtypes[name])
            for name in encoding.tensor_names(rng)
        }
        targets = dict(extras)
        for part in parts:
            targets.update(part.targets)
        targets.update(of_rng)
        read_into(self._reader, {view.stored[name]: target for name, target in targets.items()})
        for part in parts:
            part.finish()
        if rng:
            random_state.restore_rng(rng, of_rng)
        return give_extras()

    def _fitted(self, objects: Mapping[str, Any]) -> StateView:
        """Return the state as these objects need it: in pipeline parallel training each rank takes a part."""
        gather = None
        if needs_agreement(objects, self._now_world_size) and takes_only_a_part(
            objects, self._view.stored, self._by_rank
        ):
            gather = gather_of(self._rank, self._now_world_size)
        elsewhere = claimed_elsewhere(objects, gather)
        if len(self._by_rank) == 1 and not elsewhere:
            return self._view
        stored = self._reader.files.shapes
        return fitted(
            self._view,
            objects,
            self._by_rank,
            self._source,
            elsewhere,
            lambda name, rank: place if (place := own_name(name, rank)) in stored else name,
        )

    def _saved(self, view: StateView) -> StoredState:
        files = self._reader.files
        shapes, dtypes = files.shapes, files.dtypes
        return StoredState(
            shapes={name: shapes[stored] for name, stored in view.stored.items()},
            dtypes={name: dtypes[stored] for name, stored in view.stored.items()},
            sharded=frozenset(name for name, stored in view.stored.items() if stored in files.sharded),
            values=view.values,
            where=self._where,
        )


def _seen_by(rank: int, stored: Mapping[str, Any]) -> dict[str, str]:
    """Return names as this rank uses them, each with the name under which its tensor is stored."""
    seen = {name: name for name in stored if "/" not in name or not name.startswith("rank-")}
    if rank:
        prefix = own_name("", rank)
        seen.update({name.removeprefix(prefix): name for name in stored if name.startswith(prefix)})
    return seen


def _content_of(path: Path) -> bytes:
    with open(open_below(path, 1), "rb") as file:
        return file.read()


def _read_values(place: Path, rank: int) -> dict[str, Any]:
    path = place / values_name(rank)
    try:
        values: dict[str, Any] = json.loads(_content_of(path))
        if not isinstance(values["objects"], dict) or not isinstance(values["extras"], dict):
            raise ValueError("it has another form")
    except FileNotFoundError:
        raise CheckpointError(
            f"The state in {place} cannot be loaded: {path.name} is missing. Load another checkpoint."
        ) from None
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        why = f"{error.strerror or error}" if isinstance(error, OSError) else repr(error)
        raise CheckpointError(
            f"The state in {place} cannot be loaded: {path.name} cannot be read ({why}). Load another "
            "checkpoint."
        ) from error
    return values
