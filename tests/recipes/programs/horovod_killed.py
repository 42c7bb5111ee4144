"""Runs a Horovod script as `python -m everstep_horovod` does, and kills processes once each:
`horovod_killed.py WHEN:NUMBER:RANK[,…] SCRIPT …`.

WHEN is a moment in the NUMBERth step or commit of a process, or in its NUMBERth agreement on one state. RANK may be
`all`. A file of that name says that it has happened. `term` is a commit with SIGTERM in the place of SIGKILL.
`small:NUMBER:SIZE` makes commits from the NUMBERth on slow while the world has fewer processes than SIZE, so that a new
one comes while the others train. `profile:NUMBER:0` asks for a profile behind that step. Each process prints that it
has begun, and what it ends with.
"""

import hashlib
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import everstep_horovod.torch as hvd
from everstep_horovod.__main__ import main
from everstep_horovod.optimizer import Distributed
from everstep_horovod.state import TorchState
from everstep_horovod.training import Training
from everstep_horovod.world import current

asked = [tuple(one.split(":")) for one in sys.argv[1].split(",")]
counted: dict[str, int] = {}


def moment(when: str) -> None:
    counted[when] = counted.get(when, 0) + 1
    for name, number, rank in asked:
        if name == "profile" and when == "stepped" and int(number) == counted[when]:
            from support.adapters.profiled import ask_once  # noqa: PLC0415  hvd.init reads what is loaded

            ask_once(current().live_profile, Path.cwd())
        mark = Path(f"killed-{name}-{number}-{rank}" + (f"-{hvd.rank()}" if rank == "all" else ""))
        if name == when and int(number) == counted[when] and rank in ("all", str(hvd.rank())) and not mark.exists():
            mark.touch()
            os.kill(os.getpid(), signal.SIGTERM if when == "term" else signal.SIGKILL)
        if name == when == "small" and counted[when] >= int(number) and hvd.size() < int(rank):
            time.sleep(0.3)


def around(holder: Any, name: str, before: str = "", after: str = "") -> None:
    function = getattr(holder, name)

    def counting(self: Any, *arguments: Any, **options: Any) -> Any:
        if before:
            moment(before)
        result = function(self, *arguments, **options)
        if after:
            moment(after)
        return result

    counting.hooked = True  # type: ignore[attr-defined]  # torch would call its hooks twice
    setattr(holder, name, counting)


around(Distributed, "step", before="step", after="stepped")
around(Training, "_take", after="committed")
around(Training, "_take", before="term")
around(Training, "_take", before="small")
around(Training, "_synchronize", before="settling", after="settled")
around(Training, "_finish", before="finishing")
print(f"process {os.getpid()} has begun", flush=True)
main(sys.argv[2:])
state = sys.modules["__main__"].__dict__.get("state")
if isinstance(state, TorchState):
    parameters = b"".join(p.detach().numpy().tobytes() for p in state.model.parameters())
    print(f"{hvd.size()} ranks end with {hashlib.sha256(parameters).hexdigest()}", flush=True)
