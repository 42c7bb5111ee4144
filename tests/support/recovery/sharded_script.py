"""A training script with FSDP2 as people write it: HSDP over the session's mesh, uneven shards, accumulation, clipping,
a schedule; or with tensor parallelism. It says after each step what its shard is.

`exact`: gradients are sums of small integers, so they have the same bits however a batch is cut.
"""

from __future__ import annotations

import json
import os
import sys
import time
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import xxhash
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.functional import cross_entropy, gelu
from torch.utils.data import Dataset

import everstep
from everstep.recovery.group.in_flight import PeerLost
from support.recovery.recovery_script import Diary, become_a_script, leave_time

SAMPLES = 4096
FEATURES = 24


@dataclass
class Wanted:
    """`shard`: the number of shards. `width`: of the hidden layers."""

    steps: int = 10**9
    shard: int = 2
    tensor: bool = False  # cut by tensor parallelism
    width: int = 33  # even with tensor parallelism
    exact: bool = False
    url: str | None = None
    every_steps: int | None = None
    global_batch: int = 16
    micro_batches: bool = True
    pause: float = 0.0
    halves: float = 0.0  # seconds between the two halves of the model's state being made, by two optimizers
    reduced: bool = False  # bfloat16 for parameters and sums
    deaf_at: int = -1  # the vote for this step is heard by all but these ranks
    deaf: tuple[int, ...] = ()
    first: int | None = 1  # seed of the model's first values; None: every process its own
    foreign: str = ""  # shard over something that is not the session's mesh
    slow_from: int = -1  # see recovery_script
    out: str = ""


class Points(Dataset[Any]):
    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> Any:
        x = torch.randint(-4, 5, (FEATURES,), generator=torch.Generator().manual_seed(index)).float()
        return x, int(x[:8].sum() > 0)


