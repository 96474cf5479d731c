"""The house stands as docs/architecture.md draws it: who may import whom, and which files there are."""

from __future__ import annotations

import ast
import functools
import graphlib
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "src" / "powertrain"

#: From the top of the house to its ground. A room may import rooms of lower floors; rooms that share a floor
#: do not know each other.
FLOORS: list[set[str]] = [
    {"cli"},
    {"ui"},
    {"lookup"},
    {"tune", "kubernetes"},
    {"lightning", "huggingface"},
    {"torch", "xgboost", "lightgbm", "jax", "tensorflow"},
    {"frameworks"},
    {"trainer"},
    {"driver"},
    {"views"},
    {"result"},
    {"terminal", "trackers", "tasks", "collective"},
    {"calls"},
    {"diagnosis"},
    {"run"},
    {"engine"},
    {"worker"},
    {"checkpoint", "data", "trace"},
    {"backend"},
    {"storage", "wire", "config", "functions"},
    {"values", "plugins", "fork_server"},
    {"errors", "version"},
    {"text"},
]
#: The public face and ``python -m powertrain`` stand outside the floors, and so does what is published for other
#: people's tests.
OUTSIDE = {"__init__", "__main__", "testing"}
FLOOR_OF = {room: floor for floor, rooms in enumerate(FLOORS) for room in rooms}

#: (importing module, imported module) -> why this one may point the other way. All of them are lazy.
EXCEPTIONS: dict[tuple[str, str], str] = {
    ("trace.integrations.ray", "torch.trainer"): "TraceML's name for our trainer, where TraceML has it",
}
#: Modules of other people that only some rooms may import.
RESERVED: dict[str, set[str]] = {
    "ray": {
        *(
            f"engine.ray.{part}"
            for part in (
                "actors",
                "agents",
                "autoscaler",
                "claims",
                "client",
                "engine",
                "feed",
                "groups",
                "placing",
            )
        ),
        "data.ray.tasks",
        "data.ray.snapshot",
    },
}
#: Functions that import the module named by their first argument.
IMPORTERS = {"importlib.import_module", "import_module", "_load"}


@dataclass(frozen=True)
class Import:
    """Module ``importer`` of ours imports ``target``, both without the leading "powertrain."."""

    importer: str
    target: str
    line: int
    lazy: bool
    foreign: bool = False

    def __str__(self) -> str:
        name = self.target if self.foreign else f"powertrain.{self.target}"
        return f"powertrain.{self.importer} (line {self.line}) imports {name}"


def module_name(path: Path) -> str:
    """ "run.journal" for run/journal.py, "run" for run/__init__.py, "__init__" for the public face."""
    parts = list(path.relative_to(PACKAGE).with_suffix("").parts)
    if parts[-1] == "__init__" and len(parts) > 1:
        parts.pop()
    return ".".join(parts)


MODULES = {module_name(path): path for path in sorted(PACKAGE.rglob("*.py"))}


def room(module: str) -> str:
    return module.partition(".")[0]


def is_type_checking(node: ast.AST) -> bool:
    if not isinstance(node, ast.If):
        return False
    return ast.unparse(node.test) in {"TYPE_CHECKING", "typing.TYPE_CHECKING"}


def statements(
    node: ast.AST, lazy: bool = False, *, with_types: bool = False
) -> Iterator[tuple[ast.AST, bool]]:
    """Every node below, and whether it only runs when a function is called. Type-checking blocks are left out, unless
    ``with_types``."""
    for child in ast.iter_child_nodes(node):
        if is_type_checking(child) and not with_types:
            for other in child.orelse:  # type: ignore[attr-defined]
                yield other, lazy
                yield from statements(other, lazy)
            continue
        yield child, lazy
        inside = lazy or isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda))
        yield from statements(child, inside, with_types=with_types)


@functools.cache
def tree_of(module: str) -> ast.Module:
    return ast.parse(MODULES[module].read_text("utf-8"))


def imported_names(node: ast.AST, package: str) -> list[str]:
    """The absolute names of the modules that ``node`` may import; [] where it imports nothing."""
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    if isinstance(node, ast.ImportFrom):
        base = node.module or ""
        if node.level:
            above = package.split(".")[: len(package.split(".")) - node.level + 1]
            base = ".".join([*above, base] if base else above)
        return [f"{base}.{alias.name}" for alias in node.names]
    if isinstance(node, ast.Call) and ast.unparse(node.func) in IMPORTERS:
        name = node.args[0] if node.args else None
        return [name.value] if isinstance(name, ast.Constant) and isinstance(name.value, str) else []
    return []


