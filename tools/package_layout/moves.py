"""Stage 1: moves files of TREE and rewrites everything that names them."""
import re, subprocess, sys, os
from pathlib import Path
sys.path.insert(0, str(Path(__file__).parent))
import plan
from mover import *
from inner import rewrite_inner
ROOT = Path(sys.argv[1])
files = {a: b for a, b in plan.MOVES.items() if a != b}
moved = {mod(a): mod(b) for a, b in files.items() if mod(a) != mod(b)}
tracked = run("git", "ls-files", cwd=ROOT).split("\n")
text_files = [f for f in tracked if f.endswith((".py", ".md", ".toml", ".txt", ".ipynb")) or f in ("Makefile",)]
# names that are both an old and a new module: rewriting twice would go wrong
both = set(moved) & set(moved.values())
print("old and new:", both)
for f in text_files:
    p = ROOT / f
    if not p.exists() or f == "CHANGELOG.md": continue
    old = p.read_text()
    if "powertrain" not in old: continue
    if f.endswith(".py"):
        # one pass: hide what rewrite_python writes from the dotted pass
        new = rewrite_inner(old, lambda t: rewrite_python(t, moved, None).replace('powertrain', MARK))
        new = rewrite_python(new, moved, None).replace(MARK, 'powertrain')
    else:
        new = rewrite_dotted(old, moved)
    new = rewrite_paths(new, files)
    if new != old: p.write_text(new)
# move through temporary names: some targets are files of others
for a, b in files.items():
    (ROOT / b).parent.mkdir(parents=True, exist_ok=True)
    if (ROOT / b).exists(): pass
tmp = {}
for a, b in files.items():
    t = a.replace(".py", ".moving"); run("git", "mv", a, t, cwd=ROOT); tmp[t] = b
for t, b in tmp.items():
    run("git", "mv", t, b, cwd=ROOT)
# new packages
for d, _, names in os.walk(ROOT / "src/powertrain"):
    if any(n.endswith(".py") for n in names) and "__init__.py" not in names:
        print("new package", d); (Path(d) / "__init__.py").write_text('"""."""\n')
