"""What was asked for, as values: the one thing ``fit`` hands to the controller."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from powertrain.backend import BackendConfig
from powertrain.config.checkpoint import CheckpointConfig
from powertrain.config.data import DataConfig
from powertrain.config.validation import ValidationConfig
from powertrain.engine.base import SlotShape
from powertrain.run import stopping
from powertrain.worker.tracing import TraceSettings


@dataclass(frozen=True, kw_only=True)
class RunSpec:
    """What was asked for, frozen by ``fit``."""

    name: str
    #: The run's directory, the storage path it lies under, the directory ``fit`` was called in.
    path: str
    storage_path: str
    launch_dir: str
    #: A directory on this machine for sockets and scratch, removed at the end.
    runtime_dir: str
    #: The working directory of ranks, the same path on every node; "" for the launch directory as each node has it.
    working_dir: str = ""
    #: Files that the driver's standard output and standard error go to.
    outputs: Sequence[str] = ()
    min_workers: int
    max_workers: int
    shape: SlotShape
    resources: Mapping[str, float] = field(default_factory=dict)
    env: Mapping[str, str] = field(default_factory=dict)
    max_failures: int = 0
    fail_fast: bool = False
    max_preemptions: int = -1
    #: Seconds without progress after which ``on_hang`` happens; None for what the run's own pace suggests.
    hang_timeout: float | None = None
    on_hang: str = "restart"
    #: Seconds between a signal that asks for an end and the kill that follows it.
    signal_grace: float = 30.0
    stop: stopping.Criterion = None
    #: Whether ``stop`` is one of a sweep: called with every row, also while the run is ending, and with whether it has
    #: brought a checkpoint.
    stop_sees_all: bool = False
    callbacks: Sequence[Any] = ()
    checkpoints: CheckpointConfig = field(default_factory=CheckpointConfig)
    #: Where shares of checkpoints wait on each node ("": below ``runtime_dir``), and shared memory for them.
    staging: str = ""
    segments: str = ""
    #: Goes into the usual names of checkpoints: not "" after a start that was cut off.
    checkpoint_tag: str = ""
    #: Seconds after which storage that keeps refusing is given up.
    sync_timeout: float = 1800.0
    #: Seconds to wait for slots before the run fails; None for as long as it takes.
    queue_timeout: float | None = None
    #: The port that the run listens on for processes of other machines; 0 for any that is free.
    port: int = 0
    #: The address that it listens on; "" for the engine's choice.
    bind_host: str = ""
    #: The run's storage, pickled, as processes on other nodes know it.
    storage: bytes = b""
    #: The pickled filesystem of the storage, where the user gave one.
    filesystem: bytes = b""
    #: Where workers' output is kept; "" for ``logs`` in the run's directory.
    logs: str = ""
    validation: ValidationConfig | None = None
    backend: BackendConfig = field(default_factory=BackendConfig)
    #: The pickled (function, config) and the sources that tracebacks may need.
    function: bytes = b""
    sources: Mapping[str, str] = field(default_factory=dict)
    metadata: Mapping[str, Any] = field(default_factory=dict)
    #: Of a trial of a sweep: the sweep's name and the trial's id.
    sweep: str = ""
    trial_id: str = ""
    seed: int = 0
    #: The pickled datasets; b"" where there are none, or each process has its own.
    datasets: bytes = b""
    #: By dataset what it was when it was looked at, and what orders shuffled ones.
    data_fingerprints: Mapping[str, str] = field(default_factory=dict)
    data_seed: int = 0
    #: Where decoded blocks are kept on each node, and what else was asked for.
    data_cache: str = ""
    data: DataConfig = field(default_factory=DataConfig)
    #: Datasets that the engine feeds to the ranks, and those of them that every rank gets whole.
    data_streams: Sequence[str] = ()
    data_streams_whole: Sequence[str] = ()
    #: How ranks are traced; None for not at all.
    trace: TraceSettings | None = None
    #: True when an error is to be looked at in a debugger before the rank ends.
    post_mortem: bool = False
    #: True where ranks run whole scripts: the exit code 0 is a good end without a word too, and once one has ended
    #: after a request to end, the others have ``signal_grace`` seconds.
    runs_scripts: bool = False
    #: True when every report waits for all ranks.
    report_barrier: bool = False
    #: A checkpoint of another run to begin from, as a path; "" for none.
    begin_from: str = ""
    begin_from_filesystem: bytes = b""
    version: str = ""
    #: What callbacks are told of the trainer's arguments: fields of ``RunContext``.
    arguments: Mapping[str, Any] = field(default_factory=dict)
