"""An ordinary loop over what Accelerate prepared, with accumulation, a schedule, clipping and an evaluation.

    everstep-run … run_accelerate_rounds.py FOLDER KIND [STEP:POINT]

Rank 1 kills itself once in that step, at that point; each step's beginning is written down, by process.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator, DataLoaderConfiguration
from accelerate.utils import set_seed
from torch.utils.data import DataLoader

from everstep.train.adapters.accelerate import start
from everstep.train.adapters.prepared import Prepared
from support.adapters.dying import die_once
from support.adapters.points import Points
from support.adapters.profiled import ask_once

FOLDER, KIND, KILL = Path(sys.argv[1]), sys.argv[2], sys.argv[3] if len(sys.argv) > 3 else ""
EPOCHS = 2


def reach(step: int, point: str) -> None:
    if f"{step}:{point}" != KILL or os.environ["RANK"] != "1":
        return
    die_once(FOLDER)


def main() -> None:
    torch.set_num_threads(1)
    set_seed(7)
    order = DataLoaderConfiguration(use_seedable_sampler=KIND == "seedable")
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2, dataloader_config=order)
    net = torch.nn.Sequential(torch.nn.Linear(3, 16), torch.nn.Tanh(), torch.nn.Dropout(0.2), torch.nn.Linear(16, 1))
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 100)
    model, optimizer, loader, eval_loader, schedule = accelerator.prepare(
        net,
        optimizer,
        DataLoader(Points(64), batch_size=2, shuffle=True),
        DataLoader(Points(20), batch_size=3),
        schedule,
    )
    accelerator.wait_for_everyone()
    if KIND == "plain":
        for x, y in loader:
            accelerator.backward(torch.nn.functional.mse_loss(model(x), y))
            optimizer.step()
    objects = {"model": model, "optimizer": optimizer, "schedule": schedule}
    seen: list[Any] = []
    with start(accelerator, str(FOLDER / "commits"), every_steps=100, loader=loader, **objects) as run:

        def learn(batch: Any) -> dict[str, Any]:
            x, y = batch
            with accelerator.accumulate(model):
                if not accelerator.sync_gradients:
                    with (FOLDER / f"{os.getpid()}.steps").open("a") as file:
                        file.write(f"{run.completed}\n")
                    if run.completed == 4 and KIND == "train" and isinstance(run, Prepared):
                        ask_once(run._session._coordinator.live_profile, FOLDER)
                loss = torch.nn.functional.mse_loss(model(x), y)
                reach(run.completed, f"forward{int(accelerator.sync_gradients)}")
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                schedule.step()
                reach(run.completed, f"end{int(accelerator.sync_gradients)}")
                optimizer.zero_grad()
            return {"loss": loss}

        def evaluate() -> dict[str, Any]:
            model.eval()
            wrong, count = 0.0, 0
            with torch.no_grad():
                for x, y in eval_loader:
                    reach(run.completed, "evaluating")
                    errors = accelerator.gather_for_metrics((model(x) - y) ** 2)
                    wrong, count = wrong + errors.sum().item(), count + len(errors)
            seen.append([run.completed, count, wrong / count])
            return {"eval_loss": wrong / count}

        for _epoch in run.epochs(EPOCHS):
            if KIND == "batches":
                for _batch in run.batches():
                    pass
            run.train(learn)
            run.evaluate(evaluate)
    found = {
        "model": net.state_dict(),
        "optimizer": optimizer.state_dict(),
        "schedule": schedule.state_dict(),
        "step": int(run.step),
        "evaluated": seen[-1],
        "pid": os.getpid(),
    }
    torch.save(found, FOLDER / f"{accelerator.process_index}.pt")
    accelerator.end_training()


if __name__ == "__main__":
    main()
