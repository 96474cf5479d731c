"""docs/migration.md holds: its code runs, and its lists are what the code says."""

from __future__ import annotations

import ast
import dataclasses
import importlib
import importlib.util
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

from tests.data.test_docs_data import python_of

from powertrain import config
from powertrain.calls import options
from powertrain.config.checks import Config

GUIDE = Path(__file__).parents[2] / "docs" / "migration.md"


def section(title: str) -> str:
    """Return the text below a heading of the guide, up to the next one."""
    _, _, rest = GUIDE.read_text("utf-8").partition(f"\n## {title}\n")
    return rest.partition("\n## ")[0]


def first_cells(title: str) -> str:
    """Return the first column of the table in a section of the guide."""
    return "\n".join(line.split("|")[1] for line in section(title).splitlines() if line.startswith("| "))


def public_names(module: str) -> set[str]:
    """Return what ``__all__`` of one of the cluster library's modules lists, read from its file."""
    spec = importlib.util.find_spec("ray")
    assert spec is not None
    assert spec.submodule_search_locations is not None
    path = Path(spec.submodule_search_locations[0], *module.split("."), "__init__.py")
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
            names |= set(ast.literal_eval(node.value))
        elif isinstance(node, ast.Call) and ast.unparse(node.func) == "__all__.extend":
            names |= set(ast.literal_eval(node.args[0]))
    return names


def test_every_block_of_the_guide_runs(tmp_path: Path) -> None:
    script = tmp_path / "guide.py"
    script.write_text(python_of(GUIDE.read_text("utf-8")), "utf-8")
    done = subprocess.run(
        [sys.executable, str(script)], cwd=tmp_path, capture_output=True, text=True, timeout=110
    )
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"


def test_the_arguments_without_effect_are_those_of_the_configs() -> None:
    listed = set(re.findall(r"`(\w+\.\w+)`", first_cells("Arguments without effect")))
    found = [
        one
        for name in config.__all__
        for one in [getattr(config, name)]
        if isinstance(one, type) and issubclass(one, Config)
    ]
    configs: list[Any] = [one for one in found if one is not Config]
    ignored = {
        f"{one.__name__}.{field.name}"
        for one in configs
        for field in dataclasses.fields(one)
        if "ignored" in field.metadata
    }
    assert listed == ignored


def test_the_options_of_remote_without_effect_are_those_that_the_code_names() -> None:
    listed = set(re.findall(r"`(\w+)`", first_cells("Arguments without effect")))
    tables = (
        options._WITHOUT_EFFECT,
        options._WITHOUT_EFFECT_FOR_A_TASK,
        options._WITHOUT_EFFECT_FOR_AN_ACTOR,
        options._WITHOUT_EFFECT_FOR_A_METHOD,
    )
    assert listed == {"name"} | {name for table in tables for name in table if not name.startswith("_")}


def test_no_name_is_missing_as_the_guide_says() -> None:
    (sentence,) = re.findall(r"^No name of (.*) is missing\.$", section("Missing features"), re.M)
    complete = re.findall(r"`ray\.(train[\w.]*)`", sentence)
    assert {"train", "train.torch", "train.lightning", "train.xgboost"} <= set(complete)
    for theirs in complete:
        module = importlib.import_module("powertrain" + theirs.removeprefix("train"))
        assert [name for name in sorted(public_names(theirs)) if not hasattr(module, name)] == []


def test_its_modules_that_are_not_there_are_not_there() -> None:
    names = re.findall(r"`ray\.((?:train\.)?\w+)`", first_cells("Missing features"))
    assert names
    for name in names:
        ours = "powertrain." + name.removeprefix("train.")
        assert importlib.util.find_spec(ours) is None, ours
