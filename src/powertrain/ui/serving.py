"""Start the server: its socket, its address with the token, and its end."""

from __future__ import annotations

import contextlib
import errno
import html
import importlib
import ipaddress
import os
import secrets
import shutil
import socket
import tempfile
import threading
import webbrowser
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote

import uvicorn

from powertrain.errors import ConfigError
from powertrain.ui.app import make_app
from powertrain.ui.places import Places
from powertrain.ui.security import LEAST_TOKEN_LENGTH, Access

#: Seconds that open connections, which wait for news of a run, get at the end of the server.
_SHUTDOWN_S = 1
#: The server gives way to the training on its machine.
_NICENESS = 5
#: Free ports that are tried until one is free on both loopback addresses.
_PORTS_TRIED = 10


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
    if not options.token.isascii() or not options.token.isprintable():
        raise ConfigError(
            "The token has characters that an address cannot carry. Use letters, digits and signs of ASCII."
        )
    places = Places(options.root, options.only)
    with contextlib.ExitStack() as stack:
        listeners, is_own = listening_sockets(options.host, options.port)
        for listener in listeners:
            stack.enter_context(listener)
        port = listeners[0].getsockname()[1]
        own_name = own_host_name() if is_own else ""
        base = f"http://{own_name or _shown_host(options.host)}:{port}/"
        access = Access(
            options.token, lambda token: say(f"For another browser: {base}?token={quote(token, safe='')}")
        )
        names = host_names(options.host) | ({own_name} if own_name else set())
        app = make_app(
            places,
            access,
            port=port,
            names=names,
            can_control=options.can_control,
            only_loopback=is_loopback(options.host),
        )
        say(f"The dashboard is at {base}?token={quote(access.token, safe='')}")
        if own_name:
            say(f"A browser that cannot find it needs {_shown_host(options.host)} in place of {own_name}.")
        elif not is_loopback(options.host):
            say(
                "The connection is not encrypted: use it in networks that you trust, or through an SSH tunnel."
            )
        say("Ctrl-C ends it.")
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
        address = f"{base}?token={quote(access.token, safe='')}"
        threading.Thread(target=load_readers, daemon=True).start()
        browser = opened_browser(address) if options.opens_browser else contextlib.nullcontext()
        with browser, contextlib.suppress(KeyboardInterrupt):
            uvicorn.Server(config).run(sockets=listeners)


def load_readers() -> None:
    """Import what reads metrics and steps: half a second that the first page would wait for."""
    for name in ("pyarrow", "pandas"):
        importlib.import_module(name)


@contextlib.contextmanager
def opened_browser(address: str) -> Iterator[None]:
    """Open an address with a secret in the user's browser, and remove what that needed at the end of the block.

    The browser gets the name of a file that leads to the address: its command line can be read by all users of the
    machine. A thread opens it, because a browser within the terminal returns only when it is left.
    """
    directory = tempfile.mkdtemp(prefix="powertrain-ui-")  # for this user only
    page = Path(directory, "dashboard.html")
    try:
        page.write_text(_LEADS_ON.format(address=html.escape(address, quote=True)), "utf-8")
        page.chmod(0o600)
        threading.Thread(target=webbrowser.open, args=(page.as_uri(),), daemon=True).start()
        yield
    finally:
        shutil.rmtree(directory, ignore_errors=True)


_LEADS_ON = """<!doctype html><html lang="en"><meta charset="utf-8"><title>Powertrain</title>
<meta http-equiv="refresh" content="0; url={address}"><p><a href="{address}">Open the dashboard</a></p></html>
"""


def listening_sockets(host: str, port: int) -> tuple[list[socket.socket], bool]:
    """Return sockets that listen, and whether names below "localhost" lead to them and to nobody else.

    Browsers try such a name with both loopback addresses, 127.0.0.1 and ::1. Another user could listen on the one that
    is left free, and would be sent the token.
    """
    for _ in range(_PORTS_TRIED):
        first = listening_socket(host, port)
        addresses: dict[int, str] = {socket.AF_INET: "127.0.0.1", socket.AF_INET6: "::1"}
        if first.getsockname()[0] != addresses[first.family]:
            return [first], False
        family = socket.AF_INET6 if first.family == socket.AF_INET else socket.AF_INET
        try:
            other = socket.create_server((addresses[family], first.getsockname()[1]), family=family)
            return [first, other], True
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                return [first], True  # this machine has no such address
            if port:
                return [first], False
            first.close()
    return [listening_socket(host, port)], False


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


def own_host_name() -> str:
    """Return a name of this machine that no other server has.

    Names below "localhost" are this machine's for browsers, without a lookup. Cookies belong to a name and all its
    ports: under a name of its own a server shares them with none.
    """
    return f"powertrain-{secrets.token_hex(8)}.localhost"


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
