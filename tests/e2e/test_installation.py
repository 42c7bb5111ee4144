"""The chart is taken away under a running job and installed again, as by hand: no worker notices."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from support.e2e.driver import SYSTEM, Job
from support.e2e.install import install, uninstall
from support.scenarios.player import wait_for

PAUSE = 0.05
REST = 120.0  # seconds of training for the installation, a lost process, and a machine that does much else


@pytest.mark.long
@pytest.mark.kind
@pytest.mark.alone
@pytest.mark.parametrize(
    # Both are longer than every lease and every patience of a call; the second is as long as it takes by hand.
    ("script", "launcher", "away"),
    [("ledger", "everstep-run", 30.0), ("digits", "torchrun", 90.0)],
)
def test_chart_uninstalled_and_installed_under_a_running_job_ends_no_worker_and_charges_nothing(
    new_job: Callable[..., Job], script: str, launcher: str, away: float
) -> None:
    job = new_job()
    job.apply(workers=2, steps=int((away + REST) / PAUSE), pause=PAUSE, every=200, script=script, launcher=launcher)
    job.until_step(20)
    before = job.containers()
    assert len(before) == 2
    try:
        uninstall(job.cluster)
        assert job.cluster.kubectl("-n", SYSTEM, "get", "service", "everstep").returncode != 0
        reached = job.newest_step()
        # Steps tell the time: training goes on for so long, at its own pace, and nobody answers.
        trained = f"{away:g} s of steps without an operator"
        wait_for(trained, lambda: job.newest_step() >= reached + away / PAUSE, 4 * away, poll=2)
        assert job.containers() == before
    finally:
        install(job.cluster)
    reached = job.newest_step()
    job.wait("the new operator says newer steps", lambda: job.reached("progress.step") > reached)
    assert job.containers() == before
    job.expect_restarts("total", 0)
    # The round store that came is not only read: a process that is lost now is back.
    job.lose_processes(1)
    job.until_complete(seconds=360)
    job.expect_undisturbed()
    job.expect_restarts("userCode", 0)
