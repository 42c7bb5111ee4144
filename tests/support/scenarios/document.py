"""The commands of a document: its `console` blocks, each below a comment `<!-- run: … -->` that says what runs them.

`run: local, first terminal` goes on while the blocks `run: local` are typed in a second terminal; `run: local, when it
has ended` waits for the first. `run: cluster` needs one with nodes. `run: by FILE` names another test that does it, and
`run: no, REASON` is for what no machine of ours can do: the document has to say so in words, too.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

LOCAL, FIRST, ENDED, CLUSTER = "local", "local, first terminal", "local, when it has ended", "cluster"
PLAYED = (LOCAL, FIRST, ENDED, CLUSTER)
BLOCK = re.compile(r"(?:^<!-- run: (?P<how>[^\n]+) -->\n)?^```console\n(?P<text>.*?)^```$", re.DOTALL | re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Block:
    """`how` is empty where the comment is missing."""

    how: str
    commands: tuple[str, ...]


def read(path: Path) -> list[Block]:
    return [Block(found["how"] or "", commands(found["text"])) for found in BLOCK.finditer(path.read_text())]


def commands(text: str) -> tuple[str, ...]:
    """The lines behind a `$`, with those that continue them; the rest of a block is output."""
    found: list[str] = []
    goes_on = False
    for line in text.splitlines():
        if goes_on:
            found[-1] += f"\n{line}"
        elif line.startswith("$ "):
            found.append(line.removeprefix("$ "))
        else:
            continue
        goes_on = line.endswith("\\")
    return tuple(found)


def of(path: Path, *how: str) -> list[str]:
    """The commands of the blocks that are run in one of these ways, in order."""
    return [command for block in read(path) if block.how in how for command in block.commands]
