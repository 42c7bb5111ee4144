"""Scripts that divide their model over the ranks of a replica themselves, with process groups of their own: parts of
layers with an all-reduce in the forward and the backward pass, and a pipeline of two stages, by hand and as torch has
it. Two replicas of two processes each, with a rank killed: they end with the bits of the undisturbed run, which are
those under torchrun."""

from __future__ import annotations

import os
import re
import signal
from pathlib import Path

import pytest
import torch

from everstep.checkpoint import Catalog
from everstep.storage import open_store
from support.agent.agent_job import Job
from support.ordinary.cut import LIMIT, SCRIPTS, SIZE, differences, found, under_agent, undisturbed
from support.ordinary.ordinary_play import DRIVER, _environ, parent_is_ready
from support.processes.ranks import Ranks
from support.processes.warm_python import warm

pytestmark = pytest.mark.timeout(360)
PARTS, STAGES, FOUR = "own_tensor_parallel", "own_pipeline", "own_four_stages"
SCALED, UNEVEN, TORCHS = "own_scaled", "own_uneven", "torch_pipeline"
NAMES = (PARTS, STAGES)


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("own")


def began(folder: Path) -> int:
    return len(list(folder.glob("*.began")))


@pytest.mark.long_but("own_scaled-1@5:backward")
@pytest.mark.parametrize(
    ("name", "kill"),
    [
        (PARTS, "1@5:backward"),
        (PARTS, "2@5:optimizer"),
        (STAGES, "0@5:backward"),
        (STAGES, "3@5:gradients"),
        (SCALED, "1@5:backward"),
        (UNEVEN, "1@5:optimizer"),
        (TORCHS, "0@5:gradients"),
        (TORCHS, "3@5:begin"),
        *(
            (name, kill)
            for name in NAMES
            for kill in ("0@5:gradients", "1@5:optimizer", "1@5:tail", "2@5:between", "0+1@5:backward")
        ),
    ],
)
def test_rank_killed_is_replaced_and_the_run_ends_with_the_undisturbed_bits(
    name: str, kill: str, tmp_path: Path, folder: Path
) -> None:
    code, log = under_agent(tmp_path / "killed", SCRIPTS / f"{name}.py", kill)
    assert code == 0, log[-3000:]
    assert (tmp_path / "killed" / "killed").exists()
    assert differences(found(tmp_path / "killed"), undisturbed(folder, name)) == ""
    lost = 1 + kill.count("+")
    assert began(tmp_path / "killed") == SIZE + lost, "what was killed was replaced, and the others went on"


@pytest.mark.long
@pytest.mark.parametrize(("places", "kill"), [(2, "3@5:optimizer"), (3, "4@5:backward")])
def test_rank_of_six_is_replaced_in_three_replicas_of_two_and_two_of_three(
    places: int, kill: str, tmp_path: Path
) -> None:
    script = tmp_path / "script.py"
    text = (SCRIPTS / f"{PARTS}.py").read_text()
    assert "HIDDEN = 2," in text
    script.write_text(text.replace("HIDDEN = 2,", f"HIDDEN = {places},"))
    ended = []
    for folder, when in (("undisturbed", ""), ("killed", kill)):
        code, log = under_agent(tmp_path / folder, script, when, size=6)
        assert code == 0, log[-3000:]
        ended.append(found(tmp_path / folder))
    assert (tmp_path / "killed" / "killed").exists()
    assert len(ended[0]) == 6
    assert differences(ended[0], ended[1]) == ""
    assert began(tmp_path / "killed") == 6 + 1, "what was killed was replaced, and the others went on"


@pytest.mark.long
@pytest.mark.parametrize("name", NAMES)
def test_place_that_nobody_holds_comes_from_the_commit(name: str, tmp_path: Path, folder: Path) -> None:
    code, log = under_agent(tmp_path / "killed", SCRIPTS / f"{name}.py", "1@6:backward", size=2)
    assert code == 0, log[-3000:]
    assert "no state is whole" in log
    assert differences(found(tmp_path / "killed"), undisturbed(folder, name, size=2)) == ""
    first, second = (one["found"]["tracked model"] for one in undisturbed(folder, name, size=2))
    alike = {key for key in first if key in second and torch.equal(first[key], second[key])}
    assert alike != set(first), "the places hold other parameters than each other"


