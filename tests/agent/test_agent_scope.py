"""What an ordinary script asks of torch.distributed outside of its steps: right in each round, or refused by name."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from everstep.checkpoint import Catalog
from everstep.storage import open_store
from support.agent.ordinary_scripts import play, said

pytestmark = pytest.mark.timeout(300)

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
                size=dist.get_world_size(gradients), world=run.world_size, main=run.rank,
                ranks=dist.get_process_group_ranks(dist.group.WORLD), own=dist.get_process_group_ranks(figures))
    say(end=digest(model), rank=run.rank)
"""


@pytest.mark.long
def test_groups_of_all_ranks_are_made_anew_in_each_round(tmp_path: Path) -> None:
    ended = play(tmp_path, OWN_GROUPS)
    assert ended.returncode == 0, ended.stderr
    assert ended.stderr.count("no checkpoint URL") == 1, "rank 0 alone says it"
    told = said(tmp_path)
    steps = [t for t in told if "step" in t]
    assert {t["sum"] for t in steps} == {3.0}
    assert {t["source"] for t in steps} == {2.0}
    assert all(t["size"] == t["world"] == 3 and t["rank"] == t["main"] for t in steps)
    assert all(t["ranks"] == t["own"] == [0, 1, 2] for t in steps)
    ends = [t["end"] for t in told if "end" in t]
    assert len(ends) == 3
    assert ends[0] == ends[1] == ends[2]
    assert len(list(tmp_path.glob("*.jsonl"))) == 4  # one was killed


