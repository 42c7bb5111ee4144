"""`everstep-run` with one agent: real processes, their surroundings, their output, their ends."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from everstep.contract import exit_codes
from support.agent.started import FAST, LIMIT, Started, gone, write
from support.processes.children import children

pytestmark = pytest.mark.timeout(120)


def run(*argv: str | Path, cwd: Path | None = None, **environ: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "everstep.agent.main", *map(str, argv)],
        capture_output=True, text=True, timeout=LIMIT, check=False, cwd=cwd, env={**os.environ, **FAST, **environ},
    )  # fmt: skip


@pytest.fixture
def script(tmp_path: Path) -> Path:
    return tmp_path / "scripts" / "train.py"


def test_a_script_sees_what_python_and_torchrun_give_it(script: Path, tmp_path: Path) -> None:
    (script.parent).mkdir()
    (script.parent / "beside.py").write_text("here = 'beside'\n")
    write(
        script,
        "import beside, gc, json, os, sys\n"
        "assert sys.modules['__main__'].beside is beside\n"
        "names = ['RANK', 'WORLD_SIZE', 'LOCAL_RANK', 'LOCAL_WORLD_SIZE', 'GROUP_RANK', 'GROUP_WORLD_SIZE',"
        " 'ROLE_NAME', 'ROLE_RANK', 'ROLE_WORLD_SIZE', 'TORCHELASTIC_RUN_ID', 'TORCHELASTIC_RESTART_COUNT',"
        " 'TORCHELASTIC_MAX_RESTARTS', 'TORCHELASTIC_USE_AGENT_STORE', 'MASTER_ADDR', 'OMP_NUM_THREADS', 'MINE']\n"
        "told = {n: os.environ.get(n) for n in names}\n"
        "told |= dict(argv=sys.argv, file=__file__, name=__name__, path=sys.path[0], cwd=os.getcwd())\n"
        "told |= dict(gc=gc.isenabled())\n"
        "open(f'told-{told[\"RANK\"]}', 'w').write(json.dumps(told))\n",
    )
    flags = ("--nproc-per-node", "2", "--role", "trainer", "--max-restarts", "4", "--rdzv-id", "j")
    done = run(*flags, script, "--lr", "0.1", cwd=tmp_path, MINE="yes", OMP_NUM_THREADS="3")
    assert done.returncode == 0, done.stderr
    told = json.loads((tmp_path / "told-1").read_text())
    assert told == {
        "RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2", "GROUP_RANK": "0",
        "GROUP_WORLD_SIZE": "1", "ROLE_NAME": "trainer", "ROLE_RANK": "1", "ROLE_WORLD_SIZE": "2",
        "TORCHELASTIC_RUN_ID": "j", "TORCHELASTIC_RESTART_COUNT": "0", "TORCHELASTIC_MAX_RESTARTS": "4",
        "TORCHELASTIC_USE_AGENT_STORE": "True", "MASTER_ADDR": "127.0.0.1", "OMP_NUM_THREADS": "3", "MINE": "yes",
        "argv": [str(script), "--lr", "0.1"], "file": str(script), "name": "__main__", "path": str(script.parent),
        "cwd": str(tmp_path), "gc": True,
    }  # fmt: skip


@pytest.mark.long
def test_a_module_and_an_executable_are_run_too(tmp_path: Path) -> None:
    package = tmp_path / "pkg"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "train.py").write_text("import sys\nprint('module', __spec__.name, sys.argv[1:])\n")
    done = run("-m", "pkg.train", "a", cwd=tmp_path)
    assert (done.returncode, done.stdout) == (0, "module pkg.train ['a']\n"), done.stderr
    done = run("--no-python", "echo", "plain", cwd=tmp_path)
    assert (done.returncode, done.stdout) == (0, "plain\n"), done.stderr


def test_classes_of_the_script_reach_processes_that_it_spawns(script: Path) -> None:
    write(
        script,
        "import multiprocessing as mp\n"
        "class Item:\n    pass\n"
        "def work(queue):\n    queue.put(Item())\n"
        "if __name__ == '__main__':\n"
        "    context = mp.get_context('spawn')\n"
        "    queue = context.Queue()\n"
        "    p = context.Process(target=work, args=(queue,))\n"
        "    p.start()\n"
        "    print(type(queue.get(timeout=30)).__name__)\n"
        "    p.join()\n",
    )
    done = run(script)
    assert (done.returncode, done.stdout) == (0, "Item\n"), done.stderr


@pytest.mark.long
def test_each_process_has_random_numbers_of_its_own(script: Path) -> None:
    write(script, "import numpy, random, torch\nprint(random.random(), numpy.random.rand(), float(torch.rand(())))\n")
    done = run("--nproc-per-node=2", script, EVERSTEP_PRELOAD="numpy,torch")
    lines = done.stdout.splitlines()
    assert len(lines) == 2, done.stderr
    assert not set(lines[0].split()) & set(lines[1].split())


def test_output_goes_where_torchruns_flags_say(script: Path, tmp_path: Path) -> None:
    write(
        script,
        "import os, sys\nr = os.environ['RANK']\nprint('out', r)\nprint('err', r, file=sys.stderr)\n"
        "print('no end', r, end='')\n",
    )
    logs = tmp_path / "logs"
    flags = ("--nproc-per-node=2", "--log-dir", logs, "--redirects", "1:3", "--tee", "0:1", "--rdzv-id=j")
    done = run(*flags, script)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["[default0]:out 0", "[default0]:no end 0"]
    assert "err 0" in done.stderr
    assert "err 1" not in done.stderr
    (folder,) = logs.iterdir()
    assert folder.name.startswith("j_")
    found = {str(p.relative_to(folder)): p.read_text() for p in folder.rglob("*.log")}
    assert found == {
        "attempt_0/0/stdout.log": "out 0\nno end 0",
        "attempt_0/1/stdout.log": "out 1\nno end 1",
        "attempt_0/1/stderr.log": "err 1\n",
    }


def test_a_console_that_is_gone_ends_nothing(script: Path) -> None:
    """As with `| head -1`."""
    write(
        script,
        "import os, time\n"
        "print(0, flush=True)\n"
        "while not os.path.exists(__file__ + '.go'):\n"
        "    time.sleep(0.01)\n"
        "print(1, flush=True)\n",
    )
    argv = [sys.executable, "-m", "everstep.agent.main", "--tee", "3", str(script)]
    environ = {k: v for k, v in os.environ.items() if k != "PYTHONUNBUFFERED"}  # with it, nothing is left to flush
    with subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env={**environ, **FAST}) as agent:
        assert agent.stdout is not None
        assert b"0\n" in agent.stdout.readline()
        agent.stdout.close()
        script.with_name("train.py.go").touch()
        assert agent.wait(LIMIT) == 0
        assert agent.stderr is not None
        assert b"what it said is not shown" in agent.stderr.read()


@pytest.mark.long
def test_ranks_that_are_filtered_out_are_not_heard(script: Path) -> None:
    write(script, "import os\nprint('rank', os.environ['RANK'])\n")
    done = run("--nproc-per-node=3", "--local-ranks-filter=0,2", script)
    assert sorted(done.stdout.splitlines()) == ["rank 0", "rank 2"]


def test_an_error_ends_the_agent_with_its_code_and_is_in_the_error_file_and_the_pods_last_words(
    script: Path, tmp_path: Path
) -> None:
    write(script, "def f():\n    raise ValueError('no such luck')\nf()\n")
    last_words = tmp_path / "termination-log"
    last_words.touch()
    environ = {"EVERSTEP_JOB_UID": "u", "EVERSTEP_TERMINATION_LOG": str(last_words)}
    done = run("--log-dir", tmp_path / "logs", script, cwd=None, **environ)
    assert done.returncode == 1
    trace = done.stderr[done.stderr.index("Traceback") :]
    assert f'File "{script}", line 3, in <module>' in trace
    assert "everstep/agent" not in trace.partition("ValueError")[0], "our own frames are no business of the user's"
    (error,) = (tmp_path / "logs").rglob("error.json")
    message = json.loads(error.read_text())["message"]
    assert message["message"] == "ValueError: no such luck"
    assert "in f" in message["extraInfo"]["py_callstack"]
    first = json.loads(last_words.read_text().splitlines()[0])
    assert first["error"] == "ValueError: no such luck"


@pytest.mark.long_but("os.abort()-134")
@pytest.mark.parametrize(
    ("ending", "code"),
    [
        ("sys.exit(7)", 7),
        (f"sys.exit({exit_codes.FENCED})", exit_codes.FENCED),
        ("os.abort()", 128 + signal.SIGABRT),
        ("sys.exit(0)", 0),
        ("atexit.register(lambda: print('at exit')); sys.exit(0)", 0),
    ],
)
def test_the_agents_exit_code_is_that_of_the_process(script: Path, ending: str, code: int) -> None:
    write(script, f"import atexit, os, sys\n{ending}\n")
    done = run(script)
    assert done.returncode == code, done.stderr
    assert ("at exit" in done.stdout) == ("at exit" in ending)


@pytest.mark.long
def test_a_program_that_fails_is_restarted_as_often_as_is_allowed(script: Path, tmp_path: Path) -> None:
    write(
        script,
        "import os, sys\nopen('runs', 'a').write(os.environ['TORCHELASTIC_RESTART_COUNT'])\n"
        "sys.exit(0 if len(open('runs').read()) == 3 else 5)\n",
    )
    assert run("--max-restarts=2", script, cwd=tmp_path).returncode == 0
    assert (tmp_path / "runs").read_text() == "012"
    (tmp_path / "runs").unlink()
    assert run("--max-restarts=1", script, cwd=tmp_path).returncode == 5


@pytest.mark.long
def test_a_process_that_cannot_be_started_again_ends_the_agent(script: Path) -> None:
    """Say, on a full disk."""
    write(
        script,
        "import os, pathlib, sys\n"
        "mine = pathlib.Path(os.environ['TORCHELASTIC_ERROR_FILE']).parents[1]\n"
        "(mine.parent / 'attempt_1').touch()\n"
        "sys.exit(3)\n",
    )
    done = run("--nproc-per-node=2", "--max-restarts=3", script)
    assert done.returncode == 1, done.stderr
    assert "exit code 1: no process could be started: [Errno" in done.stderr


def test_a_flag_or_file_that_is_not_there_is_named(script: Path) -> None:
    done = run("--tee=9", script)
    assert (done.returncode, done.stderr) == (
        2,
        "everstep-run: --tee=9: 0, 1, 2 or 3, or such a number for each local rank as 0:3,1:0, is expected\n",
    )
    done = run(script)
    assert done.returncode == 2
    assert f"can't open file '{script}'" in done.stderr


def test_when_the_agent_is_killed_its_processes_die_with_it(script: Path) -> None:
    started = Started(script, "")
    below = started.below()
    assert len(below) == 4  # the fork server, who hosts stores, two processes
    started.process.kill()
    assert gone(below)
    started.end()


@pytest.mark.long
def test_a_signal_reaches_the_processes_which_may_end_in_their_own_way(script: Path) -> None:
    started = Started(script, "signal.signal(signal.SIGTERM, lambda *_: sys.exit(86))")
    below = started.below()
    started.process.send_signal(signal.SIGTERM)
    code, said = started.end()
    assert code == exit_codes.PREEMPTED
    assert "asked to stop by SIGTERM" in said
    assert gone(below)


@pytest.mark.long
def test_processes_that_do_not_end_when_asked_are_killed(script: Path) -> None:
    started = Started(script, "signal.signal(signal.SIGTERM, signal.SIG_IGN)", "--shutdown-timeout=0.5")
    below = started.below()
    started.process.send_signal(signal.SIGTERM)
    assert started.end()[0] == 128 + signal.SIGTERM
    assert gone(below)


def test_a_killed_process_is_replaced_with_all_others_uncharged(script: Path) -> None:
    started = Started(script, "")
    before = started.trainers()
    os.kill(before[0], signal.SIGKILL)
    assert started.process.stdout is not None
    assert [started.process.stdout.readline() for _ in range(2)] == ["up\n"] * 2
    after = started.trainers()
    assert len(after) == 2
    assert not set(after) & set(before), "a script that does not speak with us begins again, everywhere"
    started.process.kill()
    started.end()


def test_a_fork_server_that_dies_takes_its_processes_with_it_and_all_begin_again(script: Path) -> None:
    started = Started(script, "")
    (warm,) = children(started.process.pid)
    before = started.trainers()
    os.kill(warm, signal.SIGKILL)
    assert started.process.stdout is not None
    assert [started.process.stdout.readline() for _ in range(2)] == ["up\n"] * 2
    assert gone(before)
    started.process.kill()
    _, said = started.end()
    assert "the fork server ended" in said


@pytest.mark.long
def test_a_rendezvous_of_torchs_own_is_run_by_torchrun(script: Path) -> None:
    write(script, "import os\nprint(os.environ['TORCHELASTIC_RUN_ID'])\n")
    done = run("--rdzv-backend=c10d", "--rdzv-endpoint=localhost:0", "--rdzv-id=c", script)
    assert (done.returncode, done.stdout) == (0, "c\n"), done.stderr
    assert "torchrun does it" in done.stderr


def test_agent_writes_for_the_probe_of_its_pod_that_it_is_in_a_round(script: Path, tmp_path: Path) -> None:
    joined = tmp_path / "joined"
    write(script, f"import os\nassert os.path.exists({str(joined)!r})\n")
    assert run(script, EVERSTEP_JOINED_FILE=str(joined)).returncode == 0
    assert joined.exists()
