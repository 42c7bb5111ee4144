"""At a fixed size of three, a run that was disturbed ends with the bits of one that was not, in DDP's several buckets.

With three ranks, how gradients share buckets decides in which order gloo sums them. Real processes.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from multiprocessing.connection import wait as wait_for
from pathlib import Path
from typing import Any

import pytest

from everstep.checkpoint import Catalog
from everstep.storage import open_store
from support.recovery import bits_script, recovery_script
from support.recovery.recovery_agents import LIMIT, Agents, Process
from support.recovery.recovery_script import Wanted

pytestmark = pytest.mark.timeout(300)

Play = Callable[..., Agents]

BUCKETS = {"bucket_cap_mb": 0.01}  # the network of the script has three layers of 4 to 16 KiB
VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "views": {"gradient_as_bucket_view": True},
    "static": {"static_graph": True},
    "parts": {},  # of bits_script
    "unused": {"find_unused_parameters": True},  # the same
}
PARTS = ("parts", "unused")
STEPS = 24
CASES = [("plain", 1), ("plain", 12), ("views", 12), ("static", 12), ("parts", 1), ("unused", 12)]


def wanted(variant: str, **more: Any) -> Wanted:
    # torch's static graph does not go with `no_sync` in its first pass.
    micro_batch = 8 if variant == "static" else 4
    ddp = BUCKETS | VARIANTS[variant]
    return Wanted(steps=STEPS, plain=True, workers=0, collectives=False, micro_batch=micro_batch, ddp=ddp, **more)


def end(agents: Agents, p: Process) -> Any:
    return next((e for e in p.events(agents.folder) if e["kind"] == "end"), None)


def ended(agents: Agents) -> str:
    """What all members hold after their last step."""
    agents.wait(lambda: all(end(agents, p) for p in agents.members), "the run does not end")
    assert {end(agents, p)["step"] for p in agents.members} == {STEPS}
    (digest,) = {end(agents, p)["digest"] for p in agents.members}
    return str(digest)


def begin(play: Play, variant: str, **more: Any) -> Agents:
    script = bits_script.main if variant in PARTS else recovery_script.main
    return play(wanted(variant, **more), script=script)


def undisturbed(play: Play, variant: str) -> str:
    agents = begin(play, variant)
    agents.begin(3)
    return ended(agents)


def held(agents: Agents, step: int) -> None:
    """All members have made so many steps, and wait in the next."""
    agents.wait(lambda: all(len(agents.steps(p)) == step for p in agents.members), "a member does not train")


@pytest.mark.long_but("views-12")
@pytest.mark.parametrize(("variant", "step"), CASES)
def test_process_replaced_at_a_fixed_size_leaves_the_bits_as_they_were(play: Play, variant: str, step: int) -> None:
    agents = begin(play, variant, hold_at=step)
    agents.begin(3)
    new = agents.spawn(1)
    agents.wait(lambda: agents.said(new, "ready"), "the new process did not get ready")
    held(agents, step)
    first, victim, last = agents.members
    os.kill(victim.pid, signal.SIGKILL)
    wait_for([victim.process.sentinel], LIMIT)
    agents.announce([first, new, last])
    agents.hurry()
    assert ended(agents) == undisturbed(play, variant)


@pytest.mark.long
@pytest.mark.parametrize(("variant", "step"), CASES)
def test_job_restored_after_a_loss_of_all_ends_with_the_bits_of_an_undisturbed_one(
    play: Play, variant: str, step: int, tmp_path: Path
) -> None:
    stored: dict[str, Any] = {"url": str(tmp_path / "c"), "every_steps": step}
    lost = begin(play, variant, hold_at=step + 1, **stored)
    lost.begin(3)
    held(lost, step + 1)
    lost.wait(lambda: [c.step for c in Catalog(open_store(stored["url"])).list()] == [step], "nothing was committed")
    for p in lost.members:
        os.kill(p.pid, signal.SIGKILL)
    agents = begin(play, variant, **stored)
    agents.begin(3)
    digest = ended(agents)
    assert agents.steps(agents.members[0])[0]["step"] == step + 1, "it was not restored"
    assert digest == undisturbed(play, variant)
