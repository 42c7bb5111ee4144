"""The agent of one run of a rehearsal: `agent.py PID ARGUMENTS`, as `everstep-run ARGUMENTS`. It ends with process PID,
which has started it, and the processes of its workers end with it."""

from __future__ import annotations

import argparse

from everstep.agent.main import main
from everstep.agent.processes.forkserver import die_with

if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("pid", type=int)
    parser.add_argument("arguments", nargs=argparse.REMAINDER)
    given = parser.parse_args()
    die_with(given.pid)
    main(given.arguments)
