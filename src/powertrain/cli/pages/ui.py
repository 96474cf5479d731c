"""``powertrain ui``: the dashboard of a storage path, in a browser."""

from __future__ import annotations

import dataclasses
from typing import Annotated

import typer

from powertrain.cli.common.output import print_with_token
from powertrain.errors import ConfigError
from powertrain.lookup.finding import default_storage, find_run_or_sweep
from powertrain.storage import addresses, open_storage


def ui(
    storage: Annotated[
        str,
        typer.Argument(
            help="Storage path, or the path of one run; the default storage path when omitted.",
            show_default=False,
        ),
    ] = "",
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port; 0 takes a free one.", min=0, max=65535)] = 0,
    open: Annotated[bool, typer.Option("--open", help="Open it in the browser of this machine.")] = False,
    token: Annotated[
        str,
        typer.Option(
            help="A token of your own, valid for every browser; by default each browser needs a new one.",
            show_default=False,
            envvar="POWERTRAIN_UI_TOKEN",
        ),
    ] = "",
    control: Annotated[
        bool,
        typer.Option(
            "--control",
            help="Let the dashboard stop and resize runs and ask for stacks; else it only shows them.",
        ),
    ] = False,
) -> None:
    """Show runs in a browser: curves, steps, resources, findings, logs, live or long over."""
    try:
        from powertrain.ui.serving import ServerOptions, serve
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] not in ("starlette", "uvicorn"):
            raise
        raise ConfigError(
            "The dashboard needs starlette and uvicorn, which are not installed. Install them with: "
            "pip install 'powertrain[ui]'."
        ) from None
    root, only = _root_of(storage)
    serve(
        ServerOptions(root, only, host, port, token, can_control=control, opens_browser=open),
        print_with_token,
    )


def _root_of(storage: str) -> tuple[str, str]:
    """Return the directory to show, and the only run of it if the path is that of a run."""
    root = storage or default_storage()
    place = open_storage(root)
    if not place.list("journal"):
        return root, ""
    found = find_run_or_sweep(root.rstrip("/") if "/" in root else f"./{root}")
    if found.is_sweep:
        return root, ""
    return _parent_of(place.uri)


def _parent_of(uri: str) -> tuple[str, str]:
    """Return the parent of a run's directory, with the options of its address, and the run's name."""
    if "://" in uri and not uri.startswith("file:"):
        address = addresses.parse(uri)
        parent, _, name = address.prefix.rstrip("/").rpartition("/")
        return dataclasses.replace(address, prefix=parent).uri, name
    parent, _, name = uri.rstrip("/").rpartition("/")
    return parent or "/", name
