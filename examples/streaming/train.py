"""Samples are read from tar files in a folder or a bucket, through a cache on the disk of the node.

    python shards.py shards                      write them; copy the folder to a bucket if you like
    everstep-run --nproc-per-node 3 train.py     three processes; kill one
    kubectl apply -f job.yaml                    workers on a cluster; delete one, scale the job

Shards are shuffled, and the samples of every three of them among each other, so that reads stay in few files.
"""

import argparse
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

import everstep
from everstep.data import Blocks
from everstep_sources import Cache, webdataset


def decoded(sample: dict[str, Any]) -> tuple[torch.Tensor, int]:
    """An image [64] in 0..1, and its label."""
    return torch.tensor(list(sample["pixels"])) / 16, int(sample["label"])


def main(args: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    samples = webdataset(
        f"{args.shards}/{{00..11}}.tar",
        counts=f"{args.shards}/counts.json",
        cache=Cache(args.cache, limit="100 MiB") if args.cache else None,
        transform=decoded,
    )
    with everstep.start(args.checkpoint, every_steps=args.every_steps) as run:
        network = torch.nn.Sequential(
            torch.nn.Linear(64, 128), torch.nn.ReLU(), torch.nn.Dropout(0.1), torch.nn.Linear(128, 10)
        ).to(run.device)
        model = DistributedDataParallel(network) if dist.is_initialized() else network
        optimizer = torch.optim.AdamW(network.parameters(), lr=3e-3)
        run.track(model=model, optimizer=optimizer)
        data = run.loader(samples, global_batch=args.batch, shuffle=Blocks(window=3), seed=0)
        for step in run.steps(data, until=args.steps):
            with step as batch:
                images, labels = batch.to(run.device).data
                loss = cross_entropy(model(images), labels)
                batch.scale(loss).backward()
                optimizer.step()
                optimizer.zero_grad()
                run.log(loss=loss)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shards", default="shards", help="folder or URL of the tar files and counts.json")
    parser.add_argument("--cache", help="folder on a disk of this node; needed where --shards is a URL")
    parser.add_argument("--steps", type=int, default=600, help="optimizer steps in all")
    parser.add_argument("--batch", type=int, default=96, help="samples of a step, over all ranks")
    parser.add_argument("--every-steps", type=int, help="steps between commits (default: EVERSTEP_CHECKPOINT_EVERY_*)")
    parser.add_argument("--checkpoint", help="folder or URL (default: EVERSTEP_CHECKPOINT_URL)")
    main(parser.parse_args())
