"""The fork server is fit to fork: one thread, no context of a GPU; and a module that spoils that is told apart."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from everstep.agent.processes.forkserver import unfit_to_fork
from support.processes.children import children
from support.processes.descriptors import opened
from support.processes.warm_python import warm

pytestmark = pytest.mark.timeout(120)

WAITS = (
    "import os, sys, time\n"
    "import torch\n"
    "print('cuda', torch.cuda.is_initialized(), 'spoils' in sys.modules, flush=True)\n"
    "time.sleep(100)\n"
)


@pytest.fixture
def started(tmp_path: Path) -> Iterator[object]:
    """`started(modules)`: an agent whose process waits; what the process said first."""
    agents: list[subprocess.Popen[str]] = []

    def start(modules: str) -> tuple[subprocess.Popen[str], str]:
        (tmp_path / "train.py").write_text(WAITS)
        environ = {**os.environ, "EVERSTEP_PRELOAD": modules}
        environ["PYTHONPATH"] = f"{tmp_path}:{environ.get('PYTHONPATH', '')}"
        agent = subprocess.Popen(
            [sys.executable, "-m", "everstep.agent.main", str(tmp_path / "train.py")],
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environ,
        )  # fmt: skip
        agents.append(agent)
        assert agent.stdout is not None
        return agent, agent.stdout.readline()

    yield start
    for agent in agents:
        agent.kill()
        agent.communicate(timeout=30)


def threads(pid: int) -> int:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith("Threads:")).split()[1])


def devices(pid: int) -> list[str]:
    return [name for name in opened(pid).values() if name.startswith("/dev/nvidia")]


@pytest.mark.long
def test_after_it_has_imported_torch_the_parent_has_one_thread_and_no_context_of_a_gpu(started: object) -> None:
    agent, said = started("torch,torch.distributed,torch._dynamo")  # type: ignore[operator]
    assert said == "cuda False False\n"
    (warm,) = children(agent.pid)
    assert threads(warm) == 1
    assert devices(warm) == []


@pytest.mark.long
@pytest.mark.parametrize(
    ("body", "why"),
    [
        ("import threading, time\nthreading.Thread(target=time.sleep, args=(1000,), daemon=True).start()", "starts 1"),
        # What a context of a GPU shows itself by, here where there is none.
        ("import torch\ntorch.cuda._initialized = True", "makes a CUDA context"),
    ],
)
def test_a_module_that_spoils_the_parent_is_named_and_left_to_the_processes(
    started: object, tmp_path: Path, body: str, why: str
) -> None:
    (tmp_path / "spoils.py").write_text(body + "\n")
    agent, said = started("torch,spoils")  # type: ignore[operator]
    assert said == "cuda False False\n", "the process has nothing of it that it did not import itself"
    (warm,) = children(agent.pid)
    assert threads(warm) == 1
    agent.kill()
    _, errors = agent.communicate(timeout=30)
    assert f"EVERSTEP_PRELOAD: spoils {why}" in errors
    assert "is imported in each process instead" in errors


def test_an_open_device_is_a_reason_not_to_fork(tmp_path: Path) -> None:
    (tmp_path / "fd").mkdir()
    (tmp_path / "fd" / "7").symlink_to("/dev/nvidia0")
    assert unfit_to_fork(str(tmp_path)) == "opens /dev/nvidia0"


def test_threads_that_are_no_reason_not_to_fork_are_known_by_their_names(tmp_path: Path) -> None:
    (tmp_path / "fd").mkdir()
    for number, name in enumerate(("python", "jemalloc_bg_thd", "worker")):
        (tmp_path / "task" / str(number)).mkdir(parents=True)
        (tmp_path / "task" / str(number) / "comm").write_text(f"{name}\n")
    assert unfit_to_fork(str(tmp_path)) == "starts 1 threads that go on"
    (tmp_path / "task" / "2" / "comm").unlink()
    assert unfit_to_fork(str(tmp_path)) is None


def test_a_process_that_was_spoiled_before_is_seen_until_its_thread_has_ended() -> None:
    program = (
        "import threading, time\n"
        "from everstep.agent.processes.forkserver import unfit_to_fork\n"
        "go = threading.Event()\n"
        "t = threading.Thread(target=go.wait)\n"
        "t.start()\n"
        "print(unfit_to_fork())\n"
        "go.set()\n"
        "t.join()\n"
        "until = time.monotonic() + 30\n"  # it is listed for a moment more
        "while unfit_to_fork() and time.monotonic() < until:\n    time.sleep(0.01)\n"
        "print(unfit_to_fork())\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False, timeout=60)
    assert done.stdout.splitlines() == ["starts 1 threads that go on", "None"], done.stderr


@pytest.mark.parametrize(
    "text",
    [
        "import atexit; atexit.register(print, 'over'); print('said')",
        "import threading, time; threading.Thread(target=lambda: (time.sleep(0.2), print('waited for'))).start()",
        "import sys; sys.exit(7)",
        "import sys; sys.exit('no such luck')",
        "raise ValueError('a mistake')",
    ],
)
def test_process_that_the_tests_begin_warm_ends_as_python_does(text: str) -> None:
    ours = warm().run("-c", text, timeout=100)
    theirs = subprocess.run([sys.executable, "-c", text], capture_output=True, text=True, check=False, timeout=60)
    assert (ours.returncode, ours.stdout) == (theirs.returncode, theirs.stdout)
    assert ours.stderr.splitlines()[-1:] == theirs.stderr.splitlines()[-1:]
