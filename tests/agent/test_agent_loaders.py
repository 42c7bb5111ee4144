"""Ordinary DataLoaders under `everstep-run`: one process of three is killed, and the run ends as an undisturbed one."""

from __future__ import annotations

import os
import textwrap
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from support.processes import warm_agent
from support.processes.warm_python import warm

pytestmark = pytest.mark.timeout(240)
SIZE, SAMPLES, BATCH = 3, 50, 4

BEFORE = """
import os, signal, sys
import torch
import torch.distributed as dist
from torch.nn.functional import mse_loss
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, Dataset, TensorDataset, WeightedRandomSampler

import everstep

torch.set_num_threads(1)
torch.manual_seed(0)


class Points(Dataset):
    def __len__(self):
        return 50

    def __getitem__(self, i):  # augmented
        x = torch.tensor([i / 50, (i % 7) / 7, 1.0]) + 0.01 * torch.randn(3)
        return x, x.sum().reshape(1) ** 2, i


def die_once(step):
    if step.number == int(sys.argv[1]) and dist.get_rank() == 1 and not os.path.exists("killed"):
        open("killed", "w").close()
        os.kill(os.getpid(), signal.SIGKILL)


seen = {}


def learn(step, *batches):
    optimizer.zero_grad()
    loss = sum(b.scale(mse_loss(model(b.data[0]), b.data[1])) for b in batches)
    loss.backward()
    die_once(step)
    optimizer.step()
    seen[step.number] = [b.data[2].tolist()[: b.count] for b in batches]


with everstep.start() as run:
    model = DistributedDataParallel(torch.nn.Linear(3, 1))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    run.track(model=model, optimizer=optimizer)
"""
AFTER = """
    found = {"parameters": [p.detach() for p in model.parameters()], "seen": seen, "world": run.world_size}
    torch.save(found, f"{os.getpid()}.pt")
"""
PLAIN = """
    loader = DataLoader(Points(), batch_size=4, shuffle=True, num_workers=1)
    for step in run.steps(loader, until=10):
        with step as batch:
            learn(step, batch)
"""
DISTRIBUTED = """
    sampler = DistributedSampler(Points(), seed=3)
    loader = DataLoader(Points(), batch_size=4, sampler=sampler)
    for step in run.steps(loader, epochs=2):
        sampler.set_epoch(step.number // len(loader))
        with step as batch:
            learn(step, batch)
"""
WEIGHTED = """
    torch.manual_seed(os.getpid())  # each process draws its own
    loader = DataLoader(Points(), batch_size=4, sampler=WeightedRandomSampler([1.0] * 25 + [3.0] * 25, 50))
    for step in run.steps(loader, until=10):
        with step as batch:
            learn(step, batch)
"""
SEVERAL = """
    labelled, unlabelled = DataLoader(Points(), batch_size=4, shuffle=True), run.loader(Points(), global_batch=7)
    for step in run.steps((labelled, unlabelled), until=10):
        with step as (one, other):
            learn(step, one, other)
"""
EVALUATED = """
    loader = run.loader(Points(), global_batch=12)
    held_out = DataLoader(Points(), batch_size=4, sampler=DistributedSampler(Points(), shuffle=False))
    for step in run.steps(loader, until=10):
        with step as batch:
            learn(step, batch)
        if step.completed and step.number in (1, 9):
            mine = [i for _, _, rows in held_out for i in rows.tolist()]
            assert mine == (list(range(50)) + [0])[run.rank :: 3], mine
"""
COLLECTED = """
    import gc, threading, time

    class Collecting(Points):
        def __getitem__(self, i):
            if i < 2:  # a thread of the worker has the handle of one that the trainer had
                for _ in range(16):
                    threading.Thread(target=time.sleep, args=(60,), daemon=True).start()
                gc.collect()
            return super().__getitem__(i)

    gc.disable()  # no collector has run in the trainer when its loader forks
    loader = run.loader(Points(), global_batch=12)
    held_out = DataLoader(Collecting(), batch_size=None, num_workers=2)
    for step in run.steps(loader, until=10):
        with step as batch:
            learn(step, batch)
        if step.completed and step.number == 7:
            assert [i for _, _, i in held_out] == list(range(50))
"""
BY_HAND = """
    loader = DataLoader(Points(), batch_size=4, sampler=DistributedSampler(Points()))
    steps = run.steps(until=10)
    for x, y, i in loader:
        with next(steps) as step:
            optimizer.zero_grad()
            mse_loss(model(x), y).backward()
            optimizer.step()
"""


