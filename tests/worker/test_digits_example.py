"""The digits example as its users run it: real processes, killed for real, and the same bits at the end."""

import importlib.util
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import TypeVar

import pytest
import xxhash
import yaml

from everstep.contract import env, exit_codes
from support.processes.ranks import Ranks
from support.processes.warm_python import warm

T = TypeVar("T")

EXAMPLE = Path(__file__).parents[2] / "examples" / "digits"
PYTHON: list[str] = []
# Each test starts several Pythons with torch, on a machine that may be doing other things.
pytestmark = pytest.mark.timeout(300)
TORCHRUN = [
    "-m",
    "torch.distributed.run",
    "--nnodes=1",
    "--rdzv-backend=c10d",
    "--rdzv-endpoint=localhost:0",
]
STEPS = "300"  # half of the default: enough for 97 %, and the machine may be busy
# As the operator sets it: workers that share torchrun's store meet an earlier attempt's keys and hang after a restart.
MENDED = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1", "OMP_NUM_THREADS": "1"}
CLEAN = {
    k: v for k, v in os.environ.items() if not k.startswith(("EVERSTEP_", "PET_", "DIGITS_", "RANK", "WORLD_SIZE"))
}


@dataclass(frozen=True)
class Final:
    """The last two lines that the script prints."""

    step: int
    accuracy: float
    parameters: str
    samples: tuple[int, str]


class Run:
    """A running script, begun warm; under a launcher only that is, and its processes are not."""

    def __init__(self, launcher: Sequence[str], args: Sequence[str], output: Path) -> None:
        self.mark = f"DIGITS_TEST_RUN={uuid.uuid4().hex}"
        name, _, value = self.mark.partition("=")
        self.output = output
        with output.open("wb") as file:
            self.process = warm().popen(
                *launcher, EXAMPLE / "train.py", *args,
                stdout=file, stderr=subprocess.STDOUT, env=CLEAN | MENDED | {name: value}, start_new_session=True,
            )  # fmt: skip

    @property
    def text(self) -> str:
        return self.output.read_text()

    def wait_for(self, pattern: str) -> re.Match[str]:
        """The first match in what it prints."""
        return self.wait_until(repr(pattern), lambda: re.search(pattern, self.text))

    def wait_until(self, what: str, holds: Callable[[], T | None], seconds: float = 60) -> T:
        """The first true value of `holds`."""
        deadline = time.monotonic() + seconds
        while not (value := holds()):
            assert time.monotonic() < deadline, f"no {what} in:\n{self.text}"
            assert self.process.poll() is None, f"the run ended without {what}:\n{self.text}"
            time.sleep(0.01)
        return value

    def finish(self, code: int = 0, seconds: float = 120) -> str:
        try:
            self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            pytest.fail(f"not finished after {seconds} s:\n{self.text}")
        assert self.process.returncode == code, self.text
        return self.text

    def kill(self) -> None:
        """Kill everything the run started. Found by mark: torchrun's processes outlive it."""
        self.process.kill()
        for entry in Path("/proc").iterdir():
            with suppress(OSError):
                if entry.name.isdigit() and self.mark.encode() in (entry / "environ").read_bytes().split(b"\0"):
                    os.kill(int(entry.name), signal.SIGKILL)


@contextmanager
def running(launcher: Sequence[str], *args: str) -> Iterator[Run]:
    with tempfile.NamedTemporaryFile() as output:
        run = Run(launcher, args, Path(output.name))
        try:
            yield run
        finally:
            run.kill()
            run.process.wait(10)


def final(text: str) -> Final:
    samples = re.search(r"^samples=(\d+) samples_xxh3=(\w+)$", text, re.MULTILINE)
    end = re.search(r"final step=(\d+) loss=[\d.]+ test_accuracy=([\d.]+) parameters_xxh3=(\w+)", text)
    assert samples is not None, text
    assert end is not None, text
    return Final(int(end[1]), float(end[2]), end[3], (int(samples[1]), samples[2]))


def finished(launcher: Sequence[str], *args: str) -> Final:
    with running(launcher, *args) as run:
        return final(run.finish())


def torchrun(processes: int, *flags: str) -> list[str]:
    return [*TORCHRUN, f"--nproc-per-node={processes}", *flags]


