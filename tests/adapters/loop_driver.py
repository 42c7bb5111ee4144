"""Runs a script that has loops of its own over what Accelerate prepared, and kills rank 1, or all, once.

    everstep-run … loop_driver.py FOLDER SCRIPT STEP:POINT

Points: `forward`, `backward`, before them; `end`, behind the optimizer's step; `gather`, in the evaluation, before its
first batch is gathered, and `later`, before another one; `all`, as `backward` on all ranks. Behind a point may stand 0
or 1: in a batch that accumulates, or one that ends a step. What the accelerator holds when the script has ended is
written to FOLDER, by rank; the steps that began, by process.
"""

from __future__ import annotations

import atexit
import os
import runpy
import sys
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.data_loader import DataLoaderShard
from accelerate.optimizer import AcceleratedOptimizer
from torch.nn.parallel import DistributedDataParallel

from everstep.train.coordination.group_shutdown import hold_group, quiesce
from support.adapters.dying import die_once

FOLDER, SCRIPT, KILL = Path(sys.argv[1]), sys.argv[2], sys.argv[3] if len(sys.argv) > 3 else "-"
PRE_FORWARD = DistributedDataParallel._pre_forward
NAMES = {"backward", "accumulate", "gather", "gather_for_metrics", "reduce", "wait_for_everyone"}
made: list[Any] = []
gathered: list[int] = []  # the steps behind which this process has gathered batches of an evaluation


def steps() -> int:
    found = [o.optimizer.state_dict()["state"] for o in made[-1]._optimizers]
    return int(found[0][0]["step"]) if found and found[0] else 0


def reach(*points: str) -> None:
    rank = os.environ["RANK"]
    points = (*points, *(f"{point}{int(made[-1].sync_gradients)}" for point in points))
    if KILL not in [f"{steps()}:{point}" for point in points] or (rank != "1" and not KILL.endswith("all")):
        return
    die_once(FOLDER, "killed" if rank == "1" else f"killed-{rank}")


def watch() -> None:
    make, backward, gather = Accelerator.__init__, Accelerator.backward, Accelerator.gather_for_metrics
    step, forward = AcceleratedOptimizer.step, DistributedDataParallel.forward

    def starts(accelerator: Any, *arguments: Any, **named: Any) -> None:
        make(accelerator, *arguments, **named)
        made.append(accelerator)
        if Path(SCRIPT).stem == "before":
            hold_group()  # as Everstep does it for its scripts; torch alone may hang at the end

    def goes_forward(model: Any, *arguments: Any, **named: Any) -> Any:
        if model.training:
            with (FOLDER / f"{os.getpid()}.steps").open("a") as file:
                file.write(f"{steps()}\n")
            reach("forward")
        return forward(model, *arguments, **named)

    def goes_backward(accelerator: Any, *arguments: Any, **named: Any) -> Any:
        reach("backward", "all")
        return backward(accelerator, *arguments, **named)

    def stepped(optimizer: Any, *arguments: Any, **named: Any) -> Any:
        step(optimizer, *arguments, **named)
        reach("end")

    def gathers(accelerator: Any, *arguments: Any, **named: Any) -> Any:
        gathered.append(steps())
        reach("later" if gathered.count(steps()) > 1 else "gather")
        return gather(accelerator, *arguments, **named)

    Accelerator.__init__, Accelerator.backward, Accelerator.gather_for_metrics = starts, goes_backward, gathers
    AcceleratedOptimizer.step, DistributedDataParallel.forward = stepped, goes_forward


def as_before(accelerator: Any) -> bool:
    """Whether what the run has put in the place of methods is gone."""
    if DistributedDataParallel._pre_forward is not PRE_FORWARD or NAMES & vars(accelerator).keys():
        return False
    kinds = {type(loader) for loader in accelerator._dataloaders}
    return kinds == {DataLoaderShard} and not any("step" in vars(one) for one in accelerator._optimizers)


def main() -> None:
    torch.set_num_threads(1)
    if Path(SCRIPT).stem == "before":
        atexit.register(quiesce)  # Everstep does it for its scripts; torch alone ends some with SIGABRT
    watch()
    runpy.run_path(SCRIPT, run_name="__main__")
    (accelerator,) = made
    found = {
        "model": [accelerator.unwrap_model(m).state_dict() for m in accelerator._models],
        "optimizer": [o.optimizer.state_dict() for o in accelerator._optimizers],
        "registered": [o.state_dict() for o in accelerator._custom_objects],
        "schedule": [s.scheduler.state_dict() for s in accelerator._schedulers],
        "step": steps(),
        "as_before": as_before(accelerator),
        "pid": os.getpid(),
    }
    torch.save(found, FOLDER / f"{os.environ['RANK']}.pt")


if __name__ == "__main__":
    main()
