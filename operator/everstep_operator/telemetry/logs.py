"""Writes JSON logs: one object a line, the same few field names everywhere, no secrets.

Code logs with the standard library: `log.info("worker replaced", extra={"job": …, "pod": …, "reason": …})`. This module
does not know what fields mean. Invariants: a record is always one line of valid JSON, and the text of each field is
bounded. Secrets that `redact` recognises never appear. A broken record is reported, never raised.
"""

from __future__ import annotations

import json
import logging
import math
import sys
from datetime import UTC, datetime
from typing import Any, TextIO

from everstep.contract.redact import HIDDEN, short, text
from everstep_operator.telemetry import log_redaction

MAX_TEXT = 8 * 1024  # characters of a message or field
MAX_TRACE = 32 * 1024  # characters of a traceback. Its end names the error, so its start is cut off

# The attributes of every record. All other attributes came through `extra`.
_STANDARD = frozenset(logging.makeLogRecord({}).__dict__) | {"message", "asctime", "taskName"}


class JsonFormatter(logging.Formatter):
    """Formats a record as `{"time","level","logger","msg", …extra, "error"}`; `time` is RFC 3339 in UTC."""

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, Any] = {
            "time": datetime.fromtimestamp(record.created, UTC)
            .isoformat(timespec="milliseconds")
            .replace("+00:00", "Z"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "msg": short(_message(record), MAX_TEXT),
        }
        for key, item in record.__dict__.items():
            if key not in _STANDARD and key not in line:
                line[key] = HIDDEN if log_redaction.secret_key(key) else _bounded(log_redaction.value(item))
        if record.exc_info:
            # The end is kept. Secrets are hidden before the cut, because half a secret has no known shape.
            line["error"] = text(self.formatException(record.exc_info)[-2 * MAX_TRACE :])[-MAX_TRACE:]
        return json.dumps(line, ensure_ascii=False, separators=(",", ":"), default=str)


def _message(record: logging.LogRecord) -> str:
    try:
        return record.getMessage()
    except (TypeError, ValueError) as e:
        return f"{record.msg} (its arguments do not fit: {e})"


def _bounded(item: object) -> object:
    if isinstance(item, str):
        return item[:MAX_TEXT]
    if isinstance(item, float) and not math.isfinite(item):
        return str(item)  # JSON has no NaN
    if isinstance(item, dict):
        return {k: _bounded(v) for k, v in item.items()}
    if isinstance(item, list):
        return [_bounded(v) for v in item]
    return item


def setup(level: str = "INFO", stream: TextIO | None = None) -> None:
    """Send all logging of this process to `stream` (stderr by default) as JSON, replacing what was configured before.

    Raises ValueError for an unknown level.
    """
    handler = logging.StreamHandler(stream or sys.stderr)
    handler.setFormatter(JsonFormatter())
    root = logging.getLogger()
    root.setLevel(level.upper())
    for old in list(root.handlers):
        root.removeHandler(old)
    root.addHandler(handler)
    # These libraries log each request with its URL at INFO or below. The metrics count requests already.
    for name in ("aiohttp.access", "kubernetes.client.rest", "urllib3"):
        logging.getLogger(name).setLevel(max(logging.WARNING, root.level))
