"""Ranks that train apart from each other, or change what a commit must hold, under one of the three frameworks.

    run_apart.py FRAMEWORK WAY FOLDER [loop | caught]

`WAY`: "split" (each rank has shuffled its data for itself), "drift" (a rank moves a parameter by hand), "thaw" (a
layer that was frozen when DDP was made is trained later), "buffers" (DDP does not send them), "norms" (those of
BatchNorm, not sent either), "sent" (those of BatchNorm, which DDP sends), "stream" (each rank reads a stream of its
own), "shards" (of a ShardedDataset that each rank has shuffled for itself), "fsdp" (the model is sharded), "local"
(Accelerate's LocalSGD, which averages after each second step), "held" (all ranks switch what they train before step 1,
and prune a layer before step 3), "average" (one of the weights that nothing tracks), "replaced" (rank 1 is killed, and
the process in its place computes another loss), "" (nothing is wrong).
"""

# ruff: noqa: PLC0415  only one of the frameworks is imported

from __future__ import annotations

import os
import signal
import sys
import time
import warnings
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.nn.utils import prune
from torch.optim.swa_utils import AveragedModel
from torch.utils.data import DataLoader, IterableDataset

from everstep.data import Shard, ShardedDataset
from support.adapters.split import Split, module_of
from support.processes.commits import commits

FRAMEWORK, WAY, FOLDER, KIND = sys.argv[1], sys.argv[2], Path(sys.argv[3]), "".join(sys.argv[4:])
RANK = int(os.environ.get("RANK", os.environ.get("LOCAL_RANK", "0")))
STEPS = 6


NOT_SENT = WAY in ("buffers", "norms")
EVERY = 2 if WAY == "held" else 100
FREEZES = WAY == "held"  # while DDP has the layer
KILLED = FOLDER / "killed"
FACTOR = 2.0 if KILLED.exists() else 1.0


