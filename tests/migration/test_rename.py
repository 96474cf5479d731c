"""The renaming rules: each of them, what they leave alone, and that docs/migration.md states exactly these."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest
from tests.migration import running
from tests.migration.rename import rename, sed_script

GUIDE = Path(__file__).parents[2] / "docs" / "migration.md"
CASES = [
    ("import ray", "import powertrain"),
    ("import ray  # for init", "import powertrain  # for init"),
    ("    import ray", "    import powertrain"),
    ("import ray.train", "import powertrain"),
    ("import ray.train as rt", "import powertrain as rt"),
    ("import ray.train.torch", "import powertrain.torch"),
    ("import ray.data", "import powertrain.data"),
    ("from ray import train", "import powertrain as train"),
    ("    from ray import train", "    import powertrain as train"),
    ("from ray import data", "import powertrain.data as data"),
    ("from ray import train  # the loop's", "import powertrain as train  # the loop's"),
    ("    from ray import data # rows", "    import powertrain.data as data # rows"),
    ("from ray import train, data", "import powertrain as train, powertrain.data as data"),
    ("  from ray import data,train  # both", "  import powertrain as train, powertrain.data as data  # both"),
    ("from ray.train import Checkpoint, report", "from powertrain import Checkpoint, report"),
    ("from ray.train.torch import TorchTrainer", "from powertrain.torch import TorchTrainer"),
    ("from ray.train.collective import barrier", "from powertrain.collective import barrier"),
    ("from ray import tune", "from powertrain import tune"),
    ("from ray import train, tune", "import powertrain as train; from powertrain import tune"),
    ("from ray.tune.schedulers import ASHAScheduler", "from powertrain.tune.schedulers import ASHAScheduler"),
    ("ray.tune.Tuner", "powertrain.tune.Tuner"),
    ("ray.train.report({})", "powertrain.report({})"),
    ("ray.data.range(8)", "powertrain.data.range(8)"),
    ("ray.init(); ray.shutdown()", "powertrain.init(); powertrain.shutdown()"),
    ("@ray.remote(num_cpus=1)", "@powertrain.remote(num_cpus=1)"),
    ("ray.get(ray.put(1))", "powertrain.get(powertrain.put(1))"),
    ("ray.kill(actor)", "powertrain.kill(actor)"),
    ('logging.getLogger("ray.train")', 'logging.getLogger("powertrain")'),
]
LEFT_ALONE = [
    "import rayon",
    "array.train(1)",
    "ray.get_gpu_ids()",
    "from ray import serve",
    "ray.kill_all()",
    "ray.training",
    "x = 'sun ray'",
]


# Numbers as ids: a test with "ray" in its id counts as one that needs a cluster.
@pytest.mark.parametrize(("theirs", "ours"), CASES, ids=map(str, range(len(CASES))))
def test_an_old_name_becomes_ours(theirs: str, ours: str) -> None:
    assert rename(f"{theirs}\n") == f"{ours}\n"


@pytest.mark.parametrize("text", LEFT_ALONE, ids=map(str, range(len(LEFT_ALONE))))
def test_other_names_are_left_alone(text: str) -> None:
    assert rename(text) == text


def test_the_guide_states_exactly_these_rules() -> None:
    (block,) = re.findall(r"^sed -E -i(.*?)^```", GUIDE.read_text("utf-8"), re.MULTILINE | re.DOTALL)
    assert re.findall(r"-e '(.*)'", block) == sed_script()


def test_sed_makes_of_every_program_what_the_function_makes(tmp_path: Path) -> None:
    expressions = [part for expression in sed_script() for part in ("-e", expression)]
    text = "".join(running.read(name) for name in running.names())
    command = ["sed", "-E", *expressions]
    done = subprocess.run(command, input=text, capture_output=True, text=True, check=True)
    assert done.stdout == rename(text)


def test_no_old_name_is_left_in_any_program() -> None:
    left = {name: re.findall(r"\bray\b.*", rename(running.read(name))) for name in running.names()}
    assert {name: found for name, found in left.items() if found} == {}
