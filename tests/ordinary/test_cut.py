"""Scripts whose model tensor parallelism has cut: two replicas of two processes each, with a rank killed. They end with
the bits of the undisturbed run, which are those of a run under torchrun, and near those of one process."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest
import torch

from support.agent.agent_job import Job
from support.ordinary.cut import LIMIT, SCRIPTS, SIZE, differences, found, under_agent, undisturbed
from support.ordinary.ordinary_play import DRIVER, _environ, parent_is_ready
from support.processes.ranks import Ranks
from support.processes.warm_python import warm

pytestmark = pytest.mark.timeout(360)
KILLS = ("0@5:backward", "1@5:gradients", "2@5:optimizer")
DISTRIBUTED = "__import__('torch.distributed.pipelining').distributed"
MORE = ("1@5:backward", "2@5:backward", "0@5:gradients", "2@5:gradients", "0@5:optimizer", "1@5:optimizer", "1@5:tail",
        "2@5:between")  # fmt: skip


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cut")


@pytest.mark.long
@pytest.mark.parametrize("kill", [*KILLS, *MORE])
def test_rank_killed_is_replaced_and_the_run_ends_with_the_undisturbed_bits(
    kill: str, tmp_path: Path, folder: Path
) -> None:
    code, log = under_agent(tmp_path / "killed", SCRIPTS / "tensor_parallel.py", kill)
    assert code == 0, log[-3000:]
    assert (tmp_path / "killed" / "killed").exists()
    assert differences(found(tmp_path / "killed"), undisturbed(folder, "tensor_parallel")) == ""
    assert len(list((tmp_path / "killed").glob("*.began"))) == SIZE + 1, "one process was replaced, and three went on"


@pytest.mark.long
@pytest.mark.parametrize("kill", ["1@5:gradients", "1@5:optimizer"])
def test_script_with_an_evaluation_ends_with_the_undisturbed_bits(kill: str, tmp_path: Path, folder: Path) -> None:
    """Members that voted and lost the answer, and a new one, meet about the evaluations too when a round begins."""
    script = tmp_path / "script.py"
    text = (SCRIPTS / "tensor_parallel.py").read_text()
    looked_at = "    run.evaluate(lambda: {'seen': 1.0}, every=3)\n    for step in"
    script.write_text(text.replace("    for step in", looked_at))
    code, log = under_agent(tmp_path / "killed", script, kill)
    assert code == 0, log[-3000:]
    assert (tmp_path / "killed" / "killed").exists()
    assert differences(found(tmp_path / "killed"), undisturbed(folder, "tensor_parallel")) == ""
    assert len(list((tmp_path / "killed").glob("*.began"))) == SIZE + 1, "one process was replaced, and three went on"


@pytest.mark.long
@pytest.mark.parametrize("kill", ["0@5:backward", "1@5:gradients", "3@5:optimizer"])
def test_sequence_parallel_script_with_groups_of_its_own_ends_with_the_undisturbed_bits(
    kill: str, tmp_path: Path, folder: Path
) -> None:
    # An embedding of eleven rows is cut unevenly; a norm's gradients are sums not yet made.
    code, log = under_agent(tmp_path / "killed", SCRIPTS / "sequence_parallel.py", kill)
    assert code == 0, log[-3000:]
    assert (tmp_path / "killed" / "killed").exists()
    assert differences(found(tmp_path / "killed"), undisturbed(folder, "sequence_parallel")) == ""
    assert len(list((tmp_path / "killed").glob("*.began"))) == SIZE + 1, "one process was replaced, and three went on"


@pytest.mark.long_but("2@5:optimizer")
@pytest.mark.parametrize("kill", ["0@5:backward", "2@5:optimizer"])
def test_agent_of_each_replica_replaces_its_own_process(
    kill: str, tmp_path: Path, folder: Path, etcd_endpoint: str
) -> None:
    parent_is_ready()
    with Job(
        tmp_path, etcd_endpoint, str(DRIVER), str(SCRIPTS / "tensor_parallel.py"), nodes="2",
        flags=("--nproc-per-node=2", "--max-restarts=0"), environ=_environ(tmp_path, kill),
    ) as job:  # fmt: skip
        job.start(2)
        job.until(lambda: all(a.process.poll() is not None for a in job.agents), "the agents do not end", LIMIT)
        assert [a.process.poll() for a in job.agents] == [0, 0]
    assert (tmp_path / "killed").exists()
    assert differences(found(tmp_path), undisturbed(folder, "tensor_parallel")) == ""


@pytest.mark.long
def test_shard_that_nobody_holds_comes_from_the_commit_in_the_same_processes(tmp_path: Path, folder: Path) -> None:
    code, log = under_agent(tmp_path / "killed", SCRIPTS / "tensor_parallel.py", "1@6:backward", size=2)
    assert code == 0, log[-3000:]
    assert "no state is whole" in log
    assert differences(found(tmp_path / "killed"), undisturbed(folder, "tensor_parallel", size=2)) == ""
    assert len(list((tmp_path / "killed").glob("*.began"))) == 2 + 1


@pytest.mark.long
@pytest.mark.parametrize("name", ["tensor_parallel", "sequence_parallel"])
def test_undisturbed_run_has_the_bits_of_one_under_torchrun(name: str, tmp_path: Path, folder: Path) -> None:
    parent_is_ready()
    environ = {**os.environ, **_environ(tmp_path, "")}
    ranks = Ranks(warm(), SIZE, (DRIVER, SCRIPTS / f"{name}.py"), tmp_path / "log", environ)
    try:
        ranks.wait(LIMIT)
    finally:
        ranks.kill()
    assert differences(found(tmp_path), undisturbed(folder, name)) == ""


@pytest.mark.long
def test_run_computes_what_one_process_does(tmp_path: Path) -> None:
    # Without dropout, which draws for other rows. Batches of nine: replicas have five and four, with their weights.
    script = tmp_path / "script.py"
    script.write_text((SCRIPTS / "tensor_parallel.py").read_text().replace("Dropout(0.1)", "Dropout(0.0)"))
    code, log = under_agent(tmp_path / "four", script)
    assert code == 0, log[-3000:]
    (tmp_path / "one").mkdir()
    environ = {**os.environ, **_environ(tmp_path / "one", "")}
    ended = warm().run(DRIVER, script, env=environ, timeout=LIMIT)
    assert ended.returncode == 0, ended.stderr
    (alone,) = (one["found"]["tracked model"] for one in found(tmp_path / "one"))
    first, second = (one["found"]["tracked model"] for one in found(tmp_path / "four")[:2])
    for name, whole in alone.items():
        axis = next((a for a, n in enumerate(whole.shape) if first[name].shape[a] != n), None)
        ours = first[name] if axis is None else torch.cat([first[name], second[name]], axis)
        assert torch.allclose(ours, whole, rtol=0, atol=1e-6), name


REFUSED = {
    "unaveraged": ("            run.average_gradients(model)\n", "", "model.1.up.weight .*run.average_gradients"),
    "unseeded": ("    torch.manual_seed(0)\n", "", "model.0.weight or another .*torch.manual_seed"),
    "buffers": ("LayerNorm", "BatchNorm1d", "model.1.norm.running_mean.*run.untracked"),
    "pipeline": (
        "    optimizer = ",
        f"    {DISTRIBUTED}.pipelining.PipelineStage(model, 0, 2, run.device)\n    optimizer = ",
        "PipelineStage .*run.mesh",
    ),
    "both": ("tensor=2", "tensor=2, shard=2", r"mesh\(shard=2, tensor=2\)"),
    "three": ("tensor=2", "tensor=3", "4 processes, which are no whole replicas"),
    "rng": ("every_steps=4", 'every_steps=4, rng="saved"', "leave `rng=` out"),
    "own-mesh": (
        "run.mesh(tensor=2)", f"{DISTRIBUTED}.device_mesh.init_device_mesh('cpu', (2, 1, 2))", r"run.mesh\(tensor=N",
    ),
    "fsdp": (
        "    optimizer = ",
        f"    {DISTRIBUTED}.fsdp.fully_shard(model, mesh=mesh['replicate'])\n    optimizer = ",
        "run.average_gradients",
    ),
    "ddp": (
        "    optimizer = ",
        "    torch.nn.parallel.DistributedDataParallel(model, device_mesh=mesh['replicate'])\n    optimizer = ",
        "run.average_gradients",
    ),
}  # fmt: skip


@pytest.mark.long_but("unseeded")
@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_right_is_refused_by_name(name: str, tmp_path: Path) -> None:
    old, new, said = REFUSED[name]
    script = tmp_path / "script.py"
    text = (SCRIPTS / "tensor_parallel.py").read_text()
    assert old in text
    script.write_text(text.replace(old, new, 1))
    code, log = under_agent(tmp_path / "run", script)
    assert code != 0
    assert re.search(f"(LoopError|NotRecoverable): .*{said}", log), log[-3000:]
