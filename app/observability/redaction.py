"""Secrets kept out of what people read: logs, complaints about settings.

Keys never get as far as a log line, because nothing keeps them (app/auth/api_keys.py). What is left are addresses with a
password in them (`redis://user:password@host`), which libraries like to repeat in their errors, headers that a library
might show, and settings whose name says what they are. Refused: guessing at secrets by how they look.
"""

from __future__ import annotations

import logging
import re

HIDDEN = "***"

# An address's user and password end at the last '@' of its authority: a password may have one in it, unescaped.
_USERINFO = re.compile(r"(?P<scheme>[a-zA-Z][a-zA-Z0-9+.-]*://)[^\s/?#'\"<>]+@")
_BEARER = re.compile(r"(?P<scheme>\bbearer\s+)[^\s,'\"]+", re.IGNORECASE)
_SECRET_NAME = re.compile(r"API|KEY|SECRET|PASSW|AUTH|CREDENTIAL|TOKENS?$", re.IGNORECASE)


def redacted(text: str) -> str:
    """`text` without the passwords of addresses and the credentials of headers."""
    if "://" in text:
        text = _USERINFO.sub(rf"\g<scheme>{HIDDEN}@", text)
    return _BEARER.sub(rf"\g<scheme>{HIDDEN}", text)


def redacted_value(name: str, value: object) -> str:
    """A setting's value for a complaint: hidden where the name says that it is a secret."""
    return HIDDEN if _SECRET_NAME.search(name) else redacted(repr(value))


class RedactingFormatter(logging.Formatter):
    """Another formatter's lines, traceback included, redacted."""

    def __init__(self, inner: logging.Formatter) -> None:
        super().__init__()
        self._inner = inner

    def format(self, record: logging.LogRecord) -> str:
        return redacted(self._inner.format(record))
