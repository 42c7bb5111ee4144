"""The start-up probe of a worker's pod sees stock torchrun join a round, and everstep-run too."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from everstep.contract import env
from everstep_operator.api.types import TrainingJobSpec
from everstep_operator.plan.render import start_probe
from support.network.ports import Ports
from support.rendezvous.agents import until

pytestmark = [
    pytest.mark.timeout(420),
    pytest.mark.skipif(os.geteuid() != 0, reason="a process namespace of its own needs root"),
]

TEMPLATE = {"spec": {"containers": [{"name": "worker", "image": "i"}]}}


def command(**rendezvous: object) -> list[str]:
    given = {"replicas": 2, "rendezvous": {"backend": "c10d", **rendezvous}, "template": TEMPLATE}
    found: list[str] = start_probe.probe(TrainingJobSpec.model_validate(given))["exec"]["command"]
    return found


def in_a_container(shell: str, tmp_path: Path, **environ: str) -> subprocess.Popen[bytes]:
    """A process namespace, whose processes are all that the probe can see."""
    argv = ["unshare", "--pid", "--fork", "--mount-proc", "--kill-child", "sh", "-c", shell, "sh", *command()]
    env_ = {**os.environ, env.JOINED_FILE: str(tmp_path / "joined"), **environ}
    return subprocess.Popen(argv, cwd=tmp_path, env=env_, stdout=subprocess.DEVNULL)


def torchrun(port: int, place: int) -> str:
    flags = f"--nnodes=2 --nproc-per-node=1 --rdzv-backend=c10d --rdzv-endpoint=127.0.0.1:{port} --rdzv-id=probe"
    # c10d knows a launcher by its address and its process number, and each namespace counts its processes from 1.
    conf = f"--rdzv-conf=is_host={int(place == 0)},join_timeout=360 --local-addr=127.0.0.{place + 1}"
    return f"{Path(sys.executable).parent}/torchrun {flags} {conf} train.py"


@pytest.mark.long
def test_probe_succeeds_when_torchrun_has_joined_its_round_and_not_before(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("import time\ntime.sleep(600)\n")
    ports = Ports()
    port = ports.take()
    probe = 'touch began; "$@" && touch passed; wait'
    first = in_a_container(f"{torchrun(port, 0)} & {probe}", tmp_path)
    second = None
    try:
        until((tmp_path / "began").exists)
        until(lambda: listens(port), 180)
        assert not (tmp_path / "passed").exists()
        second = in_a_container(torchrun(port, 1), tmp_path)
        until((tmp_path / "passed").exists, 180)
    finally:
        for one in (first, second):
            if one is not None:
                one.kill()
                one.wait()
        ports.close()


def listens(port: int) -> bool:
    state = Path("/proc/net/tcp").read_text() + Path("/proc/net/tcp6").read_text()
    return any(f":{port:04X} " in line and " 0A " in line for line in state.splitlines())


def test_probe_succeeds_when_an_agent_has_written_that_it_joined(tmp_path: Path) -> None:
    made = in_a_container('touch began; "$@" && touch passed', tmp_path)
    try:
        until((tmp_path / "began").exists)
        assert not (tmp_path / "passed").exists()
        (tmp_path / "joined").touch()
        until((tmp_path / "passed").exists)
    finally:
        made.kill()
        made.wait()


@pytest.mark.parametrize("path", ["/nonexistent", ""], ids=["no grep", "no programs at all"])
def test_probe_of_an_image_that_shows_nothing_succeeds_at_once(tmp_path: Path, path: str) -> None:
    argv = ["unshare", "--pid", "--fork", "--mount-proc", *command()]
    done = subprocess.run([*argv[:4], "env", f"PATH={path}", *argv[4:]], cwd=tmp_path, timeout=60, check=False)
    assert done.returncode == 0


@pytest.mark.long
def test_probe_of_a_program_without_a_launcher_succeeds_when_a_rendezvous_would_be_given_up(tmp_path: Path) -> None:
    argv = ["unshare", "--pid", "--fork", "--mount-proc", *command(joinTimeoutSeconds=10)]
    done = subprocess.run(argv, cwd=tmp_path, timeout=120, check=False, env={"PATH": os.environ["PATH"]})
    assert done.returncode == 0
