"""How an agent names the end of one of its processes in the job's document, and what the operator reads in it.

The text is the reason of a setback, so it is written by agents of any release, and may be cut or odd. Only two ends are
read, those after which an agent starts another process by itself, whatever its settings are: a kill from outside, and
the end of a process that hung. After any other end its pod may end, too.
"""

from __future__ import annotations

import re
import signal
from dataclasses import dataclass

# By which nobody but a person, a node or an agent ends a process.
FROM_OUTSIDE = (signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)
OUT_OF_MEMORY = ": out of memory"  # behind the signal; this kill is the program's own fault
MAX_AT = 120  # characters of where it hung
_KILLED = re.compile(rf"rank (\d{{1,7}}): ({'|'.join(number.name for number in FROM_OUTSIDE)})")
_HUNG = re.compile(r"rank (\d{1,7}): no progress in step (\d{1,18}|None) for (\d{1,9}) s([^;]*)")


@dataclass(frozen=True, slots=True)
class Replaced:
    """A process ended, and its agent starts another. `detail`: one line. `stood_seconds`: for how long it had made no
    progress by then."""

    detail: str
    stood_seconds: float


def of_rank(rank: int, why: str) -> str:
    """The reason of a setback: what became of the process of this rank."""
    return f"rank {rank}: {why}"


def hung(step: int | None, seconds: float, at: str) -> str:
    """Of a process that its agent ends. `at`: where it stood, such as ` at train.py:12`, or empty."""
    return f"no progress in step {step} for {seconds:.0f} s{at}"


def read(why: str) -> Replaced | None:
    """What the reason of a setback says, if it is of an end after which the agent starts another process."""
    if (killed := _KILLED.match(why)) is not None:
        rest = why[killed.end() :]
        if rest[:1].isalnum() or rest.startswith(OUT_OF_MEMORY):
            return None
        return Replaced(f"rank {killed[1]} was killed ({killed[2]})", 0.0)
    if (stood := _HUNG.match(why)) is not None:
        at = stood[4][:MAX_AT].rstrip()
        return Replaced(f"rank {stood[1]} made no progress in step {stood[2]} for {stood[3]} s{at}", float(stood[3]))
    return None
