"""``powertrain``: the command and its verbs. Powertrain's errors are printed without a traceback."""

from __future__ import annotations

import sys
import traceback
from typing import Annotated

import typer

from powertrain.cli.common.output import print_line, print_message
from powertrain.cli.compare import compare
from powertrain.cli.completion.verb import completion
from powertrain.cli.diagnose import diagnose
from powertrain.cli.doctor.verb import doctor
from powertrain.cli.gc.verb import gc
from powertrain.cli.k8s import k8s
from powertrain.cli.logs import logs
from powertrain.cli.ls import ls
from powertrain.cli.metrics.verb import metrics
from powertrain.cli.migrate.verb import migrate
from powertrain.cli.pages.report import report
from powertrain.cli.pages.ui import ui
from powertrain.cli.profile import profile
from powertrain.cli.resize import resize
from powertrain.cli.run import run
from powertrain.cli.show import show
from powertrain.cli.stacks import stacks
from powertrain.cli.stop import stop
from powertrain.cli.trace import trace
from powertrain.cli.track import track
from powertrain.errors import PowertrainError
from powertrain.version import __version__

app = typer.Typer(
    name="powertrain",
    help="Run training scripts; inspect, stop and resize runs.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
app.command(context_settings={"allow_interspersed_args": False})(run)
app.command()(ls)
app.command()(show)
app.command()(metrics)
app.command()(ui)
app.command()(report)
app.command()(logs)
app.command()(stop)
app.command()(stacks)
app.command()(profile)
app.command()(resize)
app.command()(diagnose)
app.command()(compare)
app.command()(track)
app.command()(doctor)
app.command()(gc)
app.command()(migrate)
app.command()(completion)
app.add_typer(trace, name="trace")
app.add_typer(k8s, name="k8s")


def _print_version(is_requested: bool) -> None:
    if is_requested:
        print_line(f"powertrain {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool,
        typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit."),
    ] = False,
) -> None:
    """Run training scripts; inspect, stop and resize runs."""


def main() -> None:
    """Run the console script."""
    try:
        app()
    except PowertrainError as error:
        print_message(f"Error: {error}", err=True)
        sys.exit(1)
    except BrokenPipeError:
        raise
    except OSError as error:  # a file of the run, or a socket, that the system refuses
        which = f" ({str(error.filename)!r}). Check the path and its permissions." if error.filename else "."
        print_message(f"Error: {error.strerror or error}{which}", err=True)
        sys.exit(1)
    except Exception:  # a bug of ours: its traceback may quote any string of a run
        print_message("Error: this is a bug in Powertrain. Please report it with the text below.", err=True)
        print_message(traceback.format_exc(), err=True)
        sys.exit(1)
