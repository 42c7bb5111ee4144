import torch
import torch.distributed as dist
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.utils.data import DataLoader, TensorDataset

import everstep

WORDS = 11


class Block(torch.nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm = torch.nn.LayerNorm(width)
        self.up = torch.nn.Linear(width, 4 * width)
        self.down = torch.nn.Linear(4 * width, width)

    def forward(self, x):
        return x + self.down(torch.relu(self.up(self.norm(x))))


class Model(torch.nn.Module):
    def __init__(self, width):
        super().__init__()
        self.words = torch.nn.Embedding(WORDS, width)
        self.block = Block(width)
        self.norm = torch.nn.LayerNorm(width)
        self.out = torch.nn.Linear(width, WORDS)

    def forward(self, x):
        return self.out(self.norm(self.block(self.words(x))))


plan = {
    "words": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
    "block.norm": SequenceParallel(),
    "block.up": ColwiseParallel(input_layouts=Shard(1)),
    "block.down": RowwiseParallel(output_layouts=Shard(1)),
    "norm": SequenceParallel(),
    "out": ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate()),
}
g = torch.Generator().manual_seed(0)
text = torch.randint(0, WORDS, (40, 9), generator=g)
with everstep.start("commits", every_steps=4) as run:
    mesh = run.mesh(tensor=2)
    replica, replicas = mesh.get_group("tensor"), mesh.get_group("replicate")
    torch.manual_seed(0)
    model = parallelize_module(Model(8).to(run.device), mesh["tensor"], plan)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 12)
    seen = {"words": 0.0}
    run.track(model=model, optimizer=optimizer, schedule=schedule, seen=seen)
    for step in run.steps(DataLoader(TensorDataset(text), batch_size=4, shuffle=True), until=12):
        with step as batch:
            (words,) = batch.to(run.device).data
            logits = model(words[:, :-1])
            loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), words[:, 1:].flatten())
            batch.scale(loss).backward()
            run.average_gradients(model)
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            count = torch.tensor(float(words.sum()))
            dist.all_reduce(count, group=replicas)
            most = count.clone()
            dist.all_reduce(most, dist.ReduceOp.MAX, group=replica)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
            assert most == count, "the ranks of a replica have read other data"
            seen["words"] += count.item()
