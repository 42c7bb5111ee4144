"""examples/comm_hooks: fewer bytes, the accuracy of all bytes, and error feedback that outlives a process."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from support.recipes.kills import check_kill
from support.recipes.recipes import EXAMPLES, PROGRAMS, Ended, differences, disturbed, kill, launched, undisturbed
from support.recipes.recorded import record

pytestmark = pytest.mark.timeout(300)
NAME = "comm_hooks"
ARGUMENTS = ("--steps", "48", "--every-steps", "24")
RESTS = 1 / 24  # of the steps in which the rests are averaged, which are as large as the gradients
VALUES, PLAIN = 9610, 138  # of the model; those in biases, which PowerSGD does not compress
SHARES = {
    "fp16": 1 / 2,
    "bf16": 1 / 2,
    "top": 2 / 16 + RESTS,  # values and their places
    "random": 1 / 16 + RESTS,
    "sign": 1 / 32 + RESTS,
    "ternary": 2 / 32,
    "sketch": 5 / 32 + 1 / 16 + RESTS,  # five lines of a table, then values
    "powersgd": (2 * (64 + 128) + 2 * (128 + 10) + PLAIN) / VALUES + RESTS,
}


def furthest(left: Ended, right: Ended) -> float:
    parts = ((left.state["model"][name], right.state["model"][name]) for name in left.state["model"])
    return max(float((one - other).abs().max()) for one, other in parts)


@pytest.mark.long
def test_a_killed_worker_leaves_no_trace_where_each_step_averages_the_rests(tmp_path: Path) -> None:
    """The new process then has all that the lost one had: it is given the state of the hook."""
    arguments = (*ARGUMENTS, "--average-every", "1")
    calm = undisturbed(NAME, tmp_path / "calm", arguments, 2)
    figure = "values that a kill changes where each step averages the rests (top-k)"
    hit = check_kill(NAME, tmp_path / "hit", calm, arguments, (26, 40), 2, figure=figure)
    assert any(rest.ne(0).any() for rest in hit.state["compression"]["average"].values())


@pytest.mark.long
def test_a_killed_worker_costs_its_rest_since_the_last_average(tmp_path: Path) -> None:
    """The new process has the average of the rests of step 24, and not its own rest of the step in which it died."""
    calm = undisturbed(NAME, tmp_path / "calm", ARGUMENTS, 2)
    hit = disturbed(NAME, tmp_path / "hit", ARGUMENTS, 2, [kill(NAME, 26, 40, workers=2)])
    assert hit.status()["restarts"] == 1, hit.output
    assert (calm.step, calm.state["compression"]["steps"]) == (hit.step, hit.state["compression"]["steps"]) == (48, 48)
    record(NAME, "largest difference of a parameter that a kill makes (top-k)", furthest(calm, hit), "")
    assert furthest(calm, hit) < 0.05


@pytest.mark.long
@pytest.mark.parametrize("method", ["top", "sketch", "powersgd"])
def test_a_restore_changes_nothing(tmp_path: Path, method: str) -> None:
    arguments = ("--method", method, *ARGUMENTS)
    calm = undisturbed(NAME, tmp_path / "calm", arguments, 2)
    undisturbed(NAME, tmp_path / "stopped", (*arguments, "--steps", "24"), 2)
    changed = differences(calm, undisturbed(NAME, tmp_path / "stopped", arguments, 2))
    if method == "top":
        record(NAME, "values that a restore changes (top-k)", len(changed), "")
    assert changed == []


@pytest.mark.long
def test_fewer_bytes_have_the_accuracy_of_all(tmp_path: Path) -> None:
    found = tmp_path / "found.json"
    launched(tmp_path, 2, [PROGRAMS / "compressed.py", EXAMPLES / NAME, "240", found])
    results = json.loads(found.read_text())
    accuracy, everything = results["none"]
    assert accuracy > 0.85
    for method, (right, _) in results.items():
        assert right > accuracy - 0.01, (method, right, accuracy)
    for method, share in SHARES.items():
        measured = results[method][1] / everything
        record(NAME, f"bytes that {method} sends, by those of uncompressed gradients", measured, "", expected=share)
        assert measured == pytest.approx(share, rel=0.01), method
    above = results["threshold"][1] / everything
    record(NAME, "bytes that threshold sends, by those of uncompressed gradients", above, "")
    assert above < 0.1
    record(NAME, "lowest accuracy of a method, less that of uncompressed gradients", worst(results), "")
    assert results["two_level"][1] == 0, "with one node nothing goes from node to node"


def worst(results: dict[str, list[float]]) -> float:
    return min(right for right, _ in results.values()) - results["none"][0]


@pytest.mark.long
def test_nodes_exchange_what_their_first_ranks_have(tmp_path: Path) -> None:
    """Four ranks of two nodes end like four ranks without nodes."""
    plain = undisturbed(NAME, tmp_path / "plain", (*ARGUMENTS, "--method", "none"), 4)
    levels = undisturbed(NAME, tmp_path / "levels", (*ARGUMENTS, "--method", "two_level"), 4)
    assert furthest(plain, levels) < 1e-5
