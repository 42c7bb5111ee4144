"""What a script has done that cannot be right."""

from __future__ import annotations


class LoopError(RuntimeError):
    """The training loop uses the session in a way that cannot be right; the text says what to write instead."""
