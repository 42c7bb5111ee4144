"""The names of collectives: the same on all members, and still there when the process is not."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._C import _distributed_c10d as c10d

from everstep.contract.calls import KEPT, MAX_WHAT, Call, Calls, Page, read_page, read_rows, rows


@pytest.mark.parametrize(
    ("name", "same", "options", "what"),
    [
        ("allreduce", [torch.zeros(10)], c10d.AllreduceOptions(), "all_reduce(float32[10])"),
        ("_allgather_base", [torch.zeros(2, 3, dtype=torch.int64)], None, "all_gather_into_tensor(int64[2, 3])"),
        ("broadcast", [torch.zeros(())], c10d.BroadcastOptions(), "broadcast(float32[], root 0)"),
        ("barrier", (), c10d.BarrierOptions(), "barrier()"),
        ("alltoall_base", (), None, "all_to_all_single()"),
    ],
)
def test_a_collective_is_named_as_the_program_calls_it(name: str, same: Any, options: Any, what: str) -> None:
    assert Calls().begin(name, same, options) == Call(1, what)


def test_many_tensors_are_counted_and_the_text_stays_short() -> None:
    what = Calls().begin("allreduce_coalesced", [torch.zeros(i + 1) for i in range(500)]).what
    assert "497 more, 125250 values in all" in what
    assert len(what) <= MAX_WHAT


def test_the_newest_are_remembered_and_a_round_begins_to_count_anew(tmp_path: Path) -> None:
    calls = Calls()
    calls.write_to(Page(tmp_path / "calls"))
    for size in range(1, 2 * KEPT):
        calls.begin("allreduce", [torch.zeros(size)])
    assert [call.number for call in calls.recent] == list(range(KEPT, 2 * KEPT))
    assert read_page(tmp_path / "calls") == calls.recent
    assert read_rows(rows(calls.recent)) == calls.recent
    calls.restart()
    assert (calls.recent, read_page(tmp_path / "calls")) == ((), ())
    assert calls.begin("barrier", ()).number == 1


def test_a_page_that_is_not_there_or_is_torn_says_nothing(tmp_path: Path) -> None:
    assert read_page(tmp_path / "none") == ()
    (tmp_path / "torn").write_bytes(b"\xff" * 100)
    assert read_page(tmp_path / "torn") == ()


def test_calls_of_a_process_that_was_aborted_are_still_there(tmp_path: Path) -> None:
    program = (
        "import os, sys\n"
        "from everstep.contract.calls import Calls, Page\n"
        "calls = Calls()\n"
        "calls.write_to(Page(sys.argv[1]))\n"
        "calls.begin('barrier', ())\n"
        "os.abort()\n"
    )
    done = subprocess.run([sys.executable, "-c", program, tmp_path / "calls"], check=False, env=dict(os.environ))
    assert done.returncode == -signal.SIGABRT
    assert read_page(tmp_path / "calls") == (Call(1, "barrier()"),)


def test_noting_a_call_costs_microseconds(tmp_path: Path) -> None:
    calls, tensors = Calls(), [torch.zeros(1000)]
    calls.write_to(Page(tmp_path / "calls"))
    options = c10d.AllreduceOptions()
    best = min(_seconds(lambda: calls.begin("allreduce", tensors, options)) for _ in range(5))
    print(f"{best * 1e6:.2f} µs a call")
    assert best < 50e-6


def _seconds(call: Any, count: int = 2000) -> float:
    began = time.thread_time()  # of a processor: others may have it meanwhile
    for _ in range(count):
        call()
    return (time.thread_time() - began) / count
