"""Faults injected into real runs of 2 and 3 ranks, and their diagnosis; compared with TraceML.

Every scenario (``verdict_scripts/scenarios.py``) is a training function with one thing wrong, or nothing. It is run by
a TorchTrainer on this machine with default tracing (except that the machine is sampled ten times a second, since runs
take some seconds), and judged by the first finding of its ``final_summary.json``: kind, ranks and phase must be those
of the fault, and the numbers of the evidence must be in the injected range. A run without a fault is then repeated, and
must be diagnosed as healthy each time.

TraceML traces the same loop, started by its own launcher in its summary mode. It is right if any section of its summary
has a finding that means the fault, first or not, and names the rank if the fault is one rank's. For some faults it has
no name.

Scenarios that need a GPU run if there is one and are listed as skipped elsewhere.

    python benchmarks/verdicts.py [--only NAME]... [--ranks 2]... [--no-peers] [--peers-on-all] [--healthy-repeats N]
        [--cuda] [--quick] [--json FILE] [--check]
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import psutil
from child_process import Ended, outlasting_programs, run_to_end
from harness import Bound, MeasurementFailed, Options, Outcome, Row, conclude, is_installed

sys.path.append(str(Path(__file__).resolve().parent / "verdict_scripts"))

import with_powertrain
from scenarios import BY_NAME, SCENARIOS, Scenario

SCRIPTS = Path(__file__).resolve().parent / "verdict_scripts"

#: The claims of the issue.
SCENARIOS_AT_LEAST, WRONG_AT_MOST = 22, 0
HEALTHY_REPEATS, UNHEALTHY_AT_MOST = 50, 0
WORLD_SIZES = (2, 3)
#: TraceML was judged on two ranks before; a launch of it takes some seconds.
PEER_WORLD_SIZES = (2,)

#: Share of this machine's cores that others may get while a run is judged, how often it is then made, the last one
#: counting whatever it had; and all in which they got more.
STOLEN_AT_MOST, TRIES = 0.03, 3
DISTURBED: list[str] = []

REPEATED = "healthy"
REPEATED_STEPS = 60
TIMEOUT_SECONDS = 180.0
OURS, TRACEML = "Powertrain", "TraceML"
NO_SECOND_HOST = "no second host can be made here"
#: Sections of TraceML's summary.
_SECTIONS = ("step_time", "step_memory", "process", "system")
#: Healthy verdicts of its other sections.
_CALM = {"NORMAL", "NO_GPU", "NO_DATA", "BALANCED", "HIGH_CPU", "HIGH_PROCESS_CPU"}


@dataclass(frozen=True)
class Verdict:
    """The verdict of one tool on one run. ``wrong`` is empty if it was right; ``skipped`` is the reason for no
    verdict.
    """

    scenario: str
    ranks: int
    tool: str
    said: str = ""
    wrong: str = ""
    skipped: str = ""

    @property
    def cell(self) -> str:
        return "-" if self.skipped else "WRONG" if self.wrong else "right"


# --------------------------------------------------------------------------- ours


def ours(scenario: Scenario, ranks: int, storage: str, loader_workers: int = 0) -> tuple[Verdict, Any]:
    """Run a scenario and judge its diagnosis; return both."""
    if reason := cannot_run(scenario, ranks):
        return Verdict(scenario.name, ranks, OURS, skipped=reason), None
    try:
        if scenario.slow_host:
            answer = on_two_hosts(scenario, ranks)
            if "skipped" in answer:
                reason = f"{NO_SECOND_HOST}: {answer['skipped']}"
                return Verdict(scenario.name, ranks, OURS, skipped=reason), None
            told = with_powertrain.Said(**answer["said"])
        else:
            told = undisturbed(scenario, ranks, storage, loader_workers=loader_workers)
    except Exception as error:  # a failed run is not a verdict, and the others are still judged
        failed = f"the run failed: {type(error).__name__}: {error}"
        return Verdict(scenario.name, ranks, OURS, said="", wrong=failed), None
    wrong = "; ".join(faults_of(scenario, ranks, told))
    return Verdict(scenario.name, ranks, OURS, said=in_short(told), wrong=wrong), told


def cannot_run(scenario: Scenario, ranks: int) -> str:
    """Return the reason why a scenario cannot run here, "" if it can."""
    if ranks not in scenario.world_sizes:
        return f"only for {' and '.join(map(str, scenario.world_sizes))} ranks"
    if scenario.device != "cpu" and not Path("/dev/nvidiactl").exists():
        return "no GPU here"
    if scenario.computes and not scenario.threads_per_core and (os.cpu_count() or 1) < ranks:
        return f"{ranks} ranks that compute need as many cores"
    return ""


def on_two_hosts(scenario: Scenario, ranks: int) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(prefix="ptb-") as directory:
        workspace = Path(directory)
        command = (
            sys.executable,
            str(SCRIPTS / "on_two_hosts.py"),
            scenario.name,
            str(ranks),
            f"{workspace}/runs",
        )
        ended = run_beside_ours(command, workspace)
    answers = [line for line in ended.output.splitlines() if line.startswith("ANSWER ")]
    answer: dict[str, Any] = json.loads(answers[-1].removeprefix("ANSWER "))
    return answer


def run_beside_ours(command: Sequence[str], workspace: Path) -> Ended:
    """Run a program to its end. This process's own warm server keeps running."""
    own = {process.pid for process in psutil.Process().children(recursive=True)}
    with outlasting_programs(lambda: own):
        return run_to_end(command, workspace=workspace, timeout=TIMEOUT_SECONDS, grace=20.0)


