"""A loop over what Accelerate prepared, with accumulation and a schedule; or over an ElasticLoader."""

from __future__ import annotations

import sys

import torch
from accelerate import Accelerator
from accelerate.utils import DataLoaderConfiguration
from torch.utils.data import DataLoader

from everstep.data import ElasticLoader
from everstep.train.adapters.accelerate import start
from support.adapters.adapter_script import EPOCHS, Net, Points, begin, done, options


def main() -> None:
    given = options()
    torch.set_num_threads(1)
    elastic = given.kind == "elastic"
    accelerator = Accelerator(
        cpu=True,
        gradient_accumulation_steps=1 if elastic else 2,
        dataloader_config=DataLoaderConfiguration(use_seedable_sampler=given.kind != "unknown-order"),
    )
    net = Net(given)
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 100)
    model, optimizer, scheduler = accelerator.prepare(net, optimizer, scheduler)
    if elastic:
        loader = ElasticLoader(Points(), global_batch=given.batch, num_workers=given.workers)
    else:
        loader = accelerator.prepare(
            DataLoader(Points(), batch_size=given.batch // 2, shuffle=True, num_workers=given.workers)
        )
    objects = {"model": model, "optimizer": optimizer, "scheduler": scheduler}
    with start(accelerator, given.url, every_steps=5, loader=loader, **objects) as run:
        begin(run.completed)
        for _epoch in run.epochs(EPOCHS):
            for batch in run.batches():
                net.steps = int(run.step)  # the same number as run.completed
                assert net.steps == run.completed
                data = batch.data if elastic else batch
                with accelerator.accumulate(model):
                    loss = model(**data)["loss"]
                    accelerator.backward(batch.scale(loss) if elastic else loss)
                    optimizer.step()
                    scheduler.step()
                    optimizer.zero_grad()
                run.step(loss=loss)
        run.close()
    done(run.completed, net)
    accelerator.end_training()


if __name__ == "__main__":
    sys.exit(main())
