"""What an ordinary script asks of torch.distributed outside of its steps: right in each round, or refused by name."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from ordinary_scripts import play, said

pytestmark = pytest.mark.timeout(180)

OWN_GROUPS = """
with everstep.start() as run:
    gradients = dist.new_group()
    figures = dist.new_group(ranks=list(range(run.world_size)), backend="gloo")
    model = DistributedDataParallel(torch.nn.Linear(4, 1), process_group=gradients)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    run.track(model=model, optimizer=optimizer)
    for step in run.steps(until=12):
        with step:
            x = torch.randn(8, 4, generator=torch.Generator().manual_seed(step.number * 10 + run.rank))
            optimizer.zero_grad()
            model(x).square().mean().backward()
            if step.number == 6 and run.rank == 1:
                die()
            one = torch.ones(1)
            dist.all_reduce(one, group=figures)
            source = torch.tensor([float(run.rank)])
            dist.broadcast(source, src=2, group=figures)
            optimizer.step()
        if step.completed:
            say(step=run.step, sum=one.item(), source=source.item(), rank=dist.get_rank(figures),
                size=dist.get_world_size(gradients), world=run.world_size, main=run.rank)
    say(end=digest(model), rank=run.rank)
"""


def test_groups_of_all_ranks_are_made_anew_in_each_round(tmp_path: Path) -> None:
    ended = play(tmp_path, OWN_GROUPS)
    assert ended.returncode == 0, ended.stderr
    told = said(tmp_path)
    steps = [t for t in told if "step" in t]
    assert {t["sum"] for t in steps} == {3.0}
    assert {t["source"] for t in steps} == {2.0}
    assert all(t["size"] == t["world"] == 3 and t["rank"] == t["main"] for t in steps)
    ends = [t["end"] for t in told if "end" in t]
    assert len(ends) == 3
    assert ends[0] == ends[1] == ends[2]
    assert len(list(tmp_path.glob("*.jsonl"))) == 4  # one was killed


# Each is run before `steps`, with what is said of it.
REFUSED = {
    "dist.new_group([0])": "dist.new_group([0]) (<string>:1): a group of some ranks",
    "dist.new_group([0, 1])": "run.mesh(shard=N)",
    "dist.new_subgroups(1)": "dist.new_subgroups() (<string>:1): a group of some ranks",
    "dist.new_subgroups_by_enumeration([[0], [1, 2]])": "(<string>:1): a group of some ranks",
    "from torch.distributed.device_mesh import init_device_mesh; init_device_mesh('cpu', (1,))": "run.mesh(shard=N)",
    "from torch.distributed.device_mesh import DeviceMesh; DeviceMesh('cpu', [0])": "(<string>:1): a mesh",
    "from torch.distributed.fsdp import fully_shard; fully_shard(torch.nn.Linear(4, 4))": "run.mesh(shard=N)",
    "run.rank": "run.rank: before steps() nobody knows",
    "dist.get_world_size()": "dist.get_world_size() (<string>:1): before steps() nobody knows",
    "get_rank()": "dist.get_rank() (<string>:1)",
    "dist.barrier()": "barrier (<string>:1): before steps() this process is alone",
    "dist.all_reduce(torch.ones(1))": "all_reduce (<string>:1): before steps()",
    "dist.all_gather_object([None], 1)": "all_gather_object (<string>:1): before steps()",
    "dist.broadcast_object_list([1], src=0)": "broadcast_object_list (<string>:1): before steps()",
    "dist.init_process_group('gloo')": "dist.init_process_group() (<string>:1): everstep.start() has made",
    "DistributedDataParallel(torch.nn.Linear(1, 1)).join()": "run.loader, whose batch.scale weights them",
}
BUILDS = f"""
from torch.distributed import get_rank
with everstep.start() as run:
    for line in {list(REFUSED)!r}:
        try:
            exec(line)
        except everstep.LoopError as e:
            say(line=line, why=str(e))
    dist.is_initialized(), DistributedDataParallel(torch.nn.Linear(4, 1))
"""


def test_what_a_process_that_builds_alone_cannot_know_is_refused_with_the_line(tmp_path: Path) -> None:
    ended = play(tmp_path, BUILDS)
    assert ended.returncode == 0, ended.stderr
    told = said(tmp_path)
    for line, words in REFUSED.items():
        found = [t["why"] for t in told if t["line"] == line]
        assert len(found) == 3, f"{line}: {found}"  # on all ranks
        assert all(words in why for why in found), f"{line}: {found}"


def test_a_group_made_before_the_session_is_refused_with_its_line(tmp_path: Path) -> None:
    ended = play(tmp_path, "dist.init_process_group('gloo')\nwith everstep.start() as run:\n    pass\n")
    assert ended.returncode == 1
    assert re.search(
        r"LoopError: dist.init_process_group\(\) \(train.py:\d+\) came before everstep.start", ended.stderr
    )
