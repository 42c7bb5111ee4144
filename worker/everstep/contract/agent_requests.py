"""What a person may ask the agents of a machine, and how their sockets are found. Standard library only; Linux.

A request is one JSON line, `{"verb": "stacks", "job": "digits"}`. The agent answers with one JSON line for each of its
training processes, and closes the connection. An agent of another job closes it without an answer.

The sockets have names in the kernel, and no files: so a killed agent leaves nothing behind, and an agent is found
whatever its temporary folder is. Anybody on the machine can connect to such a name. So both sides ask the kernel whose
process the other one is.
"""

from __future__ import annotations

import os
import socket
import struct
from pathlib import Path

STACKS, PROFILE = "stacks", "profile"
MAX_REQUEST = 4096  # bytes of a line
MAX_ANSWER = 1024 * 1024
PREFIX = "everstep-agent-"
SOCKETS = Path("/proc/net/unix")


def name_of(unique: str) -> str:
    """The address of an agent of this user."""
    return f"\0{PREFIX}{os.getuid()}-{unique}"


def addresses() -> list[str]:
    """Those of this user's agents in this network namespace. Raises OSError where the kernel does not list sockets."""
    wanted = f"@{name_of('')[1:]}"
    names = {line.split()[-1] for line in SOCKETS.read_text().splitlines()[1:]}
    return sorted(f"\0{name[1:]}" for name in names if name.startswith(wanted))


def is_of_this_user(connection: socket.socket) -> bool:
    """Whether the process at the other end is this user's, or root's."""
    size = struct.calcsize("3i")
    _, uid, _ = struct.unpack("3i", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, size))
    return uid in (os.getuid(), 0)
