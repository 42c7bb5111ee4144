"""A session of two optimizers, as a GAN has them, in which rank 1 is killed once between their two steps.

`gan_script.py OUT URL`: the file OUT/tear asks for the kill, OUT/die for one between two steps; OUT/full says that
there is no room for a copy of the state; OUT/mutate makes a thread change a tracked tensor all the time, which it must
not.
"""

import json
import logging
import os
import signal
import sys
import threading
import time
from pathlib import Path

import torch
import torch.distributed as dist
import xxhash
from torch.nn.parallel import DistributedDataParallel

import everstep
from everstep.checkpoint import Catalog
from everstep.recovery.rollback import rollback
from everstep.storage import open_store

STEPS = 40


def mutate(tensor: torch.Tensor, while_: Path) -> None:
    while True:
        if while_.exists():
            tensor += 1
        else:
            time.sleep(0.01)


def die_if(file: Path, step: int, url: str) -> None:
    if dist.get_rank() == 1 and step > 12 and file.exists():
        file.unlink()
        while url and Catalog(open_store(url)).latest() is None:  # there is something to go back to
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGKILL)


def digest(*modules: torch.nn.Module) -> str:
    found = xxhash.xxh3_64()
    for module in modules:
        for p in module.parameters():
            found.update(p.detach().numpy().data)
    return found.hexdigest()


if __name__ == "__main__":
    out, url = Path(sys.argv[1]), sys.argv[2]
    torch.set_num_threads(1)
    torch.manual_seed(0)
    logging.basicConfig(level=logging.INFO)
    if (out / "full").exists():
        rollback.free_memory = lambda device: 0
    with everstep.start(url or None, every_steps=5 if url else None) as run:
        generator = DistributedDataParallel(torch.nn.Linear(8, 8))
        critic = DistributedDataParallel(torch.nn.Linear(8, 1))
        g, c = (torch.optim.AdamW(m.parameters(), lr=0.01) for m in (generator, critic))
        moving = torch.zeros(2**20)
        run.track(generator=generator, critic=critic, g=g, c=c, moving=moving)
        threading.Thread(target=mutate, args=(moving, out / "mutate"), daemon=True).start()
        with (out / f"{os.getpid()}.jsonl").open("a", buffering=1) as diary:
            for step in run.steps(until=STEPS):
                die_if(out / "die", step.number, url)
                with step:
                    x = torch.randn(4, 8, generator=torch.Generator().manual_seed(2 * step.number + dist.get_rank()))
                    c.zero_grad()
                    (critic(generator(x).detach()) - critic(x)).mean().backward()
                    c.step()
                    die_if(out / "tear", step.number, url)
                    g.zero_grad()
                    (-critic(generator(x))).mean().backward()
                    g.step()
                    time.sleep(0.02)
                if step.completed:
                    told = {"kind": "step", "step": run.step, "world": dist.get_world_size(), "at": time.monotonic()}
                    diary.write(json.dumps({**told, "digest": digest(generator, critic)}) + "\n")
