"""The trackers of docs/how-to-trackers.md: one continuous run, no step twice, over a lost rank 0 and a restart."""

from __future__ import annotations

import importlib
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from support import ROOT

pytestmark = pytest.mark.timeout(600)

SCRIPT = Path(__file__).with_name("trackers_script.py")
BIN = Path(sys.executable).parent


def train(kind: str, folder: Path, steps: int) -> None:
    done = subprocess.run(
        [BIN / "everstep-run", "--nproc-per-node", "2", "--rdzv-id", "job", SCRIPT, kind, folder, str(steps)],
        capture_output=True, text=True, timeout=280, check=False,
        env={**os.environ, "MLFLOW_ALLOW_FILE_STORE": "true"},
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-3000:]


def by_tensorboard(folder: Path) -> list[int]:
    accumulator = importlib.import_module("tensorboard.backend.event_processing.event_accumulator")
    seen = accumulator.EventAccumulator(str(folder / "runs"))
    seen.Reload()
    return [event.step for event in seen.Scalars("loss")]


def by_mlflow(folder: Path) -> list[int]:
    client: Any = importlib.import_module("mlflow").MlflowClient(f"file://{folder}/store")
    (run,) = client.search_runs([client.get_experiment_by_name("digits").experiment_id])
    return sorted(m.step for m in client.get_metric_history(run.info.run_id, "loss"))


@pytest.mark.long
@pytest.mark.parametrize(("kind", "logged"), [("tensorboard", by_tensorboard), ("mlflow", by_mlflow)])
def test_every_step_is_logged_once_over_a_lost_rank_and_a_restart(
    kind: str, logged: Callable[[Path], list[int]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    (tmp_path / "kill").touch()
    train(kind, tmp_path, 33)
    assert not (tmp_path / "kill").exists(), "rank 0 was killed"
    assert logged(tmp_path) == list(range(1, 34))

    # The commits are lost: the run begins again at step 0, and takes 33 steps again that were logged.
    shutil.rmtree(tmp_path / "commits")
    train(kind, tmp_path, 40)
    assert logged(tmp_path) == list(range(1, 41))


@pytest.fixture
def writer() -> Any:
    known: dict[str, Any] = {"SummaryWriter": importlib.import_module("torch.utils.tensorboard").SummaryWriter}
    exec(block("tensorboard"), known)
    return known["TensorBoard"]


COMPLETED = SimpleNamespace(completed=True)


def test_steps_that_a_process_takes_again_are_logged_once(tmp_path: Path, writer: Any) -> None:
    """All processes may go back to a commit without a restart. Then rank 0 and its file stay."""
    run = SimpleNamespace(rank=0, step=0)
    log = writer(run, str(tmp_path / "runs"))
    for run.step in (1, 2, 3, 4, 2, 3, 4, 5):
        log(COMPLETED, loss=run.step)
    assert by_tensorboard(tmp_path) == [1, 2, 3, 4, 5]


@pytest.mark.parametrize("last", [3, 4])
def test_the_last_step_of_a_lost_rank_0_is_logged_once(tmp_path: Path, writer: Any, last: int) -> None:
    """It died after step 4, and had logged the steps up to `last`."""
    runs = [SimpleNamespace(rank=rank, step=0) for rank in range(2)]
    first, second = (writer(run, str(tmp_path / "runs")) for run in runs)
    for runs[0].step in range(1, last + 1):
        first(COMPLETED, loss=1.0)
    for runs[1].step in range(1, 5):
        second(COMPLETED, loss=2.0)
    runs[1].rank, runs[1].step = 0, 5
    second(COMPLETED, loss=2.0)
    assert by_tensorboard(tmp_path) == [1, 2, 3, 4, 5]


@pytest.mark.parametrize("name", ["gpt", "resnet"])
def test_an_example_has_the_class_as_it_stands_on_the_page(name: str) -> None:
    assert block("tensorboard") in (ROOT / "examples" / name / "curves.py").read_text()


def block(kind: str) -> str:
    found = re.search(rf"```python {kind}\n(.*?)```", (ROOT / "docs" / "how-to-trackers.md").read_text(), re.DOTALL)
    assert found is not None, kind
    return found[1]