LOOPS = {
    "plain": PLAIN, "distributed": DISTRIBUTED, "weighted": WEIGHTED, "several": SEVERAL, "evaluated": EVALUATED,
    "collected": COLLECTED,
}  # fmt: skip


def play(folder: Path, loop: str, kill: int = -1) -> tuple[int, str, list[dict[str, Any]]]:
    folder.mkdir()
    (folder / "train.py").write_text(BEFORE + loop + AFTER)
    ended = warm().run(
        warm_agent.__file__, f"--nproc-per-node={SIZE}", "--max-restarts=0", "train.py", str(kill),
        cwd=folder, timeout=180, env={**os.environ, "GLOO_SOCKET_IFNAME": "lo"},
    )  # fmt: skip
    assert (folder / "killed").exists() == (kill >= 0), ended.stderr
    return ended.returncode, textwrap.dedent(ended.stderr), [torch.load(p) for p in folder.glob("*.pt")]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], list[dict[str, Any]]]:
    """What the processes of an undisturbed run of a loop end with; each is run once."""
    made: dict[str, list[dict[str, Any]]] = {}

    def find(name: str) -> list[dict[str, Any]]:
        if name not in made:
            code, log, ends = play(tmp_path_factory.mktemp("loaders") / name, LOOPS[name])
            assert code == 0, log
            made[name] = ends
        return made[name]

    return find


@pytest.mark.long
@pytest.mark.parametrize(("name", "kill"), [("plain", 0), *((name, 5) for name in LOOPS)])
def test_a_run_with_loaders_of_the_script_ends_alike_when_one_of_three_is_killed(
    name: str, kill: int, undisturbed: Callable[[str], list[dict[str, Any]]], tmp_path: Path
) -> None:
    code, log, disturbed = play(tmp_path / "disturbed", LOOPS[name], kill)
    assert code == 0, log
    of_loaders = "samples a step: batch_size=4 is that of one process"
    # Those of run.loader say their global batch. The process that takes the lost one's place says nothing again.
    assert log.count(of_loaders) == log.count(f"everstep: 3 processes x 4 samples = 12 {of_loaders}")
    assert log.count(of_loaders) == (name not in ("evaluated", "collected"))
    ends = [*disturbed, *undisturbed(name)]
    assert [end["world"] for end in ends] == [SIZE] * (2 * SIZE)
    if name != "weighted":  # who seeds by process has another order in each run
        for end in ends:
            torch.testing.assert_close(end["parameters"], ends[0]["parameters"], rtol=1e-5, atol=1e-6)
    for end in disturbed:
        assert all(torch.equal(a, b) for a, b in zip(end["parameters"], disturbed[0]["parameters"], strict=True))


@pytest.mark.long
@pytest.mark.parametrize("name", ["plain", "distributed"])
def test_ranks_share_each_epoch_with_no_sample_twice(
    name: str, undisturbed: Callable[[str], list[dict[str, Any]]]
) -> None:
    ends = undisturbed(name)
    steps = -(-SAMPLES // (BATCH * SIZE))
    for epoch in range(2):
        taken = Counter(
            i for end in ends for s in range(epoch * steps, epoch * steps + steps) for i in end["seen"][s][0]
        )
        assert taken == Counter(range(SAMPLES))


def test_a_loader_that_the_script_iterates_to_train_on_is_refused_by_name(tmp_path: Path) -> None:
    code, log, _ = play(tmp_path / "run", BY_HAND)
    assert code == 1, log
    assert "loader = DataLoader(Points, DistributedSampler) is iterated by the script itself, to train on" in log
    assert "run.steps(loader, …)" in log
