"""States, and programs that save and load them in worlds of processes."""

from __future__ import annotations

from pathlib import Path

PROGRAMS = Path(__file__).parent
