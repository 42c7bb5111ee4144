"""What the ranks compare between steps, and what a commit may lack."""

from __future__ import annotations

import copy
import os
import re
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from everstep.checkpoint.retention.catalog import Catalog
from everstep.checkpoint.state.capture import apply
from everstep.recovery.errors import LoopError
from everstep.storage import open_store
from everstep.train.guards.replicas import Replicas
from everstep.train.guards.untracked.covered import Covered
from everstep.train.once import KEY, Onces


class Averaged:
    """What is told of a `DistributedDataParallel` object here."""

    def __init__(self, module: torch.nn.Module) -> None:
        self.module, self.parameters_to_ignore, self.broadcast_buffers = module, list[str](), True
        self.modules_buffers = list(module.buffers())


def test_averaged_parameters_that_differ_are_refused_before_a_save_and_after_the_last_step() -> None:
    one = torch.nn.Linear(2, 1)
    other = copy.deepcopy(one)
    told: list[int] = []
    first = Replicas({"model": one}, [Averaged(one)])  # type: ignore[list-item]
    second = Replicas({"model": other}, [Averaged(other)])  # type: ignore[list-item]

    def say(number: int) -> bool:
        told.append(number)
        return True

    for _ in range(2):
        first.completed(2, say)
        second.completed(2, lambda number: number == told[-1])
    with torch.no_grad():
        other.weight.add_(1)
    first.completed(2, say)
    second.completed(2, lambda number: number == told[-1])  # the third step is not compared
    first.before_save(2, say)
    with pytest.raises(LoopError, match=r"parameters, model\.weight among"):
        second.before_save(2, lambda number: number == told[-1])
    first.completed(2, say, last=True)
    with pytest.raises(LoopError, match=r"parameters, model\.weight among .* gradients.*run\.track\(kept=kept\)"):
        second.completed(2, lambda number: number == told[-1], last=True)


