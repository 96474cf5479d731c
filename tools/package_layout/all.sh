#!/bin/bash
# all.sh TREE BASE PYTHON: checks BASE out in TREE (a worktree), moves, splits, and applies manual.patch if it is there.
# Commits two steps; what the second one leaves to do by hand is in manual.patch.
set -e
HERE=$(cd "$(dirname "$0")" && pwd); TREE=$(cd "$1" && pwd); BASE=$2; PYTHON=$3; RUFF="$PYTHON -m ruff"
cd "$TREE"; git reset -q --hard "$BASE"; git clean -fdq -e .venv -e .mypy_cache
python3 "$HERE/moves.py" "$TREE" > /dev/null; git add -A; git commit -qm "house: move modules into their packages"
python3 "$HERE/splits.py" "$TREE" --check || exit 1
git reset -q --hard; git clean -fdq -e .venv -e .mypy_cache; python3 "$HERE/splits.py" "$TREE"
python3 "$HERE/stage3.py" "$TREE"
$RUFF check -q --fix . --output-format concise | grep ":[0-9]" || true; $RUFF format -q .
python3 "$HERE/noqa.py" "$TREE"; $RUFF format -q .; python3 "$HERE/picture.py" "$TREE" "$BASE"; python3 "$HERE/wrap.py" "$TREE" "$PYTHON"; $RUFF check -q --fix . --output-format concise | grep ":[0-9]" || true
git add -A; git commit -qm "house: split modules by concern"
PYTHONPATH=src $PYTHON "$HERE/import_all.py" | cut -c1-150 | tail -12; python3 "$HERE/cycles.py" "$TREE"