class Own(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        data = Split(RANK)
        return (data[index] for index in range(len(data)))


def split() -> Any:
    if WAY == "stream":
        return Own()
    data = Split(RANK if WAY in ("split", "shards") else 0)
    if WAY != "shards":
        return data
    return ShardedDataset([Shard("only", len(data))], lambda _: [data[k] for k in range(len(data))])


class Net(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body = torch.nn.Linear(3, 4).requires_grad_(WAY != "thaw")
        self.head = torch.nn.Linear(4, 1)
        self.mean: torch.Tensor
        self.register_buffer("mean", torch.zeros(()))
        self.norm = torch.nn.BatchNorm1d(4) if WAY in ("norms", "sent") else torch.nn.Identity()
        self.switched = False
        self.grown: torch.Tensor
        self.register_buffer("grown", torch.zeros(1))

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        if WAY == "buffers":
            self.mean = self.mean + x.mean()
        self.norm.train(not self.switched)
        y = self.head(self.norm(self.body(x)))
        return {"loss": torch.nn.functional.mse_loss(y, labels) * FACTOR, "logits": y}

    def disturb(self, step: int) -> None:
        """Before step `step`."""
        if WAY == "drift" and torch.distributed.get_rank() == 1 and step == 1:
            with torch.no_grad():
                self.head.weight += 1e-3
        if WAY == "thaw" and step == 2:
            self.body.requires_grad_(True)
        if WAY == "held" and step == 1:
            self.body.requires_grad_(False)
            self.switched, self.grown = True, torch.ones(2)
        if WAY == "held" and step == 3:
            end = time.monotonic() + 60
            while commits(FOLDER) != [2] and time.monotonic() < end:  # it is written in the background
                time.sleep(0.01)
            prune.l1_unstructured(self.head, "weight", 0.5)
        if WAY == "replaced" and torch.distributed.get_rank() == 1 and step == 2 and not KILLED.exists():
            KILLED.touch()
            os.kill(os.getpid(), signal.SIGKILL)


def average_of(net: Net) -> AveragedModel | None:
    return AveragedModel(net) if WAY == "average" else None


def huggingface() -> None:
    from transformers import Trainer, TrainerCallback, TrainingArguments

    from everstep.train.adapters.huggingface import EverstepCallback

    class Disturbing(TrainerCallback):  # type: ignore[misc]  # the package has no types
        def __init__(self) -> None:
            self.average = average_of(net)

        def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            net.disturb(state.global_step)

        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if self.average is not None:
                self.average.update_parameters(net)

    net = Net()
    args = TrainingArguments(
        str(FOLDER / "trainer"), max_steps=STEPS, per_device_train_batch_size=4, save_strategy="no",
        report_to="none", use_cpu=True, disable_tqdm=True, ddp_broadcast_buffers=not NOT_SENT, optim="sgd",
        ddp_find_unused_parameters=FREEZES,
    )  # fmt: skip
    callback = EverstepCallback(str(FOLDER / "commits"), every_steps=EVERY)
    optimizer = torch.optim.SGD(net.parameters(), lr=1e-2)
    trainer = Trainer(
        model=net, args=args, train_dataset=split(), callbacks=[callback, Disturbing()],
        optimizers=(optimizer, None),
    )  # fmt: skip
    callback.train(trainer)


def lightning() -> None:
    from lightning.pytorch import Callback, Trainer
    from lightning.pytorch.strategies import DDPStrategy

    from everstep.train.adapters.lightning import EverstepCallback

    class Disturbing(Callback):  # type: ignore[misc]
        def __init__(self) -> None:
            self.average = average_of(net)

        def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
            pl_module.net.disturb(trainer.global_step)

        def on_train_batch_end(self, trainer: Any, pl_module: Any, *others: Any) -> None:
            if self.average is not None:
                self.average.update_parameters(net)

    net = Net()
    module = module_of(net, partial(torch.optim.SGD, lr=1e-2))
    trainer = Trainer(
        accelerator="cpu", devices=int(os.environ["LOCAL_WORLD_SIZE"]), max_steps=STEPS, logger=False,
        strategy=DDPStrategy(broadcast_buffers=not NOT_SENT, find_unused_parameters=FREEZES),
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False, default_root_dir=str(FOLDER),
        callbacks=[EverstepCallback(str(FOLDER / "commits"), every_steps=EVERY), Disturbing()],
    )  # fmt: skip
    trainer.fit(module, DataLoader(split(), batch_size=4, shuffle=WAY != "stream"))


def accelerate() -> None:
    from accelerate import Accelerator, DistributedDataParallelKwargs
    from accelerate.local_sgd import LocalSGD
    from accelerate.utils import DataLoaderConfiguration, FullyShardedDataParallelPlugin

    from everstep.train.adapters.accelerate import start

    accelerator = Accelerator(
        cpu=True, dataloader_config=DataLoaderConfiguration(use_seedable_sampler=True),
        kwargs_handlers=[
            DistributedDataParallelKwargs(broadcast_buffers=not NOT_SENT, find_unused_parameters=FREEZES)
        ],
        fsdp_plugin=FullyShardedDataParallelPlugin(fsdp_version=2) if WAY == "fsdp" else None,
    )  # fmt: skip
    net = Net()
    average = average_of(net)
    optimizer = torch.optim.SGD(net.parameters(), lr=1e-2)
    loader = DataLoader(split(), batch_size=4, shuffle=WAY != "stream")
    model, optimizer, loader = accelerator.prepare(net, optimizer, loader)
    run = start(
        accelerator, str(FOLDER / "commits"), every_steps=EVERY, model=model, optimizer=optimizer, loader=loader
    )
    with run, LocalSGD(accelerator, model, local_sgd_steps=2, enabled=WAY == "local") as local:

        def learn(batch: Any) -> None:
            net.disturb(run.completed)
            accelerator.backward(model(**batch)["loss"])
            optimizer.step()
            optimizer.zero_grad()
            local.step()
            if average is not None:
                average.update_parameters(net)

        for _ in run.epochs(2):
            if KIND == "loop":
                run.train(learn)
                continue
            for batch in run.batches():
                learn(batch)
                run.step()


if __name__ == "__main__":
    warnings.filterwarnings("ignore", category=UserWarning)
    torch.set_num_threads(1)
    (FOLDER / f"began-{os.getpid()}").touch()
    try:
        {"huggingface": huggingface, "lightning": lightning, "accelerate": accelerate}[FRAMEWORK]()
    except Exception as e:
        if KIND != "caught":
            raise
        print(f"the script has caught {type(e).__name__}\n", end="", flush=True)  # in one write: ranks share the file
        sys.exit(0)
    print("trained to the end", flush=True)
