"""The card at the end of a run."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from powertrain.run import lifecycle
from powertrain.run.checkpoints.unsaved import summarize
from powertrain.terminal.text import STATE_COLOURS, duration, metrics_text, number, one_line
from powertrain.text.printable import escape_controls

if TYPE_CHECKING:
    from powertrain.terminal.view import RunView


def end_rows(view: RunView) -> list[tuple[str, str]]:
    """Return label and value of each line of the end card; the first is the state."""
    ended = view.ended
    if ended is None:
        return []
    seconds = ended.seconds or max(0.0, ended.time - view.started)
    rows = [("state", ended.state)]
    if ended.reason and ended.reason != ended.state:
        rows.append(("reason", one_line(ended.reason, 300)))
    rows += [("rows", number(ended.rows or view.row)), ("time", duration(seconds))]
    if view.attempts > 1:
        rows.append(("attempts", str(view.attempts)))
    if view.metrics:
        rows.append(("metrics", metrics_text(view.metrics)))
    if view.data:
        rows.append(("data", one_line(view.data, 300)))
    if view.checkpoint:
        rows.append(("checkpoint", f"{one_line(view.checkpoint, 200)} (row {view.checkpoint_row})"))
    if view.unsaved:
        rows.append(("not saved", one_line(summarize(view.unsaved), 500)))
    if view.path:
        rows.append(("path", escape_controls(view.path)))
    if ended.state == lifecycle.PREEMPTED:
        rows.append(("to resume", "start the same script again"))
    return rows


def end_card(view: RunView) -> str:
    """Return the end card as plain text; "" for a run that has not ended."""
    rows = end_rows(view)
    if not rows:
        return ""
    heading = f"Run {one_line(view.name, 100)} {rows[0][1]}"
    return "\n".join([heading, *(f"  {label:<10}  {value}" for label, value in rows[1:])])


def end_panel(name: str, rows: Sequence[tuple[str, str]]) -> Any:
    from rich.panel import Panel
    from rich.table import Table
    from rich.text import Text

    table = Table.grid(padding=(0, 2))
    for label, value in rows[1:]:
        table.add_row(Text(label, style="dim"), Text(escape_controls(value), overflow="fold"))
    colour = STATE_COLOURS.get(rows[0][1], "cyan")
    title = Text.assemble((one_line(name, 60), "bold"), " ", (rows[0][1], colour))
    return Panel(table, title=title, title_align="left", border_style=colour, expand=False)
