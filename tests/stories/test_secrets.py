"""A run whose storage address holds credentials: they are used, and stand in nothing that it writes or shows."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest
from tests.s3_server import S3Server
from typer.testing import CliRunner

import powertrain
from powertrain import Checkpoint, DataParallelTrainer, FailureConfig, Result, RunConfig, ScalingConfig
from powertrain.cli.main import app
from powertrain.lookup.finding import find_run
from powertrain.run import events as ev
from powertrain.storage import open_storage
from powertrain.storage.files.private_roots import runtime_root

#: As a generator of keys would make them: with characters that stand for something else in an address.
SECRET = "Qz7Jalr/XUtn+FEMI=K7MDENG"
TOKEN = "Qz7Tok//en+With=Odd"
VARIABLE = "Qz7VariableValue"


@pytest.fixture(scope="module")
def server() -> Iterator[S3Server]:
    with S3Server() as running:
        yield running


@pytest.fixture
def address(server: S3Server) -> str:
    query = f"endpoint_override={server.endpoint}&region=us-east-1&session_token={quote(TOKEN, safe='')}"
    return f"s3://AKIAKEY:{quote(SECRET, safe='')}@bucket/secrets?{query}"


def occurrences(data: bytes | str) -> list[str]:
    """The secrets that stand in ``data``, also cut or encoded."""
    text = data.decode("utf-8", "replace") if isinstance(data, bytes) else data
    return [piece for piece in ("Qz7", "FEMI", "//en+With") if piece in text]


class _Looks:
    """Looks at the run from outside once it trains."""

    def __init__(self) -> None:
        self.cards: list[bytes] = []
        self.places: list[str] = []
        self.journals: list[bytes] = []

    def on_event(self, context: Any, event: ev.Event) -> None:
        if isinstance(event, ev.TrainingStarted) and not self.cards:
            self.cards = [path.read_bytes() for path in runtime_root().glob("*/control.json")]
            found = find_run("secretive")
            self.places = [type(place).__name__ for place in found.places]
            self.journals = [place.get(e.key) for place in found.places[:1] for e in place.list("journal")]


@pytest.mark.smoke
def test_credentials_of_an_address_stand_in_nothing_that_a_run_writes_or_shows(
    address: str, capfd: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    def loop(config: dict[str, Any]) -> str:
        assert os.environ["SECRET_VARIABLE"].endswith("VariableValue")
        if powertrain.get_checkpoint() is None:
            (tmp_path / "model").write_text("x")
            powertrain.report({"loss": 1.0}, checkpoint=Checkpoint.from_directory(str(tmp_path)))
            raise RuntimeError(f"GET {config['address']} was refused")
        powertrain.report({"loss": 0.5})
        return "done"

    looks = _Looks()
    run = RunConfig(
        name="secretive",
        storage_path=address,
        callbacks=[looks],
        failure_config=FailureConfig(max_failures=1),
        worker_runtime_env={"env_vars": {"SECRET_VARIABLE": VARIABLE}},
    )
    trainer = DataParallelTrainer(
        loop,
        train_loop_config={"address": "s3://AKIAKEY:Qz7ofTheLoop@bucket"},
        scaling_config=ScalingConfig(num_workers=1),
        run_config=run,
        metadata={"data": "s3://AKIAKEY:Qz7ofTheData@bucket/data"},
    )
    result = trainer.fit()
    shown = capfd.readouterr()
    assert result.metrics is not None
    assert result.metrics["loss"] == 0.5
    assert not occurrences(shown.out + shown.err)
    assert not occurrences(repr(result) + repr(trainer) + repr(result.checkpoint))

    assert len(looks.cards) == 1
    assert not occurrences(looks.cards[0])
    assert looks.journals
    assert not any(map(occurrences, looks.journals))
    where = address.replace("/secrets?", "/secrets/secretive?")
    storage = open_storage(where)
    kept = {entry.key: storage.get(entry.key) for entry in storage.list()}
    assert {"run.json", "final_summary.json"} <= set(kept)
    assert any(key.startswith("journal/") for key in kept)
    # The trainer's arguments are kept as they were given, but for the address and the variables of the run itself.
    arguments = kept.pop("trainer.pickle").replace(b"Qz7ofTheLoop", b"").replace(b"Qz7ofTheData", b"")
    assert not occurrences(arguments)
    assert not {key: occurrences(data) for key, data in kept.items() if occurrences(data)}

    for command in (("ls", address), ("show", where), ("show", where, "--json"), ("diagnose", where)):
        said = CliRunner().invoke(app, list(command))
        assert said.exit_code == 0, said.output
        assert not occurrences(said.output), said.output

    again = DataParallelTrainer.restore(
        where, run_config=RunConfig(worker_runtime_env=run.worker_runtime_env)
    )
    assert again.run_config.storage_path == address
    assert again.fit().path == result.path
    metrics = Result.from_path(where).metrics
    assert metrics is not None
    assert metrics["loss"] == 0.5
    assert not occurrences(repr(Result.from_path(where)))