def faults_of(scenario: Scenario, ranks: int, told: with_powertrain.Said) -> Iterator[str]:
    """Return the errors of a diagnosis. Pure."""
    expected = scenario.expected
    slow = tuple(rank for rank, host in enumerate(told.hosts) if host == told.slow_host)
    if told.kind != expected.kind:
        yield f"kind {told.kind}, not {expected.kind}"
        return
    if told.phase != expected.phase:
        yield f"phase {told.phase!r}, not {expected.phase!r}"
    if tuple(told.ranks) != expected.ranks(ranks, slow):
        yield f"ranks {tuple(told.ranks)}, not {expected.ranks(ranks, slow)}"
    for name, lowest, highest in expected.numbers:
        numbers = told.evidence.get(name)
        for number in numbers if isinstance(numbers, list) else [numbers]:
            if number is None or not lowest <= number <= highest:
                yield f"{name} {number}, not {lowest:g} to {highest:g}"
    if expected.line not in told.evidence.get("line", ""):
        yield f"line {told.evidence.get('line', '')!r}, not {expected.line!r}"
    if expected.also and (expected.also, (ranks - 1,)) not in told.others:
        yield f"no {expected.also} of rank {ranks - 1}"
    if expected.sees and not told.phases.get(expected.sees):
        yield f"{expected.sees} was not seen"


def in_short(told: with_powertrain.Said) -> str:
    ranks = f" of ranks {', '.join(map(str, told.ranks))}" if told.ranks else ""
    return f"{told.kind}{ranks}{f' in {told.phase}' if told.phase else ''}"


# --------------------------------------------------------------------------- TraceML


def traceml(scenario: Scenario, ranks: int, loader_workers: int = 0) -> Verdict:
    """Run the same loop with TraceML and judge its summary."""
    skipped = cannot_run(scenario, ranks) or ("it was not run on two hosts" if scenario.slow_host else "")
    if skipped:
        return Verdict(scenario.name, ranks, TRACEML, skipped=skipped)
    try:
        summary = summary_of_traceml(scenario, ranks, loader_workers)
    except MeasurementFailed as failure:
        return Verdict(scenario.name, ranks, TRACEML, wrong=f"it failed: {failure}")
    said, is_right = judged(scenario, ranks, summary)
    return Verdict(scenario.name, ranks, TRACEML, said=said, wrong="" if is_right else said)


