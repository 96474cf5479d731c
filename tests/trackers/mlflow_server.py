"""A real MLflow tracking server on this machine, which can be taken down and brought back."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

#: A server that has not answered by then has hung: it imports for long on a busy machine.
_STARTS_WITHIN = 240.0


class MLflowServer:
    """Keeps its runs in an SQLite file, which can be read while it is down."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        directory.mkdir(parents=True, exist_ok=True)
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self._port: int = free.getsockname()[1]
        self.uri = f"http://127.0.0.1:{self._port}"
        #: Where its runs are kept.
        self.store = f"sqlite:///{directory}/mlflow.db"
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start it, and return when it answers."""
        environment = {
            **os.environ,
            "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false",  # which needs packages that skinny does not bring
            "MLFLOW_DISABLE_TELEMETRY": "true",
        }
        command = [sys.executable, "-m", "mlflow", "server", "--backend-store-uri", self.store]
        command += ["--artifacts-destination", str(self._directory / "artifacts")]
        command += ["--host", "127.0.0.1", "--port", str(self._port), "--workers", "1"]
        with open(self._directory / "server.log", "ab") as log:
            self._process = subprocess.Popen(
                command, env=environment, cwd=self._directory, stdout=log, stderr=log, start_new_session=True
            )
        deadline = time.monotonic() + _STARTS_WITHIN
        while not self._answers():
            if self._process.poll() is not None or time.monotonic() > deadline:
                self.stop()
                raise RuntimeError((self._directory / "server.log").read_text(errors="replace"))
            time.sleep(0.05)

    def stop(self) -> None:
        """Take it down at once, as a machine that fails would."""
        if self._process is not None:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
            self._process = None

    def _answers(self) -> bool:
        try:
            with urllib.request.urlopen(f"{self.uri}/health", timeout=5) as answer:
                return bool(answer.status == 200)
        except OSError:
            return False
