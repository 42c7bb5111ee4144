"""Several ranks over gloo, each a real process: they write a part each, and any number of them reads it back.

One process forks the ranks, as a launcher with a fork server does; results come back as JSON files.
"""

import json
import os
from pathlib import Path
from typing import Any

import pytest

from everstep.checkpoint.format.manifest import OpenRecord, Owner
from everstep.checkpoint.log.commitlog import CommitLog
from everstep.checkpoint.retention.catalog import Catalog
from everstep.storage import open_store
from support.processes.warm_python import warm

PROGRAM = r'''
import hashlib, json, os, sys, threading
from datetime import timedelta
from pathlib import Path
import torch, torch.distributed as dist
import everstep
from everstep.checkpoint import CheckpointError
from everstep.storage import open_store
from everstep.storage.faults import Die, FaultStore

torch.set_num_threads(1)
scenario, world, root, out = sys.argv[1], int(sys.argv[2]), sys.argv[3], Path(sys.argv[4])

def model(seed):
    torch.manual_seed(seed)
    return torch.nn.Sequential(*[torch.nn.Linear(10 + i, 11 + i) for i in range(6)])

def digest(state):
    h = hashlib.sha256()
    def feed(x):
        if isinstance(x, torch.Tensor): h.update(str((x.dtype, tuple(x.shape))).encode()); h.update(x.numpy().tobytes())
        elif isinstance(x, dict):
            for k, v in x.items(): h.update(repr(k).encode()); feed(v)
        elif isinstance(x, (list, tuple)): [feed(v) for v in x]
        else: h.update(repr(x).encode())
    feed(state["model"].state_dict()); feed(state["optimizer"].state_dict()); feed(state["epoch"])
    return h.hexdigest()

def train(rank, state, steps):
    for _ in range(steps):
        state["optimizer"].zero_grad()
        state["ddp"](torch.randn(4, 10)).square().mean().backward()
        state["optimizer"].step()

def main(rank):
    meeting = dict(init_method=f"file://{out}/rendezvous", rank=rank, world_size=world)
    dist.init_process_group("gloo", timeout=timedelta(seconds=60), **meeting)
    m = model(1 if scenario != "load" else 2)
    state = {"model": m, "optimizer": torch.optim.Adam(m.parameters()), "epoch": 0, "rng": everstep.RngState()}
    events = []
    hook = lambda kind, **f: events.append([kind, f | {"error": str(f.get("error"))}])
    result = {}
    if scenario == "save":
        torch.manual_seed(100 + rank)
        ddp = torch.nn.parallel.DistributedDataParallel(m)
        with everstep.Checkpointer(root, every_steps=1, on_event=hook) as ck:
            assert ck.restore(dict(state, model=ddp)) is None
            train(rank, dict(state, ddp=ddp), 3)
            state["epoch"] = 3
            assert ck.should_save(3)
            ck.save(3, dict(state, model=ddp)).wait(60)
        result = {"digest": digest(state), "draw": torch.rand(2).tolist()}
    elif scenario == "load":
        torch.manual_seed(500 + rank)
        ck = everstep.Checkpointer(root, on_event=hook)
        step = ck.restore(state)
        result = {"step": step, "digest": digest(state), "draw": torch.rand(2).tolist()}
    elif scenario == "dead-peer":
        store = open_store(root)
        if rank == 1:
            store = FaultStore(store)
        with everstep.Checkpointer(store=store, on_event=hook) as ck:
            ck.restore(state)
            ck.save(1, state).wait(60)
        dist.barrier()
        ck = everstep.Checkpointer(store=store, on_event=hook, peer_timeout=1.0)
        assert ck.restore(state) == 1
        if rank == 1:
            store._faults = {len(store.calls): Die()}
        handle = ck.save(2, state)
        try:
            handle.wait(60)
        except CheckpointError as e:
            result = {"error": str(e)}
    elif scenario == "rank-0-alone":
        import logging
        from everstep.checkpoint.save import parts
        parts.PATIENCE = 0.5
        logged = []
        handler = logging.Handler()
        handler.emit = lambda record: logged.append(record.getMessage())
        logging.getLogger("everstep.checkpoint").addHandler(handler)
        ck = everstep.Checkpointer(root, on_event=hook, peer_timeout=4.0)
        ck.restore(state)
        if rank == 0:
            ck.save(1, state)  # the line at fault
        try: ck.close()
        except CheckpointError as e: result = {"error": str(e)}
        result["logged"] = logged
    elif scenario == "damaged-for-one":
        ck = everstep.Checkpointer(root, on_event=hook)
        ck.restore(state)
        for step in (1, 2):
            state["epoch"] = step
            ck.save(step, state).wait(60)
            ck.wait(); dist.barrier()
        class Blind:
            """Rank 1 alone cannot see the shards of step 2."""
            def __init__(self, inner): self._inner = inner
            def __getattr__(self, name): return getattr(self._inner, name)
            def size(self, name): return None if rank == 1 and "-00000002/" in name else self._inner.size(name)
        again = everstep.Checkpointer(store=Blind(open_store(root)), on_event=hook)
        result = {"step": again.restore(state), "epoch": state["epoch"]}
        for other in range(world):
            if rank == other:
                again.add_metrics(1, {"rank": rank})
                again.close()
            dist.barrier()
    elif scenario == "fenced":
        ck = everstep.Checkpointer(root, every_steps=1, on_event=hook)
        ck.restore(state)
        other = None
        if rank == 0:
            from everstep.checkpoint.log.commitlog import CommitLog
            from everstep.checkpoint.log.decisions import Claim
            CommitLog(open_store(root)).open(Claim("f" * 32, 9, "", 1, "now"))
            try: ck.save(1, state).wait(60)
            except everstep.Fenced: pass
        else:
            ck.save(1, state).wait(60)
        try: ck.should_save(2)
        except everstep.Fenced as e: result = {"fenced": str(e), "code": e.exit_code}
    elif scenario == "unusable":
        try: everstep.Checkpointer(root).restore(state)
        except everstep.StoreUnusable as e: result = {"unusable": str(e), "code": e.exit_code}
    elif scenario == "rounds":
        os.environ.update(EVERSTEP_JOB_UID="uid", EVERSTEP_ROUND="4", EVERSTEP_RENDEZVOUS="agent-a")
        ck = everstep.Checkpointer(root, on_event=hook)
        ck.restore(state)
        result = {"round": ck._owner.record.round}
    (out / f"{rank}.json").write_text(json.dumps(result | {"events": events}))

children = []
for rank in range(world):
    child = os.fork()
    if child == 0:
        code = 1
        try: main(rank); code = 0
        finally:
            sys.stderr.flush()
            if code:
                import traceback; traceback.print_exc()
            os._exit(code)
    children.append(child)
print(json.dumps([os.waitstatus_to_exitcode(os.waitpid(c, 0)[1]) for c in children]))
'''


