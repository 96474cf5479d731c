"""``Place``: what a worker knows about its run."""

from __future__ import annotations

from typing import Any

import msgspec


class Place(msgspec.Struct, frozen=True, kw_only=True):
    """Which rank this is, of which attempt of which run, and where things are."""

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    local_world_size: int = 1
    node_rank: int = 0
    attempt: int = 0
    #: The first row this attempt will report.
    first_row: int = 1
    run_name: str = ""
    #: The run's directory: ``storage_path/name``.
    run_path: str = ""
    storage_path: str = ""
    #: Where the driver was started.
    launch_dir: str = ""
    #: Committed checkpoint to go on from, as a path or address; "" for none.
    checkpoint: str = ""
    #: The pickled filesystem that ``checkpoint`` is on, and that of the run, where the user gave one.
    checkpoint_filesystem: bytes = b""
    run_filesystem: bytes = b""
    #: Goes into the usual names of checkpoints.
    checkpoint_tag: str = ""
    #: Names given with ``checkpoint_dir_name`` that are committed already.
    checkpoint_names: list[str] = []
    #: Registered state is saved every so many rows; 0 for never.
    checkpoint_frequency: int = 0
    #: Where shares of checkpoints are staged on this node, and how many bytes may wait there (0: half of the disk).
    staging: str = ""
    staging_bytes: int = 0
    #: Where shared-memory segments go; "" where there are none.
    segments: str = ""
    #: The rank's working directory; "" for the launch directory. And the node's scratch directory, if it is that one.
    working_dir: str = ""
    scratch: str = ""
    #: Files that the driver's standard output and standard error go to.
    outputs: list[str] = []
    #: Where the rank marks how far it has come, and where its stacks go when they are asked for; "" for nowhere.
    mark: str = ""
    stacks: str = ""
    #: True when the trainer was given a validation function.
    validates: bool = False
    #: True when every report waits until all ranks have made it.
    report_barrier: bool = False
    #: Where decoded blocks of data are kept on this node, how many bytes of them (-1: a quarter of what is free), and
    #: how many bytes of memory this rank may use to read.
    data_cache: str = ""
    data_cache_bytes: int = -1
    data_memory_bytes: int = 2**29
    #: Orders shuffled data.
    data_seed: int = 0
    #: By dataset what it was when the run's driver looked at it: a rank that looks for itself must find the same.
    data_fingerprints: dict[str, str] = {}
    #: By dataset the state that ``checkpoint`` keeps, if that is of this run; and what happens if data have changed.
    data_positions: dict[str, dict[str, Any]] = {}
    on_data_change: str = "refuse"
    #: As ``DataConfig.resume``; and by dataset how many batches were drawn without a step before the checkpoint.
    data_resume: str = "batch"
    data_gaps: dict[str, int] = {}
    #: By dataset of Ray's that is streamed, the socket where this rank gets its rows; and those that are not split.
    data_feeds: dict[str, str] = {}
    data_feeds_whole: list[str] = []
    metadata: dict[str, Any] = {}
    #: Of a trial of a sweep: the sweep's name and the trial's id.
    sweep: str = ""
    trial_id: str = ""
    resources: dict[str, float] = {}
