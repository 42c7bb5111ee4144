"""Mixed precision: bfloat16, or float16 with a GradScaler that leaves out steps whose gradients overflow.

    python train.py                              one process
    everstep-run --nproc-per-node 3 train.py     three processes; kill one
    kubectl apply -f job.yaml                    workers on a cluster; delete one, scale the job

DDP averages the gradients before the scaler looks at them, so an overflow on one rank is there on all of them.
"""

import argparse

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import TensorDataset

import everstep

TRAIN = 1440  # of 1,797 images; the others are the test set


def main(args: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    images, labels = load_digits(return_X_y=True)
    x, y = torch.from_numpy(images).float() / 16, torch.from_numpy(labels)
    half = torch.float16 if args.type == "fp16" else torch.bfloat16
    with everstep.start(args.checkpoint, every_steps=args.every_steps) as run:
        network = torch.nn.Sequential(
            torch.nn.Linear(64, 128), torch.nn.ReLU(), torch.nn.Dropout(0.1), torch.nn.Linear(128, 10)
        ).to(run.device)
        model = DistributedDataParallel(network) if dist.is_initialized() else network
        optimizer = torch.optim.AdamW(network.parameters(), lr=3e-3)
        # bfloat16 has float32's range, and needs no scale.
        scaler = torch.amp.GradScaler(
            run.device.type, enabled=args.type == "fp16", init_scale=args.scale, growth_interval=args.growth
        )
        run.track(model=model, optimizer=optimizer, scaler=scaler)
        data = run.loader(TensorDataset(x[:TRAIN], y[:TRAIN]), global_batch=96, seed=0)
        for step in run.steps(data, until=args.steps):
            with step as batch:
                pixels, digits = batch.to(run.device).data
                with torch.autocast(run.device.type, dtype=half):
                    loss = batch.scale(cross_entropy(model(pixels), digits))
                scaler.scale(loss).backward()
                scaler.unscale_(optimizer)
                torch.nn.utils.clip_grad_norm_(network.parameters(), 1.0)
                scaler.step(optimizer)
                scaler.update()
                optimizer.zero_grad()
                run.log(loss=loss, scale=scaler.get_scale())


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=600, help="optimizer steps in all")
    parser.add_argument("--type", choices=("bf16", "fp16"), default="fp16")
    parser.add_argument("--scale", type=float, default=2.0**16, help="of the loss at first, in fp16")
    parser.add_argument("--growth", type=int, default=100, help="steps without an overflow that double the scale")
    parser.add_argument("--every-steps", type=int, help="steps between commits (default: EVERSTEP_CHECKPOINT_EVERY_*)")
    parser.add_argument("--checkpoint", help="folder or URL (default: EVERSTEP_CHECKPOINT_URL)")
    args = parser.parse_args()
    if args.scale <= 0:
        parser.error("--scale: a loss can be scaled by what is above 0")
    main(args)
