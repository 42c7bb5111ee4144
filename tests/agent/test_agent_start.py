"""A program that cannot start: the agent says so in the program's words, at once, and costs no round."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from everstep.agent.arguments import Program
from everstep.agent.startable import problem

pytestmark = pytest.mark.timeout(120)


def run(folder: Path, *argv: str) -> tuple[subprocess.CompletedProcess[str], list[dict[str, object]]]:
    """The agent's end, and what it and its processes left in the pod's termination log."""
    last_words = folder / "termination-log"
    last_words.touch()
    environ = {"EVERSTEP_PRELOAD": "", "EVERSTEP_JOB_UID": "u", "EVERSTEP_TERMINATION_LOG": str(last_words)}
    done = subprocess.run(
        [sys.executable, "-m", "everstep.agent.main", *argv],
        capture_output=True, text=True, timeout=100, check=False, cwd=folder, env={**os.environ, **environ},
    )  # fmt: skip
    return done, [json.loads(line) for line in last_words.read_text().splitlines()]


# A rendezvous at which nobody listens: an agent that went there first would not end before its join_timeout.
NOWHERE = ("--nnodes=2", "--rdzv-backend=etcd-v3", "--rdzv-endpoint=127.0.0.1:9", "--rdzv-id=j")


@pytest.mark.long_but("argv3-127-can't run 'no-such-program': No such file or directory")
@pytest.mark.parametrize(
    ("argv", "code", "words"),
    [
        (("nofile.py",), 2, "can't open file '{folder}/nofile.py': No such file or directory"),
        (("folder",), 2, "can't open file '{folder}/folder': Is a directory"),
        (("-m", "no_such_package.train"), 1, "No module named 'no_such_package'"),
        (("--no-python", "no-such-program"), 127, "can't run 'no-such-program': No such file or directory"),
        (("--no-python", "./plain.txt"), 126, "can't run './plain.txt': Permission denied"),
    ],
)
def test_program_that_is_not_there_is_told_before_any_round(
    argv: tuple[str, ...], code: int, words: str, tmp_path: Path
) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "plain.txt").touch()
    done, records = run(tmp_path, *NOWHERE, *argv)
    said = words.format(folder=tmp_path)
    assert (done.returncode, len(records)) == (code, 1), done.stderr
    assert f"everstep-run: {said}" in done.stderr
    assert (records[0]["exit_code"], str(records[0]["error"]).startswith(said)) == (code, True), records


@pytest.mark.long_but("import sys\\nsys.exit('the data set is empty')\\n-1-the data set is empty")
@pytest.mark.parametrize(
    ("text", "code", "words"),
    [
        ("import no_such_module\n", 1, "ModuleNotFoundError: No module named 'no_such_module'"),
        ("x = (\n", 1, "SyntaxError: '(' was never closed"),
        ("import sys\nsys.exit('the data set is empty')\n", 1, "the data set is empty"),
        (
            "import argparse\np = argparse.ArgumentParser()\np.parse_args()\n",
            2,
            "train.py: error: unrecognized arguments: --learning 1",
        ),
    ],
)
def test_words_of_a_program_that_ends_at_once_are_the_first_in_the_termination_log(
    text: str, code: int, words: str, tmp_path: Path
) -> None:
    (tmp_path / "train.py").write_text(text)
    done, records = run(tmp_path, "train.py", "--learning", "1")
    assert done.returncode == code, done.stderr
    assert records[0]["exit_code"] == code
    assert str(records[0]["error"]).startswith(words), records


def test_binary_that_no_kernel_takes_ends_with_126_and_its_words(tmp_path: Path) -> None:
    binary = tmp_path / "binary"
    binary.write_bytes(b"\x7fELF not really")
    binary.chmod(0o755)
    done, records = run(tmp_path, "--no-python", "./binary")
    assert done.returncode == 126, done.stderr
    assert records[0]["error"] == "can't run './binary': Exec format error"


def test_what_may_be_there_is_left_to_its_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").touch()
    (tmp_path / "package").mkdir()
    for found in (
        Program("train.py", ()),
        Program("package.train", (), module=True),  # one without __init__.py
        Program("json.tool", (), module=True),
        Program("sh", (), executable=True),
    ):
        assert problem(found) is None
    assert str(tmp_path) not in sys.path


@pytest.mark.long
def test_the_agent_repeats_a_refusal_whole_with_the_line_to_write(tmp_path: Path) -> None:
    line = "write `run.track(model=model)` before the loop"
    (tmp_path / "train.py").write_text(f"raise RuntimeError('because ' * 60 + {line!r})\n")
    done, _ = run(tmp_path, "train.py")
    warned, *_, last = (text for text in done.stderr.splitlines() if "everstep-run: " in text and "because" in text)
    assert warned.endswith(line)
    assert line in last
    (tmp_path / "train.py").write_text("raise RuntimeError('x' * 100_000)\n")
    done, _ = run(tmp_path, "train.py")
    told = [text for text in done.stderr.splitlines() if "everstep-run: " in text]
    assert max(map(len, told)) < 2000


def on_a_read_only_root(*launcher: str) -> tuple[subprocess.CompletedProcess[str], list[dict[str, object]]]:
    """The end of a launcher whose root is as that of a container with `readOnlyRootFilesystem`, and what it left in the
    pod's termination log, which is mounted."""
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        last_words, script = Path(folder) / "termination-log", Path(folder) / "train.py"
        last_words.touch()
        script.touch()
        command = shlex.join([sys.executable, "-m", *launcher, str(script)])
        done = subprocess.run(
            ["unshare", "--mount", "sh", "-c", f"mount --bind / / && mount -o remount,ro,bind / && cd / && {command}"],
            capture_output=True, text=True, timeout=100, check=False,
            env={**os.environ, "EVERSTEP_JOB_UID": "u", "EVERSTEP_TERMINATION_LOG": str(last_words), "TMPDIR": "/tmp"},
        )  # fmt: skip
        return done, [json.loads(line) for line in last_words.read_text().splitlines()]


@pytest.mark.long_but("rendezvous0")
@pytest.mark.parametrize("rendezvous", [("--standalone",), ("--rdzv-backend=c10d", "--rdzv-endpoint=127.0.0.1:0")])
def test_root_that_is_read_only_is_told_with_the_volume_that_it_needs(rendezvous: tuple[str, ...]) -> None:
    done, records = on_a_read_only_root("everstep.agent.main", *rendezvous)
    assert "mount an emptyDir at /tmp" in done.stderr
    assert "Traceback" not in done.stderr
    assert [done.returncode, *(record["exit_code"] for record in records)] == [126, 126]
    assert "mount an emptyDir at /tmp" in str(records[0]["error"])


@pytest.mark.long
def test_stock_torchrun_on_a_read_only_root_ends_before_any_code_of_ours_runs() -> None:
    """Where nobody wrote a termination log, the kubelet takes the end of the log. The operator knows its last line."""
    done, records = on_a_read_only_root("torch.distributed.run", "--standalone")
    assert (done.returncode, records) == (1, [])
    last = done.stderr.splitlines()[-1]
    assert last.startswith("FileNotFoundError: [Errno 2] No usable temporary directory found in ['/tmp', "), last
