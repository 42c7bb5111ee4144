"""Transcripts: blocks of commands, a line `----`, and what the commands printed; an empty line between blocks."""

from __future__ import annotations

from collections.abc import Iterator

from everstep_local.plan.simulation.cluster import World

SEPARATOR = "----"


class TranscriptError(Exception):
    """A line of a transcript cannot be carried out; the text names it."""


def commands(block: str) -> Iterator[str]:
    """The command lines of one block, without comments."""
    for line in block.split(f"\n{SEPARATOR}", 1)[0].splitlines():
        if line.strip() and not line.startswith("#"):
            yield line


def replay(cluster: World, text: str) -> str:
    """The transcript with every block's output replaced by what is printed now. Raises TranscriptError."""
    blocks = []
    for block in text.strip("\n").split("\n\n"):
        printed = [output for line in commands(block) if (output := _run(cluster, line))]
        head = block.split(f"\n{SEPARATOR}", 1)[0]
        blocks.append("\n".join([head, SEPARATOR, *printed]))
    return "\n\n".join(blocks) + "\n"


def expected(text: str, now: str) -> str:
    """What the transcript records, with the output of `now` in the blocks that record none: they are queries."""
    blocks = zip(text.strip("\n").split("\n\n"), now.strip("\n").split("\n\n"), strict=True)
    return "\n\n".join(old.rstrip("\n") if f"\n{SEPARATOR}" in old else new for old, new in blocks) + "\n"


def _run(cluster: World, line: str) -> str:
    try:
        return cluster.run(line)
    except (AssertionError, AttributeError, KeyError, TypeError, ValueError) as e:
        # A command that does not exist, arguments that it does not take, or a pod that is not there.
        raise TranscriptError(f"command {line!r}: {type(e).__name__}: {e}") from e
