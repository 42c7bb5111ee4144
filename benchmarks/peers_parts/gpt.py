"""The GPT that all arms of `peers.py` train, its data, and the diary that tells what became of each sample.

A text of PIECES pieces, each of which an undisturbed run trains on exactly once: STEPS steps with a global batch of
BATCH pieces. PID.steps has a line a step as `recovery_parts/train.py` writes them, PID.pieces has the same step with
the numbers of the pieces that this rank trained on in it.
"""

from __future__ import annotations

import os
import sys
import time
import zlib
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, gelu, scaled_dot_product_attention

LENGTH, ALPHABET, WIDTH, HEADS, LAYERS = 32, 64, 64, 4, 2
BATCH = 24  # pieces of a global batch: two and three ranks divide it
STEP_SECONDS = 0.03  # what a step takes on a device beside its work here
SAVE_EVERY = 20  # steps, where a script saves by itself
OUT, STEPS = Path(sys.argv[1]), int(sys.argv[2])
PIECES = STEPS * BATCH


class Block(nn.Module):
    """[rows, length, WIDTH] to the same; a place sees those before it."""

    def __init__(self) -> None:
        super().__init__()
        self.before, self.between = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.attention, self.project = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.widen, self.narrow = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        parts = (
            part.unflatten(-1, (HEADS, -1)).transpose(1, 2) for part in self.attention(self.before(x)).chunk(3, -1)
        )
        x = x + self.project(scaled_dot_product_attention(*parts, is_causal=True).transpose(1, 2).flatten(2))
        return x + self.narrow(gelu(self.widen(self.between(x))))


class GPT(nn.Module):
    """Characters [rows, LENGTH] to scores of the next ones [rows, LENGTH, ALPHABET]."""

    def __init__(self) -> None:
        super().__init__()
        self.characters, self.places = nn.Embedding(ALPHABET, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.Sequential(*(Block() for _ in range(LAYERS)), nn.LayerNorm(WIDTH))
        self.scores = nn.Linear(WIDTH, ALPHABET)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.scores(self.blocks(self.characters(tokens) + self.places.weight))


class Text(torch.utils.data.Dataset[tuple[int, Tensor]]):
    """Piece i and its number; a piece is [LENGTH + 1] characters of a text with a period."""

    def __len__(self) -> int:
        return PIECES

    def __getitem__(self, i: int) -> tuple[int, Tensor]:
        places = torch.arange(LENGTH + 1) + i * LENGTH
        return i, (places * places // 7 + places % 11) % ALPHABET


def build() -> GPT:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    return GPT()


def loss_of(model: nn.Module, pieces: Tensor) -> Tensor:
    """The mean over pieces [rows, LENGTH + 1]. Takes as long as a device would, too."""
    time.sleep(STEP_SECONDS)
    return cross_entropy(model(pieces[:, :-1]).flatten(0, 1), pieces[:, 1:].flatten())


def order() -> list[int]:
    """In which the pieces are trained, where a script orders them itself."""
    return torch.randperm(PIECES, generator=torch.Generator().manual_seed(0)).tolist()


def train(model: nn.Module, optimizer: torch.optim.Optimizer, start: int, rank: int, world: int) -> Iterator[int]:
    """The loop of a script that orders its pieces itself, behind `start` steps: all ranks share a global batch that
    stays the same. Yields the number of completed steps."""
    text, numbers, diary = Text(), order(), Diary()
    for step in range(start, STEPS):
        first = step * BATCH
        mine, pieces = zip(*(text[i] for i in numbers[first : first + BATCH][rank::world]), strict=True)
        optimizer.zero_grad()
        loss_of(model, torch.stack(pieces)).backward()
        optimizer.step()
        diary.write(step + 1, rank, world, torch.tensor(mine), model)
        yield step + 1


class Diary:
    def __init__(self) -> None:
        self._steps = (OUT / f"{os.getpid()}.steps").open("a", buffering=1)
        self._pieces = (OUT / f"{os.getpid()}.pieces").open("a", buffering=1)

    def write(self, step: int, rank: int, world: int, pieces: Tensor, model: nn.Module) -> None:
        """`step` steps are complete: this rank trained on these pieces (their numbers) in the last one."""
        checksum = zlib.crc32(torch.cat([p.detach().flatten() for p in model.parameters()]).numpy())
        at = time.monotonic()
        print(step, *pieces.tolist(), file=self._pieces)
        print(os.getpid(), rank, world, step, checksum, at, file=self._steps)
