"""examples/streaming: each sample once in each epoch over resizes, and the bits of an undisturbed run."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from support.recipes.kills import check_kill
from support.recipes.recipes import PROGRAMS, disturbed, script, undisturbed
from support.recipes.recorded import record

pytestmark = pytest.mark.timeout(300)
NAME = "streaming"
SAMPLES, EPOCHS, BATCH = 1440, 3, 96


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("shards")
    script(NAME, "shards.py").main(folder)
    return str(folder)


def arguments(shards: str, cache: Path) -> tuple[str, ...]:
    steps = EPOCHS * SAMPLES // BATCH
    return ("--steps", str(steps), "--every-steps", "15", "--shards", f"file://{shards}", "--cache", str(cache))


@pytest.mark.long
def test_a_killed_worker_leaves_no_trace(tmp_path: Path, shards: str) -> None:
    asked = arguments(shards, tmp_path / "cache")
    calm = undisturbed(NAME, tmp_path / "calm", asked)
    check_kill(NAME, tmp_path / "hit", calm, asked, (10, 35))


@pytest.mark.long
def test_each_sample_comes_once_an_epoch_over_resizes(tmp_path: Path, shards: str) -> None:
    notes = tmp_path / "notes"
    notes.mkdir()
    slow, noting = (PROGRAMS / name for name in ("unhurried.py", "streaming_ids.py"))
    ended = disturbed(
        NAME,
        tmp_path,
        arguments(shards, tmp_path / "cache"),
        processes=4,
        at=["8:scale=3", "24:scale=2"],
        through=[slow, Path("8:3,24:2"), noting, notes],
        elastic="2:4",
    )
    came = samples_by_epoch(notes)
    assert came.keys() == set(range(EPOCHS)), ended.output
    once = [{sample for sample, times in epoch.items() if times == 1} for epoch in came.values()]
    wrong = sum(len(set(range(SAMPLES)) ^ samples) for samples in once)
    record(
        NAME, "samples that came once in each of 3 epochs, with 4, 3 and 2 workers", min(map(len, once)), "", SAMPLES
    )
    record(NAME, "samples that came twice or not at all", wrong, "")
    assert wrong == 0
    workers = {entry["world_size"] for entry in ended.history() if entry["kind"] == "step"}
    assert workers >= {2, 3, 4}, ended.output


def samples_by_epoch(notes: Path) -> dict[int, Counter[int]]:
    """How often each sample came. A new process first plays a step of another rank; its own is the later line."""
    came: dict[int, Counter[int]] = {}
    for file in notes.iterdir():
        steps = {}
        for line in file.read_text().splitlines():
            epoch, step, *samples = map(int, line.split())
            steps[epoch, step] = samples
        for (epoch, _), samples in steps.items():
            came.setdefault(epoch, Counter()).update(samples)
    return came
