"""Injected faults, and the expected diagnosis. Loads nothing: drivers and ranks both import it.

A step has phases of about 10, 14 and 3 ms (forward, backward, optimizer). They consist of some real work and, for the
rest, of waiting, as a thread waits for its device: so three ranks fit on two cores, and the injected fault is the only
one.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

#: Seconds that phases wait besides their computation.
FORWARD, BACKWARD, OPTIMIZER = 0.008, 0.011, 0.003
#: Seconds of the injected delay.
FAULT = 0.030
#: Affected ranks: all, the last, a different one in each step, those of the slow host.
ALL, LAST, TURNS, SLOW_HOST = "all", "last", "turns", "slow host"


@dataclass(frozen=True)
class Pause:
    """Time that ranks lose somewhere in a step."""

    #: fetch, forward, backward, optimizer, loss or outside.
    where: str
    seconds: float
    who: str = ALL
    #: Only in every n-th step; only in this one.
    every: int = 1
    only: int | None = None

    def at(self, where: str, step: int, rank: int, ranks: int) -> float:
        """Return its seconds for a rank and step."""
        is_theirs = {ALL: True, LAST: rank == ranks - 1, TURNS: rank == step % ranks}[self.who]
        is_now = step == self.only if self.only is not None else step % self.every == self.every - 1
        return self.seconds if where == self.where and is_theirs and is_now else 0.0


@dataclass(frozen=True)
class Expected:
    """The expected first finding."""

    kind: str
    phase: str = ""
    #: ``""`` for none named, which means all alike; ALL for all of them named; LAST; SLOW_HOST.
    who: str = ""
    #: Numbers of its evidence: (name, lowest, highest).
    numbers: tuple[tuple[str, float, float], ...] = ()
    #: A kind expected among the other findings, about the last rank.
    also: str = ""
    #: A phase that must have been recorded.
    sees: str = ""
    #: Part of the evidence's ``line``.
    line: str = ""

    def ranks(self, ranks: int, on_slow_host: tuple[int, ...] = ()) -> tuple[int, ...]:
        """Return the ranks that it must name, for a world size."""
        named: dict[str, tuple[int, ...]] = {
            "": (),
            ALL: tuple(range(ranks)),
            LAST: (ranks - 1,),
            SLOW_HOST: on_slow_host,
        }
        return named[self.who]


@dataclass(frozen=True)
class Scenario:
    """One run. ``name`` is its name on the command line."""

    name: str
    what: str
    expected: Expected
    #: TraceML's kinds for it, any of which is right; for one rank's fault it must name that rank.
    of_traceml: tuple[str, ...] = ()
    steps: int = 120
    pauses: tuple[Pause, ...] = ()
    #: Loader workers; the number that the diagnosis of the scenario ``after`` advises, if given.
    loader_workers: int = 0
    after: str = ""
    #: Call ``model.forward`` rather than the model.
    calls_forward: bool = False
    #: MiB leaked in each step, and MiB allocated at once, after this share of the steps; by ``memory_of``.
    leak: float = 0.0
    jump: float = 0.0
    jump_at: float = 0.5
    memory_of: str = ALL
    #: Jitter of every phase, as a share of it, hiccups in one of a hundred steps, and fluctuating memory.
    noise: float = 0.0
    #: Compute threads of each rank for each core of the machine; 0 for one thread.
    threads_per_core: int = 0
    #: Milliseconds of a step are all computation, without waiting.
    computes: bool = False
    #: Size in MiB and interval in steps of checkpoints.
    checkpoint: tuple[int, int] | None = None
    #: Ranks on two hosts; factor of the second host's phase durations.
    slow_host: float = 0.0
    device: str = "cpu"
    #: On a device: MiB of a batch, whether it is pinned.
    batch: int = 0
    pinned: bool = False
    #: On a device: the host waits in forward instead of giving the device work.
    idle_device: bool = False
    world_sizes: tuple[int, ...] = (2, 3)
    #: Whether TraceML is run too: for the scenarios of the claim.
    beside: bool = True

    @property
    def waits(self) -> bool:
        """Return whether phases wait. With a device they launch work on it instead, unless it is to be idle."""
        return self.idle_device or (self.device == "cpu" and not self.computes)

    def pause(self, where: str, step: int, rank: int, ranks: int) -> float:
        """Return the seconds that this rank loses in a phase."""
        return sum(pause.at(where, step, rank, ranks) for pause in self.pauses)

    def jitter(self, source: random.Random) -> float:
        """Return the factor by which a phase is longer in this step."""
        return max(0.2, source.gauss(1.0, self.noise)) if self.noise else 1.0

    def takes_memory(self, rank: int, ranks: int) -> bool:
        return self.memory_of == ALL or rank == ranks - 1


def _straggler(phase: str, where: str, of_traceml: tuple[str, ...], what: str) -> Scenario:
    return Scenario(
        f"{phase}_straggler",
        what,
        Expected(f"{phase}_straggler", phase, LAST, (("excess", 0.8 * FAULT, 1.4 * FAULT),)),
        of_traceml,
        pauses=(Pause(where, FAULT, LAST),),
    )


_HEALTHY = Expected("healthy")
#: TraceML's verdicts on a healthy run.
_CALM = ("BALANCED", "COMPUTE_BOUND", "NO_CLEAR_PERFORMANCE_BOTTLENECK")
#: TraceML's verdicts on a late rank with an unknown phase.
_LATE = ("STRAGGLER",)
_NOTHING: tuple[str, ...] = ()

SCENARIOS = (
    # The fifteen scenarios of the comparison with peers.
    Scenario("healthy", "nothing", _HEALTHY, _CALM),
    Scenario(
        "input_bound",
        "each batch takes 30 ms to make, in the loop",
        Expected("input_bound", "input", numbers=(("fetch", 0.028, 0.045), ("workers", 2, 4))),
        ("INPUT_BOUND",),
        pauses=(Pause("fetch", FAULT),),
    ),
    _straggler("input", "fetch", ("INPUT_STRAGGLER",), "the last rank's batches take 30 ms longer"),
    _straggler("forward", "forward", ("COMPUTE_STRAGGLER",), "the last rank's forward takes 30 ms longer"),
    Scenario(
        "direct_forward",
        "the model's forward() is called by name",
        Expected("healthy", sees="forward"),
        # TraceML either detects it through DDP, as Powertrain does, or reports that it does not.
        (*_CALM, "INCOMPLETE_DATA", "INSUFFICIENT_STEP_TIME_DATA"),
        calls_forward=True,
    ),
    _straggler("backward", "backward", _LATE, "the last rank's backward takes 30 ms longer"),
    _straggler("optimizer", "optimizer", _LATE, "the last rank's optimizer takes 30 ms longer"),
    _straggler("inside", "loss", _LATE, "the last rank stalls for 30 ms within the step"),
    Scenario(
        "outside_bound",
        "30 ms between two steps",
        Expected("outside_bound", "outside", line="pause_between_steps"),
        ("OUTSIDE_BOUND",),
        pauses=(Pause("outside", FAULT),),
    ),
    _straggler("outside", "outside", ("OUTSIDE_STRAGGLER",), "the last rank spends 30 ms between two steps"),
    Scenario(
        "slow_first_batch",
        "the first batch takes 2 s",
        Expected("slow_first_batch", "input", numbers=(("time", 1.8, 2.6),)),
        ("SLOW_FIRST_BATCH",),
        pauses=(Pause("fetch", 2.0, only=0),),
    ),
    Scenario(
        "epoch_spike",
        "an evaluation of 120 ms after each 20 steps",
        Expected("periodic_spike", "outside", numbers=(("period", 20, 20), ("time", 0.1, 0.16))),
        ("PERIODIC_SPIKE",),
        steps=160,
        pauses=(Pause("outside", 0.12, every=20),),
    ),
    Scenario(
        "late_by_turns",
        "another rank stalls for 30 ms in each step",
        Expected("alternating_straggler", "inside", ALL),
        _NOTHING,
        pauses=(Pause("loss", FAULT, TURNS),),
    ),
    Scenario(
        "host_leak",
        "each step leaves 1 MiB behind on every rank",
        # A process may grow by more than is leaked: some runs lose a quarter more to heap fragmentation.
        Expected("host_memory_leak", "", ALL, (("mib_per_step", 0.8, 1.5),)),
        _NOTHING,
        steps=200,
        leak=1.0,
    ),
    Scenario(
        "heavy_loss",
        "the loss function takes 30 ms",
        Expected("compute_bound", "inside", line="loss_function"),
        ("RESIDUAL_HEAVY",),
        pauses=(Pause("loss", FAULT),),
    ),
    # Seven more, with similar scenarios that they must be distinguished from.
    Scenario("memory_jump", "300 MiB more, once", _HEALTHY, _CALM, steps=200, jump=300.0),
    Scenario(
        "noise",
        "phases that vary, hiccups, memory that comes and goes",
        _HEALTHY,
        _CALM,
        steps=200,
        noise=0.06,
    ),
    Scenario(
        "too_many_threads",
        "two compute threads for each core, on every rank",
        Expected("threads_oversubscribed", "", ALL),
        ("HIGH_CPU", "HIGH_PROCESS_CPU"),
        steps=150,
        threads_per_core=2,
        computes=True,
    ),
    Scenario(
        "slow_checkpoint",
        "a checkpoint of 96 MiB after each 4 steps",
        Expected("checkpoint_bound", "report", numbers=(("every", 4, 4),)),
        _NOTHING,
        steps=80,
        checkpoint=(96, 4),
    ),
    Scenario(
        "slow_node",
        "all phases on one of two hosts take twice as long",
        Expected("slow_node", "backward", SLOW_HOST),
        _NOTHING,
        slow_host=2.0,
    ),
    # Further scenarios.
    Scenario(
        "shard_spike",
        "each 20th batch opens a file, which takes 150 ms",
        Expected("periodic_spike", "input", numbers=(("period", 20, 20), ("time", 0.12, 0.19))),
        ("PERIODIC_SPIKE",),
        steps=160,
        pauses=(Pause("fetch", 0.15, every=20),),
        beside=False,
    ),
    Scenario(
        "bursts",
        "three loader processes that take 240 ms for a batch each: three come at a time, too late",
        Expected("input_bound", "input", numbers=(("workers", 5, 12),)),
        ("INPUT_BOUND",),
        pauses=(Pause("fetch", 0.24),),
        loader_workers=3,
        beside=False,
    ),
    Scenario(
        "advice_taken",
        "input_bound again, with the loader workers that its finding advises",
        _HEALTHY,
        _CALM,
        pauses=(Pause("fetch", FAULT),),
        after="input_bound",
        beside=False,
    ),
    Scenario(
        "host_imbalance",
        "the last rank keeps 400 MiB more",
        Expected("healthy", also="memory_imbalance"),
        _NOTHING,
        jump=400.0,
        jump_at=0.0,
        memory_of=LAST,
        beside=False,
    ),
    Scenario(
        "computing",
        "nothing; all of a step is computed",
        _HEALTHY,
        _CALM,
        steps=150,
        computes=True,
        world_sizes=(2,),
        beside=False,
    ),
    # On a GPU.
    Scenario("gpu_healthy", "nothing", _HEALTHY, _CALM, device="cuda"),
    Scenario(
        "pageable_transfer",
        "batches of 256 MiB from memory that is not pinned",
        Expected("transfer_bound", "h2d", numbers=(("pageable", 1, 1),)),
        ("H2D_BOUND",),
        device="cuda",
        batch=256,
    ),
    Scenario(
        "pinned_transfer",
        "batches of 768 MiB from pinned memory",
        Expected("transfer_bound", "h2d", numbers=(("pageable", 0, 0),)),
        ("H2D_BOUND",),
        device="cuda",
        batch=768,
        pinned=True,
    ),
    Scenario(
        "device_creep",
        "each step leaves 1 MiB of device memory behind",
        Expected("device_memory_creep", "", ALL, (("mib_per_step", 0.8, 1.25),)),
        ("CREEP_EARLY", "CREEP_CONFIRMED"),
        device="cuda",
        # Device memory is sampled each second: some dozens of seconds are needed to distinguish a leak from a few
        # jumps.
        steps=700,
        leak=1.0,
    ),
    Scenario(
        "gpu_idle",
        "the host is busy within forward, and the device waits for it",
        Expected("gpu_idle", "", ALL),
        ("LOW_GPU_UTILIZATION", "LOW_GPU_UTILIZATION_UNEXPLAINED"),
        device="cuda",
        idle_device=True,
    ),
    Scenario(
        "gpu_imbalance",
        "the last rank keeps 2 GiB more on its device",
        Expected("memory_imbalance", "", LAST),
        ("IMBALANCE", "RANK_GPU_MEMORY_IMBALANCE"),
        device="cuda",
        jump=2048.0,
        jump_at=0.0,
        memory_of=LAST,
    ),
)
BY_NAME = {scenario.name: scenario for scenario in SCENARIOS}