def summary_of_traceml(scenario: Scenario, ranks: int, loader_workers: int) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(prefix="ptb-") as directory:
        workspace = Path(directory)
        os.environ |= {
            "SCENARIO": scenario.name,
            "LOADER_WORKERS": str(loader_workers),
            "SAVED": str(workspace / "saved"),
        }
        options = ("--mode", "summary", "--nproc-per-node", str(ranks), "--logs-dir", str(workspace / "logs"))
        script = str(SCRIPTS / "with_traceml.py")
        command = (sys.executable, "-m", "traceml_ai.launcher.cli", "run", *options, script)
        run_beside_ours(command, workspace)
        (found,) = (workspace / "logs").glob("*/final_summary.json")
        summary: dict[str, Any] = json.loads(found.read_text())
        return summary


def judged(scenario: Scenario, ranks: int, summary: dict[str, Any]) -> tuple[str, bool]:
    """Return its findings in short, and whether they are right: in any section and at any position. Pure."""
    found = {name: issues_of(summary.get(name) or {}) for name in _SECTIONS}
    every = [issue for issues in found.values() for issue in issues]
    said = ", ".join(issue["kind"] for issue in every if issue["kind"] not in ("NORMAL", "NO_GPU"))
    if not scenario.of_traceml:
        return said, False
    if scenario.expected.kind == "healthy" and not scenario.expected.sees:
        is_calm = all(issue["kind"] in scenario.of_traceml for issue in found["step_time"])
        return said, is_calm and all(
            issue["kind"] in _CALM for name in _SECTIONS[1:] for issue in found[name]
        )
    meant = [issue for issue in every if issue["kind"] in scenario.of_traceml]
    if scenario.expected.who == "last":
        meant = [issue for issue in meant if list(issue.get("ranks") or ()) == [ranks - 1]]
    return said, bool(meant)


