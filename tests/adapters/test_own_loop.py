"""Scripts in the form of Accelerate's examples recover in process, and keep their own loops.

`loop/before.py`, in the form of `nlp_example.py`, trains under torchrun; `loop/after.py` is the same file under
`everstep-run`. `loop/accumulated.py` is in the form of `run_glue_no_trainer.py`.
"""

from __future__ import annotations

import difflib
import re
from collections import Counter
from pathlib import Path

import pytest

from support.adapters.adapter_run import HERE
from support.adapters.unbroken_run import AGENT, SIZE, TORCHRUN, Played, differing
from support.adapters.unbroken_run import play as play_script

pytestmark = pytest.mark.timeout(600)

STEPS = {"after.py": 12, "accumulated.py": 12}
PRELOAD = "accelerate,accelerate.data_loader,everstep.train.adapters.accelerate"
GUIDE = Path(__file__).parents[2] / "docs" / "reference" / "adapters.md"


def play(
    folder: Path, script: str | Path = "after.py", kill: str = "-", agent: str = AGENT, restarts: int = 1
) -> Played:
    arguments = (folder, HERE / "loop" / script, kill)
    return play_script(folder, HERE / "loop_driver.py", *arguments, preload=PRELOAD, agent=agent, restarts=restarts)


_undisturbed: dict[str, Played] = {}


def undisturbed(script: str, tmp_path: Path) -> Played:
    if script not in _undisturbed:
        played = play(tmp_path / "undisturbed", script)
        assert played.code == 0, played.output[-4000:]
        assert [found["step"] for found in played.found] == [STEPS[script]] * SIZE
        assert all(found["as_before"] for found in played.found), "the classes and objects that were changed"
        _undisturbed[script] = played
    return _undisturbed[script]


@pytest.mark.long
@pytest.mark.parametrize(
    ("script", "kill"),
    [
        ("after.py", "4:backward"),
        ("after.py", "6:gather"),  # in an evaluation
        ("after.py", "0:backward"),
        ("after.py", "0:forward"),
        ("after.py", "3:forward"),  # before DDP sends its buffers
        ("after.py", "7:end"),  # optimizer moved, schedule not
        ("after.py", "11:backward"),  # of the last step, which has fewer samples
        ("after.py", "12:gather"),  # behind the last step
        ("accumulated.py", "4:backward1"),  # half of the step's gradient is there
        ("accumulated.py", "0:backward0"),
        ("accumulated.py", "3:forward1"),
        ("accumulated.py", "7:end1"),
        ("accumulated.py", "11:forward0"),
    ],
)
def test_script_with_its_own_loops_whose_rank_is_killed_ends_as_the_undisturbed_one(
    script: str, kill: str, tmp_path: Path
) -> None:
    reference = undisturbed(script, tmp_path)
    played = play(tmp_path / "killed", script, kill)
    assert played.code == 0, played.output[-4000:]
    assert (tmp_path / "killed" / "killed").exists()
    for rank, (found, wanted) in enumerate(zip(played.found, reference.found, strict=True)):
        # DDP sends rank 0's buffers before each forward pass; behind the last one each rank has its own.
        own = "running_" if kill.startswith("12:") and rank else "none"
        assert [name for name in differing(found, wanted) if own not in name] == []
    assert len(played.survivors) == SIZE - 1 + kill.startswith("0:"), "the others kept theirs"
    assert "the last commit" not in played.output
    if script == "accumulated.py":
        completed = sorted(map(int, re.findall(r"completed (\d+)", played.output)))
        assert completed == [STEPS[script]] * SIZE, "no step is counted twice, and none is forgotten"
        printed, expected = (re.findall(r"losses (\d\S+)", one.output) for one in (played, reference))
        assert printed == expected
        assert len(printed) == SIZE, "a tracked sum is whole in each process"
        taken = Counter[int]()
        for step, samples in re.findall(r"step (\d+) took (\d+)", played.output):
            taken[int(step)] += int(samples)
        expected_samples = ([24] * 5 + [21]) * 2
        if ":end" in kill:  # the others go on behind that step, and rank 1 had not printed its line
            expected_samples[int(kill.split(":", maxsplit=1)[0]) - 1] -= 8
        assert [taken[step] for step in range(STEPS[script])] == expected_samples, "a sum has each batch of a step once"


@pytest.mark.long
@pytest.mark.parametrize(
    ("script", "kill"),
    [
        ("after.py", "4:all"),
        ("after.py", "0:all"),
        ("after.py", "11:all"),
        ("accumulated.py", "4:all"),
    ],
)
def test_script_with_its_own_loops_whose_ranks_are_all_killed_goes_on_from_the_commit(
    script: str, kill: str, tmp_path: Path
) -> None:
    reference = undisturbed(script, tmp_path)
    played = play(tmp_path / "killed", script, kill)
    assert played.code == 0, played.output[-4000:]
    assert len(list((tmp_path / "killed").glob("killed*"))) == SIZE
    for found, wanted in zip(played.found, reference.found, strict=True):
        assert differing(found, wanted) == []


