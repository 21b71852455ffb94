"""Log lines: one format for everything in the process, the HTTP server's own lines and warnings included.

`console` is for people, `json` for machines: one object a line with `ts`, `level`, `logger`, `message`, the request's
ids where there is a request, and the fields that the caller gave as `extra`. The message says everything that the
fields say, so that nobody needs the fields to understand a line.

Names of pods, paths and causes come from outside. So a line stays one line: control characters are written as
escapes, a traceback is indented below, and what is longer than CHARS_MAX is cut; and what a peer can do wrong
again and again is said ever more rarely. Passwords and keys are none of a reader's business
(app/observability/redaction.py).

Lines are written where they are logged, by the thread that logs: none is lost when the process ends badly, and a
reader of standard error that stands still stops the process. So there is none for an event or, unless
`access_log_every` asks for it, for a request.
"""

from __future__ import annotations

import datetime
import json
import logging
import sys
import textwrap
from collections import Counter
from typing import Any, TextIO

from app.config import LogFormat, LogLevel
from app.observability.correlation import CURRENT
from app.observability.redaction import RedactingFormatter

CHARS_MAX = 8_000
TRACEBACK_CHARS_MAX = 32_000  # the end of it is kept

# Of every record, and `color_message`, which is uvicorn's message once more.
_NOT_FIELDS = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "color_message"}
_CONTROLS = {code: f"\\x{code:02x}" for code in (*range(32), *range(127, 160))} | {
    0x2028: "\\u2028",
    0x2029: "\\u2029",
    ord("\n"): "\\n",
    ord("\t"): "\\t",
    ord("\r"): "\\r",
}
# They say at `info` every request that this process makes; the loads of pods are asked for once a second.
_CHATTY = ("httpx", "httpcore")
_OF_PEERS = ("uvicorn.error", "app.serving.connections")  # their warnings are what peers do wrong


def configure(level: LogLevel, form: LogFormat, stream: TextIO | None = None) -> None:
    """Makes every line of this process go to `stream` (standard error) in the format `form`."""
    handler = logging.StreamHandler(stream or sys.stderr)
    handler.setFormatter(RedactingFormatter(JsonFormatter() if form == "json" else ConsoleFormatter()))
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)
    logging.captureWarnings(True)
    for name in _CHATTY:
        logging.getLogger(name).setLevel(max(logging.WARNING, logging.getLogger().level))
    for name in _OF_PEERS:
        logger = logging.getLogger(name)
        if not any(isinstance(known, Rarely) for known in logger.filters):
            logger.addFilter(Rarely())


class Rarely(logging.Filter):
    """Passes the 1st, 2nd, 4th, 8th ... warning of each place in the code, with the count.

    For the HTTP server: whoever can connect could fill a disk.
    """

    def __init__(self) -> None:
        super().__init__()
        self._counts: Counter[tuple[str, int]] = Counter()

    def filter(self, record: logging.LogRecord) -> bool:
        if record.levelno != logging.WARNING:
            return True
        place = record.pathname, record.lineno
        count = self._counts[place] = self._counts[place] + 1
        if count & (count - 1):
            return False
        record.msg, record.args = f"{record.getMessage()} ({count} in all)", None
        return True


class JsonFormatter(logging.Formatter):
    """One JSON object, ASCII only, so that no byte of it can be taken for anything else."""

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, Any] = {
            "ts": _stamp(record),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": _cut(record.getMessage().rstrip("\n")),
        }
        for name, value in {**_correlation(), **vars(record)}.items():
            if name not in _NOT_FIELDS and name not in line:
                line[name] = _cut(value) if isinstance(value, str) else value
        if trace := _traceback(self, record):
            line["traceback"] = trace
        return json.dumps(line, default=str, separators=(",", ":"))


class ConsoleFormatter(logging.Formatter):
    """Time, level, logger and message; the request's id in brackets."""

    def format(self, record: logging.LogRecord) -> str:
        message = _cut(record.getMessage().rstrip("\n")).translate(_CONTROLS)
        line = f"{_stamp(record)} {record.levelname:<7} {record.name}: {message}"
        if request := _correlation():
            line += f" [{' '.join(f'{name}={value}' for name, value in request.items())}]"
        if trace := _traceback(self, record):
            line += "\n" + textwrap.indent(trace, "    ", lambda _: True)
        return line


def _stamp(record: logging.LogRecord) -> str:
    at = datetime.datetime.fromtimestamp(record.created, datetime.UTC)
    return at.isoformat(timespec="milliseconds").replace("+00:00", "Z")


def _correlation() -> dict[str, str]:
    correlation = CURRENT.get()
    return {} if correlation is None else correlation.fields()


def _cut(text: str) -> str:
    return text if len(text) <= CHARS_MAX else text[:CHARS_MAX] + f"... ({len(text)} characters)"


def _traceback(formatter: logging.Formatter, record: logging.LogRecord) -> str:
    """Of the exception that is being logged; "" when there is none."""
    if not record.exc_info or record.exc_info[0] is None:
        return ""
    return formatter.formatException(record.exc_info)[-TRACEBACK_CHARS_MAX:]
