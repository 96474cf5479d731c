"""``Place``: the facts that a worker has about its run.

The groups are values of their own: the spec of a run holds the same ones, and each rank is sent them as they are.
"""

from __future__ import annotations

from typing import Any

import msgspec


class RunIdentity(msgspec.Struct, frozen=True, kw_only=True):
    """The identity of a run, and values that the user gave it."""

    name: str = ""
    #: The run's directory: ``storage_path/name``.
    path: str = ""
    storage_path: str = ""
    #: Where the driver was started.
    launch_dir: str = ""
    #: The pickled filesystem of the storage, where the user gave one.
    filesystem: bytes = b""
    metadata: dict[str, Any] = {}
    resources: dict[str, float] = {}
    #: Of a trial of a sweep: the sweep's name and the trial's id.
    sweep: str = ""
    trial_id: str = ""


class SavingSettings(msgspec.Struct, frozen=True, kw_only=True):
    """How ranks save checkpoints."""

    #: Goes into the usual names of checkpoints: not "" after a start that was cut off.
    tag: str = ""
    #: Registered state is saved every so many rows; 0 for never.
    frequency: int = 0
    #: Where shares of checkpoints are staged on each node, and how many bytes may wait there (0: half of the disk).
    staging: str = ""
    staging_bytes: int = 0
    #: Where shared-memory segments go; "" where there are none.
    segments: str = ""
    #: True when the trainer was given a validation function.
    validates: bool = False


class DataSettings(msgspec.Struct, frozen=True, kw_only=True):
    """How ranks read datasets."""

    #: Where decoded blocks are kept on each node, how many bytes of them (-1: a quarter of what is free), and how many
    #: bytes of memory a rank may use to read.
    cache: str = ""
    cache_bytes: int = -1
    memory_bytes: int = 2**29
    #: Orders shuffled data.
    seed: int = 0
    #: By dataset what the run's driver found: a rank that inspects data itself must find the same.
    fingerprints: dict[str, str] = {}
    #: The policy for data that have changed since the checkpoint.
    on_change: str = "refuse"
    #: As ``DataConfig.resume``.
    resume: str = "batch"
    #: Datasets that the engine streams to the ranks, and those of them that every rank gets whole.
    streams: list[str] = []
    whole_streams: list[str] = []


class AttemptStart(msgspec.Struct, frozen=True, kw_only=True):
    """The starting point of an attempt."""

    #: The committed checkpoint, as a path or address; "" for none. With the pickled filesystem it is on, if any.
    checkpoint: str = ""
    filesystem: bytes = b""
    #: Names given with ``checkpoint_dir_name`` that are committed already.
    names: list[str] = []
    #: By dataset the position that the checkpoint keeps, if it is of this run.
    data_positions: dict[str, dict[str, Any]] = {}
    #: By dataset how many batches were drawn without an optimizer step between them before it, at most.
    data_gaps: dict[str, int] = {}


class RankFiles(msgspec.Struct, frozen=True, kw_only=True):
    """Directories and files of one rank on its node; "" for none."""

    #: The working directory ("" for the launch directory), and the node's scratch directory, if it is that one.
    working_dir: str = ""
    scratch: str = ""
    #: Files that the driver's standard output and standard error go to.
    outputs: list[str] = []
    #: Where the rank keeps its newest reports, and where it writes its stacks on request.
    mark: str = ""
    stacks: str = ""
    #: By streamed dataset the socket where this rank gets its rows.
    feeds: dict[str, str] = {}


class Place(msgspec.Struct, frozen=True, kw_only=True):
    """One rank of one attempt of one run, with its directories."""

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    local_world_size: int = 1
    node_rank: int = 0
    attempt: int = 0
    #: The first row this attempt will report.
    first_row: int = 1
    #: True when every report waits until all ranks have made it.
    report_barrier: bool = False
    #: True where the controller judges each report when it comes (``RunConfig(stop=...)``): none is kept back.
    judges_reports: bool = False
    run: RunIdentity = RunIdentity()
    saving: SavingSettings = SavingSettings()
    data: DataSettings = DataSettings()
    start: AttemptStart = AttemptStart()
    files: RankFiles = RankFiles()