def world(scenario: str, size: int, root: str, folder: Path) -> tuple[list[int], list[dict[str, Any]]]:
    """Run `size` ranks; their exit codes, and the result of each that left one."""
    out = folder / f"{scenario}-{size}"
    out.mkdir()
    variables = {k: v for k, v in os.environ.items() if not k.startswith("EVERSTEP_")}
    done = warm().run("-c", PROGRAM, scenario, size, root, out, timeout=100, env=variables)
    assert done.returncode == 0, done.stderr
    codes = json.loads(done.stdout.splitlines()[-1])
    results = [json.loads(f.read_text()) for f in (out / f"{r}.json" for r in range(size)) if f.exists()]
    assert all(codes) or results, done.stderr
    return codes, results


def shards(root: str) -> list[int]:
    return [p.stat().st_size for p in sorted(Path(root).glob("data/*/*.safetensors"))]


@pytest.mark.long
def test_state_saved_by_four_ranks_loads_bit_identical_on_one_two_three_and_four(tmp_path: Path) -> None:
    # Case 83.
    root = str(tmp_path / "store")
    codes, saved = world("save", 4, root, tmp_path)
    assert codes == [0] * 4
    assert len({r["digest"] for r in saved}) == 1
    assert len({str(r["draw"]) for r in saved}) == 4
    sizes = shards(root)
    assert len(sizes) == 4
    assert max(sizes) - min(sizes) < max(sizes) / 2, "each rank writes about a fourth"
    for size in (1, 2, 3, 4):
        codes, loaded = world("load", size, root, tmp_path)
        assert codes == [0] * size
        assert {(r["step"], r["digest"]) for r in loaded} == {(3, saved[0]["digest"])}
        # Each rank goes on with its own random numbers.
        assert [r["draw"] for r in loaded] == [r["draw"] for r in saved[:size]]


