"""Secrets in addresses and in texts that quote them, made unreadable. Pure.

A secret may precede the "@" of an address, be the value of a parameter, or be in an address inside a parameter. An
allowlist decides which parts of an address are shown: of a parameter that is not in :data:`HARMLESS_PARAMETERS` only
the name is shown. Secrets that were not percent-encoded as they should be ("/", "?" and "@" are common in generated
keys) are hidden as well, at the price of hiding more than them.
"""

from __future__ import annotations

import contextlib
import logging
import re
from collections.abc import Iterable
from urllib.parse import quote, unquote

from powertrain.text.printable import escape_lines, without_colours

# Patterns are texts, which ``re`` compiles at their first use: every process imports this module, and few need them.

#: Replacement of a secret.
HIDDEN = "..."
_LEAST_SECRET = 4
#: Characters of a field's name; longer keys are content.
_LONGEST_NAME = 200
#: Parameters of an address whose values may be shown. An access key's name is an identity, not a secret.
HARMLESS_PARAMETERS = frozenset(
    {
        "access_key",
        "account_name",
        "allow_http",
        "anonymous",
        "endpoint_override",
        "force_virtual_addressing",
        "region",
        "scheme",
        "tls_ca_file_path",
        "use_emulator",
    }
)
_S3 = ("s3", "s3a", "s3n")
_AZURE = ("az", "azure", "abfs", "abfss", "wasb", "wasbs", "adl")
#: Schemes whose first part is a bucket, which has no port.
_BUCKETS = (*_S3, "gs", "gcs", *_AZURE)
#: The begin of an address; of the schemes that Powertrain knows also with a slash too few.
_BEGIN = rf"(?i)([a-z][a-z0-9+.-]{{0,30}})://|^({'|'.join((*_BUCKETS, 'hdfs', 'https', 'http'))}):/?"
_NAME = r"[A-Za-z][\w.-]{0,39}"
#: The begin of one more address, behind another.
_NEXT = r"[A-Za-z][A-Za-z0-9+.-]{0,30}://"
#: Levels of addresses in parameters of addresses that are searched; deeper ones are hidden whole.
_NESTING_LIMIT = 2
#: An address within a text: up to a blank, a quote or a bracket, and without the punctuation after it, but with the
#: dots that may stand for a secret at its end.
_IN_TEXT = r"[A-Za-z][A-Za-z0-9+.-]{0,30}://[^\s'\"<>`]*(?:[^\s'\"<>`.,;:!?)\]}](?:\.{3})?|[:?]\.{3})"
#: One of these is in every name whose value is hidden.
_SECRET_WORDS = ("pass", "secret", "token", "key", "sig", "credential")
#: Names of secrets, also at the end of a longer name, such as ``PGPASSWORD``.
_SECRET_NAMES = (
    r"(?:x-amz-(?:signature|security-token|credential)|x-goog-signature|sas_?token|account_?key"
    r"|secret_?(?:access_?)?key|session_?token|access_?token|auth_?token|api_?key|client_?secret"
    r"|password|passwd|passphrase)"
)
#: The name of a key or field that holds a secret: here a plain "token" counts, which in a text is too common a word.
_SECRET_FIELD = rf"(?ai).*(?:{_SECRET_NAMES}|token|secret|private_?key|access_?key|credentials?)"
#: A name with "=" or ":", and the opening quote of its value if there is one. Every repetition is bounded.
_ASSIGNMENT = (
    rf"(?ai)(?:{_SECRET_NAMES}\\{{0,15}}['\"]?[ \t]{{0,8}}[:=][ \t]{{0,8}}|\b(?:sig|signature)=)"
    r"(?:[bru]{0,2}(?P<quote>'''|\"\"\"|\\{0,15}['\"]))?"
)
_BARE_VALUE = r"[^\s&'\"<>,;)]*"


