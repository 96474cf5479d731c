"""Rows a second of shuffled batches of 1024 from Parquet files, beside Ray Data, Hugging Face and plain torch.

Four kinds of rows (``data_loaders/schemas.py``) are written once. Every loader reads the same files in its own process,
three epochs each in another order, and delivers tensors (text: lists of str) of all columns. Missing rows, and rows
duplicated within an epoch, are counted.

- opening: seconds from the files to the loader, including conversion, reading and caching; imports and the start of Ray
  are excluded.
- first epoch, later epochs: rows a second without opening.
- whole: rows a second of all three epochs, opening included.

Peers are measured at their best: all their settings run once on smaller files, and those that are best as a whole or in
later epochs run in the rounds (with ``--quick`` all settings run in the one round). Ray Data and the loaders behind
Hugging Face's datasets choose between the settings of their own guides; those settings are described in the loader
programs. Plain torch has all rows in memory before its first epoch; for text that means strings that exist already.

The limit is an upper bound for every loader: the copy of the bytes (floats, tokens), Pillow on two threads (images, in
an epoch that decodes them), one str made of each row (text; a loader that keeps all strings in memory makes none).

Documents are packed into windows of 2048 tokens beside a plain DataLoader that packs: tokens a second of three epochs,
and tokens lost or duplicated (``data_loaders/packing.py``).

Besides the speed, the cost of a restart in mid-epoch is measured, when 4 ranks become 3 and then 8: rows lost, rows
duplicated.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from operator import attrgetter
from pathlib import Path
from typing import Any

from child_process import run_to_end
from harness import (
    Bound,
    Contender,
    Outcome,
    Rounds,
    Row,
    conclude,
    interleave,
    median,
    median_ratio,
    parse_options,
    worst,
)
from launch import compile_ours

PROGRAMS = Path(__file__).resolve().parent / "data_loaders"
# The programs are started by path and import each other; this process imports from them too.
sys.path.insert(0, str(PROGRAMS))

import measuring  # noqa: E402
import packing  # noqa: E402
import restarting  # noqa: E402
from schemas import FLOATS, IMAGES, SCHEMAS, TEXT, TOKENS, Schema, write_parquet  # noqa: E402

REPETITIONS, QUICK_REPETITIONS = 3, 1
EPOCHS = 3
BATCH_SIZE = 1024
TIMEOUT_SECONDS = 600.0
#: Seconds for Powertrain's processes to exit. Peers get longer: the next loader needs the machine to itself.
OUR_GRACE_SECONDS, PEER_GRACE_SECONDS = 5.0, 20.0

#: The claims of the issue: Powertrain's rows per second are at least this multiple of the named peer's.
OF_RAY = 3.0
OF_BEST_PEER = 0.95
LATER_OF_BEST_PEER = {FLOATS: 0.95, TOKENS: 2.0, IMAGES: 0.95, TEXT: 0.95}

OURS, LIMIT = "Powertrain", "limit"
RAY, MEMORY = "Ray Data", "torch DataLoader over memory"
HF, HF_STATEFUL = "HF + DataLoader", "HF + StatefulDataLoader"
LIMITS = {FLOATS: "memcpy", TOKENS: "memcpy", IMAGES: "Pillow, 2 threads", TEXT: "making each str"}


@dataclass(frozen=True)
class Setting:
    """A loader with its settings for one measurement."""

    loader: str
    name: str
    program: str
    requires: tuple[str, ...]
    settings: Mapping[str, Any] = field(default_factory=dict, hash=False)

    @property
    def label(self) -> str:
        return f"{self.loader}, {self.name}" if self.name else self.loader


def hugging_face(loader: str, loader_class: str, workers: int, fetch: str) -> Setting:
    """Return settings of Hugging Face datasets with one of two loaders."""
    settings = {"loader": loader_class, "num_workers": workers, "fetch": fetch}
    requires = ("torch", "datasets", "torchdata", "PIL")
    return Setting(loader, f"{workers} workers, by {fetch}", "with_hugging_face.py", requires, settings)


def ray_data(shuffle: str, materialize: bool, decoded: bool = False) -> Setting:
    """Return settings of Ray Data with one of its two shuffles."""
    settings = {"shuffle": shuffle, "materialize": materialize, "decoded": decoded}
    name = f"{shuffle}{', materialized' if materialize else ''}{', decoded' if decoded else ''}"
    return Setting(RAY, name, "with_ray_data.py", ("torch", "ray", "PIL"), settings)


def over_memory(workers: int, decoded: bool = False) -> Setting:
    """Return settings of torch's DataLoader over rows in memory."""
    settings = {"num_workers": workers, "decoded": decoded}
    name = f"{workers} workers{', decoded' if decoded else ''}"
    return Setting(MEMORY, name, "over_memory.py", ("torch", "PIL"), settings)


