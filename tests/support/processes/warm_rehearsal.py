"""`everstep rehearse` in a process that was forked warm, and so is the fork server of its runs: `warm_rehearsal.py
ARGUMENTS`.

A rehearsal of a small script is mostly imports: of the command, and of torch in the fork server that the agents and
ranks of all runs come from. These are the product's. Only how the first two begin is ours (`warm_agent`).
"""

from __future__ import annotations

import runpy
import sys

from support.processes import warm_agent
from support.processes.warm_python import unseen

IMPORTED = ("everstep.cli.rehearse", "everstep.rehearse.agent", "everstep.rehearse.entry")
COMMAND = "everstep.cli.main"


def main() -> None:
    """Ends as the command does."""
    begin = unseen(warm_agent.__file__)["main"]
    # What a rank has imported of its user's is compared, and no user has these.
    for name in [name for name in sys.modules if name.partition(".")[0] == "support"]:
        del sys.modules[name]
    sys.argv = ["everstep", "rehearse", *sys.argv[1:]]
    sys.modules.pop(COMMAND, None)  # a new interpreter would not have it
    begin(lambda: runpy.run_module(COMMAND, run_name="__main__", alter_sys=True))


if __name__ == "__main__":
    main()
