"""Wraps paragraphs of docstrings and comments whose lines became too long."""
import re, subprocess, sys, textwrap
from pathlib import Path
ROOT = Path(sys.argv[1])
out = subprocess.run([sys.argv[2], "-m", "ruff", "check", "--select", "E501", "--output-format", "concise", "."], cwd=ROOT, capture_output=True, text=True).stdout
hits = {}
for m in re.finditer(r"^(\S+\.py):(\d+):", out, re.M): hits.setdefault(m[1], []).append(int(m[2]))
for f, lines in hits.items():
    p = ROOT / f; text = p.read_text().split("\n")
    for n in sorted(lines, reverse=True):
        l = text[n-1]; m = re.match(r'(\s*(?:#:? |r?""")?)(.*)', l)
        prefix = m[1]; rest = re.sub(r'r?"""', "", prefix) if '"""' in prefix else prefix
        if re.match(r'\s*(from|import|return|assert|def|[\w.\[\]]+ =|["\'f])', l) and not prefix.strip().startswith("#") and '"""' not in prefix: 
            print("by hand", f, n, l.strip()[:90]); continue
        para = [m[2]]; k = n
        closed = l.rstrip().endswith('"""')
        while not closed and k < len(text) and text[k].strip() and text[k].startswith(rest) and not re.match(r"\s*[-*] |.*::$", text[k]) and not text[k].strip() == '"""' and len(text[k]) - len(text[k].lstrip()) == len(rest) - len(rest.lstrip()):
            para.append(text[k][len(rest):]); k += 1
            if text[k-1].rstrip().endswith('"""'): break
        new = textwrap.wrap(" ".join(para), 120, initial_indent=prefix, subsequent_indent=rest, break_long_words=False, break_on_hyphens=False)
        text[n-1:k] = new
    p.write_text("\n".join(text))
