"""What ranks spend on comparing before a save, of 300 parameters with Adam's moments: CPU time of one rank.

The Checkpointer's comparison rides in the save's own description of a shard. That of the session has collectives of a
few numbers besides, which are not counted here.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from statistics import median

import torch
from figures import Better, Figure

from everstep.checkpoint.state.alike import digests, digests_of_samples
from everstep.checkpoint.state.capture import capture
from everstep.train.guards.replicas import Replicas

PARAMETERS, ROUNDS = 300, 200


def figures() -> list[Figure]:
    """The goals are those of a quiet machine."""
    torch.set_num_threads(1)
    model = torch.nn.ParameterList([torch.nn.Parameter(torch.randn(64, 64)) for _ in range(PARAMETERS)])
    optimizer = torch.optim.Adam(model.parameters())
    for p in model.parameters():
        p.grad = torch.rand_like(p)
    optimizer.step()
    state = {"model": model, "optimizer": optimizer}
    captured = capture(state, 0)
    replicas = Replicas(state, [])
    turn = 0

    def sample() -> None:
        nonlocal turn
        turn += 1
        digests_of_samples(state, captured, turn)

    measured: dict[str, tuple[Callable[[], object], float | None]] = {
        "samples": (sample, 1.0),
        "bytes": (lambda: digests(state, captured), None),
        "session": (lambda: replicas.before_save(2, lambda _: True), None),
    }
    return [
        Figure(f"comparing.{name}", _milliseconds(act, replicas), "ms", Better.LOWER, ROUNDS, goal=goal)
        for name, (act, goal) in measured.items()
    ]


def _milliseconds(act: Callable[[], object], replicas: Replicas) -> float:
    seconds = []
    for _ in range(ROUNDS):
        replicas.moved()  # so that nothing counts as compared
        begun = time.thread_time()
        act()
        seconds.append(time.thread_time() - begun)
    return median(seconds) * 1e3
