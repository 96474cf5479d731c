"""Failed requests to an object store: their classification as transient or permanent, and their messages.

obstore's errors have many forms; all code that parses their texts is here.
"""

from __future__ import annotations

import errno
import re

from powertrain.errors import StorageError
from powertrain.storage.addresses import Address, without_secrets
from powertrain.text.redaction import redact

#: The informative part of an XML reply.
_INFORMATIVE_TAGS = ("Code", "Message")
_STATUS = re.compile(r"status code: (\d{3})")
_REFUSED_IDENTITY = re.compile(
    r"InvalidAccessKeyId|SignatureDoesNotMatch|ExpiredToken|InvalidToken|AuthorizationHeaderMalformed|AccessDenied"
    r"|AuthenticationFailed|invalid_grant|TokenRefreshRequired|RequestTimeTooSkewed"
)
#: Transient status codes of the 400s and 500s: most 5xx are, 501 is not.
_PASSING = frozenset({404, 408, 409, 425, 429})
#: Mistakes of ours and wants of the machine, with which the store has nothing to do.
_NOT_THE_STORES = (TypeError, AttributeError, NameError, AssertionError, MemoryError, RecursionError)


class TryAgain(Exception):
    """The outcome of an attempt is unknown, and another may succeed."""


def passing_reason(error: BaseException, key: str | None, address: Address) -> str:
    """Return the reason of a transient failure; raise a permanent one.

    With ``key`` a "not found" means that this key is absent; without, that the bucket is.
    """
    from obstore.exceptions import PreconditionError

    if isinstance(error, _NOT_THE_STORES):
        raise error
    if isinstance(error, TryAgain):
        return str(error)
    if isinstance(error, PreconditionError):
        raise OSError(errno.ESTALE, "the value was replaced while it was read", key) from error
    text = str(error)
    status, reason = _status(text), redact(_in_words(text), address.secrets)
    if (status == 404 or isinstance(error, FileNotFoundError)) and "NoSuchUpload" not in text:
        if key is not None and not names_missing_bucket(text):
            raise FileNotFoundError(errno.ENOENT, "no such key", key) from None
        raise StorageError(_no_bucket(address)) from None
    if "169.254.169.254" in text and status is not None:
        raise StorageError(_no_credentials(address, reason)) from None
    if status in (401, 403) or _REFUSED_IDENTITY.search(text):
        raise StorageError(_refused(address, reason)) from None
    if "Received redirect" in text or status == 301:
        raise StorageError(_wrong_region(address)) from None
    if _cannot_pass(error, status):
        raise StorageError(
            f"The storage path {without_secrets(address.uri)!r} cannot be used: {reason}. Check the path, the endpoint "
            "and the rights on the bucket."
        ) from _fit_cause(error, address)
    return reason


def _fit_cause(error: BaseException, address: Address) -> BaseException | None:
    """Return the error to chain to ours; None where its text, which a traceback would show, has a secret in it."""
    text = str(error)
    return error if redact(text, address.secrets) == text else None


def _status(text: str) -> int | None:
    match = _STATUS.search(text)
    return int(match[1]) if match else None


def names_missing_bucket(text: str) -> bool:
    return bool(
        re.search(r"NoSuchBucket|bucket does not exist|ContainerNotFound|container does not exist", text)
    )


def _cannot_pass(error: BaseException, status: int | None) -> bool:
    """Return True for a permanent failure."""
    if status is not None:
        return (400 <= status < 500 and status not in _PASSING) or status == 501
    wrong_use = ("NotSupportedError", "InvalidPathError", "UnknownConfigurationKeyError", "PanicException")
    return isinstance(error, (ValueError, NotImplementedError)) or type(error).__name__ in wrong_use


def _in_words(text: str) -> str:
    """Return the core of a long message of obstore."""
    status = re.search(r"status code: (\d{3} [A-Za-z ]+)", text)
    if status:
        details = [
            match[1]
            for match in (re.search(rf"<{tag}>(?:<!\[CDATA\[)?([^<\]]+)", text) for tag in _INFORMATIVE_TAGS)
            if match
        ]
        return f"{status[1].strip()}" + (f" ({': '.join(details)})" if details else "")
    where = re.search(r"https?://[^/\s]+", text)
    server = f" from {where[0]}" if where else ""
    if re.search(r"kind: Timeout|TimedOut|operation timed out", text):
        return f"no answer{server} in time"
    if re.search(r"dns error", text):
        return f"no such host{server.replace(' from', ':')}"
    if re.search(r"ConnectionRefused|Connection refused", text):
        return f"no connection{server.replace(' from', ' to')}: refused"
    if re.search(r"kind: Connect\b", text):
        return f"no connection{server.replace(' from', ' to')}"
    if re.search(r"IncompleteMessage|ConnectionReset|kind: Interrupted|UnexpectedEof|kind: Decode", text):
        return f"the connection{server.replace(' from', ' to')} broke off"
    return text.partition("\n")[0].rstrip(". ")


# --------------------------------------------------------------------------- messages for users


def _no_bucket(address: Address) -> str:
    return (
        f"The bucket {address.bucket!r} of the storage path {without_secrets(address.uri)!r} does not exist. Create "
        "it, or correct the path; for a store of your own check the endpoint (AWS_ENDPOINT_URL or "
        "'?endpoint_override=')."
    )


def _refused(address: Address, reason: str) -> str:
    return (
        f"The storage path {without_secrets(address.uri)!r} refused the request: {reason}. Check "
        f"{_where_credentials_are(address)}, and that this identity may read, write, list and delete there."
    )


def _no_credentials(address: Address, reason: str) -> str:
    return (
        f"No credentials were found for the storage path {without_secrets(address.uri)!r}: the environment has none, "
        f"and the machine's own identity service answered {reason}. Set {_where_credentials_are(address)}."
    )


def _wrong_region(address: Address) -> str:
    return (
        f"The storage path {without_secrets(address.uri)!r} was requested from the wrong region. Set AWS_REGION, or "
        "add '?region=...', to the region of the bucket."
    )


def _where_credentials_are(address: Address) -> str:
    return {
        "s3": "AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY (or AWS_PROFILE)",
        "gcs": "GOOGLE_APPLICATION_CREDENTIALS",
        "azure": "AZURE_STORAGE_ACCOUNT_KEY (or AZURE_STORAGE_SAS_TOKEN)",
    }[address.kind]
