"""The digits again, as an elastic run: workers may die, come and go while the others train on.

    python elastic.py                                     one process
    everstep-run --nproc-per-node 2 elastic.py            two processes; kill one
    kubectl apply -f elastic.yaml                         workers on a cluster; delete one, scale the job

The session does what train.py does by hand: restore, cut each batch for the world that there is, save, report, stop.
"""

import argparse
import os
import sys
import time

import torch
import torch.distributed as dist
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import TensorDataset
from train import BATCH, SEED, TRAIN, dataset

import everstep


def main(args: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    torch.manual_seed(SEED)
    x, y = dataset()
    with everstep.start(args.checkpoint, every_steps=args.every_steps) as run:
        network = torch.nn.Sequential(torch.nn.Linear(64, 128), torch.nn.ReLU(), torch.nn.Linear(128, 10))
        model = DistributedDataParallel(network) if dist.is_initialized() else network
        optimizer = torch.optim.AdamW(network.parameters(), lr=5e-3)
        run.track(model=network, optimizer=optimizer)
        loader = run.loader(TensorDataset(x[:TRAIN], y[:TRAIN]), global_batch=BATCH, seed=SEED)
        for step in run.steps(loader, until=args.steps):
            with step as batch:
                images, labels = batch.data
                loss = batch.scale(cross_entropy(model(images), labels))
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                run.log(loss=loss)
                time.sleep(args.step_seconds)
            # What follows the block also runs for a step in which a peer was lost, and which comes again.
            if step.completed and run.rank == 0 and run.step % args.print_every == 0:
                print(f"step={run.step} loss={loss.item():.4f} world={run.world_size} pid={os.getpid()}", flush=True)
        if run.rank == 0:
            with torch.no_grad():
                accuracy = (network(x[TRAIN:]).argmax(1) == y[TRAIN:]).float().mean().item()
            print(f"final step={run.step} test_accuracy={accuracy:.4f} world={run.world_size}", flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    env = os.environ.get
    parser.add_argument("--steps", type=int, default=int(env("DIGITS_STEPS", "600")), help="optimizer steps in all")
    parser.add_argument(
        "--step-seconds", type=float, default=float(env("DIGITS_STEP_SECONDS", "0")), help="added pause"
    )
    parser.add_argument("--print-every", type=int, default=10, help="steps between lines of progress")
    parser.add_argument("--every-steps", type=int, help="steps between commits (default: EVERSTEP_CHECKPOINT_EVERY_*)")
    parser.add_argument(
        "--checkpoint", default=env("EVERSTEP_CHECKPOINT_URL", "checkpoints-elastic"), help="folder or URL"
    )
    try:
        main(parser.parse_args())
    except (everstep.Fenced, everstep.StoreUnusable) as e:
        print(e, file=sys.stderr)
        sys.exit(e.exit_code)
