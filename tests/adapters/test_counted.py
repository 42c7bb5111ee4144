"""Sums over batches are found by the text of a loop's body."""

from __future__ import annotations

import ast
import runpy
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from everstep.recovery.errors import LoopError
from everstep.train.adapters.counted import by_hand, check_counters, counters

ADVISED = """if run.micro == 0:
    parts = []
parts.append(loss)
if accelerator.sync_gradients:
    total += sum(parts)"""


@pytest.mark.parametrize(
    ("body", "found"),
    [
        ("total += loss.item()", ["total += loss.item()"]),
        ("total = total + loss.item()", ["total = total + loss.item()"]),
        ("counts['seen'] += 1", ["counts['seen'] += 1"]),
        ("self.total += loss", ["self.total += loss"]),
        ("losses.append(loss.item())", ["losses.append(…)"]),
        ("if loss > 1:\n    total += 1\nelse:\n    other += 1", ["total += 1", "other += 1"]),
        ("try:\n    total += 1\nexcept ValueError:\n    wrong += 1", ["total += 1", "wrong += 1"]),
        ("if accelerator.sync_gradients:\n    total += 1", []),
        ("if accelerator.sync_gradients and step:\n    total += 1\nelse:\n    other += 1", ["other += 1"]),
        ("if accelerator.sync_gradients or step:\n    total += 1", ["total += 1"]),
        ("loss = f(batch)\nloss += g(batch)\nloss = loss / 2", []),
        ("batch += 1", []),
        ("parts = []\nparts.append(1)", []),
        ("def later():\n    nonlocal total\n    total += 1", []),
        ("progress.update(1)", []),
        (ADVISED, []),
    ],
)
def test_sums_that_a_batch_would_enter_twice_are_found_unless_they_ask_first(body: str, found: list[str]) -> None:
    lines = "\n".join("    " + line for line in body.splitlines())
    (loop,) = ast.parse(f"for batch in loader:\n{lines}").body
    assert isinstance(loop, ast.For)
    assert [what for what, _ in counters(loop)] == found


KEPT = ('`sums = {"loss": 0.0}`', "`run.track(sums=sums)`", "Inside `with accelerator.accumulate(model):`")


@pytest.mark.parametrize(
    ("micros", "advised"),
    [
        (1, ("Write `if accelerator.sync_gradients:`", '`mean = accelerator.reduce(loss.detach(), "mean")`', *KEPT)),
        (4, ("run.micro == 0", '`parts.append(accelerator.reduce(loss.detach(), "mean").item())`', *KEPT)),
    ],
)
def test_advice_for_a_sum_is_the_whole_form_at_once(micros: int, advised: tuple[str, ...], tmp_path: Path) -> None:
    def batches() -> Iterator[int]:
        check_counters(sys._getframe(1), micros)
        yield 1

    script = tmp_path / "train.py"
    script.write_text("total = 0\nfor loss in batches():\n    total += loss\n")
    with pytest.raises(LoopError, match=r"total \+= loss \(train\.py:3\)") as refused:
        runpy.run_path(str(script), {"batches": batches})
    assert [text for text in advised if text not in str(refused.value)] == []


@pytest.mark.parametrize(
    ("body", "line"),
    [
        ("if i % 4 == 0:\n    optimizer.step()", 2),
        ("loss.backward()\nif (i + 1) % 4:\n    continue\noptimizer.step()", 3),
        ("if i % 4 == 0:\n    print(i)\noptimizer.step()", 0),
        ("if accelerator.sync_gradients:\n    optimizer.step()", 0),
    ],
)
def test_line_that_decides_by_a_remainder_whether_an_optimizer_steps_is_found(body: str, line: int) -> None:
    lines = "\n".join("    " + one for one in body.splitlines())
    (loop,) = ast.parse(f"for i, batch in enumerate(loader):\n{lines}").body
    assert isinstance(loop, ast.For)
    assert by_hand(loop) == line


def test_accumulation_by_hand_and_a_sum_over_its_batches_are_refused_together(tmp_path: Path) -> None:
    def batches() -> Iterator[int]:
        check_counters(sys._getframe(1), 1)
        yield 1

    script = tmp_path / "train.py"
    script.write_text(
        "total = 0\nfor i, loss in enumerate(batches()):\n    total += loss\n"
        "    if i % 2 == 0:\n        optimizer.step()\n"
    )
    with pytest.raises(
        LoopError, match=r"line 4 of train\.py: gradients .*And total \+= loss \(train\.py:3\).*micro == 0"
    ):
        runpy.run_path(str(script), {"batches": batches})