@pytest.fixture(scope="module")
def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("digits_train", EXAMPLE / "train.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Final:
    folder = tmp_path_factory.mktemp("undisturbed")
    argv = [EXAMPLE / "train.py", "--checkpoint", folder / "commits", "--every-steps", 100, "--steps", STEPS]
    ranks = Ranks(warm(), 2, argv, folder / "printed.txt", CLEAN | MENDED)
    try:
        assert ranks.wait(120) == [0, 0], (folder / "printed.txt").read_text()
    finally:
        ranks.kill()
    return final((folder / "printed.txt").read_text())


def records(folder: Path) -> str:
    """The commit log. What is still being written has a name that begins with a dot."""
    return "".join(p.read_text() for p in sorted(folder.glob("log/[0-9]*.json"))).replace(" ", "")


def lineage(script: ModuleType, steps: int) -> tuple[int, str]:
    """What the count and digest must be when each step was trained exactly once."""
    count, digest = 0, ""
    for step in range(steps):
        indices = script.batch_indices(step)
        count += len(indices)
        digest = xxhash.xxh3_128_hexdigest(digest.encode() + indices.numpy().tobytes())
    return count, digest


@pytest.mark.long
def test_every_epoch_holds_every_training_sample_once(script: ModuleType) -> None:
    batches = script.TRAIN // script.BATCH
    epochs = [[i for b in range(batches) for i in script.batch_indices(e * batches + b).tolist()] for e in range(3)]
    assert [sorted(epoch) for epoch in epochs] == [list(range(script.TRAIN))] * 3
    assert epochs[0] != epochs[1]


@pytest.mark.long
def test_two_processes_learn_the_digits(undisturbed: Final, script: ModuleType) -> None:
    assert undisturbed.step == 300
    assert undisturbed.accuracy >= 0.95
    assert undisturbed.samples == lineage(script, 300)


@pytest.mark.long
def test_single_process_with_the_defaults_learns_the_digits(script: ModuleType, tmp_path: Path) -> None:
    alone = finished(PYTHON, "--checkpoint", str(tmp_path))
    assert alone.step == 600
    assert alone.accuracy >= 0.97
    assert alone.samples == lineage(script, 600)


@pytest.mark.long
@pytest.mark.parametrize("rank", [0, 1])
def test_killed_process_changes_nothing_about_the_result(rank: int, undisturbed: Final, tmp_path: Path) -> None:
    args = ("--checkpoint", str(tmp_path), "--every-steps", "25", "--step-seconds", "0.01", "--steps", STEPS)
    with running(torchrun(2, "--max-restarts=2", "--monitor-interval=0.1"), *args) as run:
        victim = run.wait_for(rf"start step=0 rank={rank} world=2 pid=(\d+)")
        run.wait_until("a commit", lambda: '"kind":"commit"' in records(tmp_path))
        os.kill(int(victim[1]), signal.SIGKILL)
        text = run.finish()
    resumed = re.findall(r"start step=(\d+) rank=0", text)
    assert len(resumed) == 2
    assert 0 < int(resumed[1]) < 300
    assert final(text) == undisturbed


@pytest.mark.long
def test_restart_at_three_processes_rounds_like_an_undisturbed_run(tmp_path: Path) -> None:
    # From three summands on the order of a sum shows in its last bit: DDP must add in the same order after a restart.
    straight = finished(torchrun(3), "--checkpoint", str(tmp_path / "a"), "--steps", "30", "--every-steps", "1000")
    for steps in ("15", "30"):
        resumed = finished(torchrun(3), "--checkpoint", str(tmp_path / "b"), "--steps", steps, "--every-steps", "1000")
    assert resumed == straight


@pytest.mark.long
def test_finished_run_started_again_only_reports_its_result(tmp_path: Path) -> None:
    args = ("--checkpoint", str(tmp_path), "--steps", "30")
    first = finished(PYTHON, *args)
    log = sorted((tmp_path / "log").iterdir())
    assert finished(PYTHON, *args) == first
    assert records(tmp_path).count('"kind":"commit"') == 1
    assert len(list((tmp_path / "log").iterdir())) == len(log) + 1  # the second run opened, and committed nothing


@pytest.mark.long
def test_older_run_is_fenced_by_a_newer_one_and_says_so(tmp_path: Path) -> None:
    slow = ("--checkpoint", str(tmp_path), "--steps", "600", "--every-steps", "5", "--step-seconds", "0.05")
    with running(PYTHON, *slow) as old:
        old.wait_for(r"step=20 loss")
        old.process.send_signal(signal.SIGSTOP)  # of an older run that lives it would be refused
        newer = finished(PYTHON, "--checkpoint", str(tmp_path), "--steps", "100", "--every-steps", "50")
        old.process.send_signal(signal.SIGCONT)
        old.finish(exit_codes.FENCED)
        assert "final" not in old.text
    assert newer.step == 100


def test_unusable_store_ends_the_run_before_its_first_step() -> None:
    with running(PYTHON, "--checkpoint", "nosuchscheme://bucket/x") as run:
        text = run.finish(exit_codes.STORE_UNUSABLE)
    assert "nosuchscheme" in text
    assert "Traceback" not in text
    assert "step=" not in text


def test_manifest_names_the_script_that_exists_and_a_contract_it_reads() -> None:
    job = yaml.safe_load((EXAMPLE / "trainingjob.yaml").read_text())
    (worker,) = job["spec"]["template"]["spec"]["containers"]
    assert worker["name"] == "worker"
    assert (EXAMPLE / worker["command"][-1]).is_file()
    assert env.CHECKPOINT_URL in (EXAMPLE / "train.py").read_text()
    variables = {e["name"]: e["value"] for e in worker["env"]}
    assert all(name in (EXAMPLE / "train.py").read_text() for name in variables)
    pauses = int(variables["DIGITS_STEPS"]) * float(variables["DIGITS_STEP_SECONDS"])
    assert 240 <= pauses <= 600, "long enough for a person to break it several times"


@pytest.mark.long
def test_on_a_cluster_the_log_says_how_to_break_the_job(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, EXAMPLE / "train.py", "--steps", "1", "--checkpoint", tmp_path],
        env=CLEAN | {"KUBERNETES_SERVICE_HOST": "10.96.0.1", env.JOB_NAME: "digits-7"},
        capture_output=True, text=True, timeout=100, check=True,
    )  # fmt: skip
    assert "kubectl delete pod -l everstep.dev/job=digits-7,everstep.dev/worker-index=0\n" in done.stdout
    assert "kubectl scale tjob/digits-7 --replicas=3\n" in done.stdout
    assert """-p '{"spec":{"suspend":true}}'\n""" in done.stdout
