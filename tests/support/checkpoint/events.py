"""What a checkpointer tells its `on_event` hook."""

from __future__ import annotations

from typing import Any


class Events:
    """A hook that keeps what it was told."""

    def __init__(self) -> None:
        self.seen: list[tuple[str, dict[str, Any]]] = []

    def __call__(self, kind: str, **fields: Any) -> None:
        self.seen.append((kind, fields))

    def of(self, kind: str) -> list[dict[str, Any]]:
        return [fields for name, fields in self.seen if name == kind]
