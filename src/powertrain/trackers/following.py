"""The driver's side: starts the process that sends to trackers, shows its messages, and waits for it at the end."""

from __future__ import annotations

import contextlib
import os
import shlex
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import cloudpickle
import msgspec

from powertrain.config.run import RunConfig
from powertrain.diagnosis.final import SUMMARY
from powertrain.diagnosis.rules.root_cause import is_trouble
from powertrain.diagnosis.summary import from_json
from powertrain.errors import ConfigError, PowertrainError
from powertrain.storage import Storage
from powertrain.storage.addresses import without_secrets
from powertrain.storage.base import RECORD_BYTES_LIMIT
from powertrain.storage.files.descriptors import open_log
from powertrain.text.errors import describe_error
from powertrain.text.redaction import redact
from powertrain.trackers.base import RunEnding, TrackedRun, Tracker
from powertrain.trackers.choosing import params_of
from powertrain.trackers.process import HEAD, Assignment, EndRequest, TrackerMessage
from powertrain.trackers.sending import Unsent

#: Seconds beyond the trackers' own time for the process to answer and to end.
_ANSWER_TIMEOUT_S = 5.0
#: Seconds for trackers when this process itself was signalled to exit.
_LEAVING_TIMEOUT_S = 5.0


class TrackerProcess:
    """Sends the points of one run to its trackers, from its construction to :meth:`finish`."""

    def __init__(
        self, assignment: Assignment, log_path: str, command: str, show: Callable[[str], None]
    ) -> None:
        """Start the process.

        Args:
            assignment: Run and trackers.
            log_path: A file for what the process prints.
            command: What sends the rest later.
            show: Shows a sentence while the run goes on. Called on a thread of its own.

        Raises:
            ConfigError: A tracker cannot be sent to another process.
            OSError: It cannot be started.
        """
        self._command, self._show, self._log_path = command, show, log_path
        try:
            data = cloudpickle.dumps(assignment)
        except Exception as error:  # whatever the user's objects do when they are pickled
            raise ConfigError(
                f"A tracker of the run cannot be sent to the process that uses it: {describe_error(error)}. Open files "
                "and connections in open(), not before."
            ) from error
        path = [os.path.abspath(entry) if os.path.exists(entry or ".") else entry for entry in sys.path]
        code = f"import sys; sys.path[:] = {path!r}; from powertrain.trackers.process import live; live({os.getpid()})"
        with open(open_log(log_path) if log_path else os.devnull, "ab") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-c", code],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                start_new_session=True,
            )
        self._unsent: Sequence[Unsent] | None = None
        self._is_ending = False
        self._assigned, self._answered = threading.Event(), threading.Event()
        self._thread = threading.Thread(
            target=self._listen, args=(HEAD.pack(len(data)) + data,), name="powertrain-trackers", daemon=True
        )
        self._thread.start()

    def finish(self, ending: RunEnding, within: float) -> list[str]:
        """Have the rest sent, and return a sentence for each tracker that has not got all of it."""
        self._is_ending = True
        self._assigned.wait(within)
        request = EndRequest(ending.state, ending.reason, ending.findings, within)
        with contextlib.suppress(OSError):  # it has ended already
            stdin = self._process.stdin
            assert stdin is not None
            stdin.write(msgspec.json.encode(request) + b"\n")
            stdin.flush()
        self._answered.wait(within + _ANSWER_TIMEOUT_S)
        if self._unsent is None:
            return [self._about_silence()]
        return [unsent.sentence(self._command) for unsent in self._unsent]

    def close(self) -> None:
        """End the process and wait until it is gone. Again is fine."""
        self._is_ending = True
        if self._unsent is not None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(_ANSWER_TIMEOUT_S)
        if self._process.poll() is None:
            with contextlib.suppress(OSError):
                os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        self._thread.join()

    def _listen(self, assignment: bytes) -> None:
        stdin, stdout = self._process.stdin, self._process.stdout
        assert stdin is not None
        assert stdout is not None
        with contextlib.suppress(OSError):
            stdin.write(assignment)
            stdin.flush()
        self._assigned.set()
        with stdout:
            for line in stdout:
                with contextlib.suppress(msgspec.MsgspecError):
                    self._take(msgspec.json.decode(line, type=TrackerMessage))
        if self._unsent is None and not self._is_ending:
            self._show(self._about_silence())
        self._answered.set()
        with contextlib.suppress(OSError):
            stdin.close()

    def _take(self, message: TrackerMessage) -> None:
        if message.text:
            self._show(message.text)
        if message.unsent is not None:
            self._unsent = message.unsent
            self._answered.set()

    def _about_silence(self) -> str:
        code = self._process.poll()
        what = "does not answer" if code is None else f"has ended with code {code}"
        where = f" Its output is in {self._log_path!r}." if self._log_path else ""
        return (
            f"The process that sends points to trackers {what}. Training is not affected.{where} Send what is missing "
            f"later: {self._command}"
        )


def start(
    storage: Storage, trackers: list[Tracker], run: TrackedRun, show: Callable[[str], None]
) -> TrackerProcess:
    """Start sending a run's points. Output of the process goes to ``logs/trackers.log`` of a run on this machine."""
    command = f"powertrain track {shlex.quote(without_secrets(storage.uri))}"
    log = storage.local_path("logs/trackers.log")
    return TrackerProcess(Assignment(storage, trackers, run), str(log or ""), command, show)


def patience(config: RunConfig, is_to_leave: bool) -> float:
    """Seconds that trackers have at the end of a run; fewer where this process must go."""
    return min(config.tracker_timeout_s, _LEAVING_TIMEOUT_S) if is_to_leave else config.tracker_timeout_s


def describe_run(
    storage: Storage, record: Mapping[str, Any], started: float, config: Mapping[str, Any] | None
) -> TrackedRun:
    """Return the description of a run for trackers, from its ``run.json`` and the loop's config."""
    inside = storage.local_path("x")
    tags = {str(name): redact(str(value)) for name, value in (record.get("metadata") or {}).items()}
    if record.get("sweep"):
        tags["powertrain.sweep"] = str(record["sweep"])
    return TrackedRun(
        name=str(record.get("name", "")),
        path=without_secrets(storage.uri),
        key="",
        started=started,
        params=params_of(config),
        tags=tags,
        directory=str(inside.parent) if inside is not None else "",
    )


def ending_of(storage: Storage, state: str, reason: str) -> RunEnding:
    """Return how a run ended, with the findings of its stored diagnosis, if there is one."""
    findings: tuple[str, ...] = ()
    try:
        report = from_json(storage.get(SUMMARY, limit=RECORD_BYTES_LIMIT))
        findings = tuple(dict.fromkeys(one.kind for one in report.findings if is_trouble(one)))
    except (OSError, PowertrainError, msgspec.MsgspecError, ValueError):
        pass  # it was not made, or cannot be read: the end is recorded all the same
    return RunEnding(state, reason, findings)


__all__ = ["TrackerProcess", "describe_run", "ending_of", "patience", "start"]