def without_secrets(address: str) -> str:
    """Return an address as it may be shown: passwords, keys and tokens in it are dots. A plain path stays as it is."""
    return _cleaned(address, HIDDEN)


def has_secrets(address: str) -> bool:
    """Return True when a password, key or token stands in ``address``."""
    return without_secrets(address) != address


def strip_secrets(address: str) -> str:
    """Return ``address`` without its credentials, so that it can be opened with those of the environment."""
    return _cleaned(address, "") if has_secrets(address) else address


def redact(text: str, secrets: Iterable[str] = ()) -> str:
    """Return a text in which the secrets of all addresses, and all occurrences of ``secrets``, are dots.

    Secrets of fewer than four characters are only found in addresses: they could be parts of any word.
    """
    for secret in sorted((one for one in secrets if len(one) >= _LEAST_SECRET), key=len, reverse=True):
        text = text.replace(secret, HIDDEN)
    if "://" in text:
        text = re.sub(_IN_TEXT, lambda found: without_secrets(found[0]), text)
    return _hide_assigned(text) if "=" in text or ":" in text else text


def is_secret_name(name: str) -> bool:
    """Return True when the name of a field or key is that of a secret."""
    return len(name) <= _LONGEST_NAME and re.fullmatch(_SECRET_FIELD, name) is not None


def fit_to_show(text: str) -> str:
    """Return the message of an error: without secrets, without colours of its author, and safe for a terminal."""
    return escape_lines(without_colours(redact(text)))


class FitToShow(logging.Filter):
    """Makes the messages of a logger safe to show: they quote file names, errors and data of other processes."""

    def filter(self, record: logging.LogRecord) -> bool:
        """Rewrite the record's message. Always True: no record is dropped."""
        with contextlib.suppress(Exception):  # a wrong format string is the handler's to report
            record.msg, record.args = fit_to_show(record.getMessage()), None
        return True


