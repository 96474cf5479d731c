"""A report as a card of plain text, for a terminal. Pure."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Sequence

from powertrain.diagnosis import words
from powertrain.diagnosis.finding import Finding
from powertrain.diagnosis.goodput import TRAINING, training_share
from powertrain.diagnosis.rules.root_cause import is_trouble
from powertrain.diagnosis.summary import PhaseTime, Report
from powertrain.run.health.hang_report import rank_names
from powertrain.text.printable import escape_controls

#: Lines of a card.
LINES = 25
_PHASES = 6
_NOTES = 2
_MARKS = {"critical": "!!", "warning": "! ", "info": "  "}
_LEAST_WIDTH = 40
#: Shares of time that are mentioned.
_LEAST_SHARE = 0.005
#: A number and its unit, which stay on one line.
_AMOUNT = re.compile(r"(\d) (%|ms|s|MiB|GiB)(?!\w)")
_NO_BREAK = "\u00a0"


def render(report: Report, width: int = 100) -> str:
    """Return at most :data:`LINES` lines of about ``width`` characters, without a line break at the end."""
    width = max(width, _LEAST_WIDTH)
    table = _table(report)
    below = [*table, *_efficiency(report, width), *_notes(report.notes, width)]
    room = LINES - 1 - len(below)
    lines = [_head(report), *_findings(report.findings, room, width), *below]
    return "\n".join(map(escape_controls, lines))


def _head(report: Report) -> str:
    trouble = sum(is_trouble(finding) for finding in report.findings)
    verdict = f"{trouble} {'finding' if trouble == 1 else 'findings'}" if trouble else _calm(report)
    ranks = len(report.ranks)
    parts = [f"{report.steps:,} steps", f"{ranks} {'rank' if ranks == 1 else 'ranks'}"]
    if report.start_up_steps:
        parts.append(f"the first {report.start_up_steps} excluded as start-up")
    title = f"diagnosis of {report.name}" if report.name else "diagnosis"
    return f"{title}: {verdict} ({', '.join(parts)})"


def _calm(report: Report) -> str:
    return "healthy" if any(one.kind == "healthy" for one in report.findings) else "no action needed"


def _findings(findings: Sequence[Finding], room: int, width: int) -> list[str]:
    """Return as many findings as fit, the costliest first, and the number of the others."""
    lines: list[str] = []
    for place, finding in enumerate(findings):
        block = _finding(finding, width)
        left = len(findings) - place
        if len(lines) + len(block) + (left > 1) > room:
            return [*lines, f"   and {left} more in final_summary.json"]
        lines += block
    return lines


def _finding(finding: Finding, width: int) -> list[str]:
    lines = _wrapped(f"{_MARKS.get(finding.severity, '  ')} {finding.kind}: {finding.summary}", width, 3)
    if finding.action:
        lines += _wrapped(f"   do: {finding.action}", width, 3)
    if finding.echoes:
        lines += _wrapped(f"   also explains: {'; '.join(_echo(echo) for echo in finding.echoes)}", width, 1)
    return lines


def _echo(echo: Finding) -> str:
    return f"{echo.kind} of {rank_names(echo.ranks)}" if echo.ranks else echo.kind


def _wrapped(text: str, width: int, most: int) -> list[str]:
    kept_together = _AMOUNT.sub(f"\\1{_NO_BREAK}\\2", text)
    lines = textwrap.wrap(
        kept_together,
        width,
        subsequent_indent="   ",
        max_lines=most,
        placeholder=" …",
        break_on_hyphens=False,
    )
    return [line.replace(_NO_BREAK, " ") for line in lines]


def _table(report: Report) -> list[str]:
    """Return the phases with most of the time, and the slowest rank in each."""
    largest = sorted(report.phases, key=lambda time: -time.share)[:_PHASES]
    if not largest:
        return []
    rows = [*_base(report), f"   {'phase':<11}{'mean':>10}{'share':>8}   slowest"]
    for time in (time for time in report.phases if time in largest):
        by_rank = {
            rank.rank: _mean(part)
            for rank in report.ranks
            for part in rank.phases
            if part.phase == time.phase
        }
        slowest = max(by_rank, key=lambda rank: (by_rank[rank], -rank))
        base = report.mean_step_seconds
        share = time.mean_seconds / base if base > 0 else time.share
        rows.append(
            f"   {time.phase:<11}{words.seconds(_mean(time)):>10}{words.share(share):>8}   "
            f"rank {slowest}, {words.seconds(by_rank[slowest])}"
        )
    return rows


def _base(report: Report) -> list[str]:
    """Return the line about the mean step, the base of all times and shares."""
    step = report.mean_step_seconds
    if step <= 0:
        return []
    who = " of the slowest rank" if len(report.ranks) > 1 else ""
    return [f"   mean step{who} after start-up: {words.seconds(step)}; shares are relative to it"]


def _mean(time: PhaseTime) -> float:
    return time.mean_seconds or time.seconds


def _efficiency(report: Report, width: int) -> list[str]:
    named = {"speed": speed_line(report), "goodput": time_line(report)}
    lines = [f"   {name:<11}{line}" for name, line in named.items() if line]
    return [line for one in lines for line in _wrapped(one, width, 2)]


def speed_line(report: Report) -> str:
    """Return steps, samples and tokens per second and the utilisation of the device, as far as known; else ""."""
    return ", ".join(_rates(report))


def _rates(report: Report) -> list[str]:
    speed = report.throughput
    parts: list[str] = []
    for rate, name in (
        (speed.steps_per_second, "steps/s"),
        (speed.samples_per_second, "samples/s"),
        (speed.tokens_per_second, "tokens/s"),
    ):
        parts += [f"{words.rate(rate)} {name}"] if rate > 0 else []
    if speed.flops_per_second > 0:
        parts.append(words.flops(speed.flops_per_second))
    if speed.mfu is not None:
        parts.append(f"MFU {words.share(speed.mfu)}")
    return parts


def time_line(report: Report) -> str:
    """Return the goodput of the run, and what the other time went to; "" if unknown."""
    total = sum(one.seconds for one in report.time)
    if total <= 0:
        return ""
    others = sorted((one for one in report.time if one.cause != TRAINING), key=lambda one: -one.seconds)
    told = [f"{one.words.lower()} {words.share(one.share)}" for one in others if one.share >= _LEAST_SHARE]
    rest = f"; {', '.join(told)}" if told else ""
    return f"{words.share(training_share(report.time))} of {words.seconds(total)} in training{rest}"


def _notes(notes: Sequence[str], width: int) -> list[str]:
    return [line for note in notes[:_NOTES] for line in _wrapped(f"   note: {note}", width, 2)]
