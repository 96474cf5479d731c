"""Terminal: live region, plain lines, and the thread that writes them."""

from __future__ import annotations

import functools
import os
import select
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec, TextIO

from powertrain.run import events as ev
from powertrain.terminal.echoes import Echoes
from powertrain.terminal.end_card import end_card, end_panel, end_rows
from powertrain.terminal.lines import PIECE, Line, LineAssembler
from powertrain.terminal.narrator import Narrator
from powertrain.terminal.text import RANK_COLOURS, counted, one_line
from powertrain.terminal.view import RunView, live_rows
from powertrain.text.printable import escape_controls
from powertrain.text.tracebacks import TracebackFolder

if TYPE_CHECKING:
    from rich.console import Console
    from rich.live import Live
    from rich.text import Text

    from powertrain.terminal.view import Span


_P = ParamSpec("_P")

#: Live mode: seconds between two refreshes, and from the launch to the import of rich.
_REFRESH_INTERVAL_S = 1 / 8
_RICH_DELAY_S = 0.25
#: Characters buffered for a blocked stream; beyond it the oldest lines are dropped, and counted.
_PENDING_LIMIT = 8 * 2**20
_CLOSE_TIMEOUT_S = 5.0


def wants_live(stream: TextIO | None, environ: Mapping[str, str] | None = None) -> bool:
    """Return whether the stream supports a live region: a capable, interactive terminal, not a notebook."""
    environ = os.environ if environ is None else environ
    if stream is None or type(stream).__module__.startswith("ipykernel"):
        return False
    if environ.get("TERM", "") in ("", "dumb") or environ.get("CI", "").lower() not in ("", "0", "false"):
        return False
    encoding = (getattr(stream, "encoding", None) or "utf-8").lower()
    try:
        return encoding.startswith("utf") and stream.isatty()
    except (OSError, ValueError):
        return False


def _guarded(method: Callable[Concatenate[Terminal, _P], None]) -> Callable[Concatenate[Terminal, _P], None]:
    """Log the first failure of ``method`` and never raise; does nothing after ``close``."""

    @functools.wraps(method)
    def call(self: Terminal, /, *args: _P.args, **kwargs: _P.kwargs) -> None:
        if self._closed:
            return
        try:
            method(self, *args, **kwargs)
        except Exception as error:  # showing a run must not end it
            self._warn_once(error)

    return call


#: The one terminal of this process with a live region: two would overwrite each other.
_live_owner: Terminal | None = None
_live_owner_lock = threading.RLock()


