"""What the ranks compare between steps, and what a commit may lack."""

from __future__ import annotations

import copy
import os
import re
import subprocess
import sys
from pathlib import Path

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
        r"different parameters, model\.\S+ among them: plateau \(ReduceLROnPlateau\) is in another state on each rank"
    )
    assert re.search(said, done.stderr), done.stderr
    assert "dist.all_reduce(loss); loss /= dist.get_world_size()" in done.stderr


@pytest.mark.long_but("everstep.agent.main")
@pytest.mark.parametrize("launcher", ["everstep.agent.main", "torch.distributed.run"])
def test_ranks_that_drift_apart_late_make_no_commit(launcher: str, tmp_path: Path) -> None:
    # They compare after the 8th and 16th step, and a save comes in between.
    script = tmp_path / "train.py"
    saving = PLATEAU.replace("start(None)", f"start({str(tmp_path / 'c')!r}, every_steps=4)")
    late = saving.replace("until=8", "until=15")
    script.write_text(late.replace("plateau.step(loss)", "plateau.step(loss) if step.number > 8 else None"))
    done = subprocess.run(
        [sys.executable, "-m", launcher, "--standalone", "--nproc-per-node=2", str(script), "its own"],
        capture_output=True, text=True, timeout=100, check=False, env={**os.environ, "GLOO_SOCKET_IFNAME": "lo"},
    )  # fmt: skip
    assert done.returncode == 1, done.stderr
    assert re.search(r"after step 1[2-5] of this world its 2 ranks hold different parameters, model\.\S+", done.stderr)
    assert [commit.step for commit in Catalog(open_store(str(tmp_path / "c"))).list()] == [8, 4]