# Each is run before `steps`, with what is said of it.
REFUSED = {
    "dist.new_group([0])": "dist.new_group([0]) (<string>:1): a group of some ranks",
    "dist.new_group([0, 1])": "run.mesh(model=N)",
    "dist.new_subgroups(2)": "dist.new_subgroups(2) (<string>:1): a group of some ranks",
    "dist.new_subgroups(1)": "(<string>:1): a group of some ranks",
    "dist.new_subgroups_by_enumeration([[0], [1, 2]])": "(<string>:1): a group of some ranks",
    "from torch.distributed.device_mesh import init_device_mesh; init_device_mesh('cpu', (1,))": "run.mesh(shard=N)",
    "from torch.distributed.device_mesh import DeviceMesh; DeviceMesh('cpu', [0])": "(<string>:1): a mesh",
    "from torch.distributed.fsdp import fully_shard; fully_shard(torch.nn.Linear(4, 4))": "run.mesh(shard=N)",
    "run.rank": "run.rank: before the loop a process has no rank yet",
    "dist.get_world_size()": "dist.get_world_size() (<string>:1): before the loop a process has no rank yet",
    "get_rank()": "dist.get_rank() (<string>:1)",
    "dist.get_process_group_ranks(dist.group.WORLD)": "dist.get_process_group_ranks() (<string>:1): before the loop",
    "dist.group.WORLD.size()": "group.size() (<string>:1): before the loop a process has no rank yet",
    "dist.new_group().rank()": "group.rank() (<string>:1): before the loop a process has no rank yet",
    "dist.get_global_rank(dist.new_group(), 0)": "dist.get_global_rank() (<string>:1): before the loop",
    "dist.get_group_rank(dist.new_group(), 0)": "dist.get_group_rank() (<string>:1): before the loop",
    "dist.split_group(split_ranks=[[0, 1], [2]])": "dist.split_group() (<string>:1): a group of some ranks",
    "dist.shrink_group([2])": "dist.shrink_group() (<string>:1): a group of some ranks",
    "dist.group.WORLD.split_group([0, 1])": "split_group() (<string>:1): a group of some ranks",
    "from torch.distributed.pipelining import PipelineStage; PipelineStage(torch.nn.Linear(4, 4), 0, 3, "
    "torch.device('cpu'))": "schedule = run.pipeline(make)",
    "dist.barrier()": "barrier (<string>:1): before the loop this process is alone",
    "dist.all_reduce(torch.ones(1))": "all_reduce (<string>:1): before the loop",
    "dist.all_gather_object([None], 1)": "all_gather_object (<string>:1): before the loop",
    "dist.broadcast_object_list([1], src=0)": "broadcast_object_list (<string>:1): before the loop",
    "dist.init_process_group('gloo')": "dist.init_process_group() (<string>:1): everstep.start() has made",
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


@pytest.mark.long
def test_what_a_process_that_builds_alone_cannot_know_is_refused_with_the_line(tmp_path: Path) -> None:
    ended = play(tmp_path, BUILDS)
    assert ended.returncode == 0, ended.stderr
    told = said(tmp_path)
    for line, words in REFUSED.items():
        found = [t["why"] for t in told if t["line"] == line]
        assert len(found) == 3, f"{line}: {found}"  # on all ranks
        assert all(words in why for why in found), f"{line}: {found}"


@pytest.mark.long
def test_rank_that_the_world_does_not_have_is_refused_with_the_line(tmp_path: Path) -> None:
    ended = play(
        tmp_path,
        """
with everstep.start() as run:
    peers = [run.world_size, run.world_size + 1]  # kept from a larger world
    for step in run.steps(until=2):
        with step:
            if run.rank == 0:
                dist.send(torch.ones(1), peers[0])
            elif run.rank == 1:
                dist.recv(torch.ones(1), peers[1])
""",
    )
    assert ended.returncode == 1
    for words in (r"dist.send\(\) with rank 3 \(train.py:\d+\)", r"dist.recv\(\) with rank 4 \(train.py:\d+\)"):
        if re.search(f"LoopError: {words}: this world has 3 ranks.*`run.rank \\+ 1`", ended.stderr):
            return  # the first of them ends the job
    raise AssertionError(ended.stderr)


@pytest.mark.long
def test_a_group_made_before_the_session_is_refused_with_its_line(tmp_path: Path) -> None:
    ended = play(tmp_path, "dist.init_process_group('gloo')\nwith everstep.start() as run:\n    pass\n")
    assert ended.returncode == 1
    assert re.search(
        r"LoopError: dist.init_process_group\(\) \(train.py:\d+\) came before everstep.start", ended.stderr
    )


EVALUATED = """
with everstep.start("commits") as run:
    first = run.once(lambda: (say(once=True), os.getpid())[1])
    here = run.once(lambda: (say(machine=True), time.sleep(0.5), os.getpid())[2], each="machine")
    model = DistributedDataParallel(torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.BatchNorm1d(4)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    run.track(model=model, optimizer=optimizer)

    def evaluate():
        ones = torch.ones(1)
        if run.step == 8 and run.rank == 1:
            die()
        dist.all_reduce(ones)
        torch.randn(3), model(torch.randn(8, 4))  # moves BatchNorm's buffers and the generators
        sums = [None] * run.world_size
        dist.all_gather_object(sums, run.rank)
        say(evaluated=run.step, ones=ones.item(), ranks=sums, pid=os.getpid())
        return {"ones": ones}

    def learn(batch):
        x = torch.randn(8, 4, generator=torch.Generator().manual_seed(run.step * 10 + run.rank))
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        say(value=first.value, here=here.value)
        return {"loss": loss}

    run.evaluate(evaluate, every=4)
    run.train(learn, until=10)
    say(end=digest(model), rank=run.rank, buffers=[float(b.double().sum()) for b in model.buffers()])
"""


@pytest.mark.long
def test_an_evaluation_whose_peer_is_lost_comes_again_on_all_members(tmp_path: Path) -> None:
    ends = []
    for name in ("undisturbed", "killed"):
        (tmp_path / name).mkdir()
        if name == "undisturbed":
            (tmp_path / name / "killed").touch()  # `die` does it once
        ended = play(tmp_path / name, EVALUATED)
        assert ended.returncode == 0, ended.stderr
        told = said(tmp_path / name)
        evaluations = [t for t in told if "evaluated" in t]
        assert all(t["ones"] == 3 and t["ranks"] == [0, 1, 2] for t in evaluations)
        assert {(t["evaluated"], t["pid"]) for t in evaluations} >= {
            (step, t["pid"]) for step in (8, 10) for t in evaluations if t["evaluated"] == 10
        }  # who came in the place of rank 1 has evaluated step 8, too
        assert sum("once" in t for t in told) == 1
        assert sum("machine" in t for t in told) == 1
        assert len({t["value"] for t in told if "value" in t}) == 1
        assert len({t["here"] for t in told if "here" in t}) == 1
        finals = {t["rank"]: t for t in told if "end" in t}
        assert finals[0]["end"] == finals[1]["end"] == finals[2]["end"]
        ends.append((finals[0]["end"], finals[0]["buffers"]))  # each rank's BatchNorm has its own
    assert len(list((tmp_path / "killed").glob("*.jsonl"))) == 4
    (weights, buffers), (again, buffers_again) = ends
    assert again == pytest.approx(weights, abs=1e-5)  # DDP lays its buckets out anew: other last bits
    assert buffers_again == pytest.approx(buffers, abs=1e-5)


LEFT = """
with everstep.start("commits") as run:
    model = DistributedDataParallel(torch.nn.Linear(4, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    run.track(model=model, optimizer=optimizer)
    for step in run.steps(until=100):
        with step:
            optimizer.zero_grad()
            model(torch.ones(1, 4)).sum().backward()
            if step.number == 3 and run.rank == 1:
                die()
            optimizer.step()
        if step.completed and run.step == 5 and WHO:
            HOW
"""


@pytest.mark.long_but("break")
@pytest.mark.parametrize("how", ["break", "sys.exit()"])
def test_a_loop_that_all_ranks_leave_is_complete_and_saved(how: str, tmp_path: Path) -> None:
    ended = play(tmp_path, LEFT.replace("WHO", "True").replace("HOW", how))
    assert ended.returncode == 0, ended.stderr
    assert [found.step for found in Catalog(open_store(str(tmp_path / "commits"))).list()] == [5]


@pytest.mark.long
def test_a_loop_that_one_rank_leaves_ends_by_name(tmp_path: Path) -> None:
    (tmp_path / "killed").touch()
    sooner = "from everstep.train import early_exit\nearly_exit.LEAST_SECONDS = 3.0\n"
    ended = play(tmp_path, sooner + LEFT.replace("WHO", "run.rank == 0").replace("HOW", "break"))
    assert ended.returncode == 1
    assert "LoopError: rank 0 left the loop after step 5, and ranks [1, 2] did not within" in ended.stderr
    assert Catalog(open_store(str(tmp_path / "commits"))).list() == ()


IN_STEPS = """
import threading
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
with everstep.start() as run:
    model = DistributedDataParallel(torch.compile(torch.nn.Linear(4, 1), backend="eager"))
    model.register_comm_hook(None, default_hooks.fp16_compress_hook)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    run.track(model=model, optimizer=optimizer)
    tried = []

    def attempt(name, call):
        try:
            call()
            tried.append((name, None))
        except everstep.LoopError as e:
            tried.append((name, str(e)))

    for step in run.steps(until=12):
        with step:
            optimizer.zero_grad()
            model(torch.ones(1, 4)).sum().backward()
            rank, size = dist.get_rank(), dist.get_world_size()
            right, left = (rank + 1) % size, (rank - 1) % size
            got = [torch.zeros(1) for _ in range(4)]
            mine = torch.tensor([float(rank)])
            sending = dist.isend(mine, right)
            if step.number == 6 and rank == 1:
                die()
            dist.recv(got[0], left)
            sending.wait()
            ops = [dist.P2POp(dist.isend, mine, left), dist.P2POp(dist.irecv, got[1], right)]
            for work in dist.batch_isend_irecv(ops):
                work.wait()
            if rank == 0:
                dist.send(mine + 7, 1)
            elif rank == 1:
                assert dist.recv(got[2]) == 0
            dist.monitored_barrier()
            all_of = [None] * size
            dist.all_gather_object(all_of, rank)
            one_of = [rank]
            dist.broadcast_object_list(one_of, src=2)
            gathered = [torch.zeros(1) for _ in range(size)] if rank == 0 else None
            dist.gather(mine, gathered, dst=0)
            parts = torch.zeros(1)
            dist.scatter(parts, [torch.tensor([float(i)]) for i in range(size)] if rank == 0 else None, src=0)
            reduced = torch.zeros(1)
            dist.reduce_scatter(reduced, [torch.ones(1) for _ in range(size)])
            crossed = [torch.zeros(1) for _ in range(size)]
            dist.all_to_all(crossed, [mine.clone() for _ in range(size)])
            if step.number == 8:
                thread = threading.Thread(target=attempt, args=("thread", dist.barrier))
                thread.start()
                thread.join()
            optimizer.step()
        if step.completed:
            say(step=run.step, left=got[0].item() == left, right=got[1].item() == right,
                zeroth=got[2].item() == (7 if rank == 1 else 0), all=all_of, one=one_of,
                gathered=gathered is None or [g.item() for g in gathered], part=parts.item() == rank,
                reduced=reduced.item(), crossed=[c.item() for c in crossed])
            if step.number == 9:
                attempt("between", lambda: dist.all_reduce(torch.ones(1)))
                attempt("group", dist.new_group)
                attempt("evaluate", lambda: run.evaluate(print, every=1))
    say(tried=tried, end=digest(model))
"""


@pytest.mark.long
def test_sends_and_objects_are_right_after_a_loss_and_what_nobody_repeats_is_refused(tmp_path: Path) -> None:
    ended = play(tmp_path, IN_STEPS)
    assert ended.returncode == 0, ended.stderr
    told = said(tmp_path)
    for step in (t for t in told if "step" in t):
        assert step["left"], step
        assert step["right"], step
        assert step["zeroth"], step
        assert step["part"], step
        assert step["all"] == step["crossed"] == [0, 1, 2]
        assert step["one"] == [2]
        assert step["gathered"] in (True, [0, 1, 2])
        assert step["reduced"] == 3
    ends = [t for t in told if "end" in t]
    assert len(ends) == 3
    assert ends[0]["end"] == ends[1]["end"] == ends[2]["end"]
    for end in ends:
        tried = dict(end["tried"])
        assert "is in the thread" in tried["thread"]
        assert "all_reduce (train.py:" in tried["between"]
        assert "is between two steps" in tried["between"]
        assert "after steps() began" in tried["group"]
        assert "before the loop" in tried["evaluate"]


HOOKED = """
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook
with everstep.start() as run:
    model = DistributedDataParallel(torch.nn.Linear(4, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    run.track(model=model, optimizer=optimizer)
    HOW
    for step in run.steps(until=3):
        pass
"""


@pytest.mark.long
@pytest.mark.parametrize(
    ("how", "words"),
    [
        (
            "model.register_comm_hook(powerSGD_hook.PowerSGDState(None), powerSGD_hook.powerSGD_hook)",
            "powerSGD_hook keeps what each rank has of its own in a PowerSGDState",
        ),
        ("model._register_builtin_comm_hook(dist.BuiltinCommHookType.FP16_COMPRESS)", "is built in"),
        ("model = torch.compile(model, backend='eager')", "`DistributedDataParallel(torch.compile(model))`"),
    ],
    ids=["powersgd", "builtin", "compiled"],
)
def test_ddp_that_cannot_go_on_in_another_round_is_refused_before_the_first_step(
    how: str, words: str, tmp_path: Path
) -> None:
    ended = play(tmp_path, HOOKED.replace("HOW", how))
    assert ended.returncode == 1
    assert "LoopError: " in ended.stderr
    assert words in ended.stderr
