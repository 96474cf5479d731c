"""Start the server: its socket, its address with the token, and its end."""

from __future__ import annotations

import contextlib
import ipaddress
import os
import socket
import webbrowser
from collections.abc import Callable
from dataclasses import dataclass

import uvicorn

from powertrain.errors import ConfigError
from powertrain.ui.app import make_app
from powertrain.ui.places import Places
from powertrain.ui.security import LEAST_TOKEN_LENGTH, Access

#: Seconds that open connections, which wait for news of a run, get at the end of the server.
_SHUTDOWN_S = 1
#: The server gives way to the training on its machine.
_NICENESS = 5


@dataclass(frozen=True)
class ServerOptions:
    """The options of ``powertrain ui``."""

    root: str
    only: str = ""
    host: str = "127.0.0.1"
    port: int = 0
    token: str = ""
    can_control: bool = False
    opens_browser: bool = False


def serve(options: ServerOptions, say: Callable[[str], None]) -> None:
    """Serve until Ctrl-C.

    Args:
        options: What to show, and where.
        say: Called with each line for the terminal.

    Raises:
        ConfigError: The token is too short, or the address cannot be used.
    """
    if options.token and len(options.token) < LEAST_TOKEN_LENGTH:
        raise ConfigError(
            f"The token has {len(options.token)} characters, which can be guessed. Give at least "
            f"{LEAST_TOKEN_LENGTH}, or leave --token out."
        )
    places = Places(options.root, options.only)
    with listening_socket(options.host, options.port) as listener:
        port = listener.getsockname()[1]
        base = f"http://{_shown_host(options.host)}:{port}/"
        access = Access(options.token, lambda token: say(f"For another browser: {base}?token={token}"))
        names = host_names(options.host)
        app = make_app(places, access, port=port, names=names, can_control=options.can_control)
        say(f"The dashboard is at {base}?token={access.token}")
        if not is_loopback(options.host):
            say(
                "The connection is not encrypted: use it in networks that you trust, or through an SSH tunnel."
            )
        say("Ctrl-C ends it.")
        if options.opens_browser:
            webbrowser.open(f"{base}?token={access.token}")
        with contextlib.suppress(OSError):
            os.nice(_NICENESS)
        config = uvicorn.Config(
            app,
            log_level="warning",
            access_log=False,
            server_header=False,
            timeout_graceful_shutdown=_SHUTDOWN_S,
            lifespan="off",
            ws="none",
        )
        with contextlib.suppress(KeyboardInterrupt):
            uvicorn.Server(config).run(sockets=[listener])


def listening_socket(host: str, port: int) -> socket.socket:
    """Return a socket that listens; raises :class:`ConfigError` where the address is taken or unknown."""
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        return socket.create_server((host, port), family=family)
    except OSError as error:
        raise ConfigError(
            f"The dashboard cannot listen on {host}:{port}: {error.strerror or error}. Choose another --port (0 takes "
            "a free one) or --host."
        ) from error


def is_loopback(host: str) -> bool:
    """Return whether only this machine can reach the address."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def host_names(host: str) -> frozenset[str]:
    """Return the names by which the server may be called, in lower case."""
    names = {"localhost"}
    if not is_loopback(host):
        names |= {host, socket.gethostname(), socket.getfqdn()}
    return frozenset(name.lower() for name in names)


def _shown_host(host: str) -> str:
    if host in ("0.0.0.0", "::", ""):
        return socket.gethostname()
    return f"[{host}]" if ":" in host else host
