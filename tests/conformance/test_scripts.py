"""Random requests to both worlds: each answers as the other does, tells the same events, holds the same objects."""

from __future__ import annotations

from typing import Any

import pytest

from support.conformity.scripts import Player, script
from support.conformity.world import memory_world, server_world

SEEDS = range(8)
LENGTH = 150


@pytest.mark.long_but("4")
@pytest.mark.apiserver
@pytest.mark.parametrize("seed", SEEDS)
async def test_random_requests_have_the_same_answers_in_both_worlds(crd: Any, seed: int) -> None:
    requests = script(seed, LENGTH)
    async with server_world(crd) as world:
        player = Player(world)
        real = await player.play(requests)
    async with memory_world() as world:
        memory = await Player(world).play(requests)
    for number, (expected, found) in enumerate(zip(real, memory, strict=False)):
        assert found == expected, f"line {number} of {len(real)}; the second is real: {player.refusals.get(number)}"
    assert len(memory) == len(real)


async def test_script_repeats_in_memory() -> None:
    transcripts = []
    for _ in range(2):
        async with memory_world() as world:
            transcripts.append(await Player(world).play(script(1, LENGTH)))
    assert transcripts[0] == transcripts[1]
    assert any("Conflict" in line for line in transcripts[0])
    assert any("Invalid" in line for line in transcripts[0])
