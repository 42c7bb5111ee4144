"""What a newcomer waits for: the demo of the README from its start to its first line, and to its end.

    python benchmarks/local_run.py [--quick] [--json PATH]

The demo is `make demo`'s command in a fresh process: three local workers, one killed, scaled to four. `everstep
--version` is the least that any command costs.
"""

from __future__ import annotations

import re
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "benchmarks"))
from figures import Better, Figure, finish, parser

from everstep.jobs.history import ActionTaken, Entry, History, PodSeen
from everstep.jobs.timeline import build

SAMPLES = 5
LIMIT = 300.0  # seconds
ACCURACY = re.compile(r"test_accuracy=([\d.]+)")


def command() -> list[str]:
    """The demo's own command line, as the Makefile has it."""
    shown = subprocess.run(["make", "-n", "demo"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    line = next(line for line in shown.replace("\\\n", " ").splitlines() if "bin/everstep demo" in line)
    words = line.split()[1:]
    return [sys.executable, "-m", "everstep.cli.main", *words]


def sample() -> dict[str, float]:
    """One demo, in seconds by part."""
    folder = Path(tempfile.mkdtemp(prefix="everstep-bench-"))
    words = command()
    words[words.index("--out") + 1] = str(folder)
    began = time.monotonic()
    with subprocess.Popen([*words[:4], "--plain", *words[4:]], cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        limit = threading.Timer(LIMIT, process.kill)
        limit.start()
        first = process.stdout.readline()
        started = time.monotonic() - began
        rest = process.stdout.read()
        code = process.wait()
        limit.cancel()
    if code != 0 or not first:
        raise RuntimeError(f"the demo ended with exit code {code}: {first}{rest}")
    entries = list(History.load(folder / "history.jsonl"))
    timeline = build(entries)
    kill = next(e for e in entries if isinstance(e, ActionTaken))
    shutil.rmtree(folder)
    found = ACCURACY.search(rest)
    assert found is not None
    return {
        "start": started,
        "whole": time.monotonic() - began,
        "accuracy": float(found[1]),
        "recovery": next(s.end for s in timeline.spans) - kill.at,
        "replaced": replaced(entries, kill) - kill.at,
    }


def replaced(entries: list[Entry], kill: ActionTaken) -> float:
    """When the pod ran that came in the place of the killed one."""
    pods = [e for e in entries if isinstance(e, PodSeen)]
    before = {e.pod for e in pods if e.at <= kill.at}
    return next(e.at for e in pods if e.phase == "Running" and e.pod not in before)


def version() -> float:
    """Seconds of a processor that `everstep --version` takes."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run([sys.executable, "-m", "everstep.cli.main", "--version"], capture_output=True, check=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def main() -> int:
    args = parser(__doc__).parse_args()
    taken = [sample() for _ in range(1 if args.quick else SAMPLES)]
    middle = {part: sorted(t[part] for t in taken)[len(taken) // 2] for part in taken[0]}
    lower, n = Better.LOWER, len(taken)
    shown = [version() for _ in range(SAMPLES)]
    return finish(
        [
            Figure("demo.start_to_first_line.p50", middle["start"], "s", lower, n, goal=3),
            Figure("demo.whole.p50", middle["whole"], "s", lower, n, goal=60),
            Figure("demo.accuracy.p50", middle["accuracy"], "share", Better.HIGHER, n, goal=0.95),
            Figure("demo.kill_to_next_step.p50", middle["recovery"], "s", lower, n),
            Figure("demo.kill_to_new_pod.p50", middle["replaced"], "s", lower, n),
            Figure("cli.version_cpu.p50", statistics.median(shown), "s", lower, SAMPLES, goal=0.2),
        ],
        args,
    )


if __name__ == "__main__":
    sys.exit(main())
