"""Which sequences a test plays, and what it says of one that failed: how to play it again, and its text."""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import pytest

from support.scenarios import lines
from support.scenarios.player import Player
from support.scenarios.reference import ScenarioError
from support.scenarios.sequences import SEED_LINE, Place, sequence

SEEDS = "EVERSTEP_SEEDS"  # 7, or 100:150
FILE = "EVERSTEP_SEQUENCE"  # a file with a text, to replay or to shrink


def texts(environ: Mapping[str, str], each_time: Iterable[int], place: Place) -> list[Any]:
    """Parameters of a test: the text of a file, or of the seeds that are asked for, or of those of each time."""
    if path := environ.get(FILE):
        return [pytest.param(Path(path).read_text(), id="given")]
    first, colon, after = environ.get(SEEDS, "").partition(":")
    if first:
        each_time = range(int(first), int(after) if colon else int(first) + 1)
    return [pytest.param(sequence(seed, place), id=f"seed-{seed}") for seed in each_time]


def _is_fault(line: str) -> bool:
    words = shlex.split(line.removeprefix("maybe "), comments=True)
    return bool(words) and words[0] in lines.FAULTS


def play(player: Player, text: str, test: str) -> None:
    """`test`: the path of the test file. Raises `ScenarioError` with the text, and how to play it again; also if fewer
    than half of its faults were done to the job: that is a run which nobody disturbed, and shows nothing."""
    print(text)
    try:
        lines.play(player, text, leave_out=True)
        print("\n".join(f"left out: {line}" for line in player.left_out))
        wanted = sum(_is_fault(line) for line in text.splitlines())
        if 2 * len(player.struck) < wanted:
            left_out = "\n".join(player.left_out)
            raise ScenarioError(f"{len(player.struck)} of {wanted} faults were done to the job; left out:\n{left_out}")
    except ScenarioError as e:
        first = text.splitlines()[0].removeprefix(SEED_LINE)
        again = f"{SEEDS}={first} pytest -s {test}" if first.isdecimal() else "the same again"
        shorter = f"{FILE}=FILE pytest -s {test}"
        raise ScenarioError(
            f"{e}\n\nThe sequence was\n\n{text}\nTo play it again: {again}\nA shorter one from a file: {shorter}"
        ) from e