OUR_SETTING = Setting(OURS, "", "with_powertrain.py", ("torch", "powertrain", "PIL"))
LIMIT_SETTING = Setting(LIMIT, "", "limits.py", ("PIL",))
#: Settings that were best for no kind of rows in a trial on small files are omitted: Ray's local shuffle without
#: materialize, and Hugging Face by rows without workers.
PEER_SETTINGS = (
    ray_data("random_shuffle", False),
    ray_data("random_shuffle", True),
    ray_data("local_shuffle_buffer_size", True),
    *(
        hugging_face(name, loader_class, workers, fetch)
        for name, loader_class in ((HF, "DataLoader"), (HF_STATEFUL, "StatefulDataLoader"))
        for workers, fetch in ((0, "batches"), (2, "rows"), (2, "batches"))
    ),
    over_memory(0),
    over_memory(2),
)
#: For images in addition: cached pixels, which take longer before the first epoch and make all epochs fast.
DECODED_SETTINGS = (
    ray_data("random_shuffle", True, decoded=True),
    ray_data("local_shuffle_buffer_size", True, decoded=True),
    over_memory(0, decoded=True),
    over_memory(2, decoded=True),
)
PEERS = (RAY, HF, HF_STATEFUL, MEMORY)


def settings_of_peers(kind: str) -> tuple[Setting, ...]:
    """Return all settings of the peers for one kind of rows."""
    return PEER_SETTINGS + (DECODED_SETTINGS if kind == IMAGES else ())


@dataclass(frozen=True)
class Measured:
    """One loading, and the leftovers of its program."""

    loading: measuring.Loading
    left_behind: tuple[str, ...]


@dataclass(frozen=True)
class Compared:
    """All loadings of one kind of rows. ``trial`` is the round in which the peers' settings were chosen."""

    schema: Schema
    settings: tuple[Setting, ...]
    rounds: Rounds[Measured]
    trial: Rounds[Measured] | None

    def numbers(self, setting: Setting, metric: str) -> list[float | None]:
        """Return one number of each round's loading."""
        return self.rounds.numbers(setting.label, attrgetter(f"loading.{metric}"))

    def best(self, loaders: Sequence[str], metric: str) -> Setting | None:
        """Return the setting of these loaders with the highest median; None if none was measured."""
        return best_setting([one for one in self.settings if one.loader in loaders], self.rounds, metric)


def best_setting(settings: Sequence[Setting], rounds: Rounds[Measured], metric: str) -> Setting | None:
    """Return the setting with the highest median of a metric; None if none was measured."""
    medians = {
        one: median(rounds.numbers(one.label, attrgetter(f"loading.{metric}")))
        for one in settings
        if one.label in rounds.measured
    }
    present = {one: number for one, number in medians.items() if number is not None}
    return max(present, key=lambda one: present[one]) if present else None


# --------------------------------------------------------------------------- measuring


def load_once(setting: Setting, schema: Schema, rows: int, directory: Path) -> Measured:
    """Run a loader program to its end and read its measurement."""
    with tempfile.TemporaryDirectory(prefix="ptb-") as place:
        output = Path(place, "loading.json")
        request = measuring.Request(
            schema.name, str(directory), rows, BATCH_SIZE, EPOCHS, str(output), setting.settings
        )
        ended = run_to_end(
            (sys.executable, str(PROGRAMS / setting.program), request.as_argument()),
            workspace=Path(place),
            timeout=TIMEOUT_SECONDS,
            grace=OUR_GRACE_SECONDS if setting.loader == OURS else PEER_GRACE_SECONDS,
        )
        found = json.loads(output.read_text())
    loading = measuring.Loading(**{**found, "epoch_seconds": tuple(found["epoch_seconds"])})
    # A peer's files (caches, logs) are not an error; a remaining process always is.
    return Measured(loading, ended.left_behind if setting.loader == OURS else ended.left_processes)


