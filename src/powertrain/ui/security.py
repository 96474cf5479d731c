"""Access to the dashboard: who may open it, from which pages, and what its pages may do.

Any process of the machine can connect to a loopback port, any web page can send requests to it, and a name can be made
to resolve to it (DNS rebinding). So a request needs a secret that only the person who started the server has seen, its
``Host`` must be an address of this server, and its ``Origin``, if there is one, this server's own.

Browsers send a cookie to every port of its host, so a server of another user on 127.0.0.1 can receive ours and send it
here itself. Two things keep it out. The printed address has a host name of its own, to which no other server's page
belongs. And data need a second secret beside the cookie, the session's key: only the reply to the token has it, and the
page keeps it in its local storage, which belongs to one port.
"""

from __future__ import annotations

import hmac
import ipaddress
import secrets
import threading
from collections.abc import Callable
from dataclasses import dataclass
from urllib.parse import parse_qsl

from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import HTMLResponse, PlainTextResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

#: Pages load scripts, styles and data from this server only; nothing inline runs, and nothing may frame them.
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
    "require-trusted-types-for 'script'; trusted-types 'none'"
)
#: The header with the session's key, which no form and no image of another page can send. An EventSource has no
#: headers and sends the key as an argument.
KEY_HEADER = "x-powertrain-key"
KEY_ARGUMENT = "key"
_SAFE_METHODS = ("GET", "HEAD")
_HEADERS = {
    "Content-Security-Policy": POLICY,
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-store",
}
#: Minimum length of a token that a user chooses.
LEAST_TOKEN_LENGTH = 16
#: Browsers that are signed in at the same time; the oldest is signed out for another one.
MOST_SESSIONS = 64


@dataclass(frozen=True)
class BrowserSession:
    """The secrets of one browser: its cookie, and the key that only its page holds."""

    cookie: str
    key: str


class Access:
    """The secrets of one server.

    A token of ours is good for one browser: it is exchanged for a cookie, and a new one is made. A token that the user
    has chosen stays valid.

    Args:
        token: The user's own token; "" for tokens that are used once.
        on_new_token: Called with each new token after the first, to be shown to the user.
    """

    def __init__(self, token: str = "", on_new_token: Callable[[str], None] | None = None) -> None:
        self._guard = threading.Lock()
        self._is_fixed = bool(token)
        self._token = token or secrets.token_urlsafe(32)
        #: Oldest first.
        self._sessions: list[BrowserSession] = []
        self._on_new_token = on_new_token

    @property
    def token(self) -> str:
        """The token for the next browser."""
        return self._token

    def exchange(self, token: str) -> BrowserSession | None:
        """Return a new session for a browser that has shown the token; None for a wrong one."""
        session = BrowserSession(secrets.token_urlsafe(32), secrets.token_urlsafe(32))
        with self._guard:
            if not _is_equal(token, self._token):
                return None
            self._sessions = [*self._sessions[1 - MOST_SESSIONS :], session]
            if self._is_fixed:
                return session
            self._token = secrets.token_urlsafe(32)
        if self._on_new_token is not None:
            self._on_new_token(self._token)
        return session

    def session_of(self, cookie: str) -> BrowserSession | None:
        """Return the session of a browser that was let in and not signed out; None for any other cookie."""
        found = None
        for session in self._sessions:  # all of them, so that the time tells nothing
            if _is_equal(cookie, session.cookie):
                found = session
        return found

    def is_valid(self, session: BrowserSession) -> bool:
        """Return whether a browser is still signed in."""
        return any(one is session for one in self._sessions)

    def revoke(self, session: BrowserSession) -> None:
        """Sign a browser out."""
        with self._guard:
            self._sessions = [one for one in self._sessions if one is not session]


def _is_equal(given: str, expected: str) -> bool:
    """Compare in a time that does not depend on how much of the secret is right."""
    return hmac.compare_digest(given.encode("utf-8", "replace"), expected.encode())


def is_allowed_host(header: str, port: int, names: frozenset[str], *, only_loopback: bool = False) -> bool:
    """Return whether a ``Host`` header is an address of this server: an IP address, or one of its names, and its port.

    Any IP address is allowed where other machines reach the server, which may have several: a page that was rebound has
    a name in its ``Host``. With ``only_loopback`` only addresses of the loopback interface are.
    """
    host, _, given_port = header.rpartition(":") if not header.endswith("]") else (header, "", "")
    if not host:
        host, given_port = header, ""
    if (given_port and given_port != str(port)) or (not given_port and port != 80):
        return False
    bare = host.strip().lower()
    if bare in names:
        return True
    try:
        address = ipaddress.ip_address(bare[1:-1] if bare.startswith("[") and bare.endswith("]") else bare)
    except ValueError:
        return False
    return address.is_loopback or not only_loopback