def redact_values(value: object) -> object:
    """Return a value of dicts, lists and strings with every string in it redacted."""
    if isinstance(value, str):
        return redact(value)
    if isinstance(value, dict):
        return {key: redact_values(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [redact_values(item) for item in value]
    return value


def _hide_assigned(text: str) -> str:
    """Hide the values that ``text`` assigns to names of secrets, in a time that grows with its length alone."""
    lowered = text.lower()
    if not any(word in lowered for word in _SECRET_WORDS):
        return text
    shown, end = [], 0
    for begin in re.finditer(_ASSIGNMENT, text):
        if begin.end() <= end:  # within a value that is hidden
            continue
        stop = _end_of_value(text, begin.end(), begin["quote"])
        if stop > begin.end():
            shown += [text[end : begin.end()], HIDDEN]
            end = stop
    return "".join([*shown, text[end:]])


def _end_of_value(text: str, start: int, quote: str | None) -> int:
    """Return the end of a value that begins at ``start`` behind ``quote``; an unclosed one ends with its line."""
    if not quote:
        pattern = _BARE_VALUE
    elif len(quote) == 1:
        pattern = rf"[^{quote}\\\n]*(?:\\.[^{quote}\\\n]*)*"
    elif quote[0] == "\\":  # a quote within a quoted text: it ends at one with as many backslashes
        pattern = rf"(?m).*?(?=(?<!\\){re.escape(quote)}|$)"
    else:
        closing = text.find(quote, start)
        return closing if closing >= 0 else len(text)
    found = re.compile(pattern).match(text, start)
    return found.end() if found else start


def _cleaned(address: str, mark: str, depth: int = _NESTING_LIMIT) -> str:
    """Return ``address`` with ``mark`` in place of each secret; for an empty mark, without the parts with secrets.

    Further addresses may follow the first one, joined by any character: each is cleaned as an address of its own.
    """
    shown = _clean_one(address, mark, depth)
    first = re.search(_BEGIN, shown)
    if first is None:
        return shown
    starts = [found.start() for found in re.finditer(_NEXT, shown) if found.start() > first.start()]
    if not starts:
        return shown
    pieces = [shown[start:end] for start, end in zip(starts, [*starts[1:], len(shown)], strict=True)]
    return shown[: starts[0]] + "".join(_clean_one(piece, mark, depth) for piece in pieces)


def _clean_one(address: str, mark: str, depth: int) -> str:
    found = re.search(_BEGIN, address)
    if found is None:
        return address
    scheme, start = (found[1] or found[2]).lower(), found.end()
    credentials, rest = _split_credentials(scheme, address[start:])
    head = address[:start] + _cleaned_credentials(scheme, credentials, mark)
    if scheme == "file":
        return head + rest
    place, question, query = rest.partition("?")
    if not question:
        place, fragment, _ = rest.partition("#") if scheme in ("http", "https") else (rest, "", "")
        return head + place + (f"#{mark}" if fragment and mark else "")
    parameters = [_cleaned_parameter(part, mark, depth) for part in query.split("&")]
    query = "&".join(parameters if mark else filter(None, parameters))
    return head + place + (f"?{query}" if query or mark else "")


def _split_credentials(scheme: str, rest: str) -> tuple[str, str]:
    """Return the credentials with their "@", "" where there are none, and the rest.

    A ":" in the first part begins a password unless it begins a port. A password that was not percent-encoded may
    hold any character: it ends at the last "@" that does not belong to a parameter. Buckets have no port, so a
    password without any "@" is known there too.
    """
    first = re.split(r"[/?#]", rest, maxsplit=1)[0]
    place, mark, query = rest.partition("?")
    names = [part.partition("=")[0] for part in query.split("&") if part]
    is_query = mark and all(name == HIDDEN or re.fullmatch(_NAME, name) for name in names)
    if not _has_password(scheme, first):
        at = first.rfind("@") + 1
        return rest[:at], rest[at:]
    at = (place.rfind("@") if is_query else rest.rfind("@")) + 1
    at = at or rest.rfind("@") + 1
    if at:
        return rest[:at], rest[at:]
    end = 0 if scheme not in _BUCKETS else len(place) if is_query else len(rest)
    return rest[:end], rest[end:]


def _has_password(scheme: str, first: str) -> bool:
    before, at, _ = first.rpartition("@")
    if at and ":" in before:
        return True
    host, colon, port = first.rpartition(":") if not first.startswith("[") else ("", "", "")
    if not colon or first.startswith("arn:"):
        return False
    return scheme in _BUCKETS or ":" in host or re.fullmatch(r"\d{0,5}", port) is None


def _cleaned_credentials(scheme: str, credentials: str, mark: str) -> str:
    if not credentials:
        return ""
    end = "@" if credentials.endswith("@") else ""
    user, colon, _ = credentials.removesuffix("@").partition(":")
    if scheme in _AZURE:  # there the container stands before the "@"
        return f"{user}{f':{mark}' if colon and mark else ''}{end}"
    if not mark:
        return ""
    return f"{user}:{mark}{end}" if scheme in _S3 and colon else f"{mark}{end}"


def _cleaned_parameter(part: str, mark: str, depth: int) -> str:
    name, equals, value = part.partition("=")
    if not re.fullmatch(_NAME, name) or not equals:
        return mark if part else ""
    if name.lower() not in HARMLESS_PARAMETERS:
        return f"{name}={mark}" if mark else ""
    if not mark and name.lower() == "access_key":  # of no use without its secret
        return ""
    decoded = unquote(value)
    if depth == 0 and re.search(_BEGIN, decoded):
        return f"{name}={mark}" if mark else ""
    cleaned = _cleaned(decoded, mark, depth - 1) if depth else decoded
    if "://" not in decoded and "@" in decoded:  # an endpoint without its scheme
        cleaned = (f"{mark}@" if mark else "") + decoded.rpartition("@")[2]
    return part if cleaned == decoded else f"{name}={quote(cleaned, safe=':/@[]')}"