class World:
    """Ranks in threads, which compare numbers as a session's ranks do."""

    def __init__(self, size: int) -> None:
        self._here, self._rows = threading.Barrier(size), dict[int, tuple[int, ...]]()
        self.size, self.errors = size, dict[int, BaseException]()

    def play(self, each: Callable[[int, Callable[..., Any], Callable[[int], bool]], None]) -> None:
        def run(rank: int) -> None:
            def gather(numbers: Sequence[int]) -> list[tuple[int, ...]]:
                self._rows[rank] = tuple(numbers)
                self._here.wait(20)
                rows = [self._rows[r] for r in range(self.size)]
                self._here.wait(20)
                return rows

            try:
                each(rank, gather, lambda number: len(set(gather((number,)))) == 1)
            except BaseException as e:
                self.errors[rank] = e

        threads = [threading.Thread(target=run, args=(rank,)) for rank in range(self.size)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(30)


def stepped(rates: Sequence[float], gradients: Sequence[float], starts: Sequence[float]) -> dict[int, BaseException]:
    """The errors of ranks that make one step each."""

    def each(rank: int, gather: Any, same: Callable[[int], bool]) -> None:
        model = torch.nn.Linear(2, 1)
        with torch.no_grad():
            for p in model.parameters():
                p.fill_(starts[rank])
        optimizer = torch.optim.SGD(model.parameters(), lr=rates[rank])
        replicas = Replicas({"model": model, "optimizer": optimizer}, [])
        replicas.begins()
        for p in model.parameters():
            p.grad = torch.full_like(p, gradients[rank])
        optimizer.step()
        optimizer.zero_grad()
        replicas.completed(len(rates), same, gather)

    world = World(len(rates))
    world.play(each)
    return world.errors


@pytest.mark.parametrize(
    ("rates", "gradients", "starts", "text"),
    [
        ([1, 1, 2], [1, 1, 1], [0, 0, 0], "rank 2 apart from the others, though the optimizer stepped with the same"),
        ([1, 1, 1], [3, 1, 1], [0, 0, 0], "rank 0 apart from the others, as were 2 of the gradients with which"),
        ([1, 1, 1], [1, 1, 1], [0, 5, 0], "rank 1 apart from the others, different when the step began"),
        ([1, 2, 3], [1, 1, 1], [0, 0, 0], "on each rank, though the optimizer stepped with the same gradients"),
    ],
    ids=["rates", "gradients", "starts", "all"],
)
def test_refusal_says_which_ranks_differ_and_since_when(
    rates: list[float], gradients: list[float], starts: list[float], text: str, caplog: pytest.LogCaptureFixture
) -> None:
    errors = stepped(rates, gradients, starts)
    assert sorted(errors) == [0, 1, 2]
    for error in errors.values():
        assert isinstance(error, LoopError)
        assert f"model.weight among them (2 of 2, {text}" in str(error)
    lines = [line for line in caplog.messages if "digest of this rank's parameters when step 1 began" in line]
    assert len(lines) == len(rates), "one line of each rank"
    assert not any("not noted" in line for line in lines)


def test_ranks_that_are_equal_at_a_second_look_may_be_started_again() -> None:
    def each(rank: int, gather: Any, same: Callable[[int], bool]) -> None:
        Replicas({"model": model}, []).completed(2, lambda number: same(number) and False, gather)

    model = torch.nn.Linear(2, 1)
    world = World(2)
    world.play(each)
    for error in (world.errors[0], world.errors[1]):
        assert isinstance(error, LoopError)
        assert "at a second look all of them held the same" in str(error)
        assert not error.certain


def test_tensors_of_a_tracked_optimizer_are_held_where_a_checkpoint_was_loaded_into_it() -> None:
    weight = torch.nn.Parameter(torch.ones(2))
    older = torch.optim.AdamW([weight])
    weight.grad = torch.ones(2)
    older.step()
    saved = copy.deepcopy(older.state_dict())
    optimizer = torch.optim.AdamW([weight])
    optimizer.load_state_dict(saved)
    assert Covered({"optimizer": optimizer}).holds(saved["state"][0]["exp_avg"])


def test_buffers_of_a_tracked_module_of_torchscript_are_held() -> None:
    module = torch.jit.script(torch.nn.BatchNorm1d(3))
    covered = Covered({"module": module})
    assert all(map(covered.holds, (*module.parameters(), *module.buffers())))


def test_commit_of_a_script_without_once_is_gone_on_from_by_one_that_has_it() -> None:
    onces = Onces({})
    onces.add(lambda: 3, "job")
    apply({KEY: onces.results}, {"state": {}}, {}, 0)
    assert onces.results == {}
    assert not onces.done


PLATEAU = """
import sys
import torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
import everstep

torch.manual_seed(0)
with everstep.start(None) as run:
    model = DistributedDataParallel(torch.nn.Linear(1, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0)
    run.track(model=model, optimizer=optimizer, plateau=plateau)
    for step in run.steps(until=8):
        with step:
            model(torch.ones(1, 1)).mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            loss = torch.tensor(float(run.step if run.rank else -run.step))  # one falls, one rises
            if sys.argv[1] == "reduced":
                dist.all_reduce(loss)
                loss /= run.world_size
            plateau.step(loss)
"""


@pytest.mark.long_but("its own")
@pytest.mark.parametrize("fed", ["its own", "reduced"])
def test_plateau_that_is_given_each_ranks_own_loss_is_refused_by_its_name(fed: str, tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(PLATEAU)
    done = subprocess.run(
        [sys.executable, "-m", "everstep.agent.main", "--standalone", "--nproc-per-node=2", str(script), fed],
        capture_output=True, text=True, timeout=100, check=False, env={**os.environ, "GLOO_SOCKET_IFNAME": "lo"},
    )  # fmt: skip
    if fed == "reduced":
        assert done.returncode == 0, done.stderr
        return
    assert done.returncode == 1, done.stderr
    said = (
        r"different parameters, model\.\S+ among them \(2 of 2, on each rank, different when the step began\): "
        r"plateau \(ReduceLROnPlateau\) is in another state on each rank"
    )
    assert re.search(said, done.stderr), done.stderr
    assert "dist.all_reduce(loss); loss /= dist.get_world_size()" in done.stderr


COMMITTED = """
from everstep.checkpoint.retention.catalog import Catalog
from everstep.storage import open_store

def committed(url):
    return {commit.step for commit in Catalog(open_store(url)).list()}
"""


@pytest.mark.long_but("everstep.agent.main")
@pytest.mark.parametrize("launcher", ["everstep.agent.main", "torch.distributed.run"])
def test_ranks_that_drift_apart_late_make_no_commit(launcher: str, tmp_path: Path) -> None:
    # They compare after the 8th and 16th step, and a save comes in between.
    script = tmp_path / "train.py"
    saving = PLATEAU.replace("start(None)", f"start({str(tmp_path / 'c')!r}, every_steps=4)")
    # A script that ends by an error leaves its save in flight, so it waits for those of the steps before.
    waits = f"while run.step in (4, 8) and run.step not in committed({str(tmp_path / 'c')!r}): pass"
    late = saving.replace("until=8", "until=15").replace("        with step:", f"        {waits}\n        with step:")
    script.write_text(COMMITTED + late.replace("plateau.step(loss)", "plateau.step(loss) if step.number > 8 else None"))
    done = subprocess.run(
        [sys.executable, "-m", launcher, "--standalone", "--nproc-per-node=2", str(script), "its own"],
        capture_output=True, text=True, timeout=100, check=False, env={**os.environ, "GLOO_SOCKET_IFNAME": "lo"},
    )  # fmt: skip
    assert done.returncode == 1, done.stderr
    assert re.search(r"after step 1[2-5] of this world its 2 ranks hold different parameters, model\.\S+", done.stderr)
    assert [commit.step for commit in Catalog(open_store(str(tmp_path / "c"))).list()] == [8, 4]