def issues_of(section: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the findings of a section of its summary, the most important first."""
    issues = section.get("issues") or [section.get("diagnosis") or {}]
    return [issue for issue in issues if issue.get("kind")]


# --------------------------------------------------------------------------- all of them


@dataclass(frozen=True)
class Plan:
    """The command line, parsed."""

    scenarios: tuple[Scenario, ...]
    world_sizes: tuple[int, ...]
    peer_world_sizes: tuple[int, ...]
    healthy_repeats: int
    options: Options


def plan_of(arguments: Sequence[str] | None = None) -> Plan:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--only", action="append", choices=[*BY_NAME], metavar="NAME", help="this scenario alone"
    )
    parser.add_argument(
        "--ranks", action="append", type=int, choices=WORLD_SIZES, help="this world size alone"
    )
    parser.add_argument("--no-peers", action="store_true", help="without TraceML")
    parser.add_argument(
        "--peers-on-all", action="store_true", help="TraceML on every world size, not on 2 ranks only"
    )
    parser.add_argument("--healthy-repeats", type=int, metavar="N", help="of runs with nothing wrong")
    parser.add_argument("--cuda", action="store_true", help="those that need a GPU alone")
    parser.add_argument("--quick", action="store_true", help="2 ranks and few repeats, for a look")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write what was said of every run to FILE")
    parser.add_argument("--check", action="store_true", help="exit with 0 only where all verdicts are right")
    parsed = parser.parse_args(arguments)
    scenarios = tuple(
        one
        for one in SCENARIOS
        if one.name in (parsed.only or BY_NAME) and (one.device != "cpu" or not parsed.cuda)
    )
    sizes = tuple(parsed.ranks or (WORLD_SIZES[:1] if parsed.quick else WORLD_SIZES))
    repeats = 2 if parsed.quick or parsed.only or parsed.cuda else HEALTHY_REPEATS
    peers = () if parsed.no_peers else sizes if parsed.peers_on_all else PEER_WORLD_SIZES
    return Plan(
        scenarios=scenarios,
        world_sizes=sizes,
        peer_world_sizes=peers,
        healthy_repeats=repeats if parsed.healthy_repeats is None else parsed.healthy_repeats,
        options=Options(quick=parsed.quick, json_file=parsed.json, check=parsed.check),
    )


def undisturbed(scenario: Scenario, ranks: int, storage: str, **options: Any) -> with_powertrain.Said:
    """Return a Powertrain run that had the cores of this machine.

    On a virtual machine, others may get them: then the run has a fault that was not injected, and is repeated a few
    times.
    """
    for attempt in range(TRIES):
        before = psutil.cpu_times()
        name = options.get("name") or f"{scenario.name}-{ranks}"
        named = {**options, "name": f"{name}-again-{attempt}"} if attempt else options
        told = with_powertrain.run(scenario, ranks, storage, **named)
        stolen = stolen_share(before, psutil.cpu_times())
        if stolen <= STOLEN_AT_MOST:
            break
        DISTURBED.append(f"{scenario.name} on {ranks} ranks ({stolen:.0%}, {in_short(told)})")
    return told


def stolen_share(before: Any, after: Any) -> float:
    """Return the share of all cores' time between two readings that other virtual machines got."""
    return (getattr(after, "steal", 0.0) - getattr(before, "steal", 0.0)) / max(
        1e-9, sum(after) - sum(before)
    )


def judge_all(plan: Plan, storage: str) -> list[Verdict]:
    """Judge each scenario on each world size, TraceML right after Powertrain."""
    verdicts = []
    advised: dict[tuple[str, int], int] = {}
    has_traceml = is_installed("traceml_ai")
    for scenario in plan.scenarios:
        for ranks in plan.world_sizes:
            workers = advised.get((scenario.after, ranks), 0)
            if scenario.after and not workers:
                workers = advised_by(scenario.after, ranks, storage)
            verdict, told = ours(scenario, ranks, storage, workers)
            advised[scenario.name, ranks] = told.evidence.get("workers", 0) if told is not None else 0
            verdicts.append(tell(verdict, told.summary if told is not None and verdict.wrong else ""))
            if has_traceml and scenario.beside and ranks in plan.peer_world_sizes:
                verdicts.append(tell(traceml(scenario, ranks, workers)))
    return verdicts


def advised_by(name: str, ranks: int, storage: str) -> int:
    """Return the loader workers that the finding of another scenario names, which was not run before."""
    told = undisturbed(BY_NAME[name], ranks, storage, name=f"{name}-{ranks}-for-its-advice")
    return int(told.evidence.get("workers", 0))


def repeat_healthy(plan: Plan, storage: str) -> list[Verdict]:
    """Repeat short runs without faults, alternating the world sizes."""
    verdicts = []
    for number in range(plan.healthy_repeats):
        ranks = plan.world_sizes[number % len(plan.world_sizes)]
        scenario = BY_NAME[REPEATED]
        told = undisturbed(scenario, ranks, storage, name=f"repeat-{number}", steps=REPEATED_STEPS)
        wrong = "; ".join(faults_of(scenario, ranks, told))
        verdict = Verdict(f"repeat {number + 1}", ranks, OURS, said=in_short(told), wrong=wrong)
        verdicts.append(verdict)
        tell(verdict, told.summary if wrong else "")
    return verdicts


def tell(verdict: Verdict, more: str = "") -> Verdict:
    """Print a progress line."""
    said = verdict.skipped or verdict.said
    wrong = f" ({verdict.wrong})" if verdict.wrong and verdict.wrong != said else ""
    who = f"{verdict.scenario:<20} {verdict.ranks} ranks  {verdict.tool:<11}{verdict.cell:<6}"
    print(f"{time.strftime('%H:%M:%S')} {who} {said}{wrong} {more}".rstrip(), flush=True)
    return verdict


# --------------------------------------------------------------------------- the table


def table(plan: Plan, verdicts: Sequence[Verdict]) -> str:
    """Return the table of scenarios by tool, for each world size."""
    by_place = {(one.scenario, one.ranks, one.tool): one for one in verdicts}
    lines = [("scenario", "what is wrong", "ranks", OURS, "said", TRACEML, "said")]
    for scenario in plan.scenarios:
        for ranks in plan.world_sizes:
            own = by_place.get((scenario.name, ranks, OURS))
            peer = by_place.get((scenario.name, ranks, TRACEML))
            if own is None or ranks not in scenario.world_sizes:
                continue
            said = f"SKIPPED: {own.skipped}" if own.skipped else own.said
            peers = (peer.cell, peer.said) if peer is not None else ("-", "")
            lines.append((scenario.name, scenario.what, str(ranks), own.cell, said, *peers))
    widths = [max(len(line[column]) for line in lines) for column in range(len(lines[0]))]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()
        for line in lines
    )


