"""The session, alone, among ranks and under real launchers: what it restores, saves and says, and how it stops."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import pytest

from support.train.training_run import Start

pytestmark = pytest.mark.timeout(240)


def seen(folder: Path) -> dict[int, dict[int, list[int]]]:
    """step → rank → samples, of the last process that completed the step."""
    steps: dict[int, dict[int, list[int]]] = {}
    for path in sorted(folder.iterdir(), key=lambda p: p.stat().st_mtime):
        for line in path.read_text().splitlines():
            record = json.loads(line)
            steps.setdefault(record["step"], {})[record["rank"]] = record["indices"]
    return steps


@pytest.mark.long
@pytest.mark.parametrize("ranks", [0, 2])
def test_script_runs_alike_under_python_and_torchrun(ranks: int, start: Start, tmp_path: Path) -> None:
    ended = start(ranks, "--url", tmp_path / "commits", "--every-steps", 10, launched=True).end()
    assert ended.well, ended.output
    again = start(ranks, "--url", tmp_path / "commits", "--every-steps", 10).end()
    assert again.well, again.output
    assert again.parameters == ended.parameters, "a finished run restored is the finished run"


@pytest.mark.long_but("2")
@pytest.mark.parametrize("ranks", [0, 2, 3])
def test_run_killed_in_a_step_and_resumed_ends_with_the_same_bits(ranks: int, start: Start, tmp_path: Path) -> None:
    undisturbed = start(ranks, "--url", tmp_path / "a", "--every-steps", 10).end()
    dies = ("--url", tmp_path / "b", "--every-steps", 10, "--workers", 1, "--die-at", 25, "--pause", 0.05)
    killed = start(ranks, *dies).end()
    assert -signal.SIGKILL in killed.codes, killed.output
    assert 0 not in killed.codes, killed.output
    resumed = start(ranks, "--url", tmp_path / "b", "--every-steps", 10, "--workers", 1).end()
    # A save in flight at the death may or may not have ended.
    assert resumed.starts[0] in (10, 20), resumed.output
    assert resumed.parameters == undisturbed.parameters


@pytest.mark.long
def test_run_of_three_ranks_resumed_after_its_first_step_ends_with_the_same_bits(start: Start, tmp_path: Path) -> None:
    undisturbed = start(3, "--url", tmp_path / "a", "--every-steps", 100).end()
    start(3, "--url", tmp_path / "b", "--every-steps", 1, "--die-at", 1, "--pause", 0.05).end()
    resumed = start(3, "--url", tmp_path / "b", "--every-steps", 100).end()
    assert resumed.starts[0] == 1, resumed.output
    assert resumed.parameters == undisturbed.parameters


@pytest.mark.long
def test_torchrun_of_three_ranks_started_again_ends_with_the_same_bits(start: Start, tmp_path: Path) -> None:
    undisturbed = start(3, "--url", tmp_path / "a", "--every-steps", 100).end()
    dies = ("--url", tmp_path / "b", "--every-steps", 10, "--die-at", 25, "--pause", 0.05)
    killed = start(3, *dies, launched=True).end()
    assert not killed.well
    resumed = start(3, "--url", tmp_path / "b", "--every-steps", 100, launched=True).end()
    assert resumed.starts[0] in (10, 20), resumed.output
    assert resumed.parameters == undisturbed.parameters


@pytest.mark.long_but("0")
@pytest.mark.parametrize("ranks", [0, 2])
def test_sigterm_commits_the_step_at_hand_and_ends_with_its_own_code(ranks: int, start: Start, tmp_path: Path) -> None:
    undisturbed = start(ranks, "--url", tmp_path / "a", "--every-steps", 1000).end()
    slow = ("--url", tmp_path / "b", "--every-steps", 1000, "--pause", 0.3, "--workers", 1)
    run = start(ranks, *slow, launched=ranks > 0)
    run.until("all ranks train", lambda text: text.count("start step=") == max(1, ranks))
    # Only one of them is told; the others hear of it from the session.
    os.kill(run.pids()[max(ranks - 1, 0)], signal.SIGTERM)
    ended = run.end()
    assert ended.codes == [86 if ranks == 0 else 1], ended.output
    assert ranks == 0 or "exitcode  : 86" in ended.output, ended.output
    assert "its state is committed" in ended.output
    resumed = start(ranks, "--url", tmp_path / "b", "--every-steps", 1000).end()
    assert 0 < resumed.starts[0] < 40, resumed.output
    assert resumed.parameters == undisturbed.parameters


@pytest.mark.long
@pytest.mark.parametrize("context", ["fork", "spawn"])
def test_sigterm_to_a_whole_process_group_leaves_the_trainer_its_workers(
    context: str, start: Start, tmp_path: Path
) -> None:
    (tmp_path / "seen").mkdir()
    workers = ("--workers", 2, "--context", context, "--seen", tmp_path / "seen")
    run = start(0, "--url", tmp_path / "b", "--every-steps", 1000, "--until", 10_000, "--pause", 0.1, *workers)
    run.until("it trains", lambda _: any((tmp_path / "seen").iterdir()), seconds=120)
    os.killpg(run.group, signal.SIGTERM)
    ended = run.end()
    assert ended.codes == [86], ended.output
    assert "its state is committed" in ended.output


@pytest.mark.long
def test_sigterm_to_torchrun_commits_before_it_kills(start: Start, tmp_path: Path) -> None:
    run = start(2, "--url", tmp_path / "b", "--every-steps", 1000, "--pause", 0.3, launched=True)
    run.until("all ranks train", lambda text: text.count("start step=") == 2)
    os.kill(run.group, signal.SIGTERM)
    ended = run.end()
    assert "its state is committed" in ended.output, ended.output


@pytest.mark.long
def test_resized_run_takes_every_sample_once_an_epoch_and_computes_the_same(start: Start, tmp_path: Path) -> None:
    """Worlds of 1, 3, 2 and 1 over two epochs of 20 steps; the batch of 50 is not divisible by 3."""
    folder, seen_ = tmp_path / "commits", tmp_path / "seen"
    seen_.mkdir()
    fixed = start(0, "--url", tmp_path / "fixed", "--dropout", 0, "--every-steps", 1000).end()
    for ranks, until in ((0, 7), (3, 16), (2, 29), (0, 40)):
        options = ("--url", folder, "--dropout", 0, "--until", until, "--seen", seen_, "--every-steps", 1000)
        ended = start(ranks, *options).end()
        assert ended.well, ended.output
    steps = seen(seen_)
    assert sorted(steps) == list(range(40))
    for epoch in range(2):
        samples = [i for s in range(20 * epoch, 20 * epoch + 20) for part in steps[s].values() for i in part]
        assert sorted(samples) == list(range(1000))
    assert {len(parts) for parts in steps.values()} == {1, 2, 3}
    # Sums in another order: 40 steps of AdamW in float32 differ in the last digits only.
    assert ended.values == pytest.approx(fixed.values, rel=1e-3, abs=1e-4)


@pytest.mark.long
def test_micro_batches_give_the_gradient_of_the_whole_batch(start: Start, tmp_path: Path) -> None:
    whole = start(0, "--url", tmp_path / "a", "--dropout", 0).end()
    parts = start(2, "--url", tmp_path / "b", "--dropout", 0, "--micro-batch", 7).end()
    assert parts.well, parts.output
    assert parts.values == pytest.approx(whole.values, rel=1e-3, abs=1e-4)


@pytest.mark.long
def test_saves_by_time_happen_at_one_step_on_all_ranks(start: Start, tmp_path: Path) -> None:
    run = start(2, "--url", tmp_path / "a", "--every-seconds", 0.15, "--pause", 0.03, "--until", 100)
    assert run.end().well, run.text()
    records = [json.loads(p.read_text().splitlines()[0]) for p in sorted((tmp_path / "a" / "log").iterdir())]
    commits = [r["step"] for r in records if r["kind"] == "commit"]
    assert len(commits) >= 3
    assert commits[-1] == 100
    assert commits == sorted(set(commits))


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--url", "nosuch://x"), "unknown scheme 'nosuch'"),
        (("--url", "commits", "--global-batch", "1"), "global_batch"),
        (("--url", "/proc/everstep"), "/proc"),
    ],
)
def test_what_cannot_work_is_named_before_the_first_step(
    arguments: tuple[str, ...], words: str, start: Start, tmp_path: Path
) -> None:
    ranks = 2 if "--global-batch" in arguments else 0
    if arguments[1] == "commits":
        arguments = ("--url", str(tmp_path / "commits"), *arguments[2:])
    ended = start(ranks, *arguments).end()
    assert 0 not in ended.codes
    assert words in ended.output, ended.output
    assert "start step=" not in ended.output
