"""A training script over tar files in a cache, a mixture and a stream, one batch of each in a step. Says which samples
it trained on."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

import torch
import webdataset as wds

import everstep
from everstep.data import Blocks, Mixture, Stream
from everstep_sources import Cache, tar_counts, webdataset
from support.recovery.recovery_script import Diary, become_a_script, leave_time

SHARDS, EACH, SAMPLES = 6, 16, 96
LOADERS: dict[str, dict[str, Any]] = {
    "tar": {"global_batch": 8, "shuffle": Blocks(window=2)},
    "mixture": {"global_batch": 10, "micro_batch": None},
    "stream": {"global_batch": 9},
}


@dataclass
class Wanted:
    steps: int
    tars: str  # a folder
    split: bool = False  # each rank cuts the stream for itself, which is a mistake
    out: str = ""
    slow_from: int = 20  # until the test has done what it has to do


def write(folder: str) -> None:
    for shard in range(SHARDS):
        with wds.TarWriter(f"{folder}/{shard}.tar") as sink:
            for i in range(EACH):
                sink.write({"__key__": f"{shard}-{i}", "json": {"id": shard * EACH + i}})


def number(sample: Any) -> int:
    if isinstance(sample, dict) and "json" in sample:
        found = wds.autodecode.Decoder([])(sample)["json"]["id"]
    else:
        found = sample["id"] if isinstance(sample, dict) else sample
    return int(found)


def sources(wanted: Wanted, cache: str, rank: int = 0) -> dict[str, Any]:
    urls = [f"file://{wanted.tars}/{shard}.tar" for shard in range(SHARDS)]
    counts = tar_counts(urls)
    size = next(iter(counts.values()))["bytes"]
    tars = webdataset(urls, counts, cache=Cache(cache, 17 * size), transform=number, open_limit=2 * 2)
    a, b = list(range(70)), list(range(1000, 1020))
    from datasets import Dataset  # noqa: PLC0415 - seconds, in whatever collects the tests

    stream = Dataset.from_dict({"id": list(range(SAMPLES))}).to_iterable_dataset(num_shards=4)
    if wanted.split:
        stream = stream.skip(rank).take(SAMPLES - 8)
    return {
        "tar": tars,
        "mixture": Mixture({"a": (a, 0.75), "b": (b, 0.25)}),
        "stream": Stream(stream, SAMPLES - (8 if wanted.split else 0), transform=number, every=16),
    }


def train(wanted: Wanted) -> None:
    torch.set_num_threads(1)
    diary = Diary(wanted.out)
    with everstep.start() as run:
        torch.manual_seed(1)
        model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(1, 1))
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)
        found = sources(wanted, f"{wanted.out}/cache", int(os.environ["EVERSTEP_WORKER_INDEX"]))
        loaders = {name: run.loader(data, **LOADERS[name]) for name, data in found.items()}
        run.track(model=model, optimizer=optimizer)
        for step in run.steps(loaders, until=wanted.steps):
            with step as batches:
                optimizer.zero_grad()
                losses = [b.scale(model(b.data[:, None].float() / 1000).mean()) for b in batches.values()]
                torch.autograd.backward(torch.stack(losses).sum())
                optimizer.step()
            if step.completed:
                seen = {name: b.data[: b.count].tolist() for name, b in batches.items()}
                diary.write(kind="step", step=run.step, rank=run.rank, world=run.world_size, seen=seen, digest="")
            leave_time(wanted, step.number)


def main(wanted: Wanted, environ: dict[str, str]) -> None:
    """In a forked process."""
    become_a_script(wanted.out, environ)
    train(wanted)
