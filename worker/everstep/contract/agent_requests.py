"""What a person may ask the agents of a machine, and how their sockets are found. Standard library only; Linux.

A request is one JSON line, `{"verb": "stacks", "job": "digits"}`. The agent answers with one JSON line for each of its
training processes, and closes the connection. An agent of another job closes it without an answer. If the request has
`"names": true`, the first line is `{"job": "digits", "answers": […]}`, with what identifies each process that will
answer: so the person hears of those that end before. A training process that no agent supervises listens and answers
like an agent.

The sockets have names in the kernel, and no files: so a killed agent leaves nothing behind, and an agent is found
whatever its temporary folder is. A name has a mark for each name of the agent's job, so that a frozen agent of another
job is not waited for. Anybody on the machine can connect to such a name. So both sides ask the kernel whose process the
other one is.
"""

from __future__ import annotations

import hashlib
import os
import secrets
import socket
import struct
from collections.abc import Iterable
from pathlib import Path

STACKS, PROFILE = "stacks", "profile"
REQUEST_SECONDS = 5.0  # for the request's line to arrive
PROFILE_SECONDS = 3600.0  # for a profile, at most
MAX_STEPS = 1000  # of a profile
MAX_REQUEST = 4096  # bytes of a line
MAX_ANSWER = 1024 * 1024
PREFIX = "everstep-agent-"
SOCKETS = Path("/proc/net/unix")


def new_address(jobs: Iterable[str]) -> str:
    """An address for an agent of this user, which answers for each of these names of its job."""
    return f"\0{'-'.join((_of_user(), *sorted(set(map(mark, jobs))), secrets.token_hex(8)))}"


def addresses(job: str | None = None) -> list[str]:
    """Those of this user's agents in this network namespace: of one job, or of all. Raises OSError where the kernel
    does not list sockets."""
    names = {line.split()[-1] for line in SOCKETS.read_text().splitlines()[1:]}
    ours = (f"\0{name[1:]}" for name in names if name.startswith(f"@{_of_user()}-"))
    return sorted(address for address in ours if job is None or mark(job) in marks(address))


def marks(address: str) -> frozenset[str]:
    """Those of an agent's job. All agents of one job have the same."""
    return frozenset(address[1:].split("-")[3:-1])


def _of_user() -> str:
    return f"{PREFIX}{os.getuid()}"


def mark(job: str) -> str:
    """A job's name may be longer than an address, which has 107 bytes."""
    return hashlib.sha256(job.encode()).hexdigest()[:16]


def refused_steps(steps: object) -> str:
    """Why a profile cannot have so many steps; empty if it can."""
    if type(steps) is int and 1 <= steps <= MAX_STEPS:
        return ""
    return f"steps: {steps!r} is not a number from 1 to {MAX_STEPS}"


def is_of_this_user(connection: socket.socket) -> bool:
    """Whether the process at the other end is this user's, or root's."""
    size = struct.calcsize("3i")
    _, uid, _ = struct.unpack("3i", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, size))
    return uid in (os.getuid(), 0)