def imports_of(module: str, *, with_types: bool = False) -> Iterator[Import]:
    """Imports of ``module``, at its top and inside functions, ours and others'; ``with_types`` adds those for types."""
    path = MODULES[module]
    full = "powertrain" if module == "__init__" else f"powertrain.{module}"
    package = full if path.name == "__init__.py" else full.rpartition(".")[0]
    for node, lazy in statements(tree_of(module), with_types=with_types):
        for name in imported_names(node, package):
            top, _, rest = name.partition(".")
            line = getattr(node, "lineno", 0)
            if top == "powertrain":
                yield Import(module, known_module(rest), line, lazy)
            else:
                yield Import(module, name, line, lazy, foreign=True)


def known_module(name: str) -> str:
    """The module that "run.journal.read" lives in; a name of the public face lives in "__init__"."""
    while name and name not in MODULES and name not in FLOOR_OF:
        name = name.rpartition(".")[0]
    return name or "__init__"


@functools.cache
def all_imports() -> list[Import]:
    """The imports of all modules. Only when a test needs them: every worker of a test run loads this file."""
    return [found for module in MODULES for found in imports_of(module)]


def own_imports() -> list[Import]:
    """Those of our own modules."""
    return [found for found in all_imports() if not found.foreign]


def points_down(found: Import) -> bool:
    above, below = room(found.importer), room(found.target)
    if above in OUTSIDE or above == below:
        return True
    if below in OUTSIDE:
        return False
    # A package without a layer is found by a test of its own.
    return FLOOR_OF.get(above, -1) < FLOOR_OF.get(below, len(FLOORS))


def test_every_module_has_a_floor() -> None:
    homeless = {room(module) for module in MODULES} - FLOOR_OF.keys() - OUTSIDE
    assert not homeless, f"say in FLOORS which floor these are on: {sorted(homeless)}"


@pytest.mark.smoke
def test_the_documentation_lists_the_same_layers() -> None:
    text = (ROOT / "docs" / "architecture.md").read_text("utf-8")
    listed = text.partition("## Import rules")[2].split("```")[1].split("\n")
    assert [set(re.findall(r"\w+", line)) for line in listed if line] == FLOORS


def test_imports_point_down_only() -> None:
    wrong = [
        str(found)
        for found in own_imports()
        if not points_down(found) and (found.importer, found.target) not in EXCEPTIONS
    ]
    assert not wrong, "\n".join(wrong)


def test_every_exception_is_lazy_and_still_needed() -> None:
    used = {(found.importer, found.target): found for found in own_imports() if not points_down(found)}
    eager = [str(found) for key, found in used.items() if key in EXCEPTIONS and not found.lazy]
    assert not eager, "\n".join(eager)
    unused = {key for key in EXCEPTIONS.keys() - used.keys() if MODULES.keys() >= set(key)}
    assert not unused, f"no module makes use of these exceptions, take them out: {sorted(unused)}"


def test_the_control_plane_sees_of_engines_only_the_protocol() -> None:
    wrong = [
        str(found)
        for found in own_imports()
        if room(found.importer) == "run" and room(found.target) == "engine" and found.target != "engine.base"
    ]
    assert not wrong, "\n".join(wrong)


def test_the_control_plane_imports_neither_torch_nor_ray() -> None:
    wrong = [
        str(found)
        for found in all_imports()
        if found.foreign and room(found.importer) == "run" and room(found.target) in {"torch", "ray"}
    ]
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("package", RESERVED)
def test_reserved_packages_are_imported_only_where_they_belong(package: str) -> None:
    wrong = [
        str(found)
        for found in all_imports()
        if found.foreign and room(found.target) == package and found.importer not in RESERVED[package]
    ]
    assert not wrong, "\n".join(wrong)


def test_engines_are_compared_by_name_only_where_they_are_chosen() -> None:
    """Code elsewhere reads facts about an engine, so that one of another package is treated as it says."""
    compared = re.compile(
        r"""engine(\.name)? *(==|!=|in|not in) *[\("'\[]|(get|has)attr\((self\.)?_?engine\b"""
    )
    allowed = {"driver.engines", "config.scaling"}
    wrong = [
        f"powertrain.{module} (line {number}): {line.strip()}"
        for module, path in MODULES.items()
        if module not in allowed
        for number, line in enumerate(path.read_text("utf-8").splitlines(), 1)
        if compared.search(line)
    ]
    assert not wrong, "\n".join(wrong)