def rows_of(plan: Plan, verdicts: Sequence[Verdict], repeats: Sequence[Verdict]) -> list[Row]:
    rows = []
    for ranks in plan.world_sizes:
        for tool in (OURS, TRACEML):
            judged_ones = [
                one for one in verdicts if (one.tool, one.ranks) == (tool, ranks) and not one.skipped
            ]
            if judged_ones:
                right = [sum(not one.wrong for one in judged_ones)]
                rows.append(Row(f"right on {ranks} ranks", tool, f"of {len(judged_ones)}", right))
    if repeats:
        rows.append(
            Row("healthy, repeated", OURS, f"of {len(repeats)}", [sum(not one.wrong for one in repeats)])
        )
    return rows


def bounds_of(plan: Plan, verdicts: Sequence[Verdict], repeats: Sequence[Verdict]) -> list[Bound]:
    own = [one for one in verdicts if one.tool == OURS]
    wrong = sum(bool(one.wrong) for one in own)
    unhealthy = sum(bool(one.wrong) for one in repeats)
    bounds = [Bound("verdicts of ours that are wrong", wrong, WRONG_AT_MOST)]
    if len(plan.scenarios) == len(SCENARIOS):
        bounds.append(Bound("scenarios", len(SCENARIOS), at_least=SCENARIOS_AT_LEAST))
        bounds.append(Bound("repeats of nothing wrong", len(repeats), at_least=HEALTHY_REPEATS))
    if repeats:
        bounds.append(Bound("of them not called healthy", unhealthy, UNHEALTHY_AT_MOST))
    return bounds


def notes_of(verdicts: Sequence[Verdict]) -> list[str]:
    skipped: dict[str, list[str]] = {}
    for one in verdicts:
        if one.skipped and one.tool == OURS and not one.skipped.startswith("only for"):
            skipped.setdefault(one.skipped, []).append(f"{one.scenario} on {one.ranks}")
    return [f"SKIPPED, {why}: {', '.join(which)}." for why, which in skipped.items()]


def notes_of_disturbed() -> list[str]:
    if not DISTURBED:
        return []
    return [
        f"others got more than {STOLEN_AT_MOST:.0%} of the cores, so made anew, {TRIES} times in all at most: "
        f"{', '.join(DISTURBED)}."
    ]


def failures_of(verdicts: Sequence[Verdict]) -> list[str]:
    """Return the scenarios that cannot be judged with this machine's settings: a claim without them is incomplete."""
    return [
        f"{one.scenario} on {one.ranks} ranks was not judged: {one.skipped}."
        for one in verdicts
        if one.tool == OURS and one.skipped.startswith(NO_SECOND_HOST)
    ]


def main() -> int:
    plan = plan_of()
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="ptb-") as storage:
        verdicts = judge_all(plan, storage)
        repeats = repeat_healthy(plan, storage)
    print(f"\n{table(plan, verdicts)}")
    outcome = Outcome(
        title="What is said of faults that were put in",
        repetitions=1,
        rows=rows_of(plan, verdicts, repeats),
        bounds=bounds_of(plan, verdicts, repeats),
        missing=(TRACEML,) if plan.peer_world_sizes and not is_installed("traceml_ai") else (),
        failures=failures_of(verdicts),
        notes=[
            *notes_of(verdicts),
            *notes_of_disturbed(),
            f"it took {(time.monotonic() - began) / 60:.1f} minutes.",
        ],
        samples={"verdicts": [asdict(one) for one in verdicts], "repeats": [asdict(one) for one in repeats]},
    )
    return conclude(outcome, plan.options)


if __name__ == "__main__":
    raise SystemExit(main())