def load_in_rounds(
    settings: Sequence[Setting], schema: Schema, rows: int, directory: Path, repetitions: int
) -> Rounds[Measured]:
    """Run each setting once a round."""
    contenders = [
        Contender(one.label, one.requires, partial(load_once, one, schema, rows, directory))
        for one in settings
    ]
    return interleave(contenders, repetitions, warm_up=False)


def chosen_settings(trial: Rounds[Measured], kind: str) -> tuple[Setting, ...]:
    """Return the best settings of each peer as a whole and in later epochs; all of an unmeasured peer."""
    chosen: dict[Setting, None] = {}
    for peer in PEERS:
        settings = [one for one in settings_of_peers(kind) if one.loader == peer]
        best = [best_setting(settings, trial, metric) for metric in ("whole", "later")]
        chosen |= dict.fromkeys(one for one in best if one is not None) or dict.fromkeys(settings)
    return tuple(chosen)


def compare(schema: Schema, workspace: Path, quick: bool) -> Compared:
    """Write the files, try the peers' settings, measure in rounds."""
    small, large = workspace / "small", workspace / "large"
    write_parquet(schema, schema.quick_rows, small)
    if quick:
        settings = (OUR_SETTING, *settings_of_peers(schema.name), LIMIT_SETTING)
        rounds = load_in_rounds(settings, schema, schema.quick_rows, small, QUICK_REPETITIONS)
        return Compared(schema, settings, rounds, None)
    trial = load_in_rounds(settings_of_peers(schema.name), schema, schema.quick_rows, small, 1)
    settings = (OUR_SETTING, *chosen_settings(trial, schema.name), LIMIT_SETTING)
    write_parquet(schema, schema.rows, large)
    rounds = load_in_rounds(settings, schema, schema.rows, large, REPETITIONS)
    return Compared(schema, settings, rounds, trial)


# --------------------------------------------------------------------------- restarts


@dataclass(frozen=True)
class Restarter:
    """A loader that resumes in mid-epoch with another number of ranks, and its method; no program if it has none."""

    name: str
    how: str
    requires: tuple[str, ...] = ()
    program: tuple[str, ...] = ()


OUR_RESTARTER = Restarter(
    OURS, "state_dict() of the shard", ("torch", "powertrain"), ("restart_powertrain.py",)
)
RESTARTERS = (
    OUR_RESTARTER,
    Restarter(RAY, "streaming_split: no state, begins anew", ("torch", "ray"), ("restart_ray_data.py",)),
    Restarter(
        "HF, iterable",
        "split_dataset_by_node, state_dict()",
        ("torch", "datasets", "torchdata"),
        ("restart_hugging_face.py", "stream"),
    ),
    Restarter(
        HF_STATEFUL,
        "StatefulDistributedSampler",
        ("torch", "datasets", "torchdata"),
        ("restart_hugging_face.py", "sampler"),
    ),
    Restarter(HF, "none: a DataLoader has no state"),
    Restarter(MEMORY, "none: a DataLoader has no state"),
)


def restart_once(restarter: Restarter, directory: Path) -> restarting.Restarts:
    """Run a restart program to its end and read its counts."""
    with tempfile.TemporaryDirectory(prefix="ptb-") as place:
        output = Path(place, "restarts.json")
        script, *arguments = restarter.program
        request = restarting.Request(str(directory), str(output)).as_argument()
        run_to_end(
            (sys.executable, str(PROGRAMS / script), request, *arguments),
            workspace=Path(place),
            timeout=TIMEOUT_SECONDS,
            grace=PEER_GRACE_SECONDS,
        )
        return restarting.Restarts(**json.loads(output.read_text()))


def restart_all(workspace: Path) -> Rounds[restarting.Restarts]:
    """Run each restart once: the rows do not depend on timing."""
    directory = workspace / "restarts"
    write_parquet(SCHEMAS[FLOATS], restarting.ROWS, directory)
    contenders = [
        Contender(one.name, one.requires, partial(restart_once, one, directory))
        for one in RESTARTERS
        if one.program
    ]
    return interleave(contenders, 1, warm_up=False)


# --------------------------------------------------------------------------- packing


PACKERS = {
    OURS: ("pack_powertrain.py", 0, ("torch", "powertrain")),
    "torch DataLoader that packs": ("pack_torch.py", 0, ("torch",)),
    "torch DataLoader that packs, 2 workers": ("pack_torch.py", 2, ("torch",)),
}


