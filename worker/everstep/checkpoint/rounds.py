"""The round that a process may claim: the highest that its pod has been part of.

The operator tells each pod the round in which it was created. A pod that outlives a peer's replacement is a member of
the newer round too, and must be able to open the log later, when that peer is gone again. So each process learns the
highest round among its world, and leaves it in a small file that the pod's next process reads. A pod that was cut off
never learns the newer round, and stays fenced. Losing the file costs a restart by the operator, never a torn state.
"""

from __future__ import annotations

import hashlib
import logging
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path

from everstep.contract import env

log = logging.getLogger("everstep.checkpoint")


def known_round(environ: Mapping[str, str] = os.environ) -> int:
    """The highest round that this pod knows of, 0 outside Kubernetes."""
    told = _number(environ.get(env.ROUND, "0"))
    path = _path(environ)
    if path is None:
        return told
    try:
        return max(told, _number(path.read_text("ascii")))
    except (OSError, ValueError):
        return told


def remember_round(number: int, environ: Mapping[str, str] = os.environ) -> None:
    """Leave `number` for the next process of this pod."""
    path = _path(environ)
    if path is None or number <= known_round(environ):
        return
    temporary = path.with_name(f"{path.name}.{os.getpid()}")
    try:
        temporary.write_text(str(number), "ascii")
        temporary.replace(path)
    except OSError as e:
        log.warning("cannot remember round %d in %s: %s", number, path, e)


def _path(environ: Mapping[str, str]) -> Path | None:
    """Named after this incarnation of the pod, so that no other pod on the same machine reads it."""
    uid, pod = environ.get(env.JOB_UID, ""), environ.get(env.POD_NAME, "")
    if not uid or not pod:
        return None
    name = hashlib.blake2b(f"{uid}/{pod}".encode(), digest_size=8).hexdigest()
    return Path(tempfile.gettempdir()) / f"everstep-round-{name}"


def _number(text: str) -> int:
    return int(text) if text.isdecimal() and len(text) < 12 else 0
