import re, sys
from pathlib import Path
ROOT = Path(sys.argv[1])
# what must stay below importorskip
for f in ("tests/gpu/test_cuda_trace.py", "tests/gpu/test_cuda_trace_input.py"):
    p = ROOT / f; lines = p.read_text().split("\n"); seen = False
    for i, l in enumerate(lines):
        if "importorskip" in l: seen = True
        if seen and re.match(r"(from|import) ", l) and "noqa" not in l: lines[i] = l + "  # noqa: E402"
    p.write_text("\n".join(lines))