def agents(folder: Path, endpoint: str, script: Path, kill: str, nodes: str) -> Job:
    """Of a process each."""
    parent_is_ready()
    flags = ("--max-restarts=0",)
    return Job(
        folder, endpoint, str(DRIVER), str(script), nodes=nodes, flags=flags, environ=_environ(folder, kill)
    )  # fmt: skip


def end(job: Job) -> str:
    """Wait for all agents to end well; what they said."""
    job.until(lambda: all(a.process.poll() is not None for a in job.agents), "the agents do not end")
    log = "".join(a.log.read_text(errors="replace") for a in job.agents)
    codes = [a.process.poll() for a in job.agents]
    assert [code for code in codes if code != -signal.SIGKILL] == [0, 0], log[-3000:]
    return log


@pytest.mark.long
def test_process_of_another_agent_is_replaced_in_its_place(tmp_path: Path, folder: Path, etcd_endpoint: str) -> None:
    with agents(tmp_path, etcd_endpoint, SCRIPTS / f"{STAGES}.py", "1@6:backward", "2") as job:
        job.start(2)
        end(job)
    assert (tmp_path / "killed").exists()
    assert differences(found(tmp_path), undisturbed(folder, STAGES, size=2)) == ""


@pytest.mark.long
def test_process_that_is_given_another_place_ends_and_a_new_one_builds_that(tmp_path: Path, etcd_endpoint: str) -> None:
    # Of four agents the first and the last are lost: ranks 1 and 2 are ranks 0 and 1 then, and have built other places.
    script = tmp_path / "script.py"
    text = (SCRIPTS / f"{STAGES}.py").read_text().replace("optimizer.step()", "optimizer.step(), time.sleep(0.3)")
    script.write_text("import time\n" + text)
    with agents(tmp_path, etcd_endpoint, script, "", "2:4") as job:
        job.start(4)
        commits = tmp_path / "commits"
        job.until(lambda: commits.exists() and Catalog(open_store(str(commits))).latest(), "nothing is committed")
        ranked = {r: a for r in range(4) for a in job.agents if f"rank {r} of 4 agents" in a.log.read_text()}
        job.kill(ranked[0])
        job.kill(ranked[3])
        log = end(job)
    assert "its script has built what belongs to place 0" in log
    assert "its script has built what belongs to place 1" in log
    first, second = found(tmp_path)
    assert (first["step"], second["step"], first["world"]) == (12, 12, 2)
    # The first stage's layer has the shape that it was built with, and the last one's has: neither took the other's.
    assert first["found"]["tracked model"]["0.weight"].shape == (16, 8)
    assert second["found"]["tracked model"]["0.weight"].shape == (16,)


@pytest.mark.long
@pytest.mark.parametrize("name", [*NAMES, FOUR, SCALED, UNEVEN, TORCHS])
def test_undisturbed_run_has_the_bits_of_one_under_torchrun(name: str, tmp_path: Path, folder: Path) -> None:
    parent_is_ready()
    environ = {**os.environ, **_environ(tmp_path, "")}
    ranks = Ranks(warm(), SIZE, (DRIVER, SCRIPTS / f"{name}.py"), tmp_path / "log", environ)
    try:
        ranks.wait(LIMIT)
    finally:
        ranks.kill()
    assert differences(found(tmp_path), undisturbed(folder, name)) == ""