@pytest.mark.long
def test_number_of_processes_is_that_of_the_whole_job_before_a_script_trains(tmp_path: Path) -> None:
    """A batch of 4 and a schedule of 100 steps, as a script computes them from those of all processes."""
    reference, text = undisturbed("after.py", tmp_path), (HERE / "loop" / "after.py").read_text()
    for shown, here in (
        ('get_dataloaders(config["batch_size"])', "get_dataloaders(12 // accelerator.num_processes)"),
        ("CosineAnnealingLR(optimizer, 100)", "CosineAnnealingLR(optimizer, 300 // accelerator.num_processes)"),
    ):
        assert shown in text
        text = text.replace(shown, here)
    (tmp_path / "computed.py").write_text(text)
    played = play(tmp_path / "killed", tmp_path / "computed.py", "4:backward")
    assert played.code == 0, played.output[-4000:]
    assert (tmp_path / "killed" / "killed").exists()
    for found, wanted in zip(played.found, reference.found, strict=True):
        assert differing(found, wanted) == []


def test_length_of_a_prepared_loader_is_that_of_the_whole_job_before_a_script_trains(tmp_path: Path) -> None:
    """By it a script computes how long its schedule is."""
    text = (HERE / "loop" / "after.py").read_text()
    lengths = "len(train_dataloader), len(eval_dataloader)\n"
    for shown, here in (
        ("    run = start(", f"    before = {lengths}    run = start("),
        ("        model.train()\n", f"        model.train()\n        lengths = {lengths}"),
        ("    accelerator.end_training()\n", '    print("lengths", *before, *lengths)\n'),
    ):
        assert text.count(shown) == 1
        text = text.replace(shown, here)
    (tmp_path / "counted.py").write_text(text)
    played = play(tmp_path / "played", tmp_path / "counted.py", restarts=0)
    assert played.code == 0, played.output[-4000:]
    assert played.output.count("lengths 6 3 6 3") == SIZE, "69 and 20 samples, 4 and 3 in each process's batch"


@pytest.mark.long
def test_metric_of_an_evaluation_in_which_a_peer_is_lost_counts_each_sample_once(tmp_path: Path) -> None:
    played = play(tmp_path / "killed", "after.py", "6:later")
    assert played.code == 0, played.output[-4000:]
    assert (tmp_path / "killed" / "killed").exists()
    printed = dict(re.findall(r"epoch (\d): accuracy \S+ of (\d+)", played.output))
    assert printed == {"0": "20", "1": "20"}


def test_own_loops_cost_a_script_six_lines_which_the_reference_shows() -> None:
    """But for what is indented: the evaluation becomes a function, which makes its metric."""
    texts = ((HERE / "loop" / f"{name}.py").read_text().splitlines() for name in ("before", "after"))
    before, after = ([line.strip() for line in text if line.strip()] for text in texts)
    found = [line for line in difflib.unified_diff(before, after, n=0, lineterm="") if line[:3] not in ("---", "+++")]
    shown = [line for line in found if not line.startswith("@@")]
    assert len([line for line in shown if line.startswith("+")]) == 6
    assert "\n".join(shown) in GUIDE.read_text(), f"docs/reference/adapters.md is to show\n{shown}"


@pytest.mark.long
def test_script_with_its_own_loops_as_it_was_trains_under_torchrun(tmp_path: Path) -> None:
    played = play(tmp_path / "before", "before.py", agent=TORCHRUN, restarts=0)
    assert played.code == 0, played.output[-4000:]
    assert "of 20" in played.output


def test_own_loop_may_close_its_run_right_behind_the_loop(tmp_path: Path) -> None:
    """A collective of the script's own may follow, because the run is over."""
    script = tmp_path / "changed.py"
    text = (HERE / "loop" / "after.py").read_text()
    end = "    accelerator.end_training()\n"
    closed = "    run.close()\n    run.close()\n    print(f'closed after {run.completed}')\n"
    script.write_text(text.replace(end, closed + end))
    played = play(tmp_path / "closed", script, restarts=0)
    assert played.code == 0, played.output[-4000:]
    assert played.output.count("closed after 12") == SIZE


