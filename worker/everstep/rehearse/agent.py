"""The agent of one run of a rehearsal: `agent.py PID ARGUMENTS`, as `everstep-run ARGUMENTS`. It ends with process PID,
which has started it, and the processes of its workers end with it."""

from __future__ import annotations

import sys

from everstep.agent.main import main
from everstep.agent.processes.forkserver import die_with

if __name__ == "__main__":
    die_with(int(sys.argv[1]))
    main(sys.argv[2:])
