"""Parses the plan: module moves, and splits (module -> {target: [names]})."""
import re
from pathlib import Path

TEXT = (Path(__file__).parent / "moves.txt").read_text()
HERE = Path(__file__).parent

def mod(path: str) -> str:
    path = path.strip().removeprefix("src/").removesuffix(".py").replace("/", ".")
    return path.removesuffix(".__init__")

def is_init(path): return path.strip().endswith("__init__.py")

MOVES: dict[str, str] = {}     # old path -> new path (files)
SPLITS: dict[str, dict[str, list[str]]] = {}   # old module path -> {new path: names}
for line in TEXT.splitlines():
    if m := re.match(r"\s+(src/\S+) moves to (src/\S+)$", line):
        MOVES[m[1]] = m[2]
    elif m := re.match(r"\s+from (src/\S+) to (src/\S+): (.*)$", line):
        SPLITS.setdefault(m[1], {})[m[2]] = [n.strip() for n in m[3].split(",")]
for line in (HERE / "extra.txt").read_text().splitlines():
    line = line.split("#")[0].strip()
    if not line: continue
    a, b = line.split(" -> ")
    MOVES[f"src/powertrain/{a}.py"] = f"src/powertrain/{b}.py"
