import torch
import torch.distributed as dist
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.utils.data import TensorDataset

import everstep

STAGES, WIDTH, HIDDEN, PARTS, BATCH = 2, 8, 16, 3, 12


def first(width, hidden):
    return torch.nn.Sequential(torch.nn.Linear(width, hidden), torch.nn.ReLU(), torch.nn.Dropout(0.1))


def last(hidden):
    return torch.nn.Sequential(torch.nn.LayerNorm(hidden), torch.nn.Linear(hidden, 3))


g = torch.Generator().manual_seed(0)
data = TensorDataset(torch.randn(96, WIDTH, generator=g), torch.randint(0, 3, (96,), generator=g))
with everstep.start("commits", every_steps=4) as run:
    mesh = run.mesh(model=STAGES)
    replica, _ = dist.new_subgroups(STAGES)
    number = dist.get_rank(replica)
    torch.manual_seed(number)
    stage = first(WIDTH, HIDDEN) if number == 0 else last(HIDDEN)
    optimizer = torch.optim.AdamW(stage.to(run.device).parameters(), lr=0.01)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 12)
    run.track(model=stage, optimizer=optimizer, schedule=schedule)

    def loss_of(output, target):
        return run.scale(torch.nn.functional.cross_entropy(output, target))

    def make():
        rows = BATCH * STAGES // run.world_size // PARTS
        hidden = torch.empty(rows, HIDDEN, requires_grad=True)
        ends = (torch.empty(rows, WIDTH), hidden) if number == 0 else (hidden, torch.empty(rows, 3, requires_grad=True))
        made = PipelineStage(stage, number, STAGES, run.device, input_args=ends[0], output_args=ends[1], group=replica)
        return Schedule1F1B(made, PARTS, loss_fn=loss_of)

    pipeline = run.pipeline(make)
    for step in run.steps(run.loader(data, global_batch=BATCH), until=12):
        with step as batch:
            x, y = batch.to(run.device).data
            if number == 0:
                pipeline.step(x)
            else:
                pipeline.step(target=y)
            run.average_gradients(stage)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
