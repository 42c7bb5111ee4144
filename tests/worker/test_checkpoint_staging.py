"""Staging: a snapshot of every kind of tensor, in one buffer that is kept."""

import gc
import mmap
import os
from pathlib import Path

import pytest
import safetensors.torch
import torch

from everstep.checkpoint.save import snapshot as module
from everstep.checkpoint.save.shard import plan_shard
from everstep.checkpoint.save.snapshot import Staging


def fill(staging: Staging, tensors: dict[str, torch.Tensor]) -> memoryview:
    return staging.fill(plan_shard(tensors), tensors)


def resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * mmap.PAGESIZE


def test_strided_conjugated_and_negated_tensors_are_staged_as_their_values() -> None:
    c = torch.randn(4, 6, dtype=torch.complex64)
    tensors = {"transposed": torch.randn(5, 7).t(), "conjugate": c.conj(), "negated": c.conj().imag,
               "expanded": torch.randn(1, 9).expand(4, 9), "cut": torch.arange(100)[10:90:3]}  # fmt: skip
    loaded = safetensors.torch.load(bytes(fill(Staging(), tensors)))
    for name, tensor in tensors.items():
        assert torch.equal(loaded[name], tensor.resolve_conj().resolve_neg()), name


def test_state_larger_than_a_block_is_copied_whole_by_several_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_BLOCK", 2**16)
    tensors = {f"{i}": torch.randn(1 + 37 * i) for i in range(60)} | {"big": torch.randn(500_001)}
    staging = Staging()
    before = torch.get_num_threads()
    torch.set_num_threads(4)
    try:
        loaded = safetensors.torch.load(bytes(fill(staging, tensors)))
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(loaded[name], tensor) for name, tensor in tensors.items())


def test_snapshot_does_not_follow_the_tensors() -> None:
    tensor = torch.zeros(1000)
    data = fill(Staging(), {"a": tensor})
    tensor.fill_(1)
    assert safetensors.torch.load(bytes(data))["a"].sum() == 0


def test_staging_buffer_is_reused_between_saves_of_one_size() -> None:
    staging = Staging()
    first = fill(staging, {"a": torch.zeros(1000)})
    second = fill(staging, {"a": torch.ones(1000)})
    assert second.obj is first.obj
    assert safetensors.torch.load(bytes(first))["a"].sum() == 1000


@pytest.mark.long
def test_state_that_grows_and_shrinks_never_has_two_buffers() -> None:
    staging = Staging()
    fill(staging, {"a": torch.zeros(2**23)})
    gc.collect()
    before = resident()
    fill(staging, {"a": torch.zeros(2**24)})
    assert resident() - before < 2**26 - 2**24, "the first buffer of 32 MiB was kept beside one of 64"
    fill(staging, {"a": torch.zeros(2**18)})
    assert before - resident() > 2**24, "a buffer of 64 MiB was kept for a state of 1 MiB"


def test_forked_child_stages_in_memory_of_its_own() -> None:
    staging = Staging()
    data = fill(staging, {"a": torch.ones(10_000)})
    child = os.fork()
    if child == 0:
        code = 1
        try:
            mine = fill(staging, {"a": torch.full((10_000,), 2.0)})
            code = 0 if safetensors.torch.load(bytes(mine))["a"].sum() == 20_000 else 2
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert safetensors.torch.load(bytes(data))["a"].sum() == 10_000
