"""What the scripts of the three frameworks share: a tiny model with dropout, points to fit, and faults at a step."""

from __future__ import annotations

import argparse
import json
import os
import signal
import time
from dataclasses import dataclass
from pathlib import Path

import torch
import xxhash
from torch.utils.data import Dataset

SAMPLES = 40
EPOCHS = 3


@dataclass
class Options:
    url: str
    workers: int
    term_at: int | None
    kill_at: int | None
    kill_after: int
    rank_told: int
    batch: int
    kind: str
    pause: float
    seen: Path | None


def options() -> Options:
    parser = argparse.ArgumentParser()
    parser.add_argument("--url", required=True)
    parser.add_argument("--workers", type=int, default=0)
    parser.add_argument("--term-at", type=int, help="SIGTERM to one rank in this step")
    parser.add_argument("--kill-at", type=int, help="SIGKILL to every rank in this step")
    parser.add_argument("--kill-after", type=int, default=0, help="but not before this step is committed")
    parser.add_argument("--rank-told", type=int, default=0, help="the rank that gets the SIGTERM")
    parser.add_argument("--batch", type=int, default=4, help="samples of a rank and step")
    parser.add_argument("--kind", default="", help="what a script offers variants of")
    parser.add_argument("--pause", type=float, default=0.0, help="seconds that a step takes longer")
    parser.add_argument("--seen", type=Path, help="folder for the samples of each step")
    return Options(**vars(parser.parse_args()))


class Points(Dataset[dict[str, torch.Tensor]]):
    """Points of a fixed function."""

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        x = torch.tensor([index / SAMPLES, (index % 10) / 10, 1.0])
        return {"x": x, "labels": (x.sum() ** 2).reshape(1)}


class Net(torch.nn.Module):
    """81 parameters and dropout. Commits its faults in the middle of a training step."""

    def __init__(self, given: Options) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = torch.nn.Sequential(
            torch.nn.Linear(3, 16), torch.nn.Tanh(), torch.nn.Dropout(0.2), torch.nn.Linear(16, 1)
        )
        self.given = given
        self.steps = 0  # the script says how many are complete

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        if self.training:
            self._record(x)
            self._fault()
        y = self.layers(x)
        return {"loss": torch.nn.functional.mse_loss(y, labels), "logits": y}

    def _record(self, x: torch.Tensor) -> None:
        if self.given.seen is not None:
            samples = (x[:, 0] * SAMPLES).round().int().tolist()
            with (self.given.seen / f"{os.getpid()}.jsonl").open("a") as file:
                file.write(json.dumps({"step": self.steps, "samples": samples}) + "\n")

    def _fault(self) -> None:
        given = self.given
        time.sleep(given.pause)
        if self.steps == given.term_at and int(os.environ.get("RANK", "0")) == given.rank_told:
            given.term_at = None
            os.kill(os.getpid(), signal.SIGTERM)
        if self.steps == given.kill_at:
            deadline = time.monotonic() + 120  # a busy disk may take long over an fsync
            while given.kill_after not in commits(Path(given.url)):
                assert time.monotonic() < deadline, f"step {given.kill_after} is not committed"
                time.sleep(0.02)
            os.kill(os.getpid(), signal.SIGKILL)


def commits(folder: Path) -> list[int]:
    """The steps in a commit log. A record that is still being written has a name that begins with a dot."""
    records = [json.loads(p.read_text().splitlines()[0]) for p in sorted((folder / "log").glob("[0-9]*.json"))]
    return [r["step"] for r in records if r["kind"] == "commit"]


def begin(step: int) -> None:
    """Say where this process goes on."""
    print(f"start step={step} rank={os.environ.get('RANK', '0')}", flush=True)


def done(step: int, net: torch.nn.Module) -> None:
    """Say how it ended."""
    flat = torch.cat([p.detach().flatten() for p in net.parameters()])
    if os.environ.get("RANK", "0") == "0":
        digest = xxhash.xxh3_128_hexdigest(flat.numpy().tobytes())
        print(f"done step={step} parameters={digest}", flush=True)
