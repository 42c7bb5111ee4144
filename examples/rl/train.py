"""PPO with a learner and rollout workers, the shape of RLHF jobs: a pole is balanced on a cart.

    everstep run job.yaml --checkpoint commits               a learner and two rollout workers as processes; kill any
    kubectl apply -f job.yaml                                the same as pods on a cluster
    python train.py --checkpoint commits                     the learner alone; then, as often as you like:
    python train.py --checkpoint commits --role rollouts

Schulman et al. (2017). Worker 0 of the job is the learner. It hands out fragments of rollouts by number. A fragment is
a function of the parameters and its number, so a lost worker's fragment is made again by another one, with the same
bits. A step of the session is one minibatch of the buffer.
"""

import argparse
import copy
import os
import threading
from collections import deque

import torch
from cartpole import POLES, TICKS, Policy, loss_of, rollout
from torch import Tensor
from torch.nn.utils import clip_grad_norm_

import everstep
from everstep.roles import Ask, Hub, follow

FRAGMENTS, EPOCHS, BATCH = 6, 3, 800  # of a buffer; passes over it; ticks of a minibatch
SIZE = FRAGMENTS * TICKS * POLES  # ticks of a buffer


class Rollouts:
    """The state that the learner's threads share: fragments that are wanted, that workers have, and that are done."""

    def __init__(self) -> None:
        self.changed, self.parameters = threading.Condition(), dict[str, Tensor]()
        self.wanted: deque[int] = deque()
        self.given: dict[int, int] = {}  # by worker
        self.done: dict[int, dict[str, Tensor]] = {}

    def answer(self, worker: int, made: dict | None) -> dict:
        """Take what a worker has made, and give it its next fragment as soon as there is one."""
        with self.changed:
            if made is not None:
                self.done[self.given.pop(worker)] = made
                self.changed.notify_all()
            self.changed.wait_for(lambda: self.wanted)
            self.given[worker] = self.wanted.popleft()
            return {"fragment": self.given[worker], "parameters": self.parameters}

    def left(self, worker: int) -> None:
        with self.changed:
            if worker in self.given:
                self.wanted.appendleft(self.given.pop(worker))  # another worker makes it
                self.changed.notify_all()

    def gather(self, first: int, policy: Policy) -> dict[str, Tensor]:
        numbers = range(first, first + FRAGMENTS)
        with self.changed:
            self.parameters = copy.deepcopy(policy.state_dict())
            self.wanted.extend(numbers)
            self.changed.notify_all()
            self.changed.wait_for(lambda: len(self.done) == FRAGMENTS)
            found = [self.done.pop(number) for number in numbers]
        return {name: torch.cat([one[name] for one in found]) for name in found[0]}


def learn(args: argparse.Namespace) -> None:
    torch.manual_seed(0)
    with everstep.start(args.checkpoint, every_steps=args.every_steps) as run:
        policy = Policy().to(run.device)
        optimizer = torch.optim.Adam(policy.parameters(), lr=3e-3)
        # Commits hold the buffer and the place in it, so that a new learner goes on in the middle.
        buffer: dict[str, Tensor | int] = {"used": EPOCHS * SIZE, "next": 0}
        run.track(policy=policy, optimizer=optimizer, buffer=buffer)
        rollouts = Rollouts()
        run.untracked("rollouts")  # a fragment that is lost with the learner is made again, with the same bits
        with Hub(rollouts.answer, rollouts.left, url=args.checkpoint):
            for step in run.steps(until=args.steps):
                with step:
                    if buffer["used"] == EPOCHS * SIZE:
                        buffer.update(rollouts.gather(buffer["next"], policy))
                        buffer.update(used=0, next=buffer["next"] + FRAGMENTS)
                    epoch = torch.Generator().manual_seed(step.number * BATCH // SIZE)
                    rows = torch.randperm(SIZE, generator=epoch)[buffer["used"] % SIZE :][:BATCH]
                    taken = {name: v[rows].to(run.device) for name, v in buffer.items() if isinstance(v, Tensor)}
                    loss = loss_of(policy, taken)
                    loss.backward()
                    clip_grad_norm_(policy.parameters(), 0.5)
                    optimizer.step()
                    optimizer.zero_grad()
                    buffer["used"] += BATCH
                    run.log(loss=loss, ticks_until_a_fall=SIZE / max(1.0, buffer["fallen"].sum().item()))


def work(ask: Ask) -> None:
    """Make rollouts until the connection to the learner ends."""
    policy, made = Policy(), None
    while True:
        wanted = ask(made)
        policy.load_state_dict(wanted["parameters"])
        made = rollout(policy, wanted["fragment"])


def main(args: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    if args.role == "learner":
        learn(args)
    else:
        follow(work, url=args.checkpoint)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    first = os.environ.get("EVERSTEP_WORKER_INDEX", "0") == "0"  # of a TrainingJob's workers
    parser.add_argument("--role", choices=("learner", "rollouts"), default="learner" if first else "rollouts")
    parser.add_argument("--steps", type=int, default=720, help="minibatches in all; a buffer has 18")
    parser.add_argument("--every-steps", type=int, help="steps between commits (default: EVERSTEP_CHECKPOINT_EVERY_*)")
    parser.add_argument("--checkpoint", help="folder or URL (default: EVERSTEP_CHECKPOINT_URL)")
    main(parser.parse_args())