def pack_once(program: str, workers: int, directory: Path, tokens: int) -> packing.Packed:
    """Run a packing program to its end and read its measurement."""
    with tempfile.TemporaryDirectory(prefix="ptb-") as place:
        output = Path(place, "packed.json")
        request = packing.Request(str(directory), tokens, str(output), workers).as_argument()
        run_to_end(
            (sys.executable, str(PROGRAMS / program), request),
            workspace=Path(place),
            timeout=TIMEOUT_SECONDS,
            grace=PEER_GRACE_SECONDS,
        )
        found = json.loads(output.read_text())
    return packing.Packed(**{**found, "epoch_seconds": tuple(found["epoch_seconds"])})


def pack_all(workspace: Path, quick: bool) -> Rounds[packing.Packed]:
    """Write the documents, and run each packing program once a round."""
    directory = workspace / "documents"
    tokens = packing.write_documents(directory, packing.QUICK_DOCUMENTS if quick else packing.DOCUMENTS)
    contenders = [
        Contender(name, requires, partial(pack_once, program, workers, directory, tokens))
        for name, (program, workers, requires) in PACKERS.items()
    ]
    return interleave(contenders, QUICK_REPETITIONS if quick else REPETITIONS, warm_up=False)


def packing_rows(rounds: Rounds[packing.Packed]) -> list[Row]:
    """Return tokens a second, and tokens lost or duplicated."""
    rows = []
    for title, metric, unit in (
        ("opening", "opening_seconds", "s"),
        ("later epochs", "later", "tokens/s"),
        ("whole", "whole", "tokens/s"),
        ("tokens lost", "lost", ""),
        ("tokens twice", "twice", ""),
    ):
        ours = rounds.numbers(OURS, attrgetter(metric))
        for name in PACKERS:
            numbers = rounds.numbers(name, attrgetter(metric))
            ratio = None if name == OURS or not unit else median_ratio(ours, numbers)
            rows.append(Row(f"packing: {title}", name, unit, numbers, ratio, ""))
    return rows


def packing_bounds(rounds: Rounds[packing.Packed]) -> list[Bound]:
    """Return the bound that Powertrain loses no token and repeats none."""
    wrong = worst(rounds.numbers(OURS, lambda found: found.lost + found.twice))
    return [Bound("packing: tokens lost or twice", wrong, at_most=0)]


# --------------------------------------------------------------------------- the table and the bounds


def rows_of(compared: Compared) -> list[Row]:
    """Return rows for Powertrain and each peer's best setting: as a whole with its parts, then in later epochs."""
    kind = compared.schema.name
    limit = median(compared.numbers(LIMIT_SETTING, "later"))
    limit_text = "" if limit is None else f"{LIMITS[kind]} {limit:,.0f} rows/s"
    rows = []
    for title, metric, chosen_by, unit in (
        ("opening", "opening_seconds", "whole", "s"),
        ("first epoch", "first", "whole", "rows/s"),
        ("later epochs", "later", "later", "rows/s"),
        ("whole", "whole", "whole", "rows/s"),
    ):
        ours = compared.numbers(OUR_SETTING, metric)
        for loader in (OURS, *PEERS):
            setting = compared.best([loader], chosen_by)
            label = loader if setting is None else setting.label
            theirs = [] if setting is None else compared.numbers(setting, metric)
            ratio = None if loader == OURS or not theirs else median_ratio(ours, theirs)
            rows.append(
                Row(f"{kind}: {title}", label, unit, theirs, ratio, limit_text if unit != "s" else "")
            )
    return rows


def restart_rows(rounds: Rounds[restarting.Restarts]) -> list[Row]:
    """Return rows lost and duplicated, with the resume method of each."""
    rows = []
    for title, count in (("rows lost", "lost"), ("rows twice", "twice")):
        for one in RESTARTERS:
            numbers = rounds.numbers(one.name, attrgetter(count)) if one.program else []
            rows.append(
                Row(
                    f"4 -> 3 -> 8 ranks, {restarting.ROWS:,} rows: {title}",
                    one.name,
                    "",
                    numbers,
                    None,
                    one.how,
                )
            )
    return rows


def times_of(compared: Compared, loaders: Sequence[str], metric: str) -> float | None:
    """Return the ratio of Powertrain's rows a second to the best of these loaders."""
    peer = compared.best(loaders, metric)
    if peer is None:
        return None
    return median_ratio(compared.numbers(OUR_SETTING, metric), compared.numbers(peer, metric))