def test_dead_peer_costs_the_save_and_the_previous_commit_stays_the_latest(tmp_path: Path) -> None:
    # Case 74.
    root = str(tmp_path / "store")
    codes, results = world("dead-peer", 2, root, tmp_path)
    assert codes == [0, -9]
    assert "no part from ranks [1] within 1 s" in results[0]["error"]
    codes, loaded = world("load", 1, root, tmp_path)
    assert loaded[0]["step"] == 1


def test_save_on_rank_0_alone_names_the_others_while_it_waits_and_the_line_to_change(tmp_path: Path) -> None:
    _, results = world("rank-0-alone", 3, str(tmp_path / "store"), tmp_path)
    line = 1 + next(n for n, text in enumerate(PROGRAM.splitlines()) if "the line at fault" in text)
    remedy = f"look at <string>:{line}, and take an `if rank == 0` around it away"
    waits, fails = results[0]["logged"]
    assert waits.startswith("the save of step 1: after 1 s there is no part from ranks [1, 2]"), waits
    assert fails.startswith("step 1 was not saved: no part from ranks [1, 2] within 4 s"), fails
    assert fails.endswith(". The commit before stays the newest"), "no training goes on behind close()"
    assert all(remedy in text for text in (waits, fails, results[0]["error"]))


def test_commit_that_one_rank_cannot_read_is_stepped_over_by_all(tmp_path: Path) -> None:
    root = str(tmp_path / "store")
    codes, results = world("damaged-for-one", 2, root, tmp_path)
    assert codes == [0, 0]
    assert [(r["step"], r["epoch"]) for r in results] == [(1, 1), (1, 1)]
    found = {f.step: dict(f.metrics) for f in Catalog(open_store(root)).list()}
    assert found == {2: {}, 1: {"rank": 0.0}}, "of what all ranks say of the restored commit, that of rank 0 counts"


def test_fenced_coordinator_stops_every_rank(tmp_path: Path) -> None:
    codes, results = world("fenced", 2, str(tmp_path / "store"), tmp_path)
    assert codes == [0, 0]
    assert [r["code"] for r in results] == [84, 84]


def test_unusable_store_stops_every_rank_with_the_same_reason(tmp_path: Path) -> None:
    codes, results = world("unusable", 2, "/proc/everstep", tmp_path)
    assert codes == [0, 0]
    assert [r["code"] for r in results] == [85, 85]
    assert results[0]["unusable"] == results[1]["unusable"]


def test_world_that_its_launcher_formed_opens_the_log_in_the_round_that_the_launcher_says(tmp_path: Path) -> None:
    codes, results = world("rounds", 3, str(tmp_path / "store"), tmp_path)
    assert codes == [0] * 3
    assert [r["round"] for r in results] == [4, 4, 4]
    record = CommitLog(open_store(str(tmp_path / "store"))).read(0)
    assert isinstance(record, OpenRecord)
    assert record.owners == (Owner("uid", 4, 0, "agent-a"),)


pytestmark = pytest.mark.timeout(180)
