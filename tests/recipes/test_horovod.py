"""examples/horovod: unmodified Horovod scripts. The elastic one recovers in its processes, the other from its file."""

from __future__ import annotations

import ast
import random
import re
from pathlib import Path

import pytest
import torch

import everstep
from support.adapters import profiled
from support.recipes.kills import check_kill
from support.recipes.recipes import (
    EXAMPLES,
    PROGRAMS,
    Ended,
    RecipeFailed,
    differences,
    disturbed,
    kill,
    launched,
    loaded,
    undisturbed,
)
from support.recipes.recorded import record
from support.recipes.shared import SharedRuns

pytestmark = pytest.mark.timeout(300)
NAME = "horovod"
ARGUMENTS = ("--epochs", "2")  # of 15 commits
THROUGH = (Path("-m"), Path("everstep_horovod"))
KILLED = PROGRAMS / "horovod_killed.py"


@pytest.fixture(scope="module")
def calm(shared: SharedRuns) -> Ended:
    return shared(NAME, ARGUMENTS, through=THROUGH, EVERSTEP_CHECKPOINT_EVERY_STEPS="5")


@pytest.mark.long
def test_a_killed_worker_leaves_no_trace(tmp_path: Path, calm: Ended) -> None:
    check_kill(NAME, tmp_path, calm, ARGUMENTS, (5, 25))


# In each moment a survivor's state is another: of the last commit, steps behind it, or of a commit that others lack.
# With 4 batches for a commit the 17th step is in the second epoch, and the last commit, the third, in the first.
MOMENTS = [(4, "stepped:17:0", 3), (4, "step:11:1", 2), (1, "step:12:1", 11), (1, "committed:9:2", 9),
           (1, "step:8:1,settling:2:0", 7), (1, "step:8:0,settled:2:1", 7), (1, "finishing:1:2", 31)]  # fmt: skip


@pytest.mark.long
@pytest.mark.parametrize(("batches", "moments", "commits"), MOMENTS)
def test_survivors_keep_their_processes_and_all_go_on_from_the_last_commit(
    tmp_path: Path, shared: SharedRuns, batches: int, moments: str, commits: int
) -> None:
    arguments = (*ARGUMENTS, "--batches-per-commit", str(batches))
    calm = shared(NAME, arguments, through=THROUGH)
    hit = undisturbed(NAME, tmp_path, arguments, through=(KILLED, Path(moments)))
    assert processes(hit.output) == 3 + len(moments.split(",")), hit.output
    # A lost rank's gradients may have reached the others, or what they had computed may not have reached all of them.
    assert abs(int(re.findall(r"round \d+: step (\d+)", hit.output)[-1]) - commits) <= 1, hit.output
    assert differences(calm, hit) == []


@pytest.mark.long
def test_a_profile_measures_the_steps_of_each_rank_and_changes_none(tmp_path: Path, calm: Ended) -> None:
    seen = undisturbed(
        NAME, tmp_path, ARGUMENTS, through=(KILLED, Path("profile:6:0")), EVERSTEP_CHECKPOINT_EVERY_STEPS="5"
    )
    profiled.check(tmp_path, tmp_path / "commits", [0, 1, 2])
    assert differences(calm, seen) == []


@pytest.mark.long
def test_all_killed_workers_leave_no_trace(tmp_path: Path, calm: Ended) -> None:
    hit = undisturbed(
        NAME, tmp_path, ARGUMENTS, through=(KILLED, Path("step:12:all")), EVERSTEP_CHECKPOINT_EVERY_STEPS="5"
    )
    assert processes(hit.output) == 6, hit.output
    changed = differences(calm, hit)
    record(NAME, "values that a kill of all workers changes", len(changed), "")
    assert changed == []


@pytest.mark.long
def test_a_run_that_is_asked_to_stop_saves_and_goes_on_when_it_is_started_again(tmp_path: Path, calm: Ended) -> None:
    with pytest.raises(RecipeFailed, match="ended with 86"):
        undisturbed(NAME, tmp_path, ARGUMENTS, through=(KILLED, Path("term:7:1")))
    assert 7 <= everstep.load(tmp_path / "commits").step < calm.step
    assert differences(calm, undisturbed(NAME, tmp_path, ARGUMENTS, through=THROUGH)) == []


