"""Train a small network on handwritten digits with DDP. Kill it anywhere: the result does not change.

    python train.py                              one process
    torchrun --nproc-per-node 2 train.py         two processes
    kubectl apply -f trainingjob.yaml            workers on a cluster

Which samples a step sees depends on the step alone, never on the world size or on how often the run was disturbed.
"""

import argparse
import os
import sys
import time
from datetime import timedelta

import torch
import torch.distributed as dist
import xxhash
from sklearn.datasets import load_digits
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

import everstep

SEED = 0
BATCH = 96  # the global batch, whatever the world size: 1, 2, 3, 4, 6 and 8 divide it
TRAIN = 1440  # of 1,797 images, 15 batches an epoch; the other 357 (20 %) are the test set


def dataset() -> tuple[torch.Tensor, torch.Tensor]:
    """Images [1797, 64] in 0..1 and labels [1797], in one fixed random order."""
    images, labels = load_digits(return_X_y=True)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(SEED))
    return torch.from_numpy(images).float()[order] / 16, torch.from_numpy(labels)[order]


def batch_indices(step: int) -> torch.Tensor:
    """The BATCH samples of the global step: each epoch is a new permutation, each sample once in it."""
    epoch, position = divmod(step, TRAIN // BATCH)
    order = torch.randperm(TRAIN, generator=torch.Generator().manual_seed(SEED + 1 + epoch))
    return order[position * BATCH : (position + 1) * BATCH]


def what_to_try(job: str) -> str:
    """For whoever reads the log of a job on a cluster: how to break it while it trains."""
    return f"""meanwhile, from another terminal:
  kubectl delete pod -l everstep.dev/job={job},everstep.dev/worker-index=0
  kubectl scale tjob/{job} --replicas=3
  kubectl patch tjob/{job} --type=merge -p '{{"spec":{{"suspend":true}}}}'
  kubectl patch tjob/{job} --type=merge -p '{{"spec":{{"suspend":false}}}}'
  kubectl describe tjob {job}"""


def main(args: argparse.Namespace) -> None:
    # One thread and no racing kernels: the same world size gives the same bits.
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    torch.manual_seed(SEED)
    if "RANK" in os.environ:
        dist.init_process_group("gloo", timeout=timedelta(minutes=5))
    rank, world = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))

    x, y = dataset()
    network = torch.nn.Sequential(torch.nn.Linear(64, 128), torch.nn.ReLU(), torch.nn.Linear(128, 10))
    model = DistributedDataParallel(network) if dist.is_initialized() else network
    # After its first backward pass DDP lays the gradients out anew and sums them in another order. Have that behind us,
    # else the first step after each restart would round differently from the same step of an undisturbed run.
    cross_entropy(model(x[:1]), y[:1]).backward()
    optimizer = torch.optim.AdamW(network.parameters(), lr=5e-3)
    # How many samples, and exactly which, made the parameters what they are: committed together with them.
    lineage = {"count": 0, "digest": ""}

    state = {"model": network, "optimizer": optimizer, "lineage": lineage}
    checkpointer = everstep.Checkpointer(args.checkpoint, every_steps=args.every_steps)
    start = checkpointer.restore(state) or 0
    print(f"start step={start} rank={rank} world={world} pid={os.getpid()}", flush=True)
    if rank == 0 and start < args.steps and "KUBERNETES_SERVICE_HOST" in os.environ:
        print(what_to_try(os.environ["EVERSTEP_JOB_NAME"]), flush=True)

    for step in range(start, args.steps):
        indices = batch_indices(step)
        mine = indices[rank::world]
        loss = cross_entropy(model(x[mine]), y[mine])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        lineage["count"] += len(indices)
        lineage["digest"] = xxhash.xxh3_128_hexdigest(lineage["digest"].encode() + indices.numpy().tobytes())
        time.sleep(args.step_seconds)

        done = step + 1
        everstep.report(step=done, total_steps=args.steps, epoch=done * BATCH // TRAIN, metrics={"loss": loss})
        if rank == 0 and done % 10 == 0:
            print(f"step={done} loss={loss.item():.4f} world={world}", flush=True)
        if done < args.steps and checkpointer.should_save(done):
            checkpointer.save(done, state)

    if start < args.steps:
        checkpointer.wait()
        checkpointer.save(args.steps, state).wait()
    checkpointer.close()
    if dist.is_initialized():
        dist.barrier()  # nobody leaves before the last commit exists: if it fails, all of them train on

    if rank == 0:
        with torch.no_grad():
            test_loss = cross_entropy(network(x[TRAIN:]), y[TRAIN:]).item()
            accuracy = (network(x[TRAIN:]).argmax(1) == y[TRAIN:]).float().mean().item()
        parameters = torch.cat([p.detach().flatten() for p in network.parameters()]).numpy().tobytes()
        print(f"samples={lineage['count']} samples_xxh3={lineage['digest']}")
        print(
            f"final step={args.steps} loss={test_loss:.4f} test_accuracy={accuracy:.4f}"
            f" parameters_xxh3={xxhash.xxh3_128_hexdigest(parameters)}",
            flush=True,
        )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    env = os.environ.get
    parser.add_argument("--steps", type=int, default=int(env("DIGITS_STEPS", "600")), help="optimizer steps in all")
    parser.add_argument(
        "--step-seconds", type=float, default=float(env("DIGITS_STEP_SECONDS", "0")), help="added pause"
    )
    parser.add_argument("--every-steps", type=int, help="steps between commits (default: EVERSTEP_CHECKPOINT_EVERY_*)")
    parser.add_argument("--checkpoint", default=env("EVERSTEP_CHECKPOINT_URL", "checkpoints"), help="folder or URL")
    try:
        main(parser.parse_args())
    except (everstep.Fenced, everstep.StoreUnusable) as e:
        # The operator reads these codes: a fenced process is not a failure, and an unusable store is not retried.
        print(e, file=sys.stderr)
        sys.exit(e.exit_code)
