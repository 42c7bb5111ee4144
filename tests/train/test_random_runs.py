"""A run that was disturbed draws what an undisturbed one draws, and ends with the same bits.

Real processes, three ranks: under `everstep-run`, and in worlds as torchrun makes them, which end with one of them.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from support.processes import warm_agent
from support.processes.ranks import Ranks
from support.processes.warm_python import warm
from support.train.training_run import environment

pytestmark = pytest.mark.timeout(240)
SCRIPT = Path(__file__).with_name("random_script.py")


class Told:
    """What the processes of a run have said."""

    def __init__(self, folder: Path) -> None:
        said = [json.loads(line) for path in folder.glob("*.jsonl") for line in path.read_text().splitlines()]
        self.steps = sorted((e for e in said if e["kind"] == "step"), key=lambda e: e["at"])
        self.ends = {e["rank"]: e for e in said if e["kind"] == "end"}

    @property
    def drawn(self) -> dict[tuple[int, int], dict[str, float]]:
        """By step and rank, of the process that completed it last."""
        return {(e["step"], e["rank"]): e["drawn"] for e in self.steps}

    @property
    def parameters(self) -> set[str]:
        return {e["parameters"] for e in self.ends.values()}


def play(folder: Path, **wanted: Any) -> Told:
    """Under `everstep-run`."""
    folder.mkdir()
    command = (warm_agent.__file__, "--nproc-per-node=3", str(SCRIPT), json.dumps({"out": str(folder), **wanted}))
    ended = warm().run(*command, cwd=folder, timeout=200, env={**environment(), "GLOO_SOCKET_IFNAME": "lo"})
    assert ended.returncode == 0, ended.stderr[-4000:]
    return Told(folder)


def restart(folder: Path, ranks: int = 3, **wanted: Any) -> Told:
    """Begin such worlds until one ends well, as torchrun does."""
    folder.mkdir(exist_ok=True)
    codes = [1]
    for _ in range(1 + len(wanted.get("die", ()))):
        said = json.dumps({"out": str(folder), **wanted})
        world = Ranks(warm(), ranks, [SCRIPT, said], folder / "output.txt", environment())
        try:
            codes = world.wait(100)
        finally:
            world.kill()
        if not any(codes):
            break
    assert not any(codes), (folder / "output.txt").read_text()[-4000:]
    return Told(folder)


DEATHS = [[1, 3, "forward"], [0, 5, "backward"], [2, 8, "tail"], [1, 11, "between"]]


@pytest.mark.long_but("by rank")
@pytest.mark.parametrize("seeded", ["alike", "by rank"])
def test_run_with_lost_processes_draws_and_ends_as_an_undisturbed_one(seeded: str, tmp_path: Path) -> None:
    still = play(tmp_path / "still", seeded=seeded)
    disturbed = play(tmp_path / "disturbed", seeded=seeded, die=DEATHS, evaluate=True)
    assert len(list((tmp_path / "disturbed").glob("died-*"))) == len(DEATHS)
    assert len(still.parameters) == 1
    assert disturbed.parameters == still.parameters
    assert {rank: e["after"] for rank, e in disturbed.ends.items()} == {r: e["after"] for r, e in still.ends.items()}
    assert sorted(still.drawn) == [(step, rank) for step in range(14) for rank in range(3)]
    # A member that was given a step says nothing of it.
    for at, drawn in disturbed.drawn.items():
        assert drawn == still.drawn[at], at
    by_rank = seeded == "by rank"
    for name in ("torch", "numpy", "python", "torch_own", "shared"):
        differ = len({still.drawn[4, rank][name] for rank in range(3)}) == 3
        assert differ == (by_rank and name not in ("torch_own", "shared")), name


BY_RANK = pytest.mark.parametrize("seeded", ["alike", "by rank"])


@pytest.mark.long
@BY_RANK
def test_run_that_is_restarted_from_its_commits_ends_as_an_undisturbed_one(seeded: str, tmp_path: Path) -> None:
    still = play(tmp_path / "still", seeded=seeded)
    die = [[1, 6, "forward"], [0, 11, "tail"]]
    commits = str(tmp_path / "commits")
    disturbed = restart(tmp_path / "disturbed", seeded=seeded, die=die, url=commits, every_steps=2, evaluate=True)
    assert len(list((tmp_path / "disturbed").glob("died-*"))) == len(die)
    assert disturbed.parameters == still.parameters
    assert disturbed.drawn == still.drawn


@pytest.mark.long
def test_run_without_a_seed_goes_on_with_the_one_that_its_commits_hold(tmp_path: Path) -> None:
    play(tmp_path / "begin", seeded="not", url=str(tmp_path / "a"), until=4)
    shutil.copytree(tmp_path / "a", tmp_path / "b")
    still = play(tmp_path / "still", seeded="not", url=str(tmp_path / "a"))
    disturbed = play(tmp_path / "disturbed", seeded="not", url=str(tmp_path / "b"), die=DEATHS[1:])
    assert disturbed.parameters == still.parameters
    assert all(drawn == still.drawn[at] for at, drawn in disturbed.drawn.items())
    assert len({still.drawn[9, rank]["torch"] for rank in range(3)}) == 3
    other = play(tmp_path / "other", seeded="not", until=2)
    assert other.drawn[0, 0] != Told(tmp_path / "begin").drawn[0, 0]


@pytest.mark.long
@BY_RANK
def test_resized_run_draws_by_rank_what_a_run_of_that_size_draws(seeded: str, tmp_path: Path) -> None:
    still = play(tmp_path / "still", seeded=seeded)
    commits = str(tmp_path / "commits")
    for ranks, until in ((3, 4), (2, 9), (3, 14)):
        resized = restart(tmp_path / "resized", ranks, seeded=seeded, url=commits, until=until)
    found, expected = resized.drawn, still.drawn
    for step in range(4, 9):
        del expected[step, 2]
        for rank in range(2):  # two ranks read other samples each
            assert found[step, rank].pop("batch") != expected[step, rank].pop("batch")
    assert found == expected


@pytest.mark.long
def test_rank_as_the_option_lets_ranks_that_were_seeded_alike_draw_other_numbers(tmp_path: Path) -> None:
    found = play(tmp_path / "run", until=3, rng="rank").drawn
    for name in ("torch", "numpy", "python", "torch_own", "numpy_own", "python_own"):
        assert len({found[2, rank][name] for rank in range(3)}) == 3, name
    assert len({found[2, rank]["shared"] for rank in range(3)}) == 1
