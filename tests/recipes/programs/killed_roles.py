"""Runs a recipe with roles and kills two of its processes: `killed_roles.py PER:STEP:ASKS:SECONDS SCRIPT …`.

The first process kills itself in step STEP, or in a later one: as soon as the newest commit lies inside the same PER
steps. The second kills itself when it asks for the ASKS-th time, with its work in hand. Processes that replace them
live on. A third one is slow: it sleeps for SECONDS before it asks. The step that a process begins with is printed, and
each fragment of a rollout.
"""

import os
import runpy
import signal
import sys
import time
from typing import Any

from everstep.checkpoint import Catalog
from everstep.roles import following
from everstep.storage import open_store
from everstep.train.step import Step

per, last, asks, pause = (float(part) for part in sys.argv[1].split(":"))
index, lives_on = int(os.environ["EVERSTEP_WORKER_INDEX"]), os.environ["EVERSTEP_INCARNATION"] != "0"
enter, ask, asked, began = Step.__enter__, following._Asking.ask, [0], list[int]()


def entering(step: Step) -> Any:
    if not began:
        began.append(step.number)
        print(f"began at step {step.number}", flush=True)
    if not lives_on and step.number >= last:
        newest = Catalog(open_store(os.environ["EVERSTEP_CHECKPOINT_URL"])).latest()
        if newest is not None and newest.step // per == step.number // per and newest.step % per:
            print(f"killed in step {step.number} after the commit of step {newest.step}", flush=True)
            os.kill(os.getpid(), signal.SIGKILL)
    return enter(step)


def asking(*connection_and_message: Any) -> Any:
    asked[0] += 1
    if index == 1 and not lives_on and asked[0] == asks:
        os.kill(os.getpid(), signal.SIGKILL)
    if index == 2:
        time.sleep(pause)
    return ask(*connection_and_message)


Step.__enter__ = entering  # type: ignore[method-assign]
following._Asking.ask = asking  # type: ignore[method-assign]
sys.argv = sys.argv[2:]
sys.path.insert(0, os.path.dirname(sys.argv[0]))
if os.path.exists(os.path.join(sys.path[0], "cartpole.py")):
    import cartpole

    rollout = cartpole.rollout

    def made(policy: Any, fragment: int) -> Any:
        found = rollout(policy, fragment)
        print(f"made fragment {fragment}", flush=True)
        return found

    cartpole.rollout = made
runpy.run_path(sys.argv[0], run_name="__main__")
