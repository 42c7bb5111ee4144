"""`everstep rehearse` in a process that was forked warm, and so are the agents of its runs and their fork servers.

    warm_rehearsal.py ARGUMENTS            (in place of `everstep rehearse ARGUMENTS`)
    warm_rehearsal.py --agent ARGUMENTS    (in place of `python -m everstep.rehearse.agent ARGUMENTS`)

A rehearsal of a small script is mostly imports of torch: its own, and one for each of its runs. Command, agents, fork
servers and ranks are the product's. Only how the first three begin is ours.
"""

from __future__ import annotations

import os
import runpy
import socket
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

from support.processes import warm_agent, warm_python
from support.processes.warm_python import Warm, unseen

IMPORTED = ("everstep.cli.rehearse", "everstep.rehearse.agent", "everstep.rehearse.entry")
AGENT = ("-m", "everstep.rehearse.agent")


def main() -> None:
    """Ends as the command or the agent does."""
    if sys.argv[1] == "--agent":
        sys.argv = [sys.argv[0], *sys.argv[2:]]
        _forget_ours()
        unseen(warm_agent.__file__)["main"](lambda: _run(AGENT[1]))
        return
    forks, pid = _who_forks()
    begin: Any = subprocess.Popen

    def popen(argv: Sequence[str], *arguments: Any, stdin: Any = None, **options: Any) -> Any:
        if tuple(argv[1:3]) != AGENT:
            return begin(argv, *arguments, stdin=stdin, **options)
        # An agent ends with its parent, which is the process that forks.
        return forks.popen(__file__, "--agent", pid, *argv[4:], *arguments, **options)

    subprocess.Popen = popen  # type: ignore[assignment,misc]  # of its many options, what a rehearsal uses
    sys.argv = ["everstep", "rehearse", *sys.argv[1:]]
    unseen(warm_agent.__file__)["main"](lambda: _run("everstep.cli.main"))  # a fork server of its own is warm, too


def _who_forks() -> tuple[Warm, int]:
    """It is forked from this process as long as that has one thread, and ends with it; and its pid."""
    us = os.getpid()
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    pid = os.fork()
    if pid == 0:
        ours.close()
        unseen(warm_python.__file__)["fork_until_closed"](theirs, us)
        os._exit(0)
    theirs.close()
    forks = Warm.__new__(Warm)
    forks._commands = ours
    return forks, pid


def _run(module: str) -> None:
    sys.modules.pop(module, None)  # a new interpreter would not have it
    runpy.run_module(module, run_name="__main__", alter_sys=True)


def _forget_ours() -> None:
    """What a rank has imported of its user's is compared, and no user has these."""
    for name in [name for name in sys.modules if name.partition(".")[0] == "support"]:
        del sys.modules[name]


if __name__ == "__main__":
    main()