class Guard:
    """ASGI middleware: lets only permitted requests through, and adds the headers that restrict pages.

    Args:
        app: The application.
        access: The secrets.
        port: The port of the server.
        names: Host names of the server, in lower case.
        only_loopback: Whether only this machine can reach it.
    """

    def __init__(
        self, app: ASGIApp, access: Access, port: int, names: frozenset[str], *, only_loopback: bool = False
    ) -> None:
        self._app, self._access, self._port, self._names = app, access, port, names
        self._only_loopback = only_loopback
        #: Cookies are shared by all ports of a host: the port keeps two servers apart.
        self._cookie = f"powertrain-ui-{port}"

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one connection."""
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
            return
        if scope["type"] != "http":
            return

        async def send_restricted(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                for name, value in _HEADERS.items():
                    headers.setdefault(name, value)
            await send(message)

        refusal = self._refusal(scope)
        await (refusal or self._app)(scope, receive, send_restricted)

    def _refusal(self, scope: Scope) -> Response | None:
        """Return the reply to a request that must not pass; None for a permitted one."""
        headers = Headers(scope=scope)
        hosts = headers.getlist("host")
        if len(hosts) != 1 or not self._is_own_host(hosts[0]):
            return PlainTextResponse("This server has another address.\n", 421)
        if not self._is_own_page(headers, hosts[0], scope["method"]):
            return PlainTextResponse("Requests of other pages are refused.\n", 403)
        query = parse_qsl(scope["query_string"].decode("latin-1"), keep_blank_values=True)
        tokens = [value for name, value in query if name == "token"]
        if tokens and scope["method"] == "GET":
            session = self._access.exchange(tokens[-1])
            if session is not None:
                return self._welcome(session)
        session = self._access.session_of(self._cookie_of(headers))
        if session is None:
            return HTMLResponse(_LOCKED, 401)
        if scope["path"].startswith("/api/"):
            key = headers.get(KEY_HEADER) or dict(query).get(KEY_ARGUMENT, "")
            if not _is_equal(key, session.key):
                return PlainTextResponse("The key of the session is missing or wrong.\n", 401)
        scope["state"] = {**scope.get("state", {}), "session": session}
        return None

    def _is_own_host(self, host: str) -> bool:
        return is_allowed_host(host, self._port, self._names, only_loopback=self._only_loopback)

    def _is_own_page(self, headers: Headers, host: str, method: str) -> bool:
        """Return whether the request comes from a page of this server, or from no page at all."""
        origins, site = headers.getlist("origin"), headers.get("sec-fetch-site", "")
        if any(origin not in (f"http://{host}", f"https://{host}") for origin in origins):
            return False
        if method in _SAFE_METHODS:
            # Links on other pages lead here; their scripts and images do not.
            return site in ("", "same-origin", "none") or headers.get("sec-fetch-mode") == "navigate"
        return bool(origins) and site in ("", "same-origin") and KEY_HEADER in headers

    def _cookie_of(self, headers: Headers) -> str:
        for part in headers.get("cookie", "").split(";"):
            name, _, value = part.strip().partition("=")
            if name == self._cookie:
                return value
        return ""

    def _welcome(self, session: BrowserSession) -> Response:
        """Return a page that sets the cookie, keeps the key, and leads to the same address without the token.

        It is a page, not a redirect: after a redirect the browser still counts the request as one of the page with the
        link, and would not send a SameSite=Strict cookie. Nothing of the request is written into it.
        """
        response = HTMLResponse(_WELCOME.format(key=session.key))
        response.set_cookie(self._cookie, session.cookie, httponly=True, samesite="strict", path="/")
        return response


#: The key has only letters, digits, "-" and "_".
_WELCOME = """<!doctype html><html lang="en" data-key="{key}"><meta charset="utf-8"><title>Powertrain</title>
<link rel="icon" href="data:,"><script type="module" src="/static/welcome.js"></script>
<p>Opening the dashboard…</p><noscript>The dashboard needs scripts, all of its own. Allow them here.</noscript></html>
"""
_LOCKED = """<!doctype html><html lang="en"><meta charset="utf-8"><title>Powertrain: not signed in</title>
<link rel="icon" href="data:,">
<h1>Not signed in</h1>
<p>Open the address that <code>powertrain ui</code> has printed in its terminal. It contains a token, which lets one
browser in. After it was used, the terminal shows a new one.</p></html>
"""
