"""Tar files through a cache, a mixture and a stream in a session: kills and resizes change no sample and no order."""

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from everstep.data import ElasticLoader
from support.recovery import sources_script
from support.recovery.recovery_agents import Agents
from support.recovery.sources_script import LOADERS, Wanted

STEPS = 80
pytestmark = pytest.mark.timeout(300)
Play = Callable[..., Agents]


def begin(agents: Agents, count: int) -> None:
    """As `agents.begin`, with the time that it takes to import what is tested."""
    started = [agents.spawn(rank) for rank in range(count)]
    agents.wait(lambda: all(agents.said(p, "ready") for p in started), "processes did not get ready", 150)
    agents.announce(started)


def undisturbed(wanted: Wanted, cache: str) -> list[dict[str, list[int]]]:
    """What each step takes, in one process."""
    found: list[dict[str, list[int]]] = [{} for _ in range(STEPS)]
    for name, data in sources_script.sources(wanted, cache).items():
        loader = ElasticLoader(data, rank=0, world_size=1, **LOADERS[name])
        at = 0
        while at < STEPS:
            for batch in loader:
                found[at][name] = batch.data.tolist()
                at += 1
                if at == STEPS:
                    break
    return found


@pytest.mark.long
def test_kills_and_resizes_give_every_sample_once_in_the_undisturbed_order(play: Play, tmp_path: Path) -> None:
    sources_script.write(str(tmp_path))
    wanted = Wanted(STEPS, str(tmp_path))
    agents = play(wanted, script=sources_script.main)
    new = [agents.spawn(rank) for rank in (2, 3)]  # they wait; importing may take longer than all steps
    begin(agents, 3)

    def trained(steps: int) -> None:
        now = time.monotonic()
        agents.wait(lambda: agents.trained(agents.members, now, steps), "a member does not train")

    trained(8)
    agents.kill(agents.members[1])
    trained(8)
    agents.wait(lambda: all(agents.said(p, "ready") for p in new), "the new ones did not get ready", 150)
    agents.announce([*agents.members, *new], whole=True)
    trained(8)
    agents.kill(agents.members[0])
    agents.hurry()
    agents.wait(lambda: all(not p.process.is_alive() for p in agents.members), "the job did not end", 90)
    assert {p.process.exitcode for p in agents.members} == {0}
    steps: dict[int, dict[int, dict[str, Any]]] = {}
    for p in agents.all:
        for e in agents.steps(p):
            steps.setdefault(e["step"], {})[e["rank"]] = e
    assert sorted({e["world"] for ranks in steps.values() for e in ranks.values()}) == [2, 3, 4]
    alone = undisturbed(wanted, str(tmp_path / "cache"))
    compared = 0
    for number, ranks in sorted(steps.items()):
        if set(ranks) == set(range(ranks[min(ranks)]["world"])):  # a killed process may not have said its last step
            compared += 1
            for name in LOADERS:
                assert [i for r in sorted(ranks) for i in ranks[r]["seen"][name]] == alone[number - 1][name], number
    assert len(steps) == STEPS
    assert compared >= STEPS - 2


@pytest.mark.long
def test_stream_that_ranks_cut_for_themselves_is_refused(play: Play, tmp_path: Path) -> None:
    sources_script.write(str(tmp_path))
    agents = play(Wanted(STEPS, str(tmp_path), split=True), script=sources_script.main)
    begin(agents, 2)
    with pytest.raises(AssertionError, match="the ranks read other samples than each other from the same Stream"):
        agents.wait(lambda: False, "it ended")
