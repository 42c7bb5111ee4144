"""Trains the model of examples/comm_hooks with each method in turn: `everstep-run … compressed.py FOLDER STEPS FILE`.

Rank 0 writes into FILE, for each method, the accuracy at the end and the bytes that it gave to collectives. All ranks
are of one node.
"""

import json
import sys
from pathlib import Path

import torch
import torch.distributed as dist

sys.path.insert(0, sys.argv[1])
import hooks
import train
from compression import Compression, hook

torch.set_num_threads(1)
dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
images, labels = train.load_digits(return_X_y=True)
x, y = torch.from_numpy(images).float() / 16, torch.from_numpy(labels)
found = {}
for method in (*train.METHODS, "powersgd"):
    torch.manual_seed(0)
    module = train.network()
    compression = Compression(module, method)
    model = train.DistributedDataParallel(module)
    model.register_comm_hook(compression, hook)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.5)
    hooks.sent[0] = 0
    for step in range(int(sys.argv[2])):
        rows = torch.randperm(train.TRAIN, generator=torch.Generator().manual_seed(step))[:96][rank::world]
        train.cross_entropy(model(x[rows]), y[rows]).backward()
        compression.meet()
        optimizer.step()
        optimizer.zero_grad()
        compression.step()
    with torch.no_grad():
        right = (module(x[train.TRAIN :]).argmax(1) == y[train.TRAIN :]).float().mean().item()
    found[method] = [right, hooks.sent[0]]
if rank == 0:
    Path(sys.argv[3]).write_text(json.dumps(found))
dist.destroy_process_group()
