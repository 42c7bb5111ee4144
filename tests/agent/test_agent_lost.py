"""State that is lost with a peer, though its process lives: nobody is charged, and training comes to the same end.

One agent with two processes, `--max-restarts=0`: a single failure that was charged would end the job.
"""

from __future__ import annotations

import json
import os
import re
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from support.agent.agent_job import HERE, LIMIT
from support.processes import warm_agent
from support.processes.warm_python import warm

pytestmark = pytest.mark.timeout(240)
SCRIPT = HERE / "gan_script.py"


class Run:
    """`everstep-run` of the script in a folder of its own."""

    def __init__(self, folder: Path, url: str, asked: tuple[str, ...], script: Path = SCRIPT) -> None:
        self.folder = folder
        folder.mkdir()
        for file in asked:
            (folder / file).touch()
        self.log = folder / "log"
        argv = [warm_agent.__file__, "--nproc-per-node=2", "--max-restarts=0", script, folder, url]
        with self.log.open("wb") as out:
            self.process = warm().popen(*argv, stdout=out, stderr=out, env={**os.environ, "GLOO_SOCKET_IFNAME": "lo"})

    def end(self) -> int:
        code = self.process.wait(LIMIT)
        return code

    def steps(self) -> dict[int, list[dict[str, Any]]]:
        """By process, in the order in which they were made."""
        return {
            int(path.stem): [json.loads(line) for line in path.read_text().splitlines()]
            for path in self.folder.glob("*.jsonl")
        }

    def final(self) -> set[str]:
        return {e["digest"] for steps in self.steps().values() for e in steps if e["step"] == 40}

    def until(self, text: str) -> None:
        deadline = time.monotonic() + LIMIT
        while text not in self.log.read_text():
            assert self.process.poll() is None, f"ended before {text!r}\n{self.log.read_text()[-4000:]}"
            assert time.monotonic() < deadline, f"no {text!r}\n{self.log.read_text()[-4000:]}"
            time.sleep(0.02)


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Callable[..., Run]]:
    made: list[Run] = []

    def start(name: str, url: str, *asked: str, script: Path = SCRIPT) -> Run:
        made.append(Run(tmp_path / name, url, asked, script))
        return made[-1]

    yield start
    for one in made:
        if one.process.poll() is None:
            one.process.kill()
            one.process.wait()


@pytest.mark.long
def test_step_of_two_optimizers_that_was_lost_between_them_is_repeated_in_the_process(run: Callable[..., Run]) -> None:
    still = run("still", "")
    assert still.end() == 0, still.log.read_text()
    lost = run("lost", "", "tear")
    assert lost.end() == 0, lost.log.read_text()
    assert lost.final() == still.final()
    said = lost.log.read_text()
    assert "copied when a step begins" in said
    steps = {pid: [e["step"] for e in told] for pid, told in lost.steps().items()}
    assert len(steps) == 3, said
    assert [*range(1, 41)] in steps.values(), "the survivor makes each step once"


@pytest.mark.long_but("from-the-start")
@pytest.mark.parametrize("saves", [True, False], ids=["from-the-commit", "from-the-start"])
def test_kill_between_two_optimizers_is_charged_to_nobody_and_changes_nothing(
    saves: bool, run: Callable[..., Run], tmp_path: Path
) -> None:
    still = run("still", "")
    assert still.end() == 0, still.log.read_text()
    torn = run("torn", str(tmp_path / "commits") if saves else "", "tear", "full")
    assert torn.end() == 0, torn.log.read_text()
    assert torn.final() == still.final()
    assert len(torn.final()) == 1
    said = torn.log.read_text()
    assert "SIGKILL" in said
    assert "lost its peers in the middle of what a step changes" in said
    steps = torn.steps()
    orders = {pid: [e["step"] for e in told] for pid, told in steps.items()}
    if saves:
        # The survivor keeps its process, and goes back to the last commit. The new one begins there.
        assert len(steps) == 3, said
        (back,) = [o for o in orders.values() if o[0] == 1 and o[-1] == 40]
        again = next(at for at in range(1, len(back)) if back[at] <= back[at - 1])
        assert back[again] in (6, 11, 16)
        assert "exit code 87" not in said
    else:
        # What there was is gone with the peer: both begin again.
        assert re.search(r"rank 0 .*exit code 87: it lost its peers", said), said
        assert sum(o == list(range(1, 41)) for o in orders.values()) == 2, orders


@pytest.mark.long
def test_state_that_arrives_damaged_costs_a_new_process_and_no_restart(run: Callable[..., Run], tmp_path: Path) -> None:
    job = run("job", "", "die", "mutate")
    job.until("fails its checksum")
    (job.folder / "mutate").unlink()
    assert job.end() == 0, job.log.read_text()
    assert "exit code 87" in job.log.read_text()
    assert len(job.final()) == 1


@pytest.mark.long
def test_peer_that_is_lost_behind_a_loop_that_was_left_costs_new_processes_and_no_restart(
    run: Callable[..., Run], tmp_path: Path
) -> None:
    ends = []
    for asked in ((), ("die",)):
        job = run("-".join(("job", *asked)), str(tmp_path / "-".join(("commits", *asked))), *asked,
                  script=HERE / "leaves_script.py")  # fmt: skip
        assert job.end() == 0, job.log.read_text()
        said = job.log.read_text()
        assert ("exit code 87" in said) == bool(asked), said
        ends.append(set(re.findall(r"ended at 12 with \S+", said)))
    assert len(ends[0]) == 1
    assert ends[0] == ends[1]
