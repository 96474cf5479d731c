"""Everything that reads a run's directory, each as a function that returns text which is the same for the same run."""

from __future__ import annotations

import contextlib
import io
import json
import logging
import os
import re
import shutil
import stat
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import typer

import powertrain
from powertrain.checkpoint import committed
from powertrain.cli.compare import compare
from powertrain.cli.diagnose import diagnose
from powertrain.cli.logs import logs
from powertrain.cli.ls import ls
from powertrain.cli.show import show
from powertrain.errors import PowertrainError
from powertrain.result.contents import picture_of
from powertrain.result.result import Result
from powertrain.run import events as ev
from powertrain.run.metrics import curves as metric_view
from powertrain.run.record import journal
from powertrain.storage import open_storage
from powertrain.trace import store

#: What the clock shows while readers run, so that "3 s ago" is always the same. Unix seconds.
_NOW = time.time()


@dataclass(frozen=True)
class Reading:
    """What one reader made of a run."""

    #: What it returned or printed; "" where it raised.
    text: str = ""
    #: What it warned of.
    warnings: tuple[str, ...] = ()
    #: An error of ours.
    refusal: str = ""
    #: Any other error.
    raw: str = ""


def _result(run: Path, _: Path) -> str:
    found = Result.from_path(run)
    return repr((found.state, found.reason, found.metrics, str(found.error), repr(found)))


def _return_value(run: Path, _: Path) -> str:
    return repr(Result.from_path(run).return_value)


def _frame(run: Path, _: Path) -> str:
    return str(Result.from_path(run).dataframe(ranks="all").to_csv())


def _curves(run: Path, _: Path) -> str:
    storage = open_storage(run)
    state = journal.replay(journal.read(storage))
    names = metric_view.metric_names(storage, state)
    curves = [metric_view.curve(storage, state, name) for name in names]
    others = [metric_view.curve(storage, state, "loss", pixels=2, rank=rank) for rank in (0, 1)]
    shown = [(c.rows.tolist(), c.low.tolist(), c.last.tolist(), c.points) for c in curves + others]
    return repr((names, shown))


def _picture(run: Path, _: Path) -> str:
    picture = picture_of(Result.from_path(run)._contents, None, x="row", rank=0, smooth=0.0)
    lines = [(p.name, [(line.rank, line.last.tolist()) for line in p.lines]) for p in picture.panels]
    return repr((picture.title, lines, picture.saved, picture.happened))


def _card(run: Path, _: Path) -> str:
    return Result.from_path(run)._repr_html_()


def _checkpoints(run: Path, _: Path) -> str:
    found = Result.from_path(run)
    kept = [(c.path, metrics, c.get_metadata()) for c, metrics in found.best_checkpoints]
    best = found.get_best_checkpoint("loss", "min")
    return repr((found.checkpoint, best, kept, found.data_positions))


def _verified(run: Path, _: Path) -> str:
    storage = open_storage(run)
    newest = committed.newest_verified(storage, logging.getLogger("powertrain").warning)
    reported = [(r.checkpoint.path, r.metrics, r.status) for r in committed.reported(storage)]
    return repr((newest, reported))


def _findings(run: Path, _: Path) -> str:
    return repr(Result.from_path(run).findings)


def _journal(run: Path, _: Path) -> str:
    reading = journal.read_counting(open_storage(run))
    return repr((reading.events, journal.replay(reading.events)))


def _telemetry(run: Path, _: Path) -> str:
    found = store.read(open_storage(run))
    arrays = {
        kind: {a: {r: t.tobytes() for r, t in ranks.items()} for a, ranks in attempts.items()}
        for kind, attempts in (("steps", found.steps), ("samples", found.samples))
    }
    return repr((arrays, found.facts, found.level))


def _copy_anything(source: str, target: str) -> str:
    if stat.S_ISFIFO(os.lstat(source).st_mode):
        os.mkfifo(target)
        return target
    return str(shutil.copy2(source, target))


