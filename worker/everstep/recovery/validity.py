"""What the state of a member is worth when a round forms. Pure."""

from __future__ import annotations

from enum import IntEnum


class Validity(IntEnum):
    """What a member's state is worth."""

    TORN = -1  # something has moved that cannot be put back, and perhaps not all: of no use
    NONE = 0  # a new process: what its script made
    WHOLE = 1
    VOTED = 2  # sharded state alone: it said that the step can be made, and does not know whether others have made it
