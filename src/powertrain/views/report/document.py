"""The HTML file of a report. No value of a run is code in it: its replies are JSON in a block that does not run."""

from __future__ import annotations

import base64
import functools
import hashlib
import html
from collections.abc import Mapping
from typing import Any

from powertrain.text.printable import escape_lines
from powertrain.version import __version__
from powertrain.views.encoding import encoded
from powertrain.views.report.bundle import bundle
from powertrain.views.static_files import read_static

#: Characters of JSON that could end the block, or begin a comment in it.
_ESCAPES = {"<": "\\u003c", ">": "\\u003e", "&": "\\u0026", "\u2028": "\\u2028", "\u2029": "\\u2029"}
#: Only the two blocks with these hashes run or apply; nothing is loaded from anywhere.
_POLICY = (
    "default-src 'none'; script-src 'sha256-{script}'; style-src 'sha256-{style}'; img-src data:; base-uri 'none'; "
    "form-action 'none'; require-trusted-types-for 'script'; trusted-types 'none'"
)


def document(name: str, replies: Mapping[str, Any]) -> bytes:
    """Return the file with these replies; ``name`` is its title."""
    before, between, after = _shell()
    title = html.escape(escape_lines(name)).encode("utf-8", "backslashreplace")
    return b"".join((before, title, between, embedded(replies), after))


def embedded(content: Any) -> bytes:
    """Return a value as JSON without characters that HTML gives a meaning."""
    text = encoded(content).decode()
    for character, escape in _ESCAPES.items():
        text = text.replace(character, escape)
    return text.encode()


@functools.cache
def _shell() -> tuple[bytes, bytes, bytes]:
    """Return the parts of the file before the title, between it and the replies, and after them."""
    files = {name: data.decode() for name, data in read_static().items()}
    modules = {name[: -len(".js")]: text for name, text in files.items() if name.endswith(".js")}
    script, style = bundle(modules, "report"), files["style.css"]
    fields = {
        "policy": _POLICY.format(script=_digest(script), style=_digest(style)),
        "version": __version__,
        "icon": base64.b64encode(files["icon.svg"].encode()).decode(),
        "style": style,
        "script": script,
    }
    text = files["report.html"]
    for field, value in fields.items():
        text = text.replace(f"@{field}@", value, 1)
    before, _, rest = text.partition("@title@")
    between, _, after = rest.partition("@replies@")
    return before.encode(), between.encode(), after.encode()


def _digest(text: str) -> str:
    return base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
