"""examples/ddp: with each of its options gradients as one process has them, which travel once a step; kills leave no
trace."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from support.recipes.kills import check_kill
from support.recipes.recipes import PROGRAMS, script, undisturbed
from support.recipes.recorded import record

pytestmark = pytest.mark.timeout(300)
NAME = "ddp"
FURTHEST = "largest difference of a gradient from that of one process, by the largest gradient"
OPTIONS = {
    "plain": (),
    "static graph, small buckets": ("--static-graph", "--bucket-mb", "0.03"),
    "static graph, a layer never used": ("--static-graph", "--leave-out", "1"),
    "a layer left out": ("--leave-out", "0.5"),
    "a hook on gradients": ("--first", "0.25"),
    "join": ("--join",),
}
ARGUMENTS = ("--steps", "60", "--every-steps", "20")


@pytest.mark.long
def test_a_killed_worker_leaves_no_trace(tmp_path: Path) -> None:
    calm = undisturbed(NAME, tmp_path / "calm", ARGUMENTS)
    check_kill(NAME, tmp_path / "hit", calm, ARGUMENTS, (15, 45))


@pytest.mark.long
def test_gradients_are_those_of_one_process(tmp_path: Path) -> None:
    one, three = (undisturbed(NAME, tmp_path / str(n), ("--steps", "1", "--dropout", "0"), processes=n) for n in (1, 3))
    alone, together = (e.state["optimizer"]["state"] for e in (one, three))
    assert alone.keys() == together.keys()
    furthest = max(float((together[i]["exp_avg"] - state["exp_avg"]).abs().max()) for i, state in alone.items())
    largest = max(float(state["exp_avg"].abs().max()) for state in alone.values())
    record(NAME, FURTHEST, furthest / largest, "")
    for i, state in alone.items():
        # After its first step Adam's average is a tenth of the gradient.
        torch.testing.assert_close(together[i]["exp_avg"], state["exp_avg"], rtol=1e-4, atol=1e-7)


@pytest.mark.long
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_gradients_over_an_epoch_are_those_of_one_process(tmp_path: Path, options: tuple[str, ...]) -> None:
    """In the last batch of the epoch two of three ranks have no samples."""
    epoch = ("--steps", str(script(NAME).TRAIN // 96 + 1), "--dropout", "0", *options)
    one, three = (undisturbed(NAME, tmp_path / str(n), epoch, processes=n) for n in (1, 3))
    alone, together = (e.state["optimizer"]["state"] for e in (one, three))
    assert alone.keys() == together.keys()
    for i, state in alone.items():
        torch.testing.assert_close(together[i]["exp_avg"], state["exp_avg"], rtol=1e-4, atol=1e-6)


def test_gradients_travel_once_a_step(tmp_path: Path) -> None:
    through = [PROGRAMS / "bytes_averaged.py"]
    small = ("--steps", "4", "--bucket-mb", "0.03")
    few = undisturbed(NAME, tmp_path / "few", small, 2, through)
    many = undisturbed(NAME, tmp_path / "many", ("--steps", "4"), 2, through, EVERSTEP_TEST_ALWAYS="1")
    parts = 96 // 2 // 8  # of a rank's batch
    (few_bytes, few_buckets), (many_bytes, many_buckets) = averaged(few.output), averaged(many.output)
    ratio = few_bytes / many_bytes
    record(NAME, "bytes that travel with 6 micro-batches, by those without `no_sync`", ratio, "", expected=1 / parts)
    assert few_bytes * parts == many_bytes, few.output
    # Without the option one bucket holds the whole model.
    assert many_buckets == 4 * parts, many.output
    record(NAME, "buckets that travel in 4 steps with `--bucket-mb 0.03`, one a step without", few_buckets, "")
    assert few_buckets > 4, few.output


def averaged(output: str) -> tuple[int, int]:
    """Bytes and buckets of each rank."""
    found = re.findall(r"averaged (\d+) bytes in (\d+) buckets", output)
    assert len(found) == 2, output
    assert found[0] == found[1], output
    return int(found[0][0]), int(found[0][1])
