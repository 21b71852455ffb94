"""Passwords and keys do not get into logs."""

from __future__ import annotations

import logging

import pytest

from app.observability.redaction import RedactingFormatter, redacted, redacted_value


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("redis://user:pa55@host:6379/0", "redis://***@host:6379/0"),
        ("rediss://:pa55@host", "rediss://***@host"),
        ("redis://user:p@55:w@host/0", "redis://***@host/0"),
        ("http://token@pod/metrics and http://u:p@b", "http://***@pod/metrics and http://***@b"),
        ("at 'redis://a:b@h' again", "at 'redis://***@h' again"),
        ("tcp://10.0.0.7:5557", "tcp://10.0.0.7:5557"),
        ("http://pod/metrics?to=a@b", "http://pod/metrics?to=a@b"),
        ("pod-a@tenant=acme", "pod-a@tenant=acme"),
        ("{'authorization': 'Bearer abc.def'}", "{'authorization': 'Bearer ***'}"),
        ("b'Authorization: bearer abc\\r\\n'", "b'Authorization: bearer ***'"),
    ],
)
def test_redacted(text: str, shown: str) -> None:
    assert redacted(text) == shown
    assert redacted(shown) == shown


def test_settings() -> None:
    assert redacted_value("KVINDEXER_API_KEYS", "secret") == "***"
    assert redacted_value("KVINDEXER_TOKENS_MAX", "soon") == "'soon'"
    assert redacted_value("KVINDEXER_REDIS_URL", "redis://u:secret@h") == "'redis://***@h'"


def test_log_lines_with_their_tracebacks() -> None:
    formatter = RedactingFormatter(logging.Formatter("%(levelname)s %(message)s"))
    try:
        raise ConnectionError("no answer from redis://u:pa55@host")
    except ConnectionError as error:
        info = (type(error), error, error.__traceback__)
    record = logging.LogRecord("a", logging.ERROR, "", 0, "from %s", ("redis://u:pa55@host",), info)
    line = formatter.format(record)
    assert line.startswith("ERROR from redis://***@host")
    assert "no answer from redis://***@host" in line
    assert "pa55" not in line
