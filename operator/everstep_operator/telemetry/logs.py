"""JSON logs: one object a line, the same few field names everywhere, no secrets.

Code logs with the standard library: `log.info("worker replaced", extra={"job": …, "pod": …, "reason": …})`. This module
knows no field's meaning. Invariants: a record is always one line of valid JSON of at most MAX_LINE characters of text
per field; what `redact` hides never appears; a broken record is reported, never raised.
"""

from __future__ import annotations

import json
import logging
import math
import sys
from datetime import UTC, datetime
from typing import Any, TextIO

from everstep.contract.redact import HIDDEN, short, text
from everstep_operator.telemetry import redact

MAX_TEXT = 8 * 1024  # characters of a message or field
MAX_TRACE = 32 * 1024  # characters of a traceback; its end names the error, so the start is cut

# The attributes of every record; whatever else it carries came through `extra`.
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
                line[key] = HIDDEN if redact.secret_key(key) else _bounded(redact.value(item))
        if record.exc_info:
            # The end is kept, and hidden with more than that before it: what is cut in the middle has no shape.
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
    # These log each request with its URL at INFO or below; the metrics count them without the noise.
    for name in ("aiohttp.access", "kubernetes.client.rest", "urllib3"):
        logging.getLogger(name).setLevel(max(logging.WARNING, root.level))
