"""What processes of one node print of their refusals: each text once, and none is lost. Real processes."""

from __future__ import annotations

import fcntl
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path

import pytest

from everstep.contract import env, error_file, refusal_output

BEGIN = "import os, sys\nfrom everstep.contract import refusal, termination\ntermination.install()\n"
SAID = "model.fc is not tracked. Write run.track(model=model)"
REFUSED = f"def train():\n    raise refusal.Refusal('{SAID}')\n"


def environment(folder: Path, rank: int, ranks: int = 3) -> dict[str, str]:
    """That of a process of torchrun, or of our agent."""
    file = folder / "attempt_0" / str(rank) / "error.json"
    file.parent.mkdir(parents=True, exist_ok=True)
    given = {**os.environ, "RANK": str(rank), "WORLD_SIZE": str(ranks), error_file.PATH: str(file)}
    given.pop(env.DEBUG, None)
    return given


def ends(folder: Path, rank: int, script: str, ranks: int = 3, more: Mapping[str, str] = {}) -> str:
    """What a process prints in which `script` runs, and which fails."""
    file = folder / f"train-{len(script)}.py"
    file.write_text(BEGIN + script)
    given = {**environment(folder, rank, ranks), **more}
    argv = [sys.executable, str(file)]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=60, check=False, env=given)
    assert done.returncode == 1, done.stderr
    return done.stderr


def test_first_rank_prints_what_it_says_with_its_lines_and_others_name_that_rank(tmp_path: Path) -> None:
    script = REFUSED + "train()\n"
    file = tmp_path / f"train-{len(script)}.py"
    assert ends(tmp_path, 1, script).splitlines() == [
        f"[rank1]: everstep: refused: Refusal: {SAID}",
        f'[rank1]:   File "{file}", line 6, in <module>',
        "[rank1]:     train()",
        f'[rank1]:   File "{file}", line 5, in train',
        f"[rank1]:     raise refusal.Refusal('{SAID}')",
    ]
    for rank in (0, 2):
        assert ends(tmp_path, rank, script) == f"[rank{rank}]: everstep: refused as rank 1 is: Refusal\n"


def test_each_other_text_and_each_other_error_is_printed(tmp_path: Path) -> None:
    ends(tmp_path, 0, REFUSED + "train()\n")
    assert "[rank1]: everstep: refused: Refusal: write x\n" in ends(tmp_path, 1, "raise refusal.Refusal('write x')")
    assert "ValueError: no luck\n" in ends(tmp_path, 2, "raise ValueError('no luck')")
    again = ends(tmp_path, 0, REFUSED + "train()\n", more={"TORCHELASTIC_RESTART_COUNT": "1"})
    assert SAID in again, "a text of an earlier round may be far above"


@pytest.mark.parametrize(
    ("ends_by", "remark"),
    [
        ("raise RuntimeError('training failed') from e", "the script ended with RuntimeError: training failed"),
        ("raise RuntimeError(f'failed: {e}')", "the script ended with RuntimeError: failed: …"),
        ("{}['fc']", "the script ended with KeyError: 'fc'"),
    ],
)
def test_error_of_the_script_that_a_refusal_led_to_has_a_line_of_its_own(
    ends_by: str, remark: str, tmp_path: Path
) -> None:
    said = ends(tmp_path, 0, f"{REFUSED}try:\n    train()\nexcept Exception as e:\n    {ends_by}\n")
    assert said.count(SAID) == 2, said  # in the sentence, and in the line that raised it
    assert "Traceback" not in said
    assert len(said.splitlines()) == 6
    assert said.splitlines()[-1].startswith(f"[rank0]:   {remark}")
    assert re.search(r" \(train-\d+\.py:9\)$", said)


@pytest.mark.parametrize(
    "raises",
    [
        "raise ExceptionGroup('threads', [ValueError('also'), refusal.Refusal('write x')])",
        "try:\n    raise refusal.Refusal('write x')\nexcept Exception:\n    raise ValueError('also\\nmore')",
    ],
)
def test_errors_of_several_lines_and_groups_keep_their_traceback(raises: str, tmp_path: Path) -> None:
    said = ends(tmp_path, 0, raises)
    assert said.splitlines()[0] == "[rank0]: everstep: refused: Refusal: write x"
    assert "Traceback (most recent call last)" in said
    assert "ValueError: also" in said


def test_debugging_keeps_the_traceback(tmp_path: Path) -> None:
    said = ends(tmp_path, 0, REFUSED + "train()\n", more={env.DEBUG: "info"})
    assert said.splitlines()[0] == f"[rank0]: everstep: refused: Refusal: {SAID}"
    assert "Traceback (most recent call last)" in said


def test_what_hooks_of_others_print_stays(tmp_path: Path) -> None:
    hook = "print('the tracker has closed this run', file=sys.stderr)"
    also = f"previous = sys.excepthook\nsys.excepthook = lambda *error: ({hook}, previous(*error))\n"
    script = also + BEGIN + REFUSED + "train()\n"
    said = ends(tmp_path, 0, script)
    assert "[rank0]: the tracker has closed this run\n" in said
    assert "Traceback" not in said


def test_process_alone_has_no_label(tmp_path: Path) -> None:
    assert ends(tmp_path, 0, "raise refusal.Refusal('write x')", ranks=1).startswith("everstep: refused: ")


@pytest.mark.parametrize("given", [{error_file.PATH: "/nowhere/attempt_0/0/error.json"}, {error_file.PATH: "e.json"}])
def test_without_a_folder_in_common_each_process_prints(given: Mapping[str, str], tmp_path: Path) -> None:
    for rank in range(2):
        assert SAID in ends(tmp_path, rank, REFUSED + "train()\n", more=given)


def test_process_that_stands_still_or_was_killed_while_it_printed_keeps_no_text_from_the_others(tmp_path: Path) -> None:
    """It is stopped with the lock, behind half of its text."""
    script = tmp_path / "stops.py"
    stops = "raise refusal.Refusal('write x')\n"
    halts = (
        "class Halting:\n"
        "    flush = lambda self: None\n"
        "    def write(self, text):\n"
        "        os.write(2, b'half')\n"
        "        os.kill(os.getpid(), 19)\n"
        "sys.stderr = Halting()\n"
    )
    script.write_text(BEGIN + halts + stops)
    argv, given = [sys.executable, str(script)], environment(tmp_path, 0)
    with subprocess.Popen(argv, stderr=subprocess.PIPE, env=given) as halted:
        try:
            assert halted.stderr is not None
            assert halted.stderr.read(4) == b"half"
            os.waitid(os.P_PID, halted.pid, os.WSTOPPED | os.WNOWAIT)
            with (tmp_path / "refusals").open() as notes, pytest.raises(BlockingIOError):
                fcntl.flock(notes, fcntl.LOCK_EX | fcntl.LOCK_NB)
            begun = time.monotonic()
            assert ends(tmp_path, 1, stops).startswith("[rank1]: everstep: refused: Refusal: write x\n")
            assert time.monotonic() - begun < 5, f"the lock is waited for {refusal_output.MOST_SECONDS} s at most"
        finally:
            halted.send_signal(signal.SIGKILL)
    assert ends(tmp_path, 2, stops).startswith("[rank2]: everstep: refused: Refusal: write x\n")
    assert ends(tmp_path, 1, stops) == "[rank1]: everstep: refused as rank 2 is: Refusal\n"
