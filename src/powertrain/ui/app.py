"""The application: pages, their scripts, and the JSON that these fetch."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import msgspec
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route

from powertrain.errors import PowertrainError
from powertrain.ui import log_pages, run_pages, sweep_pages
from powertrain.ui.control import control
from powertrain.ui.listing import RunList
from powertrain.ui.live import LOOK_INTERVAL_S, ChangeFeeds, events_while, version_text
from powertrain.ui.places import Places, name_of
from powertrain.ui.queries import BadQuery
from powertrain.ui.replies import Memo
from powertrain.ui.security import Access, BrowserSession, Guard
from powertrain.views.encoding import encoded
from powertrain.views.static_files import read_static

_TYPES = {"js": "text/javascript", "css": "text/css", "html": "text/html", "svg": "image/svg+xml"}
#: Bytes of a request's body.
_MOST_BODY = 10_000


def make_app(
    places: Places,
    access: Access,
    *,
    port: int,
    names: frozenset[str],
    can_control: bool = False,
    only_loopback: bool = False,
    interval: float = LOOK_INTERVAL_S,
) -> Guard:
    """Return the whole application, behind its guard.

    Args:
        places: The directory that is shown.
        access: The secrets that let browsers in.
        port: The port that the server listens on.
        names: Host names of the server, in lower case.
        can_control: Whether runs can be stopped and resized.
        only_loopback: Whether only this machine can reach the server.
        interval: Seconds between two looks at a live run at least.
    """
    dashboard = _Dashboard(places, access, can_control, ChangeFeeds(interval, is_near=places.is_near))
    handlers: dict[type[Exception] | int, Any] = {PowertrainError: _refused, OSError: _unreadable}
    app = Starlette(routes=dashboard.routes(), exception_handlers=handlers)
    return Guard(app, access, port, names, only_loopback=only_loopback)


class _Dashboard:
    """The endpoints. Those that are not ``async`` run in threads."""

    def __init__(self, places: Places, access: Access, can_control: bool, feeds: ChangeFeeds) -> None:
        self._places, self._access = places, access
        self._can_control, self._feeds = can_control, feeds
        self._replies: Memo[bytes] = Memo()
        self._runs = RunList(places)
        self._files = {name: data for name, data in read_static().items() if _kind(name) in _TYPES}

    def routes(self) -> list[Route]:
        """Return all addresses. Pages have one shell, which shows what the address says."""
        get = ["GET"]
        return [
            Route("/", self._page, methods=get),
            Route("/runs/{run:path}", self._page, methods=get),
            Route("/sweeps/{run:path}", self._page, methods=get),
            Route("/static/{file}", self._static, methods=get),
            Route("/api/runs", self._list, methods=get),
            Route("/api/sparks", self._sparks, methods=get),
            Route("/api/run", self._run, methods=get),
            Route("/api/lines", self._lines, methods=get),
            Route("/api/steps", self._steps, methods=get),
            Route("/api/resources", self._resources, methods=get),
            Route("/api/logs", self._logs, methods=get),
            Route("/api/sweep", self._sweep, methods=get),
            Route("/api/events", self._events, methods=get),
            Route("/api/control", self._control, methods=["POST"]),
            Route("/api/sign-out", self._sign_out, methods=["POST"]),
        ]

    def _page(self, request: Request) -> Response:
        return Response(self._files["index.html"], media_type="text/html")

    def _static(self, request: Request) -> Response:
        name = request.path_params["file"]
        if name not in self._files:
            raise HTTPException(404)
        return Response(self._files[name], media_type=_TYPES[_kind(name)])

    def _list(self, request: Request) -> Response:
        version = self._runs.version()
        shown = {"can_control": self._can_control, "version": version_text(version)}
        return self._reply("", request, (version, _this_second()), lambda: {**self._runs.all(), **shown})

    def _sparks(self, request: Request) -> Response:
        names = [name_of(one) for one in request.query_params.getlist("run")]
        return json_reply(self._timed("", lambda: self._runs.sparks(names)))

    def _run(self, request: Request) -> Response:
        places, name = self._places, _name(request)
        is_over = places.record(name).has_ended
        return self._page_of(request, is_over, lambda: run_pages.run_overview(places, name))

    def _lines(self, request: Request) -> Response:
        name, query = _name(request), request.query_params
        metrics = query.getlist("metric")
        return self._kept(request, lambda: run_pages.run_lines(self._places, name, query, metrics))

    def _steps(self, request: Request) -> Response:
        name, query = _name(request), request.query_params
        return self._kept(request, lambda: run_pages.run_steps(self._places, name, query))

    def _resources(self, request: Request) -> Response:
        name, query = _name(request), request.query_params
        return self._kept(request, lambda: run_pages.run_resources(self._places, name, query))

    def _logs(self, request: Request) -> Response:
        files, there = self._places.logs(_name(request))
        return json_reply(log_pages.log_page(files, there, request.query_params))

    def _sweep(self, request: Request) -> Response:
        sweep = self._places.sweep(_name(request))
        return self._page_of(request, sweep.watch.is_over, lambda: sweep_pages.sweep_page(sweep))

    async def _events(self, request: Request) -> Response:
        name = _name(request) if "run" in request.query_params else ""
        if name:
            await run_in_threadpool(self._places.find, name)  # raises if there is none

        def version() -> object:
            return self._places.version(name) if name else self._runs.version()

        session: BrowserSession = request.state.session
        events = events_while(self._feeds.of(name, version), lambda: self._access.is_valid(session))
        return StreamingResponse(events, media_type="text/event-stream")

    async def _control(self, request: Request) -> Response:
        if not self._can_control:
            raise HTTPException(
                403, "This dashboard only shows runs. Start it with --control to stop and resize."
            )
        body = b""
        async for piece in request.stream():
            body += piece
            if len(body) > _MOST_BODY:
                raise HTTPException(413)
        try:
            wanted = msgspec.json.decode(body)
        except msgspec.DecodeError as error:
            raise BadQuery(f"the request is not JSON: {error}") from error
        name = _name(request)
        found = await run_in_threadpool(self._places.find, name)
        return json_reply(await run_in_threadpool(control, found, wanted))

    async def _sign_out(self, request: Request) -> Response:
        self._access.revoke(request.state.session)
        return json_reply({"ok": True})

    def _page_of(self, request: Request, is_over: bool, make: Callable[[], dict[str, Any]]) -> Response:
        """Return what a page of a run shows, with the version by which its events name the same state."""
        name = _name(request)
        version = self._places.version(name)
        shown = {"can_control": self._can_control, "version": version_text(version)}
        # Durations and the status of a run that goes on change by themselves.
        at = 0 if is_over else _this_second()
        return self._reply(name, request, (version, at), lambda: {**make(), **shown})

    def _kept(self, request: Request, make: Callable[[], Any]) -> Response:
        name = _name(request)
        return self._reply(name, request, self._places.version(name), make)

    def _reply(self, name: str, request: Request, version: object, make: Callable[[], Any]) -> Response:
        """Return a reply that is made once for all viewers who ask for the same of the same state."""
        key = (request.url.path, request.url.query)
        content = self._replies.get(key, version, lambda _: self._timed(name, lambda: encoded(make())))
        return Response(content, media_type="application/json")

    def _timed(self, name: str, make: Callable[[], Any]) -> Any:
        began = time.monotonic()
        try:
            return make()
        finally:
            self._feeds.note(name, time.monotonic() - began)


def _this_second() -> int:
    return int(time.time())


def _kind(file: str) -> str:
    return file.rpartition(".")[2]


def _name(request: Request) -> str:
    return name_of(request.query_params.get("run", ""))


def json_reply(content: Any, status: int = 200) -> Response:
    """Return a value as JSON."""
    return Response(encoded(content), status, media_type="application/json")


def _refused(request: Request, error: Exception) -> Response:
    return json_reply({"error": str(error)}, 400 if isinstance(error, BadQuery) else 404)


def _unreadable(request: Request, error: Exception) -> Response:
    reason = error.strerror if isinstance(error, OSError) and error.strerror else type(error).__name__
    return json_reply({"error": f"The run cannot be read: {reason}."}, 503)