# By name: a text of `loop/after.py`, the text that takes its place, and a part of the refusal.
BODY = """        for inputs, labels in train_dataloader:
            outputs = model(inputs)
            loss = torch.nn.functional.cross_entropy(outputs, labels)
            accelerator.backward(loss)
"""
BACKWARD = "            accelerator.backward(loss)\n"
REFUSED = {
    "gather": (
        BACKWARD,
        BACKWARD + "            accelerator.gather(loss)\n",
        "accelerator.gather(…) (changed.py:54) is in the body of the loop over the prepared loader. If a peer is lost "
        "in it, the body ends with an error that Everstep cannot catch there. Write `with "
        "accelerator.accumulate(model):`",
    ),
    "collective": (
        BACKWARD,
        BACKWARD + "            torch.distributed.all_reduce(loss.detach())\n",
        "all_reduce (changed.py:54) is in the body of the loop over the prepared loader. If a peer is lost in it, the "
        "body ends with an error that Everstep cannot catch there. Write `with accelerator.accumulate(model):`",
    ),
    "loss.backward": (
        BACKWARD,
        "            loss.backward()\n",
        "without accelerator.backward(loss), which weights it: write it in the place of loss.backward()",
    ),
    "accumulation by hand": (
        BODY,
        BODY.replace(
            "for inputs, labels in train_dataloader", "for i, (inputs, labels) in enumerate(train_dataloader)"
        ).replace("loss)\n", "loss / 2)\n            if i % 2 == 0:\n                continue\n"),
        "Accelerator(gradient_accumulation_steps=k)",
    ),
    "a step left out": (
        "            optimizer.step()\n",
        "            if len(inputs) > 4:\n                optimizer.step()\n",
        "no prepared optimizer's step() was called",
    ),
    "accumulation without its block": (
        "Accelerator(cpu=True)",
        "Accelerator(cpu=True, gradient_accumulation_steps=2)",
        "write `with accelerator.accumulate(model):` around its work",
    ),
    "break": (
        BACKWARD,
        BACKWARD + "            break\n",
        "the loop over the prepared loader was left before its end, by break or return: the rest of the epoch would "
        "not be trained. To stop early, decide it by a value that is the same on all ranks",
    ),
    "early stopping": (
        BACKWARD,
        BACKWARD + "            if accelerator.check_trigger():\n                break\n",
        "accelerator.check_trigger(…) (changed.py:54) is in the body of the loop over the prepared loader. If a peer "
        "is lost in it, the body ends with an error that Everstep cannot catch there. Write `with "
        "accelerator.accumulate(model):` around the body of the loop",
    ),
    "train": (
        "        model.train()\n",
        "        run.train(model)\n",
        "write `for batch in loader:`, or pass model=, optimizer=, loader= to start",
    ),
    "two loaders": (
        "DataLoader(held, ",
        "DataLoader(held, shuffle=True, ",
        "say start(accelerator, …, loader=train_dataloader)",
    ),
    "SyncBatchNorm": (  # DDP takes it on an accelerator alone
        "    run = start(",
        "    accelerator._models.append(torch.nn.SyncBatchNorm(2))\n    run = start(",
        "SyncBatchNorm runs collectives in the forward pass",
    ),
    "nothing prepared": (
        "    run = start(",
        "    accelerator._models.clear()\n    run = start(",
        "call it after accelerator.prepare(model, optimizer, loader)",
    ),
}


@pytest.mark.long_but("accumulation by hand")
@pytest.mark.parametrize("name", REFUSED)
def test_own_loop_that_could_not_come_again_is_refused_with_the_line_to_write(name: str, tmp_path: Path) -> None:
    old, new, said = REFUSED[name]
    text = (HERE / "loop" / "after.py").read_text()
    assert text.count(old) == 1
    script = tmp_path / "changed.py"
    script.write_text(text.replace(old, new))
    played = play(tmp_path / "refused", script, restarts=0)
    assert played.code != 0
    assert said in played.output, played.output[-4000:]
    assert not played.found


@pytest.mark.long
def test_own_loop_that_changes_parameters_by_hand_goes_on_from_the_commit_and_says_what_to_write(
    tmp_path: Path,
) -> None:
    old = "            optimizer.zero_grad()\n"
    script = tmp_path / "changed.py"
    text = (HERE / "loop" / "after.py").read_text()
    script.write_text(text.replace(old, old + "            next(model.parameters()).data.mul_(0.5)\n"))
    played = play(tmp_path / "killed", script, "4:backward")
    assert played.code == 0, played.output[-4000:]
    assert "write `if accelerator.sync_gradients:` before what changes parameters" in played.output


def test_own_loop_that_adds_up_its_batches_is_warned_of_the_sum(tmp_path: Path) -> None:
    """A batch in which a peer is lost enters it twice, and a new process begins it anew."""
    script = tmp_path / "changed.py"
    text = (HERE / "loop" / "after.py").read_text()
    script.write_text(text.replace(BACKWARD, BACKWARD + '            config["seed"] += 1\n'))
    played = play(tmp_path / "played", script, "4:backward")
    assert played.code == 0, played.output[-4000:]
    assert "carried by the loop and not tracked: config['seed'] (changed.py:54). " in played.output


@pytest.mark.long
def test_own_loop_that_carries_what_nothing_tracks_is_refused_where_runs_are_strict(tmp_path: Path) -> None:
    script = tmp_path / "changed.py"
    strict = '    __import__("os").environ["EVERSTEP_STRICT"] = "1"; run = start('
    text = (HERE / "loop" / "after.py").read_text().replace("    run = start(", strict)
    script.write_text(text.replace(BACKWARD, BACKWARD + '            config["seed"] += 1\n'))
    played = play(tmp_path / "refused", script, restarts=0)
    assert played.code != 0
    assert "config['seed'] (changed.py:54)" in played.output
    assert "They are refused because the run is strict" in played.output


@pytest.mark.long
def test_own_loop_under_torchrun_is_refused_with_the_call_to_write(tmp_path: Path) -> None:
    played = play(tmp_path / "refused", agent=TORCHRUN, restarts=0)
    assert played.code != 0
    assert "works under everstep-run alone: here pass model=, optimizer=, loader=" in played.output
    assert not played.steps
