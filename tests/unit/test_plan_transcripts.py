"""The planner's behaviour as readable transcripts: `transcripts/*.txt` are the specification.

A block is commands, a line `----`, and what they printed. `EVERSTEP_REWRITE=1 pytest …` writes the present output into
the files, to be reviewed as a diff.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest

from everstep_local.plan.simulation import agents as elastic_world
from everstep_local.plan.simulation import cluster as plan_world
from everstep_local.plan.simulation.cluster import World
from everstep_local.plan.simulation.transcript import replay

FOLDER = Path(__file__).with_name("transcripts")
CONTRIBUTING = Path(__file__).parents[2] / "CONTRIBUTING.md"


@pytest.mark.parametrize("path", sorted(FOLDER.glob("*.txt")), ids=lambda p: p.stem)
def test_transcript_replayed_prints_the_same(path: Path) -> None:
    compare(path, plan_world.World())


@pytest.mark.parametrize(
    "path", sorted([*FOLDER.glob("elastic/*.txt"), *FOLDER.glob("queue/*.txt")]), ids=lambda p: p.stem
)
def test_transcript_of_agents_that_form_rounds_prints_the_same(path: Path) -> None:
    compare(path, elastic_world.ElasticWorld())


def compare(path: Path, world: World) -> None:
    text = path.read_text()
    now = replay(world, text)
    if os.environ.get("EVERSTEP_REWRITE"):
        path.write_text(now)
    assert now == text


def test_transcripts_exist() -> None:
    assert len(list(FOLDER.glob("*.txt"))) >= 10


def test_transcript_that_contributing_shows_ends_as_it_says() -> None:
    commands, end = re.findall(r"^```text\n(.*?)^```$", CONTRIBUTING.read_text(), re.DOTALL | re.MULTILINE)
    assert replay(elastic_world.ElasticWorld(), commands).endswith(f"----\n{end}")
