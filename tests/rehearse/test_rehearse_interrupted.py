"""`everstep rehearse` that is told to end says so, leaves no process behind, and a folder only for what was found by
then; one that is killed leaves no process, and the next one removes its folder."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import pytest

from everstep.rehearse.folder import Folder, remove_abandoned

pytestmark = pytest.mark.timeout(180)

SCRIPT = """
import os, sys, time, torch, everstep
weight = torch.zeros(1)
with everstep.start() as run:
    run.track(weight=weight)
    for step in run.steps(until=10_000):
        with step:
            weight += 1
        if os.path.exists(os.environ["SLOW"]):
            time.sleep(0.5)
"""


def processes_of(folder: Path) -> list[int]:
    """Those that run in the folder, or in a folder below it."""
    found = []
    for entry in Path("/proc").glob("[0-9]*/cwd"):
        try:
            if os.readlink(entry).startswith(str(folder)):
                found.append(int(entry.parent.name))
        except OSError:
            continue
    return found


@pytest.mark.long_but("calm-interrupted", "calm-killed")
@pytest.mark.parametrize(
    "number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL], ids=["interrupted", "terminated", "killed"]
)
@pytest.mark.parametrize("runs", [1, 2], ids=["calm", "further"])
def test_rehearsal_that_ends_leaves_nothing_behind(
    number: int, runs: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script, slow, temporary = tmp_path / "train.py", tmp_path / "slow", tmp_path / "tmp"
    script.write_text(SCRIPT)
    temporary.mkdir()
    if runs == 1:
        slow.touch()
    command = [sys.executable, "-m", "everstep.cli.main", "rehearse", "--ranks", "2", "--steps", "40", str(script)]
    environ = {**os.environ, "TMPDIR": str(temporary), "SLOW": str(slow), "GLOO_SOCKET_IFNAME": "lo"}
    before = signal.signal(signal.SIGINT, signal.SIG_DFL)  # a shell lets its background jobs ignore it
    rehearsal = subprocess.Popen(command, env=environ, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    signal.signal(signal.SIGINT, before)
    try:
        until = time.monotonic() + 100
        while len(list(temporary.glob("everstep-rehearsal-*/*/log"))) < runs and rehearsal.poll() is None:
            assert time.monotonic() < until, "the run has not begun"
            time.sleep(0.02)
        slow.touch()
        while not processes_of(temporary) and rehearsal.poll() is None:
            assert time.monotonic() < until, "the run has no process"
            time.sleep(0.02)
        assert rehearsal.poll() is None, rehearsal.communicate()
        rehearsal.send_signal(number)
        printed, errors = (text.decode() for text in rehearsal.communicate(timeout=60))  # a whole run takes longer
        assert rehearsal.returncode == (-number if number == signal.SIGKILL else 128 + number)
        if number != signal.SIGKILL:
            assert "interrupted: the runs are being ended" in errors
            assert ("interrupted before the first run was over" in printed) is (runs == 1)
        until = time.monotonic() + 10  # what is killed is still listed until the kernel has taken it down
        while (left := processes_of(tmp_path)) and time.monotonic() < until:
            time.sleep(0.02)
        assert left == []
        if number == signal.SIGKILL:
            assert list(temporary.glob("everstep-rehearsal-*/owner"))
            monkeypatch.setattr(tempfile, "tempdir", str(temporary))
            remove_abandoned()
        assert list(temporary.glob("everstep-rehearsal-*")) == []
    finally:
        rehearsal.kill()
        for pid in processes_of(tmp_path):
            os.kill(pid, signal.SIGKILL)


@pytest.mark.parametrize("found", [True, False])
def test_folder_of_an_interrupted_rehearsal_stays_where_a_run_has_found_something(
    found: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from everstep.cli import rehearse  # noqa: PLC0415 - torch
    from everstep.rehearse import findings  # noqa: PLC0415 - torch

    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    kind = findings.Kind.TRACKED if found else findings.Kind.WRITTEN
    monkeypatch.setattr(findings, "find", lambda _: [findings.Finding(kind, (), "the model differs")])
    monkeypatch.setattr(rehearse, "_show", lambda *_: None)
    folder, runs = Folder(), [object()]
    with pytest.raises(SystemExit), rehearse._shown_if_interrupted(folder, tmp_path, runs, 0.0):  # type: ignore[arg-type]
        raise SystemExit(143)
    folder.leave()
    assert folder.path.exists() is found
    assert (f"logs of each run: {folder.path}" in capsys.readouterr().out) is found


def test_folder_of_a_rehearsal_that_runs_or_is_kept_is_nobody_elses_to_remove(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    running, kept = Folder(), Folder()
    kept.kept = True
    kept.leave()
    remove_abandoned()
    assert {*tmp_path.iterdir()} == {running.path, kept.path}
    running.leave()
    assert {*tmp_path.iterdir()} == {kept.path}


def test_run_whose_imports_take_long_is_ended_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from everstep.rehearse.agents import Stopped  # noqa: PLC0415 - torch
    from everstep.rehearse.plan import calm  # noqa: PLC0415 - torch
    from everstep.rehearse.play import Player  # noqa: PLC0415 - torch

    begun = tmp_path / "begun"
    (tmp_path / "slow_module.py").write_text(f"import time\nopen({str(begun)!r}, 'w')\ntime.sleep(100)\n")
    (tmp_path / "train.py").write_text(SCRIPT)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setenv("EVERSTEP_PRELOAD", "slow_module")
    (tmp_path / "runs").mkdir()
    player = Player(tmp_path / "runs", [str(tmp_path / "train.py")], 5, 100.0)
    ended: list[BaseException] = []

    def play() -> None:
        try:
            player.play(calm(2, 12), lambda _: None)
        except Stopped as e:
            ended.append(e)

    playing = threading.Thread(target=play, daemon=True)
    playing.start()
    try:
        until = time.monotonic() + 60
        while not begun.exists():
            assert time.monotonic() < until, "the imports have not begun"
            time.sleep(0.02)
        player.stop()
        playing.join(5)
        assert ended, "it waits for the imports"
    finally:
        player.close()
