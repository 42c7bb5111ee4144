"""Runs a script in a Slurm job, which is disturbed in its first run: `slurm_disturbed.py KILL STOP HOW SCRIPT …`.

Rank 1 dies at step KILL. At step STOP rank 0 asks Slurm to stop the job: HOW is `requeue`, `cancel`, or `warn`, the
signal that comes some time before the job's time is up; or `nothing`, or `lose`, by which its own agent is killed. From
then on steps are long, so that the job is not over before Slurm has acted.
"""

import os
import runpy
import signal
import subprocess
import sys
import time
from typing import Any

import torch.distributed as dist

from everstep.contract import env
from everstep.train.step import Step

LONG = 0.1  # seconds
JOB = os.environ["SLURM_JOB_ID"]
COMMANDS = {
    "requeue": ["scontrol", "requeue", JOB],
    "cancel": ["scancel", JOB],
    "warn": ["scancel", "--batch", "--signal=USR1", JOB],
    "lose": ["sh", "-c", f"kill -KILL {os.environ['SLURM_TASK_PID']}"],
    "nothing": ["true"],
}
kill, stop, command = int(sys.argv[1]), int(sys.argv[2]), COMMANDS[sys.argv[3]]
enter = Step.__enter__


def disturbed(step: Step) -> Any:
    rank = dist.get_rank()
    if step.number == kill and rank == 1 and os.environ[env.ROUND] == "1":
        os.kill(os.getpid(), signal.SIGKILL)
    if step.number == stop and rank == 0:
        subprocess.run(command, check=True)
    if step.number >= stop:
        time.sleep(LONG)
    return enter(step)


if os.environ.get("SLURM_RESTART_COUNT", "0") == "0":
    Step.__enter__ = disturbed  # type: ignore[method-assign]
sys.argv = sys.argv[4:]
sys.path.insert(0, os.path.dirname(sys.argv[0]))
runpy.run_path(sys.argv[0], run_name="__main__")
