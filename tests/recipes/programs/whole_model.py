"""The model of examples/pipeline or examples/three_d in one piece, trained by one process: what its loss and parameters
are to be.

everstep-run … whole_model.py SCRIPT --steps N
"""

import os
import sys

import torch
from torch.utils.data import TensorDataset

import everstep

sys.path.insert(0, os.path.dirname(sys.argv[1]))
import train

torch.set_num_threads(1)
images, labels = train.load_digits(return_X_y=True)
x, y = torch.from_numpy(images).float() / 16, torch.from_numpy(labels)
with everstep.start() as run:
    made = (train.Block, train.BLOCKS) if hasattr(train, "BLOCKS") else (train.part, train.PARTS)
    model = torch.nn.Sequential(*(made[0](i) for i in range(made[1])))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    run.track(model=model, optimizer=optimizer)
    data = run.loader(TensorDataset(x[: train.TRAIN], y[: train.TRAIN]), global_batch=train.BATCH, seed=0)
    for step in run.steps(data, until=int(sys.argv[3])):
        with step as batch:
            batch.scale(train.cross_entropy(model(batch.data[0]), batch.data[1])).backward()
            optimizer.step()
            optimizer.zero_grad()