def bounds_of(compared: Compared) -> list[Bound]:
    """Return the issue's bounds for one kind of rows, and that Powertrain loses no row and leaves nothing behind."""
    kind = compared.schema.name
    ours = compared.rounds.measured[OUR_SETTING.label]
    wrong = worst([None if one is None else one.loading.lost + one.loading.twice for one in ours])
    left = worst([None if one is None else len(one.left_behind) for one in ours])
    later = LATER_OF_BEST_PEER[kind]
    return [
        Bound(f"{kind}: whole, times Ray Data's", times_of(compared, [RAY], "whole"), at_least=OF_RAY),
        Bound(
            f"{kind}: whole, times the best peer's", times_of(compared, PEERS, "whole"), at_least=OF_BEST_PEER
        ),
        Bound(
            f"{kind}: later epochs, times the best peer's", times_of(compared, PEERS, "later"), at_least=later
        ),
        Bound(f"{kind}: rows lost or twice in an epoch", wrong, at_most=0),
        Bound(f"{kind}: processes, files, sockets left behind", left, at_most=0),
    ]


def restart_bounds(rounds: Rounds[restarting.Restarts]) -> list[Bound]:
    """Return the bounds that Powertrain loses no row and repeats none."""
    wrong = worst(rounds.numbers(OURS, lambda found: found.lost + found.twice))
    return [Bound("4 -> 3 -> 8 ranks: rows lost or twice", wrong, at_most=0)]


def notes_of(compared: Compared) -> list[str]:
    """Return notes on the best peers, and on loaders that lost or repeated rows or left processes."""
    kind = compared.schema.name
    notes = []
    for metric, words in (("whole", "as a whole"), ("later", "in later epochs")):
        best = compared.best(PEERS, metric)
        if best is not None:
            notes.append(f"{kind}: best peer {words}: {best.label}")
    for label, measured in compared.rounds.measured.items():
        present = [one for one in measured if one is not None]
        wrong = [one.loading for one in present if one.loading.lost or one.loading.twice]
        if wrong:
            notes.append(f"{kind}: {label} lost {wrong[0].lost} rows, gave {wrong[0].twice} twice")
        notes += [f"{kind}: {label} left behind: {thing}" for one in present for thing in one.left_behind]
    return notes


def samples_of(rounds: Rounds[Any] | None) -> dict[str, list[Any]]:
    """Return all measurements, for the JSON file."""
    measured = {} if rounds is None else rounds.measured
    return {name: [None if one is None else asdict(one) for one in found] for name, found in measured.items()}


def failures_of(kind: str, rounds: Rounds[Any] | None) -> list[str]:
    return [] if rounds is None else [f"{kind}: {failure}" for failure in rounds.failures]


def main() -> int:
    """Measure, print, and return the exit code."""
    options = parse_options(
        "Rows a second of shuffled batches, and rows lost when the number of ranks changes."
    )
    compile_ours()
    compared = []
    with tempfile.TemporaryDirectory(prefix="ptb-data-") as directory:
        for number, schema in enumerate(SCHEMAS.values()):
            compared.append(compare(schema, Path(directory, str(number)), options.quick))
        restarts = restart_all(Path(directory))
        packed = pack_all(Path(directory), options.quick)
    repetitions = QUICK_REPETITIONS if options.quick else REPETITIONS
    missing = (
        {name for one in compared for name in one.rounds.missing}
        | set(restarts.missing)
        | set(packed.missing)
    )
    outcome = Outcome(
        title=f"Shuffled batches of {BATCH_SIZE} from Parquet, {EPOCHS} epochs, {repetitions} x interleaved",
        repetitions=repetitions,
        rows=[row for one in compared for row in rows_of(one)]
        + restart_rows(restarts)
        + packing_rows(packed),
        bounds=[
            *(bound for one in compared for bound in bounds_of(one)),
            *restart_bounds(restarts),
            *packing_bounds(packed),
        ],
        missing=sorted(missing),
        failures=[
            *(line for one in compared for line in failures_of(one.schema.name, one.trial)),
            *(line for one in compared for line in failures_of(one.schema.name, one.rounds)),
            *failures_of("restarts", restarts),
            *failures_of("packing", packed),
        ],
        notes=[note for one in compared for note in notes_of(one)],
        samples={
            **{
                one.schema.name: {"trial": samples_of(one.trial), "rounds": samples_of(one.rounds)}
                for one in compared
            },
            "restarts": samples_of(restarts),
            "packing": samples_of(packed),
        },
    )
    return conclude(outcome, options)


if __name__ == "__main__":
    raise SystemExit(main())
