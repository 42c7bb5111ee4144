"""How the script of this process ends, where the program that runs it knows. The interpreter tells no function that it
calls at the end which exit code was asked for."""

from __future__ import annotations


class ScriptEnd:
    """Of this process."""

    failed = False  # with an exit code other than 0
