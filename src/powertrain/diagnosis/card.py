"""A report as a card of plain text, for a terminal. Pure."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Sequence

from powertrain.diagnosis import words
from powertrain.diagnosis.finding import Finding
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
#: A number and its unit, which stay on one line.
_AMOUNT = re.compile(r"(\d) (%|ms|s|MiB|GiB)(?!\w)")
_NO_BREAK = "\u00a0"


def render(report: Report, width: int = 100) -> str:
    """Return at most :data:`LINES` lines of about ``width`` characters, without a line break at the end."""
    width = max(width, _LEAST_WIDTH)
    table = _table(report)
    below = [*table, *_speed(report), *_notes(report.notes, width)]
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


def _speed(report: Report) -> list[str]:
    speed = report.throughput
    parts: list[str] = []
    for rate, name in (
        (speed.steps_per_second, "steps/s"),
        (speed.samples_per_second, "samples/s"),
        (speed.tokens_per_second, "tokens/s"),
    ):
        parts += [f"{_rate(rate)} {name}"] if rate > 0 else []
    if speed.mfu is not None:
        parts.append(f"MFU {words.share(speed.mfu)}")
    return [f"   speed      {', '.join(parts)}"] if parts else []


def _rate(rate: float) -> str:
    return f"{rate:,.0f}" if rate >= 99.5 else f"{rate:.3g}"


def _notes(notes: Sequence[str], width: int) -> list[str]:
    return [line for note in notes[:_NOTES] for line in _wrapped(f"   note: {note}", width, 2)]
