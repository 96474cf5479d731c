"""Injected faults, and the expected diagnosis. Loads nothing: drivers and ranks both import it.

A step has phases of about 10, 14 and 3 ms (forward, backward, optimizer). They consist of some real work and, for the
rest, of waiting, as a thread waits for its device: so three ranks fit on two cores, and the injected fault is the only
one.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

#: Seconds that phases wait besides what they compute.
FORWARD, BACKWARD, OPTIMIZER = 0.008, 0.011, 0.003
#: Seconds of what is put in.
FAULT = 0.030
#: Which ranks: all of them, the last one, another one in each step, those of the slow host.
ALL, LAST, TURNS, SLOW_HOST = "all", "last", "turns", "slow host"


@dataclass(frozen=True)
class Pause:
    """Time that ranks lose somewhere in a step."""

    #: fetch, forward, backward, optimizer, loss or outside.
    where: str
    seconds: float
    who: str = ALL
    #: Only in each so-manyeth step; only in this one.
    every: int = 1
    only: int | None = None

    def at(self, where: str, step: int, rank: int, ranks: int) -> float:
        """Seconds of it there and then."""
        is_theirs = {ALL: True, LAST: rank == ranks - 1, TURNS: rank == step % ranks}[self.who]
        is_now = step == self.only if self.only is not None else step % self.every == self.every - 1
        return self.seconds if where == self.where and is_theirs and is_now else 0.0


@dataclass(frozen=True)
class Expected:
    """The finding that must lead."""

    kind: str
    phase: str = ""
    #: ``""`` for none named, which means all alike; ALL for all of them named; LAST; SLOW_HOST.
    who: str = ""
    #: Numbers of its evidence: (name, lowest, highest).
    numbers: tuple[tuple[str, float, float], ...] = ()
    #: A kind that must be among the others, about the last rank.
    also: str = ""
    #: A phase that must have been seen.
    sees: str = ""
    #: Part of the evidence's ``line``.
    line: str = ""

    def ranks(self, ranks: int, on_slow_host: tuple[int, ...] = ()) -> tuple[int, ...]:
        """Those that it must name, of so many."""
        named: dict[str, tuple[int, ...]] = {
            "": (),
            ALL: tuple(range(ranks)),
            LAST: (ranks - 1,),
            SLOW_HOST: on_slow_host,
        }
        return named[self.who]


@dataclass(frozen=True)
class Scenario:
    """One run. ``name`` is what it is called on the command line."""

    name: str
    what: str
    expected: Expected
    #: Kinds that TraceML has for it, any of which is right; of a rank's fault it must name that rank.
    of_traceml: tuple[str, ...] = ()
    steps: int = 120
    pauses: tuple[Pause, ...] = ()
    #: Processes of the loader; as many as the diagnosis of the scenario ``after`` advises, where that is given.
    loader_workers: int = 0
    after: str = ""
    #: Call ``model.forward`` rather than the model.
    calls_forward: bool = False
    #: MiB kept of each step, and MiB taken at once, after this share of the steps; by ``memory_of``.
    leak: float = 0.0
    jump: float = 0.0
    jump_at: float = 0.5
    memory_of: str = ALL
    #: Jitter of every phase, as a share of it, hiccups in one of a hundred steps, and memory that comes and goes.
    noise: float = 0.0
    #: Compute threads of each rank for each core of the machine; 0 for one thread.
    threads_per_core: int = 0
    #: Milliseconds of a step are computed, none waited.
    computes: bool = False
    #: Save a checkpoint of so many MiB each so many steps.
    checkpoint: tuple[int, int] | None = None
    #: Ranks on two hosts, the second with phases so many times as long.
    slow_host: float = 0.0
    device: str = "cpu"
    #: On a device: MiB of a batch, whether it is pinned.
    batch: int = 0
    pinned: bool = False
    #: On a device: the host waits in forward instead of giving the device work.
    idle_device: bool = False
    world_sizes: tuple[int, ...] = (2, 3)
    #: Whether TraceML is run beside it: on those that the claim names.
    beside: bool = True

    @property
    def waits(self) -> bool:
        """Whether phases wait. Where there is a device they give it work instead, unless it is to be idle."""
        return self.idle_device or (self.device == "cpu" and not self.computes)

    def pause(self, where: str, step: int, rank: int, ranks: int) -> float:
        """Seconds that this rank loses there."""
        return sum(pause.at(where, step, rank, ranks) for pause in self.pauses)

    def jitter(self, source: random.Random) -> float:
        """By how much a phase is longer this time, as a factor."""
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
#: What TraceML says of a healthy run.
_CALM = ("BALANCED", "COMPUTE_BOUND", "NO_CLEAR_PERFORMANCE_BOTTLENECK")
#: What it says of a late rank whose phase it does not know.
_LATE = ("STRAGGLER",)
_NOTHING: tuple[str, ...] = ()

SCENARIOS = (
    # The fifteen that the peers were judged by.
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
        # Either it sees it through DDP, as we do, or it says that it does not.
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
        # A process may grow by more than is kept: some runs lose a quarter more between the blocks of its heap.
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
    # Seven more, and what they are told from.
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
    # Beyond them.
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
        # What a device holds is read each second: it takes some dozens of seconds to tell creep from a few jumps.
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