REFUSED = {
    "unaveraged": (STAGES, "            run.average_gradients(stage)\n", "", "are not averaged.*average_gradients"),
    "half": (
        PARTS, "    torch.manual_seed(0)\n", "    dist.new_group([0, 1])\n    torch.manual_seed(0)\n",
        r"dist\.new_group\(\[2, 3\]\) was left out.*range\(0, run\.world_size, 2\)",
    ),
    "apart": (  # as many on each rank, and of other meanings
        PARTS, "    torch.manual_seed(0)\n",
        "    for r in ([[0, 1], [2, 3]] if dist.get_rank(mine) else [[0, 2], [1, 3]]):\n        dist.new_group(r)\n",
        "rank 0's script made .*places 0, 1 of a replica: 1.*places 0, 1 of a replica: 2",
    ),
    "crossed": (
        PARTS, "list(range(first, first + PARTS))", "[0, 3] if first == 0 else [1, 2]",
        r"dist\.new_group\(\[0, 3\]\) \(script\.py:\d+\): a group of some ranks.*run\.mesh\(model=N\)",
    ),
    "no-mesh": (PARTS, "    run.mesh(model=PARTS)\n", "", r"a group of some ranks.*run\.mesh\(model=N\)"),
    "ddp": (
        PARTS, "    for step in", "    model = torch.nn.parallel.DistributedDataParallel(model)\n    for step in",
        r"DistributedDataParallel\(Sequential\).*run\.average_gradients",
    ),
    "in-step": (PARTS, "            loss.backward()\n", "            dist.new_group([0, 1])\n", "after steps.. began"),
    "names": (
        STAGES, "seen=seen)", "**({'seen': seen} if number else {}))",
        r"run\.track\(.*seen.*Each process must make the same.*buffer of a tracked module",
    ),
    "values": (
        STAGES, 'seen["loss"] += total.item()', 'seen["loss"] += number', "values of seen, which is tracked.*buffer",
    ),
    "scaled": (
        SCALED, "ShardedGradScaler(run.device.type, init_scale=64.0, growth_interval=4, process_group=replica)",
        'torch.amp.GradScaler("cpu", init_scale=64.0)',
        r"in step 3 ranks 1, 3 left the optimizer's step out.*ShardedGradScaler\(",
    ),
    "shapes": (
        TORCHS, "input_args=ends[0], output_args=ends[1], ", "",
        r"PipelineStage \(script\.py:\d+\): a stage that is not told its shapes.*input_args= and output_args=",
    ),
    "schedule": (
        TORCHS, "return Schedule1F1B(made, PARTS, loss_fn=loss_of)", "return made", "make.. returned a Pipeline",
    ),
    "rows": (
        TORCHS, "run.loader(data, ", "run.loader(torch.utils.data.Subset(data, range(92)), ",
        r"run\.pipeline: its (input|target) has 4 rows, and had 6\..*write `drop_last=True` in run\.loader",
    ),
    "type": (
        TORCHS, "hidden = torch.empty(rows, HIDDEN, ", "hidden = torch.empty(rows, HIDDEN, dtype=torch.float64, ",
        r"stage 0 returned float32 \[2, 16\], and its output_args= are float64 \[2, 16\]\..*type that the stage",
    ),
    "no-replicas": (
        TORCHS, "    mesh = run.mesh(model=STAGES)\n", "    run.pipeline(list)\n",
        r"run\.pipeline\(make\): write `run\.mesh\(model=N\)` before it",
    ),
    "untracked": (
        PARTS, "run.track(model=model, ", "run.track(model=model[0], ",
        r"model\.1\.up\) is trained by the tracked optimizer.*nothing that is tracked holds it",
    ),
}  # fmt: skip


@pytest.mark.long_but("half")
@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_right_is_refused_by_name(case: str, tmp_path: Path) -> None:
    name, old, new, said = REFUSED[case]
    script = tmp_path / "script.py"
    text = (SCRIPTS / f"{name}.py").read_text()
    assert old in text
    script.write_text(text.replace(old, new, 1))
    code, log = under_agent(tmp_path / "run", script)
    assert code != 0
    assert re.search(f"LoopError: .*{said}", log), log[-3000:]


@pytest.mark.long
@pytest.mark.parametrize(("size", "kill"), [(SIZE, "1@5:backward"), (2, "1@6:backward")])
def test_ddp_over_the_replicas_of_a_place_has_the_bits_of_averaging_by_hand(
    size: int, kill: str, tmp_path: Path, folder: Path
) -> None:
    text = (SCRIPTS / f"{PARTS}.py").read_text()
    by_hand = text[text.index("            for p in model.parameters():") : text.index("            total = ")]
    wrapped = "    model = torch.nn.parallel.DistributedDataParallel(model, process_group=replicas)\n    for step in"
    script = tmp_path / "script.py"
    script.write_text(text.replace(by_hand, "").replace("    for step in", wrapped))
    code, log = under_agent(tmp_path / "killed", script, kill, size=size)
    assert code == 0, log[-3000:]
    assert (tmp_path / "killed" / "killed").exists()
    ours, theirs = found(tmp_path / "killed"), undisturbed(folder, PARTS, size=size)
    for one in (*ours, *theirs):
        one["found"] = {key: value for key, value in one["found"].items() if key.startswith("tracked ")}
    assert differences(ours, theirs) == ""
