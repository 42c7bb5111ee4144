"""How records tell the time."""

from __future__ import annotations

from datetime import UTC, datetime


def stamp(seconds: float) -> str:
    """RFC 3339 in UTC of a time in seconds since the epoch."""
    return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
