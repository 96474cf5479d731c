"""Classes of the user's script, as a worker and the processes that it spawns know them."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

#: Two modules that only the driver could import, each with a class of one name.
SCRIPT = """
import multiprocessing, operator, sys, types
from concurrent.futures import ProcessPoolExecutor
import cloudpickle
from powertrain.worker.scripts import script

modules = [types.ModuleType(name) for name in ("left", "right")]
for module in modules:
    exec("class Item:\\n    def where(self):\\n        return NAME", module.__dict__)
    module.NAME = module.__name__
    sys.modules[module.__name__] = module
    cloudpickle.register_pickle_by_value(module)
pickled = cloudpickle.dumps([module.Item for module in modules])
for module in modules:
    cloudpickle.unregister_pickle_by_value(module)
    del sys.modules[module.__name__]

classes = script.load(pickled)
script.bring_to_children()
with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
    print("SEEN", *pool.map(operator.methodcaller("where"), [kind() for kind in classes]))
"""


def test_classes_of_one_name_in_two_modules_are_distinguished_in_processes_that_a_worker_spawns(
    tmp_path: Path,
) -> None:
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT], capture_output=True, text=True, timeout=60, cwd=tmp_path
    )
    assert "SEEN left right" in done.stdout, done.stderr
