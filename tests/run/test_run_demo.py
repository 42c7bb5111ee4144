"""What a newcomer sees first: `make demo`, and the live table on a terminal."""

from __future__ import annotations

import os
import pty
import re
import select
import subprocess
import sys
import time
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest

from everstep.jobs.history import ActionTaken, EventSeen, History, StatusSeen
from everstep.jobs.source import JobError
from everstep_local.run.demo import SCRIPT, demo, program_name
from support import ROOT
from support.local.elastic_rows import taken, worker_logs

pytestmark = pytest.mark.timeout(300)
STYLES = re.compile(r"\x1b\[[0-9;]*m")


@pytest.mark.long
def test_make_demo_kills_and_adds_workers_while_the_others_train_on_and_draws_what_happened(tmp_path: Path) -> None:
    out, steps = tmp_path / "demo", 1500
    # More steps than a person has to wait for: the workers that come must not be late on a machine that does much else.
    done = subprocess.run(
        ["make", "-C", str(ROOT), "demo", f"DEMO={out}", f"DEMO_STEPS={steps}"],
        capture_output=True, text=True, timeout=280, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-2000:]
    (accuracy,) = re.findall(rf"final step={steps} test_accuracy=([\d.]+) world=4$", done.stdout, re.M)
    assert float(accuracy) >= 0.95

    history = list(History.load(out / "history.jsonl"))
    assert [e.text.split()[0] for e in history if isinstance(e, ActionTaken)] == ["kill", "scale"]
    sizes = [e.size for e in history if isinstance(e, StatusSeen)]
    assert {2, 3, 4} <= set(sizes), sizes
    reasons = {e.reason for e in history if isinstance(e, EventSeen)}
    assert "WorkerLost" in reasons
    assert "RestoredFromCheckpoint" not in reasons, "the state came from a living peer"

    logs = worker_logs(out)
    assert set(logs) == {f"spirals-w{i}-{n}" for i, n in ((0, 0), (1, 0), (1, 1), (2, 0), (3, 0))}
    rows = taken(logs)
    assert sorted(step for step, _, _ in rows) == list(range(10, steps + 1, 10)), (
        "no step was taken twice, none left out"
    )
    assert {world for _, world, _ in rows} == {2, 3, 4}
    assert len({pid for _, _, pid in rows}) == 1, "rank 0 was never started again"

    drawing = ElementTree.parse(out / "timeline.svg")
    words = " ".join(t for t in drawing.getroot().itertext() if t.strip())
    for lane in range(4):
        assert f"worker {lane}" in words, words
    assert "kill" in words


def test_picture_and_output_in_the_readme_are_of_one_run_of_the_demo() -> None:
    """`everstep demo` leaves `timeline.svg`, which is docs/assets/demo.svg."""
    title = ElementTree.parse(ROOT / "docs/assets/demo.svg").getroot().findtext("{http://www.w3.org/2000/svg}title")
    seconds = re.fullmatch(rf"{SCRIPT.stem}: Complete after ([\d.]+) s", title or "")
    assert seconds is not None, title
    readme = (ROOT / "README.md").read_text()
    assert f"  {seconds[1]}s  JobCompleted: all 4 workers succeeded\n" in readme
    assert f"> kill {SCRIPT.stem}-w1-0\n" in readme


def test_demo_takes_away_no_folder_that_is_not_its_own(tmp_path: Path) -> None:
    theirs = tmp_path / "thesis"
    theirs.mkdir()
    (theirs / "chapter").write_text("1")
    done = subprocess.run(
        [sys.executable, "-m", "everstep.cli.main", "demo", "--out", str(theirs)],
        capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert done.returncode == 2, done.stderr
    assert f"{theirs} is not an earlier demo's folder: name another with --out" in " ".join(done.stderr.split())
    assert (theirs / "chapter").read_text() == "1"


def test_next_commands_can_be_typed_though_no_environment_is_active(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = Path(sys.executable).parent
    monkeypatch.setenv("PATH", str(folder))
    assert program_name() == "everstep"
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.chdir(folder.parents[1])
    assert program_name() == os.path.relpath(folder / "everstep")
    assert os.access(program_name(), os.X_OK)
    monkeypatch.chdir(tmp_path)
    assert program_name() == str(folder / "everstep")


def test_demo_keeps_a_script_that_was_changed(tmp_path: Path) -> None:
    script = tmp_path / SCRIPT.name
    script.write_text(SCRIPT.read_text() + "# mine\n")
    (tmp_path / "history.jsonl").touch()
    with pytest.raises(JobError, match="has been changed: move it"):
        demo(tmp_path)
    assert script.read_text().endswith("# mine\n")


def test_run_on_a_terminal_shows_a_live_table_with_every_worker(tmp_path: Path) -> None:
    script = tmp_path / "sleep.py"
    script.write_text("import time\ntime.sleep(4)\nprint('over')\n")
    screen, terminal = pty.openpty()
    command = [sys.executable, "-m", "everstep.cli.main", "run", str(script), "--workers", "2", "--nodes", "2"]
    environment = {**os.environ, "TERM": "xterm-256color", "COLUMNS": "150", "LINES": "50"}
    process = subprocess.Popen(
        [*command, "--out", str(tmp_path / "out")], stdin=terminal, stdout=terminal, stderr=terminal, env=environment
    )
    os.close(terminal)
    shown = STYLES.sub("", read_all(screen, process, 60))
    assert process.wait(10) == 0, shown
    assert re.search(r"WORKER +NODE +STATE +RANK +STEP +INCARNATION +PEAK RAM +POD +PID", shown), shown
    for worker in range(2):
        assert re.search(rf"{worker} +node-[12] +\w+ .*-w{worker}-0 +\d+", shown), shown
    assert "WorldFormed" in shown, shown
    assert "\x1b[?25l" in shown, "the cursor is hidden while the table is live"
    assert shown.rindex("\x1b[?25h") > shown.rindex("\x1b[?25l"), "and is given back"


def read_all(screen: int, process: subprocess.Popen[bytes], seconds: float) -> str:
    """What a terminal was sent until the process ended."""
    deadline, data = time.monotonic() + seconds, b""
    while time.monotonic() < deadline:
        ready, _, _ = select.select([screen], [], [], 0.2)
        if not ready:
            if process.poll() is not None:
                break
            continue
        try:
            chunk = os.read(screen, 65536)
        except OSError:  # the other end is closed
            break
        if not chunk:
            break
        data += chunk
    os.close(screen)
    return data.decode(errors="replace")
