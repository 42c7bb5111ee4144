"""What a refused script leaves in the terminal: its sentence is the last of it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from support.processes import warm_agent
from support.processes.warm_python import warm

pytestmark = pytest.mark.timeout(400)

SCRIPT = """
import os, sys
import torch
from torch.nn.parallel import DistributedDataParallel
import everstep

def note(what):
    with open(os.path.join(sys.argv[1], what + os.environ["RANK"]), "a") as file:
        file.write("x")

def train():
    with everstep.start(None) as run:
        note("started")
        model = DistributedDataParallel(torch.nn.Linear(1, 1))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        run.track(model=model, optimizer=optimizer)
        own = torch.Generator().manual_seed(int(os.environ["LOCAL_RANK"]))
        mine = torch.arange(64.0).reshape(64, 1)[torch.randperm(64, generator=own)]
        loader = run.loader(torch.utils.data.TensorDataset(mine), global_batch=4)
        for step in run.steps(loader, until=20):
            with step as batch:
                (x,) = batch.data
                batch.scale(model(x).mean()).backward()
                optimizer.step()
                optimizer.zero_grad()

note("begun")
try:
    train()
except Exception as e:
    CATCHES
"""
CATCHES = {
    "raised from it": "raise RuntimeError('training failed') from e",
    "raised under record": """
    from torch.distributed.elastic.multiprocessing.errors import record
    @record
    def main():
        raise RuntimeError('training failed') from e
    main()
""",
    "caught": "print('went wrong:', type(e).__name__)",
}
SENTENCE = "rank 1 reads another sample than rank 0 under index 0"


@pytest.mark.long
@pytest.mark.parametrize("catches", CATCHES)
def test_last_line_of_torchruns_table_is_the_sentence(catches: str, tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT.replace("CATCHES", CATCHES[catches]))
    done = subprocess.run(
        [
            sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2",
            str(script), str(tmp_path),
        ],
        capture_output=True, text=True, timeout=380, check=False, cwd=tmp_path,
        env={**os.environ, "OMP_NUM_THREADS": "1", "TMPDIR": str(tmp_path)},  # torchrun leaves its error files
    )  # fmt: skip
    assert done.returncode == 1, done.stderr[-3000:]
    assert {file.name: file.read_text() for file in tmp_path.glob("*[01]")} == dict.fromkeys(
        ("begun0", "begun1", "started0", "started1"), "x"
    )
    said = [line for line in done.stderr.splitlines() if "everstep: refused: " in line]
    assert len(said) == 1, said
    assert SENTENCE in said[0]
    # torchrun prints its table after its processes have ended: below it are only the rules that close it.
    *_, last, rule = [line for line in done.stderr.splitlines() if line.strip()]
    assert rule.strip("=") == ""
    assert SENTENCE in last
    assert last.endswith("compare_samples=False)"), last


@pytest.mark.long_but("caught")
@pytest.mark.parametrize("catches", CATCHES)
def test_last_line_of_everstep_run_is_the_sentence(catches: str, tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT.replace("CATCHES", CATCHES[catches]))
    variables = {**os.environ, "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    argv = (warm_agent.__file__, "--nproc-per-node=2", script, tmp_path)
    done = warm().run(*argv, cwd=tmp_path, timeout=240, env=variables)
    assert done.returncode == 1, done.stderr[-3000:]
    last = done.stderr.splitlines()[-1]
    assert " everstep-run: exit code 1: " in last
    assert SENTENCE in last
    assert last.endswith("compare_samples=False) (the script is refused, and not restarted)"), last