@pytest.mark.long
def test_a_run_goes_on_with_two_workers_and_takes_the_third_in_at_a_commit(tmp_path: Path) -> None:
    hit = disturbed(
        NAME, tmp_path, ("--epochs", "6"), at=[kill(NAME, 5, 25)], through=(KILLED, Path("small:1:3")), elastic="2:3"
    )
    sizes = [line["size"] for line in hit.history() if line["kind"] == "status" and line.get("size")]
    assert [size for size, before in zip(sizes, [0, *sizes], strict=False) if size != before] == [3, 2, 3], hit.output
    printed = "".join(file.read_text() for file in (tmp_path / "out" / "logs").glob("*.log"))
    assert processes(printed) == 4, printed
    ends = re.findall(r"(\d) ranks end with (\w+)", printed)
    assert [size for size, _ in ends] == ["3"] * 3, printed
    assert len(set(ends)) == 1, printed
    assert hit.state["values"]["values"]["epoch"] == 5
    assert hit.state["sampler"]["epoch"] == 6


@pytest.mark.long
def test_an_elastic_script_that_is_taken_for_another_begins_again_from_its_newest_commit(
    tmp_path: Path, calm: Ended
) -> None:
    """As under torchrun: the processes form one process group, and all are started again."""
    saves = {"EVERSTEP_CHECKPOINT_EVERY_STEPS": "5", "EVERSTEP_HOROVOD_ELASTIC": "0"}
    printed = launched(tmp_path, 3, [KILLED, "step:12:1", EXAMPLES / NAME / "train.py", *ARGUMENTS], **saves)
    assert processes(printed) == 6, printed
    assert differences(calm, loaded(tmp_path, printed)) == []


def processes(output: str) -> int:
    return len(set(re.findall(r"process (\d+) has begun", output)))


def plain(folder: Path, *through: str | Path) -> dict[str, object]:
    """The content of the last file of the script that is not elastic. The program around it names what is elastic."""
    script = [*through, EXAMPLES / NAME / "plain.py", "--epochs", "3"]
    printed = launched(folder, 3, script, EVERSTEP_HOROVOD_ELASTIC="0")
    assert "accuracy" in printed
    found: dict[str, object] = torch.load(folder / "checkpoint-2.pt")
    return found


def test_a_script_that_is_not_elastic_begins_again_from_its_own_file(tmp_path: Path) -> None:
    chance = random.Random(NAME)
    at, victim = chance.randint(20, 40), chance.randrange(3)
    expected = flat(plain(tmp_path / "calm", KILLED, "profile:6:0"))
    profiled.check(tmp_path / "calm", tmp_path / "calm" / "commits", [0, 1, 2])
    found = flat(plain(tmp_path / "hit", KILLED, f"step:{at}:{victim}"))
    assert (tmp_path / "hit" / f"killed-step-{at}-{victim}").exists()
    assert expected.keys() == found.keys()
    different = [n for n, v in expected.items() if not torch.equal(torch.as_tensor(v), torch.as_tensor(found[n]))]
    record(NAME, "values that a kill changes in the script that is not elastic", len(different), "")
    assert different == []


def flat(value: object, name: str = "") -> dict[str, object]:
    match value:
        case dict():
            return {k: v for key, item in value.items() for k, v in flat(item, f"{name}/{key}").items()}
        case list():
            return flat(dict(enumerate(value)), name)
        case None:
            return {}
    return {name: value}


def test_no_line_of_the_scripts_is_everstep() -> None:
    own = []
    for file in ("train.py", "plain.py"):
        text = (EXAMPLES / NAME / file).read_text()
        documented = ast.get_docstring(ast.parse(text), clean=False) or ""
        own += [line for line in text.replace(documented, "").splitlines() if "everstep" in line.lower()]
    record(NAME, "lines of the scripts that are Everstep's", len(own), "")
    assert own == []
