"""Workers do not outlive their trainer: real trainers, killed with SIGKILL while their workers are blocked."""

import os
import signal
import time
from contextlib import suppress
from pathlib import Path

import pytest

from support.processes.warm_python import warm

TRAINER = """
import os, sys, threading
from everstep.data import ElasticLoader

FOLDER, CONTEXT, THREAD = sys.argv[1], sys.argv[2], sys.argv[3] == "thread"

class Slow:
    def __len__(self):
        return 1000
    def __getitem__(self, index):
        with open(os.path.join(FOLDER, str(os.getpid())), "w"):
            pass
        threading.Event().wait()  # a store that does not answer

def train():
    loader = ElasticLoader(Slow(), global_batch=4, num_workers=2, multiprocessing_context=CONTEXT)
    next(iter(loader))

if __name__ == "__main__":
    if THREAD:
        thread = threading.Thread(target=train)
        thread.start()
        thread.join()
    else:
        train()
"""


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


def wait_for(condition: object, seconds: float, what: str) -> None:
    end = time.monotonic() + seconds
    while not condition():  # type: ignore[operator]
        assert time.monotonic() < end, what
        time.sleep(0.01)


@pytest.mark.long_but("fork-main")
@pytest.mark.parametrize(
    ("context", "thread"), [("fork", "main"), ("fork", "thread"), ("spawn", "main"), ("forkserver", "main")]
)
def test_blocked_workers_end_when_their_trainer_is_killed(context: str, thread: str, tmp_path: Path) -> None:
    """Stock workers would live on: they look for their parent only while they wait for work."""
    script = tmp_path / "trainer.py"
    script.write_text(TRAINER)
    seen = tmp_path / "workers"
    seen.mkdir()
    workers: list[int] = []
    trainer = warm().popen(script, seen, context, thread)
    try:
        wait_for(lambda: len(os.listdir(seen)) == 2 or trainer.poll() is not None, 90, "two workers read")
        workers = [int(name) for name in os.listdir(seen)]
        assert len(workers) == 2
        assert all(alive(pid) for pid in workers)
    finally:
        trainer.kill()
        assert trainer.wait(20) == -signal.SIGKILL
    try:
        wait_for(lambda: not any(alive(pid) for pid in workers), 20, f"workers {workers} outlive their trainer")
    finally:
        for pid in workers:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def test_workers_of_a_thread_that_ends_live_on(tmp_path: Path) -> None:
    """The kernel's parent-death signal means the thread that forked; a loader may be begun in one that ends."""
    code = """
import threading
from everstep.data import ElasticLoader
loader = ElasticLoader(list(range(40)), global_batch=4, num_workers=1)
loop, got = iter(loader), []
thread = threading.Thread(target=lambda: got.extend(next(loop).data.tolist()))
thread.start()
thread.join()
for batch in loop:
    got += batch.data.tolist()
assert sorted(got) == list(range(40)), got
"""
    done = warm().run("-c", code, timeout=90)
    assert done.returncode == 0, done.stderr
