"""Text that others made, such as names, paths and messages of a run directory, fit for a terminal. Pure.

Every string that Powertrain itself prints passes one of these functions. None of them lets a control character
through, so no string can move the cursor, set the title or begin a line of its own. The output of a rank keeps its
colours, and loses everything else that a terminal would act on.
"""

from __future__ import annotations

import re

# Patterns are texts, which ``re`` compiles at their first use: every process imports this module, and few need them.

#: Characters that a terminal acts on or that change how their neighbours are shown: C0, DEL and C1 controls, line and
#: paragraph separators, bidirectional controls, other invisible format characters, and halves of characters.
_UNSAFE_CLASS = (
    "\x00-\x1f\x7f-\x9f\xad\u061c\u180e\u200b\u200e\u200f\u2028-\u202e\u2060-\u206f\ufeff\ufff9-\ufffb"
    "\ud800-\udfff\U000e0000-\U000e007f"
)
_UNSAFE = f"[{_UNSAFE_CLASS}]"
_UNSAFE_IN_LINES = f"(?!\n)[{_UNSAFE_CLASS}]"
#: The only escape sequences of a rank's output that reach a terminal.
_COLOUR = r"\x1b\[[0-9;:]*m"
#: Everything else that begins with an escape character, or with its one-character forms: sequences with parameters,
#: strings (title, clipboard, device control) as far as they end in the same text, and two-character sequences.
_SEQUENCES = (
    rf"({_COLOUR})"
    r"|(?:\x1b\[|\x9b)[0-?]*[ -/]*[@-~]"
    r"|(?:\x1b[\]PX^_]|[\x90\x98\x9d-\x9f])[^\x07\x1b\x9c\n]*(?:\x07|\x1b\\|\x9c)"
    r"|\x1b[ -/]*[0-~]"
)
_OUTPUT = rf"({_COLOUR}|[\t\n])|[{_UNSAFE_CLASS}]"
#: Marks of output that is more than text with colours; most output has none of them.
_NOT_PLAIN = rf"\x1b(?!\[[0-9;:]*m)|(?![\t\n\x1b])[{_UNSAFE_CLASS}]"
_RESET = "\x1b[0m"
_COLOUR_RESET = r"\x1b\[[0;]*m"
_TAB = "    "


def escape_controls(text: str) -> str:
    r"""Return ``text`` as one line without control characters: each is written as Python would, such as ``\x1b``.

    Line ends are written as ``\n``, so that a value cannot begin another line. A tab becomes four spaces.
    """
    return text if text.isprintable() else re.sub(_UNSAFE, _escaped, text)


def escape_lines(text: str) -> str:
    """Return ``text`` without control characters, like :func:`escape_controls`, but with its line ends."""
    return text if text.isprintable() else re.sub(_UNSAFE_IN_LINES, _escaped, text.replace("\r\n", "\n"))


def indent_continuation(text: str, indent: str = "    ") -> str:
    """Return a message whose lines after the first are indented: none of them looks like a message of its own."""
    return escape_lines(text).rstrip("\n").replace("\n", f"\n{indent}")


def without_colours(text: str) -> str:
    """Return ``text`` without the colours of its author, for messages that are shown in ours."""
    return re.sub(_COLOUR, "", text) if "\x1b" in text else text


def clean_output(text: str) -> str:
    """Return the output of a rank for a terminal: colours, tabs and line ends stay, other controls are left out.

    Separators of lines, bidirectional controls and halves of characters are written as Python would.
    """
    if text.isprintable() or re.search(_NOT_PLAIN, text) is None:
        return text
    return re.sub(_OUTPUT, _shown_of_output, re.sub(_SEQUENCES, lambda found: found[1] or "", text))


def reset_colours(line: str) -> str:
    """Return ``line`` with the terminal's own colours after it: a line that hides text hides only its own."""
    colours = re.findall(_COLOUR, line) if "\x1b" in line else []
    return line + _RESET if colours and not re.fullmatch(_COLOUR_RESET, colours[-1]) else line


def escape_json(text: str) -> str:
    r"""Return JSON text in which control characters stand as ``\u...``: the same values, safe for a terminal."""
    return text if text.isprintable() else re.sub(_UNSAFE_IN_LINES, _json_escaped, text)


def _escaped(found: re.Match[str]) -> str:
    if found[0] == "\t":
        return _TAB
    return found[0].encode("unicode_escape").decode("ascii")


def _shown_of_output(found: re.Match[str]) -> str:
    if found[1] is not None:
        return found[1]
    return "" if found[0] < "\xa0" else _escaped(found)


def _json_escaped(found: re.Match[str]) -> str:
    code = ord(found[0])
    if code < 0x10000:
        return f"\\u{code:04x}"
    high, low = divmod(code - 0x10000, 0x400)
    return f"\\u{0xD800 + high:04x}\\u{0xDC00 + low:04x}"
