"""What a scenario's job must come to: the same script in as many ranks, without an operator, a launcher and a fault.

Two witnesses: what the script prints at its end, and the training state of its last commit, read by the library.
"""

from __future__ import annotations

import os
import re
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch
from safetensors.torch import load_file

from support import ROOT
from support.processes.ranks import Ranks
from support.processes.warm_python import warm

EXAMPLE = ROOT / "examples" / "digits"
# The script by the name that a scenario has for it.
SCRIPTS = {
    "digits": EXAMPLE / "train.py", "elastic": EXAMPLE / "elastic.py", "ledger": Path(__file__).parent / "ledger.py",
}  # fmt: skip
BESIDE = {"elastic": (EXAMPLE / "train.py",)}  # files that a script imports
TELL_NO_SAMPLES = ("elastic",)  # scripts whose last lines are no `Result`: their parameters are all that is compared
LEDGER = "ledger"  # the tensor of ledger.py that counts the uses of each sample
# Sums over another number of ranks are rounded otherwise, and training carries that on: after 400 steps of digits or
# ledger parameters of worlds of 1 to 4 differ by less than 1e-6. After 600 of elastic, whose Adam divides small sums by
# small sums, they differ by 2e-6 on one kind of processor and by 2e-4 on another: `rounding_of` measures it. One step
# more moves them by 1e-3.
ROUNDING, MOST_ROUNDING = 2e-5, 5e-4
FINAL = re.compile(
    r"samples=(?P<samples>\d+) samples_xxh3=(?P<samples_hash>\w+)\s+"
    r"final step=\d+ loss=\S+ test_accuracy=(?P<accuracy>[\d.]+) parameters_xxh3=(?P<parameters>\w+)"
)
NEWEST = """
import sys
from pathlib import Path
from everstep.checkpoint import Catalog
from everstep.checkpoint.convert.outgoing import export
from everstep.storage import open_store
store = open_store(sys.argv[1], single_committer=True)
record = Catalog(store).find()
export(store, record, Path(sys.argv[2]))
print(record.step)
"""


class ScenarioError(AssertionError):
    """An expectation did not hold; the text has the job's state for whoever reads the log."""


@dataclass(frozen=True)
class Result:
    """What the last lines of a finished run say."""

    samples: int
    samples_hash: str
    parameters: str
    accuracy: float

    @classmethod
    def parse(cls, log: str) -> Result | None:
        found = FINAL.search(log)
        if found is None:
            return None
        return cls(int(found["samples"]), found["samples_hash"], found["parameters"], float(found["accuracy"]))


@dataclass(frozen=True)
class Committed:
    """The newest commit: completed steps, and the parameters by name."""

    step: int
    parameters: Mapping[str, torch.Tensor]

    @classmethod
    def read(cls, url: str, environ: Mapping[str, str] = os.environ) -> Committed:
        """As a third party reads it. Raises `ScenarioError` with what the library says."""
        with tempfile.TemporaryDirectory(prefix="everstep-committed-") as folder:
            done = warm().run("-c", NEWEST, url, folder, env=environ, timeout=60)
            if done.returncode != 0:
                raise ScenarioError(f"the newest commit cannot be read: {done.stderr[-2000:]}")
            return cls(int(done.stdout), load_file(Path(folder) / "model.safetensors"))


@dataclass(frozen=True)
class Reference:
    told: Result | None
    committed: Committed

    @property
    def result(self) -> Result:
        """Raises `ScenarioError` for a script that prints none."""
        if self.told is None:
            raise ScenarioError(f"a script of {', '.join(TELL_NO_SAMPLES)} tells no samples: only `expect outcome`")
        return self.told


@cache
def undisturbed(workers: int, steps: int, script: str = "digits") -> Reference:
    """The script in so many ranks on this machine."""
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("EVERSTEP_", "PET_"))}
    with tempfile.TemporaryDirectory(prefix="everstep-reference-") as folder:
        commits = f"{folder}/commits"
        argv = [SCRIPTS[script], "--steps", steps, "--checkpoint", commits, "--every-steps", 100]
        printed = Path(folder) / "printed.txt"
        ranks = Ranks(warm(), workers, argv, printed, environment)
        try:
            codes = ranks.wait(180)
        finally:
            ranks.kill()
        result = Result.parse(printed.read_text())
        if any(codes) or (result is None and script not in TELL_NO_SAMPLES):
            raise ScenarioError(f"the undisturbed run failed:\n{printed.read_text()[-4000:]}")
        return Reference(result, Committed.read(commits, environment))


def rounding_of(workers: int, steps: int, script: str) -> float:
    """By how much another number of ranks may move a parameter: twice what undisturbed runs differ by on this
    machine."""
    one, many = (undisturbed(size, steps, script).committed.parameters for size in (1, workers))
    apart = max(
        float((one[name].double() - tensor.double()).abs().max()) for name, tensor in many.items() if name != LEDGER
    )
    return min(max(ROUNDING, 2 * apart), MOST_ROUNDING)


def differences(got: Committed, wanted: Committed, *, rounding: float) -> list[str]:
    """What is wrong with the training state that a job came to; empty if it is that of the undisturbed run. With a
    `rounding` of 0 it has to be that to the bit."""
    found = [] if got.step == wanted.step else [f"the newest commit is of step {got.step}, not {wanted.step}"]
    if got.parameters.keys() != wanted.parameters.keys():
        return [*found, f"parameters {sorted(got.parameters)}, expected {sorted(wanted.parameters)}"]
    for name, tensor in sorted(got.parameters.items()):
        reference = wanted.parameters[name]
        apart = (tensor.double() - reference.double()).abs()
        if name == LEDGER:
            wrong = (apart > 0.25).nonzero().flatten().tolist()
            found += [f"sample {i} was used {tensor[i]:.3f} times, not {reference[i]:.0f}" for i in wrong[:8]]
            found += [f"and {len(wrong) - 8} other samples"] if len(wrong) > 8 else []
        elif not rounding and not torch.equal(tensor, reference):
            found.append(f"{name} differs in {int((apart > 0).sum())} values, by {float(apart.max()):.3g} at most")
        elif rounding and float(apart.max()) > rounding:
            found.append(f"{name} is {float(apart.max()):.3g} apart, which is no rounding")
    return found