def _resume(run: Path, scratch: Path) -> str:
    """What the next start of the run goes on from, up to its first row."""
    copy = scratch / "resumed" / run.name
    shutil.rmtree(copy.parent, ignore_errors=True)
    shutil.copytree(run, copy, copy_function=_copy_anything)
    seen: dict[str, Any] = {}

    def look() -> None:
        checkpoint = powertrain.get_checkpoint()
        seen["checkpoint"] = Path(checkpoint.path).name if checkpoint is not None else None
        seen["metadata"] = checkpoint.get_metadata() if checkpoint is not None else None

    config = powertrain.RunConfig(name=run.name, storage_path=str(copy.parent))
    scaling = powertrain.ScalingConfig(num_workers=0)
    with contextlib.redirect_stdout(io.StringIO()):
        powertrain.DataParallelTrainer(look, scaling_config=scaling, run_config=config).fit()
    storage = open_storage(copy)
    facts = journal.read(storage)
    for fact in facts:
        if isinstance(fact, ev.Warned) and "other settings" not in fact.message:
            logging.getLogger("powertrain").warning("%s", fact.message)
    start = [f for f in facts if isinstance(f, ev.AttemptStarted)][-1]
    record = json.loads(storage.get("run.json"))
    kept = [manifest.name for manifest in committed.committed(storage)]
    state = journal.replay(facts)
    frame = Result.from_path(copy).dataframe(ranks="all").to_csv()
    return repr(
        (seen, start.attempt, start.first_row, start.checkpoint, record["seed"], kept, state.branches, frame)
    )


def _restore(run: Path, _: Path) -> str:
    trainer = powertrain.DataParallelTrainer.restore(run)
    return repr((trainer.run_config.name, trainer.scaling_config))


def _printed(command: Callable[..., None], **arguments: Any) -> Callable[[Path, Path], str]:
    def read(run: Path, _: Path) -> str:
        out, err = io.TextIOWrapper(io.BytesIO(), "utf-8"), io.StringIO()
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            chosen = {name: str(run) if value == "RUN" else value for name, value in arguments.items()}
            chosen = {name: str(run.parent) if value == "ROOT" else value for name, value in chosen.items()}
            with contextlib.suppress(typer.Exit):
                command(**chosen)
        for line in err.getvalue().splitlines():
            logging.getLogger("powertrain").warning("%s", line)
        out.flush()
        text: str = out.buffer.getvalue().decode("utf-8", "backslashreplace")
        # Other runs of this machine are none of these.
        return "".join(line for line in text.splitlines(keepends=True) if " is running at " not in line)

    return read


READERS: dict[str, Callable[[Path, Path], str]] = {
    "result": _result,
    "return_value": _return_value,
    "frame": _frame,
    "curves": _curves,
    "picture": _picture,
    "card": _card,
    "checkpoints": _checkpoints,
    "verified": _verified,
    "findings": _findings,
    "journal": _journal,
    "telemetry": _telemetry,
    "ls": _printed(ls, storage="ROOT"),
    "show": _printed(show, run="RUN"),
    "show_json": _printed(show, run="RUN", json=True),
    "diagnose": _printed(diagnose, run="RUN"),
    "diagnose_json": _printed(diagnose, run="RUN", json=True),
    "compare": _printed(compare, first="RUN", second="RUN"),
    "restore": _restore,
    "resume": _resume,
}
#: Plain text that carries no hash: whatever is in it is shown.
WITHOUT_HASH: dict[str, Callable[[Path, Path], str]] = {"logs": _printed(logs, run="RUN", all_attempts=True)}


class _Warnings(logging.Handler):
    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.seen: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.seen.append(record.getMessage())


@contextlib.contextmanager
def _watched() -> Iterator[_Warnings]:
    logger, handler = logging.getLogger("powertrain"), _Warnings()
    logger.addHandler(handler)
    clock, time.time = time.time, lambda: _NOW
    try:
        yield handler
    finally:
        time.time = clock
        logger.removeHandler(handler)


def read_with(name: str, run: Path, scratch: Path) -> Reading:
    """What one reader makes of the run at ``run``; never raises."""
    read = {**READERS, **WITHOUT_HASH}[name]
    text = refusal = raw = ""
    with _watched() as handler:
        try:
            text = read(run, scratch)
        except (PowertrainError, typer.BadParameter) as error:
            refusal = f"{type(error).__name__}: {error}"
        except KeyboardInterrupt:
            raise
        except BaseException as error:  # SystemExit of a reader would be as bad
            raw = f"{type(error).__name__}: {error} {_where(error)}"

    def plain(text: str) -> str:
        """Without the place of this copy of the run, and of objects in memory."""
        for place in (run.parent, scratch):
            text = text.replace(str(place), "PLACE")
        return re.sub(r" at 0x[0-9a-f]+", "", text)

    return Reading(plain(text), tuple(map(plain, handler.seen)), plain(refusal), plain(raw))


def _where(error: BaseException) -> str:
    """The innermost line of ours."""
    lines = [
        f"{f.filename.rpartition('/src/')[2]}:{f.lineno}" for f in traceback.extract_tb(error.__traceback__)
    ]
    return next((line for line in reversed(lines) if line.startswith("powertrain")), "")
