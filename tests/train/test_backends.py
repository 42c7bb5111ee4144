"""The backend of the process group: by device, by override, or refused by name."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from everstep.recovery.errors import LoopError
from everstep.train.process_place import backend_for

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)


def test_device_decides_if_nobody_else_does() -> None:
    assert backend_for(CPU, {}, recovers=False) == "gloo"
    assert backend_for(GPU, {}, recovers=False) == "cpu:gloo,cuda:nccl"
    assert backend_for(CPU, {"EVERSTEP_BACKEND": " "}, recovers=True) == "gloo"


def test_override_is_taken_where_torch_has_it() -> None:
    assert backend_for(CPU, {"EVERSTEP_BACKEND": "cpu:gloo"}, recovers=True) == "cpu:gloo"
    assert backend_for(GPU, {"EVERSTEP_BACKEND": "Gloo"}, recovers=False) == "gloo"


def test_backend_that_this_torch_lacks_is_refused_with_those_that_it_has() -> None:
    missing = next(name for name in ("mpi", "ucc", "nccl") if not dist.is_backend_available(name))
    with pytest.raises(LoopError, match=rf"has no backend '{missing}'; it has .*gloo"):
        backend_for(CPU, {"EVERSTEP_BACKEND": missing}, recovers=False)


def test_backend_that_cannot_be_given_up_is_refused_where_processes_recover(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dist, "is_backend_available", lambda name: name in ("gloo", "mpi"))
    assert backend_for(CPU, {"EVERSTEP_BACKEND": "mpi"}, recovers=False) == "mpi"
    with pytest.raises(LoopError, match=r"recovers in process, which gloo .* alone can do"):
        backend_for(CPU, {"EVERSTEP_BACKEND": "mpi"}, recovers=True)
    with pytest.raises(LoopError, match="alone can do"):
        backend_for(GPU, {"EVERSTEP_BACKEND": "gloo"}, recovers=True)


@pytest.mark.long
def test_script_that_asks_for_a_missing_backend_ends_with_its_name(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text("import everstep\neverstep.start()\n")
    place = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    done = subprocess.run(
        [sys.executable, script], capture_output=True, text=True, timeout=100, check=False, cwd=tmp_path,
        env={**os.environ, **place, "EVERSTEP_BACKEND": "smoke-signals"},
    )  # fmt: skip
    assert done.returncode != 0
    assert "this build of torch has no backend 'smoke-signals'; it has" in done.stderr