def test_nothing_imports_testing() -> None:
    wrong = [
        str(found)
        for found in own_imports()
        if room(found.target) == "testing" and room(found.importer) != "testing"
    ]
    assert not wrong, "\n".join(wrong)


def test_importing_powertrain_imports_nothing_heavy() -> None:
    heavy = {
        "torch",
        "pyarrow",
        "pandas",
        "rich",
        "ray",
        "numpy",
        "lightning",
        "pytorch_lightning",
        "transformers",
    }
    heavy |= {"starlette", "uvicorn"}
    heavy |= {"accelerate", "xgboost", "lightgbm", "jax", "tensorflow", "tensorboard", "mlflow", "wandb"}
    script = f"import powertrain, sys; print(*({heavy!r} & sys.modules.keys()))"
    loaded = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout
    assert loaded.split() == []


def test_no_import_closes_a_circle_also_not_a_lazy_or_type_only_one() -> None:
    graph = {
        module: {
            found.target
            for found in imports_of(module, with_types=True)
            if not found.foreign and found.target != module
        }
        for module in MODULES
    }
    try:
        graphlib.TopologicalSorter(graph).prepare()
    except graphlib.CycleError as error:
        pytest.fail(f"these modules import each other in a circle: {' <- '.join(error.args[1])}")


# --------------------------------------------------------------------------- sizes

MOST_FILES_OF_A_FOLDER = 15
MOST_LINES_OF_A_FILE = 555
MOST_LINES_OF_A_CLASS = 450
#: Of the body: neither the docstring nor the arguments count, which a public signature has as many of as it needs.
MOST_LINES_OF_A_FUNCTION = 60
#: Faces of the public API: their methods are docstrings and delegations.
LARGE_CLASSES = {"data.dataset.Dataset"}


def test_no_folder_has_too_many_files() -> None:
    folders = {path.parent for path in MODULES.values()}
    counts = {
        str(folder.relative_to(PACKAGE)): sum(path.name != "__init__.py" for path in folder.glob("*.py"))
        for folder in folders
    }
    large = {name: count for name, count in counts.items() if count > MOST_FILES_OF_A_FOLDER}
    assert not large, f"more than {MOST_FILES_OF_A_FOLDER} files: {large}"


def test_no_file_has_too_many_lines() -> None:
    counts = {module: len(path.read_text("utf-8").splitlines()) for module, path in MODULES.items()}
    large = {module: count for module, count in counts.items() if count > MOST_LINES_OF_A_FILE}
    assert not large, f"more than {MOST_LINES_OF_A_FILE} lines: {large}"


def large_definitions(
    kinds: tuple[type[ast.AST], ...], most: int, lines: Callable[[Any], int]
) -> dict[str, int]:
    found = {
        f"{module}.{node.name}": lines(node)  # type: ignore[attr-defined]
        for module in MODULES
        for node in ast.walk(tree_of(module))
        if isinstance(node, kinds)
    }
    return {name: count for name, count in found.items() if count > most}


def lines_of_body(function: ast.FunctionDef) -> int:
    """From the first statement that is not the docstring to the last."""
    first = function.body[0]
    if ast.get_docstring(function, clean=False) is not None:
        if len(function.body) == 1:
            return 0
        first = function.body[1]
    return (function.end_lineno or 0) - first.lineno + 1


def test_no_class_has_too_many_lines() -> None:
    large = large_definitions(
        (ast.ClassDef,), MOST_LINES_OF_A_CLASS, lambda node: node.end_lineno - node.lineno + 1
    )
    assert large.keys() <= LARGE_CLASSES, f"more than {MOST_LINES_OF_A_CLASS} lines: {large}"
    unused = LARGE_CLASSES - large.keys()
    assert not unused, f"these exceptions are not needed any more, take them out: {unused}"


def test_no_function_has_too_many_lines() -> None:
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef)
    large = large_definitions(kinds, MOST_LINES_OF_A_FUNCTION, lines_of_body)
    assert not large, f"more than {MOST_LINES_OF_A_FUNCTION} lines of body: {large}"


# --------------------------------------------------------------------------- names

#: Names that a framework's or Ray's API prescribes for more than one module.
PRESCRIBED_NAMES = {"Chain", "ReportCallback", "TuneReportCallback", "TuneReportCheckpointCallback"}


