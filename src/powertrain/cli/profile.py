"""``powertrain profile``: torch's profiler on the next steps of a live run."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any

import typer

from powertrain.cli.common import arguments
from powertrain.cli.common.output import print_json, print_line, print_lines, print_message
from powertrain.cli.common.ranks import parse_ranks
from powertrain.diagnosis.profiles.card import profile_lines
from powertrain.diagnosis.profiles.hotspots import ProfileSummary, summarize
from powertrain.diagnosis.profiles.trace_events import read_trace
from powertrain.lookup.asking import ask, out_of_reach
from powertrain.lookup.finding import FoundRun, find_run
from powertrain.run.record import profiles as records
from powertrain.run.record.profiles import ProfileRecord
from powertrain.run.remote import protocol
from powertrain.storage.addresses import without_secrets
from powertrain.terminal.text import rank_list


def profile(
    run: arguments.Run,
    storage: arguments.Storage = "",
    rank: arguments.Ranks = None,
    steps: Annotated[int, typer.Option(min=1, max=1000, help="Number of steps to profile.")] = 3,
    memory: Annotated[bool, typer.Option("--memory", help="Also record allocations.")] = False,
    timeout: Annotated[float, typer.Option(min=1.0, help="Seconds to wait for the steps.")] = 120.0,
    json: Annotated[bool, typer.Option("--json", help="Print everything as JSON.")] = False,
) -> None:
    """Profile the next steps of a live run with torch's profiler; of a run that has ended, print its last profile.

    The traces are kept in profiles/ of the run's directory; ui.perfetto.dev opens them. Rank 0 is profiled when no
    rank is named.
    """
    ranks, found = parse_ranks(rank or ()) or (0,), find_run(run, storage)
    if found.live is None:
        _print_kept(found, json=json)
        return
    order = protocol.ProfileSteps(ranks=ranks, steps=steps, memory=memory, within=timeout)
    parts: list[protocol.RankProfiled] = []

    def on_part(part: protocol.Part) -> None:
        if isinstance(part, protocol.RankProfiled):
            parts.append(part)
        elif isinstance(part, protocol.StillWaiting):
            print_line(f"waiting for {rank_list(part.ranks)}, {part.seconds:.0f} s", err=True)

    answer = ask(found, order, on_part)
    parts.sort(key=lambda part: part.rank)
    for part in parts:
        if part.error:
            print_message(f"Rank {part.rank} has no profile: {part.error}.", err=True)
    _print_profiles(found, [part.key for part in parts if part.key], json=json)
    if answer.message:
        print_message(answer.message, err=True)
    if not answer.ok or any(part.error for part in parts):
        raise typer.Exit(1)


def _print_kept(found: FoundRun, *, json: bool) -> None:
    """Print the newest profile of a run that cannot be reached, of each rank that was profiled then."""
    print_line(out_of_reach(found), err=True)
    keys = records.kept(found.place)
    if not keys:
        print_line("It has no profiles: they are made while a run trains.", err=True)
        raise typer.Exit(1)
    newest = records.read(found.place, keys[-1])
    kept = [(key, records.read(found.place, key)) for key in keys]
    same = [key for key, one in kept if (one.attempt, one.first_step) == (newest.attempt, newest.first_step)]
    _print_profiles(found, same, json=json)


def _print_profiles(found: FoundRun, keys: Sequence[str], *, json: bool) -> None:
    profiles = [_summary(found, key) for key in keys]
    if json:
        path = without_secrets(found.place.uri)
        print_json({"run": found.name, "path": path, "profiles": [_as_json(*one) for one in profiles]})
        return
    for number, (record, summary) in enumerate(profiles):
        if number:
            print_line("")
        print_lines(profile_lines(record.rank, summary))
        print_lines(["", *_about(found, record)])


def _summary(found: FoundRun, key: str) -> tuple[ProfileRecord, ProfileSummary]:
    record = records.read(found.place, key)
    trace = read_trace(found.place.get(record.trace))
    return record, summarize(trace, record.steps, record.step_seconds)


def _about(found: FoundRun, record: ProfileRecord) -> list[str]:
    """Return what the profile cost the run, and where it is."""
    local = found.place.local_path(record.trace)
    where = str(local) if local is not None else f"{without_secrets(found.place.uri)}/{record.trace}"
    lines = [
        f"  from step {record.first_step:,} of attempt {record.attempt}; starting and stopping the profiler held the "
        f"loop up for {record.start_seconds + record.stop_seconds:.2f} s, packing took {record.packing_seconds:.2f} s "
        "beside it",
        f"  trace: {where} (open it in ui.perfetto.dev)",
    ]
    if record.memory:
        lines.append(f"  allocations: {record.memory} (unpack it, and open it in pytorch.org/memory_viz)")
    return lines


def _as_json(record: ProfileRecord, summary: ProfileSummary) -> dict[str, Any]:
    return {"record": record, "summary": summary}
