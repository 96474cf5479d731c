"""TraceML as its documentation says, steps marked by turns and then at a steady pace, started by ``traceml run``.

DIRECTORY and SETTINGS are passed by environment variables, because its launcher consumes the arguments.
"""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

import traceml_ai as traceml
from training import Training, alternate

traceml.init(mode="auto")
directory, settings = Path(os.environ["TRACED_DIRECTORY"]), json.loads(os.environ["TRACED_SETTINGS"])


def traced(is_on: bool) -> Any:
    return traceml.trace_step if is_on else None


training = Training(settings["device"])
training.make_step_take(settings["step_seconds"])
pairs = alternate(training, settings["blocks"], settings["steps"], traced)
small = Training(is_small=True)
small.run(200)
count = round(settings["pace"] * settings["pace_seconds"])
began = time.monotonic()
small.run(count, traceml.trace_step, seconds_each=1 / settings["pace"])
seconds = time.monotonic() - began
in_turns = settings["blocks"] * (settings["steps"] + settings["settling"])
answer = {"turns": {"pairs": pairs}, "pace": {"made": count, "seconds": seconds, "before": in_turns}}
(directory / "answer.json").write_text(json.dumps(answer))