def test_a_public_class_name_has_one_meaning() -> None:
    homes: dict[str, list[str]] = {}
    for module in MODULES:
        for node in tree_of(module).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                homes.setdefault(node.name, []).append(module)
    twice = {name: modules for name, modules in homes.items() if len(modules) > 1}
    assert twice.keys() <= PRESCRIBED_NAMES, f"give one of them a name of its own: {twice}"
    unused = PRESCRIBED_NAMES - twice.keys()
    assert not unused, f"these exceptions are not needed any more, take them out: {unused}"


def test_a_constant_has_one_value() -> None:
    twice = {}
    for module in MODULES:
        assigned = [
            target.id
            for node in tree_of(module).body
            if isinstance(node, ast.Assign)
            for target in node.targets
            if isinstance(target, ast.Name) and target.id.isupper()
        ]
        if repeated := {name for name in assigned if assigned.count(name) > 1}:
            twice[module] = repeated
    assert not twice, f"assigned twice, of which the second value counts everywhere: {twice}"


# --------------------------------------------------------------------------- the picture

#: "  journal.py   append-only facts" under "run/": two spaces a level, a name, then what it is.
_LINE = re.compile(r"^(?P<indent>(?:  )*)(?P<name>[\w.]+/?)(?P<words>\s{2,}\S.*)?$")


def drawn_files(document: str) -> dict[str, str]:
    """Path below src/powertrain -> its words, as the first code block after "## Package layout" draws it."""
    block = re.search(r"^## Package layout\n.*?^```\n(.*?)^```", document, re.DOTALL | re.MULTILINE)
    assert block, 'docs/architecture.md has no code block under "## Package layout"'
    drawn: dict[str, str] = {}
    folders: list[str] = []
    for text in block[1].splitlines()[1:]:
        line = _LINE.match(text)
        assert line, f"not a line of the picture: {text!r}"
        depth = len(line["indent"]) // 2 - 1
        folders[depth:] = [line["name"].rstrip("/")]
        drawn["/".join(folders)] = (line["words"] or "").strip()
    return drawn


def files_on_disk() -> set[str]:
    """Every module and folder; a folder's empty or one-line __init__.py is its folder's."""
    files = {path for path in PACKAGE.rglob("*.py") if path.name != "__init__.py"} | {PACKAGE / "__init__.py"}
    folders = {path.parent for path in PACKAGE.rglob("*.py")} - {PACKAGE}
    return {str(path.relative_to(PACKAGE)) for path in files | folders}


def test_the_picture_in_the_documentation_is_the_tree_on_disk() -> None:
    drawn = drawn_files((ROOT / "docs" / "architecture.md").read_text("utf-8"))
    missing, gone = files_on_disk() - drawn.keys(), drawn.keys() - files_on_disk()
    assert not missing, f"docs/architecture.md does not draw {sorted(missing)}"
    assert not gone, f"docs/architecture.md draws what is not there: {sorted(gone)}"


def test_the_picture_says_what_each_file_is() -> None:
    drawn = drawn_files((ROOT / "docs" / "architecture.md").read_text("utf-8"))
    mute = sorted(path for path, words in drawn.items() if not words)
    assert not mute, f"docs/architecture.md says nothing about {mute}"


# --------------------------------------------------------------------------- the reader itself


def test_the_reader_sees_lazy_relative_and_named_imports_and_skips_type_checking(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    path = tmp_path / "probe.py"
    path.write_text(
        "import zmq\n"
        "from typing import TYPE_CHECKING\n"
        "from . import wire\n"
        "from .run.events import Fact\n"
        "if TYPE_CHECKING:\n"
        "    from powertrain import cli\n"
        "else:\n"
        "    from powertrain import storage\n"
        "def later():\n"
        "    import powertrain.torch.backend\n"
        "    importlib.import_module('powertrain.engine.base')\n"
    )
    monkeypatch.setitem(MODULES, "probe", path)
    tree_of.cache_clear()
    seen = {(found.target, found.lazy) for found in imports_of("probe") if not found.foreign}
    assert seen == {
        ("wire", False),
        ("run.events", False),
        ("storage", False),
        ("torch.backend" if "torch.backend" in MODULES else "torch", True),
        ("engine.base", True),
    }
    with_types = {found.target for found in imports_of("probe", with_types=True) if not found.foreign}
    assert with_types == {target for target, _ in seen} | {"cli"}
    tree_of.cache_clear()


def test_the_body_of_a_function_counts_without_its_docstring_and_arguments() -> None:
    source = (
        'def f(\n    a,\n    b,\n):\n    """Two\n    lines."""\n    if a:\n        return b\n    return a\n'
    )
    (function,) = ast.parse(source).body
    assert isinstance(function, ast.FunctionDef)
    assert lines_of_body(function) == 3
