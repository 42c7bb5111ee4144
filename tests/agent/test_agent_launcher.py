"""What `everstep-run` does as torchrun does: how many processes, alone on a machine, first errors, binding to CPUs."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import pty
import select
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from torch.distributed.run import determine_local_world_size

from everstep.agent.processes.client import ForkServer

pytestmark = pytest.mark.timeout(120)
COUNT = "import os\nprint(os.environ['LOCAL_WORLD_SIZE'])\n"


def run(
    *argv: str | Path, prefix: tuple[str, ...] = (), cwd: Path | None = None, **environ: str
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*prefix, sys.executable, "-m", "everstep.agent.main", *map(str, argv)],
        capture_output=True, text=True, timeout=100, check=False, cwd=cwd,
        env={**os.environ, "EVERSTEP_PRELOAD": "", "GLOO_SOCKET_IFNAME": "lo", **environ},
    )  # fmt: skip


@pytest.fixture
def script(tmp_path: Path) -> Path:
    return tmp_path / "train.py"


# --- how many processes


@pytest.mark.long
@pytest.mark.parametrize("wanted", ["auto", "cpu"])
def test_as_many_processes_as_torchrun_would_start(script: Path, wanted: str) -> None:
    script.write_text(COUNT)
    done = run(f"--nproc-per-node={wanted}", script)
    count = determine_local_world_size(wanted)
    assert (done.returncode, done.stdout) == (0, f"{count}\n" * count), done.stderr


@pytest.mark.long
def test_cpus_that_the_agent_may_not_use_are_not_counted(script: Path) -> None:
    script.write_text(COUNT)
    one = str(min(os.sched_getaffinity(0)))
    done = run("--nproc-per-node=cpu", script, prefix=("taskset", "-c", one))
    assert (done.returncode, done.stdout) == (0, "1\n"), done.stderr


@pytest.mark.long
def test_a_gpu_that_is_not_there_is_named_and_nothing_is_started(script: Path) -> None:
    script.write_text(COUNT)
    done = run("--nproc-per-node=gpu", script, CUDA_VISIBLE_DEVICES="")
    assert (done.returncode, done.stdout) == (2, "")
    assert "--nproc-per-node=gpu: torch sees no GPU on this machine; give a number" in done.stderr


# --- as the interpreter runs it


def test_annotations_of_the_script_are_what_it_wrote(script: Path) -> None:
    """torch refuses a communication hook whose `bucket: dist.GradBucket` is a text; dataclasses read them too."""
    script.write_text("def hook(bucket: int) -> float: ...\nprint(hook.__annotations__)\n")
    done = run("--standalone", script)
    assert done.stdout == "{'bucket': <class 'int'>, 'return': <class 'float'>}\n", done.stderr


def test_the_main_module_is_described_as_the_interpreter_does_it(script: Path) -> None:
    names = ("__name__", "__file__", "__package__", "__spec__", "__doc__", "__cached__", "__annotations__")
    script.write_text(
        f"'a script'\nprint([globals()[n] for n in {names}], type(__loader__).__name__, __loader__.path)\n"
    )
    plain = subprocess.run(
        [sys.executable, script.name], cwd=script.parent, capture_output=True, text=True, timeout=100, check=True
    )
    done = run("--standalone", script.name, cwd=script.parent)
    assert done.stdout == plain.stdout, done.stderr


def test_builtins_of_the_main_module_are_a_module(script: Path) -> None:
    """Scripts that replace `print` on other ranks write `__builtins__.print = …`."""
    script.write_text("__builtins__.print('hello')\n")
    assert run("--standalone", script).stdout == "hello\n"


def test_classes_of_a_module_that_is_run_are_found_after_its_last_line(tmp_path: Path) -> None:
    """A thread that still writes a checkpoint, or a function of atexit, pickles them."""
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "train.py").write_text(
        "import atexit, pickle, sys\nclass State: ...\n"
        "atexit.register(lambda: print(type(pickle.loads(pickle.dumps(State()))) is State, sys.argv))\n"
    )
    plain = subprocess.run(
        [sys.executable, "-m", "package.train", "a"],
        cwd=tmp_path, capture_output=True, text=True, timeout=100, check=True,
    )  # fmt: skip
    done = run("--standalone", "-m", "package.train", "a", cwd=tmp_path)
    assert plain.stdout.startswith("True")
    assert done.stdout == plain.stdout, done.stderr


def test_script_that_reads_a_terminal_gets_an_error_and_is_not_stopped_for_ever(script: Path) -> None:
    """It runs in the background of the terminal, where a read stops a process by default."""
    script.write_text("input('continue? ')\n")
    pid, terminal = pty.fork()
    if pid == 0:
        os.environ["EVERSTEP_PRELOAD"] = ""
        os.execv(sys.executable, [sys.executable, "-m", "everstep.agent.main", str(script)])
    said, until = b"", time.monotonic() + 60
    with contextlib.suppress(OSError):  # all that had the terminal open have ended
        while time.monotonic() < until:
            if select.select([terminal], [], [], 1.0)[0]:
                said += os.read(terminal, 65536)
    os.close(terminal)  # hangs up: what is left of it ends
    _, status = os.waitpid(pid, 0)
    assert b"EOFError" in said, said.decode()
    assert os.waitstatus_to_exitcode(status) == 1


# --- alone


def test_standalone_processes_find_each_other_and_reduce(script: Path) -> None:
    script.write_text(
        "import torch, torch.distributed as dist\n"
        "dist.init_process_group('gloo')\n"
        "t = torch.ones(1) * (dist.get_rank() + 1)\n"
        "dist.all_reduce(t)\n"
        "print(int(t))\n"
        "dist.destroy_process_group()\n"
    )
    done = run("--standalone", "--nproc-per-node=2", script, EVERSTEP_PRELOAD="torch,torch.distributed")
    assert (done.returncode, done.stdout) == (0, "3\n3\n"), done.stderr


# --- a refusal


@pytest.mark.long_but("raise refused from None-1")
@pytest.mark.parametrize(
    ("ends", "starts"),
    [
        ("raise refused from None", 1),
        ("raise refused from KeyError('fc.weight')", 1),
        ("raise ValueError('no data') from refused", 1),
        ("try: raise refused\nexcept StateMismatch: raise ValueError('no data')", 1),
        ("try: raise refused\nexcept StateMismatch as e: sys.exit(3)", 1),
        ("raise ExceptionGroup('threads', [refused])", 1),
        ("try: raise refused\nfinally: raise ValueError('cannot close')", 1),
        ("raise refused from OSError('the store is away')", 3),  # a restart may heal that
    ],
)
def test_refusal_is_final_whatever_way_it_leaves_the_script(script: Path, ends: str, starts: int) -> None:
    said = "fc.weight has another shape"
    script.write_text(
        f"import sys\nfrom everstep.checkpoint.errors import StateMismatch\nprint('start')\n"
        f"refused = StateMismatch('{said}')\n{ends}\n"
    )
    done = run("--standalone", "--max-restarts=2", script)
    assert (done.returncode, done.stdout.split()) == (1, ["start"] * starts), done.stderr
    if starts == 1:
        assert "the script is refused, and not restarted" in done.stderr
        lines = [line for line in done.stderr.splitlines() if line.strip()]
        assert said in lines[-1]
        assert said in next(line for line in lines if "refused" in line)


@pytest.mark.long
def test_refusal_of_all_ranks_is_printed_once_and_briefly(script: Path) -> None:
    script.write_text(
        "from everstep.checkpoint.errors import StateMismatch\n"
        "def train():\n    raise StateMismatch('fc.weight has another shape')\ntrain()\n"
    )
    done = run("--standalone", "--nproc-per-node=4", script)
    printed = [line for line in done.stderr.splitlines() if "everstep-run: " not in line]
    assert done.stderr.count("everstep: refused: ") == 1, done.stderr
    (first,) = (n for n, line in enumerate(printed) if "everstep: refused: " in line)
    assert printed[first + 1].endswith(f'File "{script}", line 4, in <module>')
    assert len(printed) <= 5 + 3, done.stderr
    assert all("everstep: refused as rank" in line for line in printed[:first] + printed[first + 5 :]), done.stderr
    assert "fc.weight has another shape" in done.stderr.splitlines()[-1]


@pytest.mark.long
def test_refusal_and_error_of_one_rank_each_are_printed_both_with_their_ranks(script: Path, tmp_path: Path) -> None:
    """Each rank prints before it lets the other one do so, and ends when both have."""
    script.write_text(
        "import atexit, os, pathlib, time\nfrom everstep.checkpoint.errors import StateMismatch\n"
        f"rank, folder = int(os.environ['RANK']), pathlib.Path({str(tmp_path)!r})\n"
        "def wait(*ranks):\n    while not all((folder / str(one)).exists() for one in ranks): time.sleep(0.01)\n"
        "atexit.register(wait, 0, 1, 2)\natexit.register((folder / str(rank)).touch)\n"
        "wait(*range(rank))\n"
        "if rank == 1:\n    raise ValueError('no such luck')\n"
        "raise StateMismatch(f'the state of rank {rank}')\n"
    )
    done = run("--standalone", "--nproc-per-node=3", script)
    for rank in (0, 2):
        assert f"[rank{rank}]: everstep: refused: StateMismatch: the state of rank {rank}\n" in done.stderr, done.stderr
    assert "ValueError: no such luck\n" in done.stderr


# --- the first error


FAILS = "import os, sys, time\nif os.environ['RANK'] == '1':\n    raise ValueError('no such luck')\ntime.sleep(100)\n"


def torchrun(script: Path, error_file: Path) -> Any:
    """What torchrun leaves for whoever started it."""
    text = script.read_text()
    body = "\n".join("    " + line for line in text.splitlines())
    script.write_text(
        f"from torch.distributed.elastic.multiprocessing.errors import record\n@record\ndef main():\n{body}\nmain()\n"
    )
    argv = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", str(script)]
    subprocess.run(
        argv,
        capture_output=True,
        check=False,
        timeout=100,
        env={**os.environ, "TORCHELASTIC_ERROR_FILE": str(error_file)},
    )
    script.write_text(text)
    return json.loads(error_file.read_text())


@pytest.mark.long
def test_whoever_starts_the_agent_gets_the_first_error_as_from_torchrun(script: Path, tmp_path: Path) -> None:
    script.write_text(FAILS)
    ours, theirs = tmp_path / "ours.json", tmp_path / "theirs.json"
    assert run("--nproc-per-node=2", script, TORCHELASTIC_ERROR_FILE=str(ours)).returncode == 1
    expected = torchrun(script, theirs)["message"]
    found = json.loads(ours.read_text())["message"]
    assert found["message"] == expected["message"] == "ValueError: no such luck"
    assert found["errorCode"] == expected["errorCode"] == 1
    assert "no such luck" in found["extraInfo"]["py_callstack"]
    assert set(found["extraInfo"]) == set(expected["extraInfo"])


def test_an_end_without_an_error_file_is_told_too(script: Path, tmp_path: Path) -> None:
    script.write_text("import os\nos.abort()\n")
    assert run(script, TORCHELASTIC_ERROR_FILE=str(tmp_path / "e.json")).returncode == 128 + 6
    found = json.loads((tmp_path / "e.json").read_text())["message"]
    assert found["message"] == "SIGABRT at train.py:2 in <module>"
    assert found["errorCode"] == -6


def test_an_agent_that_succeeds_leaves_no_error(script: Path, tmp_path: Path) -> None:
    script.write_text("pass\n")
    assert run(script, TORCHELASTIC_ERROR_FILE=str(tmp_path / "e.json")).returncode == 0
    assert not (tmp_path / "e.json").exists()


# --- flags


@pytest.mark.long
def test_binding_to_the_cpus_beside_a_gpu_that_is_not_there_is_refused_by_the_flags_name(script: Path) -> None:
    script.write_text(COUNT)
    done = run("--numa-binding=node", script, CUDA_VISIBLE_DEVICES="")
    assert done.returncode == 2
    assert "everstep-run: --numa-binding=node: " in done.stderr


def test_a_process_runs_on_the_cpus_that_it_is_bound_to(script: Path, tmp_path: Path) -> None:
    one = max(os.sched_getaffinity(0))
    script.write_text("import os, sys\nprint(sorted(os.sched_getaffinity(0)))\n")
    assert asyncio.run(run_bound(script, tmp_path, [one])) == 0
    assert (tmp_path / "out").read_text() == f"[{one}]\n"


async def run_bound(script: Path, tmp_path: Path, cpus: list[int]) -> int:
    """The exit code of a process that the fork server forks on these CPUs."""
    ended: asyncio.Future[int] = asyncio.get_running_loop().create_future()
    parent = ForkServer([], dict(os.environ), lambda _, code: ended.set_result(code))
    try:
        await parent.fork(
            {
                "kind": "program", "target": str(script), "arguments": [], "module": False, "executable": False,
                "environment": dict(os.environ), "stdout": str(tmp_path / "out"), "stderr": None,
                "stacks": str(tmp_path / "stacks"), "cpus": cpus,
            }
        )  # fmt: skip
        return await asyncio.wait_for(ended, 60)
    finally:
        await parent.close()


@pytest.mark.long
def test_flags_that_change_nothing_are_named(script: Path) -> None:
    script.write_text("pass\n")
    done = run("--start-method=forkserver", "--monitor-interval=3", script, TORCH_DISABLE_SHARE_RDZV_TCP_STORE="1")
    assert done.returncode == 0
    named = "--monitor-interval, --start-method, TORCH_DISABLE_SHARE_RDZV_TCP_STORE: without meaning here"
    assert named in done.stderr