class Layers(torch.nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.a = torch.nn.Linear(FEATURES, width)
        self.b = torch.nn.Linear(width, width)
        self.c = torch.nn.Linear(width, 3)
        self.norm = torch.nn.LayerNorm(width)
        self.seen: torch.Tensor
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen += 1
        y: torch.Tensor = self.c(self.norm(self.b(gelu(self.a(x)))))
        return y

    def loss(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return cross_entropy(self(x), y)


class Products(torch.nn.Module):
    """Each layer's parameters times the input, summed."""

    class Layer(torch.nn.Module):
        def __init__(self, width: int) -> None:
            super().__init__()
            self.weight = torch.nn.Parameter(torch.randn(width, FEATURES))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return (self.weight * x.sum(0)).sum() / len(x)

    def __init__(self, width: int) -> None:
        super().__init__()
        self.a, self.b = self.Layer(width), self.Layer(5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.a(x) + self.b(x)
        return y

    def loss(self, x: torch.Tensor, _: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self(x)
        return found


def build(wanted: Wanted, run: Any) -> Any:
    torch.manual_seed(wanted.first if wanted.first is not None else os.getpid())
    model = Products(wanted.width) if wanted.exact else Layers(wanted.width)
    if wanted.tensor:
        plan = {"a": ColwiseParallel(), "b": RowwiseParallel(), "c": ColwiseParallel(output_layouts=Replicate())}
        return parallelize_module(model, run.mesh(tensor=wanted.shard)["tensor"], plan)
    if wanted.foreign == "fsdp1":
        from torch.distributed.fsdp import FullyShardedDataParallel  # noqa: PLC0415

        return FullyShardedDataParallel(model, device_id=torch.device("cpu"))
    if wanted.foreign:
        from torch.distributed.device_mesh import init_device_mesh  # noqa: PLC0415

        mesh: Any = init_device_mesh("cpu", (1,))
    else:
        mesh = run.mesh(shard=wanted.shard)
        assert run.mesh(shard=wanted.shard) is mesh
    half = torch.bfloat16 if wanted.reduced else None
    policy = MixedPrecisionPolicy(param_dtype=half, reduce_dtype=half)
    for part in model.children():
        fully_shard(part, mesh=mesh, mp_policy=policy)
    return fully_shard(model, mesh=mesh, mp_policy=policy)


def digest(model: torch.nn.Module, optimizers: list[torch.optim.Optimizer]) -> str:
    """Of what this process holds."""
    found = xxhash.xxh3_64()
    states = [value for o in optimizers for state in o.state.values() for value in state.values()]
    for value in [*model.parameters(), *model.buffers(), *states]:
        if isinstance(value, torch.Tensor):
            local: Any = value.detach()
            local = local.to_local() if hasattr(local, "to_local") else local
            found.update(local.contiguous().numpy().reshape(-1))
    return found.hexdigest()


def deafen(run: Any, wanted: Wanted, diary: Diary) -> None:
    """At one step these ranks vote and lose the connection before they hear of the others."""
    recovery = run._recovery
    vote = recovery._sharded.vote
    once = iter((True,))

    def broken(step: int, *said: Any) -> Any:
        if step != wanted.deaf_at or not next(once, False):
            return vote(step, *said)
        before = recovery._sharded._made
        heard = vote(step, *said)
        # A rank that has begun the next collective has heard the vote. Without it a deaf rank's end could come before
        # that, and the vote would be lost for all.
        try:
            recovery.members.maximum(0)
        except PeerLost:
            if run.rank in wanted.deaf:
                raise
        if run.rank not in wanted.deaf:
            return heard
        recovery._sharded._made = before
        diary.write(kind="deaf", step=step)
        recovery.round.abandon("the connection was lost just now")
        raise PeerLost("the connection was lost just now")

    recovery._sharded.vote = broken


def train(wanted: Wanted) -> None:
    torch.set_num_threads(1)
    diary = Diary(wanted.out)
    with everstep.start(wanted.url, every_steps=wanted.every_steps) as run:
        model = build(wanted, run)
        parameters = list(model.parameters())
        parts = [parameters[:2], parameters[2:]] if wanted.halves else [parameters]
        optimizers: list[torch.optim.Optimizer] = [torch.optim.AdamW(part, lr=0.0625) for part in parts]
        schedulers = [torch.optim.lr_scheduler.CosineAnnealingLR(o, 10_000) for o in optimizers]
        run.track(model=model, **{f"optimizer{i}": o for i, o in enumerate(optimizers)})
        run.track(**{f"scheduler{i}": s for i, s in enumerate(schedulers)})
        micro = 2 if wanted.micro_batches else None
        loader = run.loader(Points(), global_batch=wanted.global_batch, micro_batch=micro)
        if wanted.deaf:
            deafen(run, wanted, diary)
        diary.write(kind="begin")
        for step in run.steps(loader, until=wanted.steps):
            leave_time(wanted, step.number)
            with step as batches:
                for batch in batches if micro else [batches]:
                    if not wanted.tensor:
                        model.set_requires_gradient_sync(batch.last)
                    batch.scale(model.loss(*batch.data)).backward()
                    time.sleep(wanted.pause)
                if wanted.tensor:
                    run.average_gradients(model)
                elif not wanted.exact:
                    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                for i, optimizer in enumerate(optimizers):
                    time.sleep(wanted.halves * i)
                    optimizer.step()
                for scheduler in schedulers:
                    scheduler.step()
                for optimizer in optimizers:
                    optimizer.zero_grad(set_to_none=True)
                dist.all_reduce(torch.ones(1))
            if step.completed:
                diary.write(
                    kind="step", step=run.step, digest=digest(model, optimizers), rank=run.rank, world=run.world_size,
                    shard=run.rank % wanted.shard, lr=schedulers[0].get_last_lr()[0],
                )  # fmt: skip
        diary.write(kind="end", step=run.step, digest=digest(model, optimizers), shard=run.rank % wanted.shard)


def main(wanted: Wanted, environ: dict[str, str]) -> None:
    """In a forked process."""
    become_a_script(wanted.out, environ)
    train(wanted)


if __name__ == "__main__":
    train(Wanted(**json.loads(sys.argv[1])))