class Terminal:
    """Shows one run on one stream.

    All methods may be called from any thread, return at once and never raise; ``close`` alone waits until the
    stream has taken all lines. Nothing is printed after ``close``.
    """

    def __init__(
        self,
        name: str,
        path: str,
        *,
        stream: TextIO | None = None,
        live: bool | None = None,
        log_to_file: bool = False,
        verbose: int = 1,
    ) -> None:
        """``stream`` is stdout by default; ``live=None`` decides by the stream.

        With ``log_to_file`` the ranks' output is left to their files. :class:`Narrator` explains ``verbose``.
        """
        stream = sys.stdout if stream is None else stream
        # A live view of another run may have put its proxy in place of stdout.
        self._stream: TextIO | None = getattr(stream, "rich_proxied_file", stream)
        self._log_to_file, self._verbose = log_to_file, verbose
        self._lock = threading.RLock()  # the state: held for microseconds, also by signal handlers
        self._writing = threading.Lock()  # the stream, in plain mode
        self._pending: deque[Line] = deque()
        self._pending_size = self._left_out = 0
        self._unwritten = ""
        self._assemblers: dict[int, LineAssembler] = {}
        self._folders: dict[int, TracebackFolder] = {}
        self._echoes = Echoes()
        self._closed = self._noted = self._card_shown = False
        self._stop = threading.Event()
        #: Set while a debugger uses this terminal; and while the live region is suspended for that.
        self._held, self._off = threading.Event(), threading.Event()
        wanted = wants_live(self._stream) if live is None else live
        self._live = wanted and verbose > 0 and self._stream is not None and self._claim_live()
        self._shared = wanted and not self._live
        self.view = RunView(name=name, path=path)
        self._narrator = Narrator(self.view, progress=not self._live, verbose=verbose)
        self._thread: threading.Thread | None = None
        if self._live:
            self._thread = threading.Thread(target=self._show_live, name="powertrain-terminal", daemon=True)
            self._thread.start()

    # -- events of the run

    @_guarded
    def event(self, event: ev.Event) -> None:
        """Show a fact of the run."""
        with self._lock:
            if isinstance(event, ev.AttemptStarted):
                self._finish_lines()  # of processes that have exited
            self.view.on_event(event)
            self._queue(self._narrator.on_event(event))
        self._write()

    @_guarded
    def row(self, row: int, by_rank: Sequence[Mapping[str, Any] | None], at: float) -> None:
        """Show that ``row`` closed at ``at`` (Unix seconds) with these metrics, in rank order."""
        with self._lock:
            self.view.on_row(row, by_rank[0] if by_rank else None, at)
            lines = self._narrator.on_row(at)
            if lines:
                self._queue(lines)
        if lines:
            self._write()

    @_guarded
    def waiting(self, row: int, ranks: Sequence[int], seconds: float) -> None:
        """Show ranks that have not reported ``row``, which others did ``seconds`` ago; none if empty."""
        now = time.time()
        with self._lock:
            self.view.on_waiting(row, ranks, seconds, now)
            self._queue(self._narrator.on_waiting(now))
        self._write()

    @_guarded
    def data(self, text: str) -> None:
        """Show the position of rank 0 in its data."""
        with self._lock:
            self.view.on_data(text)

    @_guarded
    def output(self, rank: int, data: bytes) -> None:
        """Show output of ``rank``, cut at any byte."""
        if self._log_to_file:
            return
        with self._lock:
            assembler = self._assemblers.setdefault(rank, LineAssembler())
            folder = self._folders.setdefault(rank, TracebackFolder())
            lines = self._echoes.fold(rank, folder.feed(assembler.feed(data)))
            self._queue([Line(text, rank) for text in lines])
        self._write()

    @_guarded
    def text(self, text: str) -> None:
        """Show lines about the run as a whole."""
        if self._verbose > 0:
            self._queue([Line(line) for line in text.splitlines()])
            self._write()

    @_guarded
    def hold(self) -> None:
        """Buffer all output until :meth:`release`, because a debugger uses this terminal.

        Waits until the live region is removed."""
        self._held.set()
        if self._live:
            self._off.wait(_CLOSE_TIMEOUT_S)

    @_guarded
    def release(self) -> None:
        """Show the output since :meth:`hold`, and continue."""
        self._held.clear()
        self._write()

    def close(self, metrics: Mapping[str, Any] | None = None, checkpoint: str | None = None) -> None:
        """Print buffered lines and the end card (of a run that ended), and restore the terminal.

        ``metrics`` and ``checkpoint`` replace those of the view. May be called twice.
        """
        if self._closed:
            return
        try:
            with self._lock:
                self.view.metrics = self.view.metrics if metrics is None else dict(metrics)
                self.view.checkpoint = self.view.checkpoint if checkpoint is None else checkpoint
                self._finish_lines()
            self._stop.set()
            if self._thread is not None:
                self._thread.join(_CLOSE_TIMEOUT_S)
            if self._thread is None or not self._thread.is_alive():
                self._print_rest()
        except Exception as error:  # showing a run must not end it
            self._warn_once(error)
        finally:
            self._closed = True

    def _finish_lines(self) -> None:
        for rank, assembler in sorted(self._assemblers.items()):
            folder = self._folders[rank]
            shown = [*folder.feed(assembler.finish()), *folder.finish()]
            lines = [*self._echoes.fold(rank, shown), *self._echoes.finish(rank)]
            self._queue([Line(text, rank) for text in lines])
        self._assemblers.clear()
        self._folders.clear()

    def _print_rest(self) -> None:
        if not self._card_shown and self._verbose > 0:
            self._queue([Line(text) for text in end_card(self.view).splitlines()])
        self._write(wait=True)

    # -- the queue

    def _queue(self, lines: Iterable[Line]) -> None:
        with self._lock:
            for line in lines:
                self._pending.append(line)
                self._pending_size += len(line.text) + 16
            while self._pending_size > _PENDING_LIMIT:
                self._pending_size -= len(self._pending.popleft().text) + 16
                self._left_out += 1

    def _take(self, size: int) -> list[Line]:
        """Remove and return the oldest queued lines, about ``size`` characters."""
        taken: list[Line] = []
        with self._lock:
            if self._left_out:
                lines = counted(self._left_out, "line")
                where = self.view.path
                taken.append(Line(f"[{lines} left out: this terminal was too slow; all are kept in {where}]"))
                self._left_out = 0
            while self._pending and size > 0:
                line = self._pending.popleft()
                self._pending_size -= len(line.text) + 16
                size -= len(line.text) + 16
                taken.append(line)
        return taken

    def _warn_once(self, error: Exception) -> None:
        """Print one warning that showing the run failed."""
        if self._noted:
            return
        self._noted = True
        what = one_line(f"{type(error).__name__}: {error}", 300)
        note = f"[{self.view.name}] the terminal output failed ({what}); the run continues"
        self._queue([Line(note)])
        try:
            self._write()
        except Exception:  # the warning cannot be printed either
            self._stream = None

    # -- plain mode

    def _write(self, wait: bool = False) -> None:
        """Write queued lines as far as the stream does not block, or all of them if ``wait``.

        One thread writes at a time, also the lines of other threads.
        """
        if self._live or (self._held.is_set() and not wait) or (self._shared and self._hand_over()):
            return
        while self._pending or self._unwritten:
            if not self._writing.acquire(blocking=wait):
                return
            try:
                if not self._write_queued(wait):
                    return
            finally:
                self._writing.release()

    def _write_queued(self, wait: bool) -> bool:
        """Write queued lines; return False when the stream would block."""
        while True:
            if not self._unwritten:
                self._unwritten = self._encodable("".join(line.plain() + "\n" for line in self._take(2**15)))
            piece = self._unwritten[:PIECE]
            if not piece:
                return True
            if self._stream is None or getattr(self._stream, "closed", False):
                self._unwritten = ""
                continue
            if not wait and not _can_write(self._stream):
                return False
            # Forgotten before it is written: after an error the same piece must not come again.
            self._unwritten = self._unwritten[PIECE:]
            self._put(self._stream, piece)

    def _put(self, stream: TextIO, piece: str) -> None:
        try:
            stream.write(piece)
            stream.flush()
        except (OSError, ValueError):
            self._stream = None  # the reader is gone; the files have everything

    def _encodable(self, text: str) -> str:
        encoding = getattr(self._stream, "encoding", None) or "utf-8"
        return text.encode(encoding, "replace").decode(encoding)

    def _hand_over(self) -> bool:
        """Pass the queued lines to the terminal that has the live region, if there is one."""
        with _live_owner_lock:
            if _live_owner is None:
                return False
            _live_owner._queue(self._take(_PENDING_LIMIT))
            return True

    # -- live mode

    def _claim_live(self) -> bool:
        global _live_owner
        with _live_owner_lock:
            if _live_owner is None:
                _live_owner = self
            return _live_owner is self

    def _show_live(self) -> None:
        """Run the refresh thread. After its end, callers write themselves."""
        global _live_owner
        try:
            if not self._stop.wait(_RICH_DELAY_S):
                self._run_live()
        except OSError:
            self._stream = None
        except Exception as error:  # showing a run must not end it
            self._warn_once(error)
        finally:
            with _live_owner_lock, self._lock:
                _live_owner, self._live = None, False
                self._narrator.progress = self._verbose > 0

    def _run_live(self) -> None:
        from rich.console import Console

        console = Console(file=self._stream, force_terminal=True, highlight=False, markup=False, emoji=False)
        while not self._stop.is_set():
            self._wait_until_released(console)
            self._draw_until_held(console)
        rows = end_rows(self.view)
        if rows:
            console.print(end_panel(self.view.name, rows))
            self._card_shown = True

    def _wait_until_released(self, console: Console) -> None:
        """Wait while a debugger uses the terminal."""
        if self._held.is_set():
            self._print_queued(console)
        while self._held.is_set() and not self._stop.is_set():
            self._off.set()
            self._stop.wait(_REFRESH_INTERVAL_S)
        self._off.clear()

    def _draw_until_held(self, console: Console) -> None:
        from rich.live import Live

        stdout_is_ours = self._stream is sys.stdout
        live = Live(
            console=console,
            auto_refresh=False,
            transient=True,
            # Prints of the driver (callbacks, say) must go above the region, not into it.
            redirect_stdout=stdout_is_ours,
            redirect_stderr=stdout_is_ours and sys.stderr is not None and sys.stderr.isatty(),
        )
        with live:
            # Rich hides the cursor; a killed driver could not bring it back.
            console.show_cursor(True)
            while not self._held.is_set() and not self._stop.wait(_REFRESH_INTERVAL_S):
                self._refresh(console, live)
            self._print_queued(console)
            live.update("", refresh=True)

    def _refresh(self, console: Console, live: Live) -> None:
        with self._lock:
            bars = [(rank, a.unfinished()) for rank, a in sorted(self._assemblers.items()) if a.is_bar]
            rows = live_rows(self.view, time.time(), bars[:4])
        # One write for both, so that the region does not flicker; printing alone would draw it as it was.
        with console:
            self._print_queued(console)
            live.update(_region(rows), refresh=True)

    def _print_queued(self, console: Console) -> None:
        from rich.text import Text

        while lines := self._take(2**16):
            # Soft wrap: the terminal breaks long lines itself, so that they can be copied whole.
            console.print(Text("\n").join(_line_text(line) for line in lines), soft_wrap=True)


def _can_write(stream: TextIO) -> bool:
    """Return whether a write of one piece will not block; True if unknown."""
    if not hasattr(select, "poll"):
        return True
    try:
        poll = select.poll()
        poll.register(stream.fileno(), select.POLLOUT)
        return bool(poll.poll(0))
    except (OSError, ValueError, AttributeError):
        return True


def _line_text(line: Line) -> Text:
    from rich.text import Text

    if line.rank < 0:
        return Text(line.text, style=line.style)
    body = Text.from_ansi(line.text) if "\x1b" in line.text else Text(line.text)
    return Text.assemble((f"[rank {line.rank}] ", RANK_COLOURS[line.rank % len(RANK_COLOURS)]), body)


def _region(rows: Sequence[Sequence[Span]]) -> Text:
    from rich.text import Text

    lines = [Text.assemble(*((escape_controls(text), style) for text, style in row)) for row in rows]
    return Text("\n", no_wrap=True, overflow="ellipsis").join(lines)
