"""Commits made of what other libraries have written, by those libraries."""

import json
import pickle
import re
import uuid
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save

import everstep
from everstep.checkpoint import CheckpointError, StateMismatch, import_checkpoint
from everstep.checkpoint.convert import incoming
from everstep.checkpoint.convert.copying import copy
from everstep.checkpoint.convert.source_files import open_source
from everstep.checkpoint.format.chunks import CHUNKS
from everstep.checkpoint.format.layout import record_name
from everstep.checkpoint.retention.catalog import Catalog
from everstep.storage import MemoryStore, RetryableError, RetryingStore, RetryPolicy, open_store
from everstep.storage.faults import Fail, FaultStore, LoseResponse
from everstep.storage.rate_limit import Pacer
from support.checkpoint import PROGRAMS
from support.checkpoint.conversions import made, plain, same, write
from support.processes.warm_python import warm

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")


@pytest.mark.parametrize("form", ["torch", "dcp"])
def test_training_state_of_others_is_restored_whole(form: str, tmp_path: Path) -> None:
    before, after = made(1), made(2)
    store = MemoryStore()
    record = import_checkpoint(write(form, plain(before), tmp_path / "file"), store=store, step=7)
    assert Catalog(store).verify(7) == ()
    assert (record.step, record.n) == (7, 1)
    run = everstep.Checkpointer(store=store)
    assert run.restore(after) == 7
    assert same(plain(before), plain(after))
    run.save(8, after).wait(30)
    run.close()
    assert [f.step for f in Catalog(store).list()] == [8, 7]


def test_dcp_folder_of_sharded_tensors_and_odd_types_is_imported_as_dcp_loads_it(tmp_path: Path) -> None:
    state = {
        "a.b": {"c/d": torch.randn(5, 3).to(torch.bfloat16), "scalar": torch.tensor(2.5), "none": torch.empty(0, 4)},
        "flags": torch.tensor([True, False]), "half": torch.randn(7).half(), "u": torch.arange(9, dtype=torch.uint8),
        "list": [torch.ones(2), {"x": torch.zeros(3, dtype=torch.int64)}, 4], "text": "é", "tuple": (1, 2.5, None),
    }  # fmt: skip
    store = MemoryStore()
    import_checkpoint(write("dcp", state, tmp_path / "dcp"), store=store)
    loaded = everstep.load(store=store).state
    assert same(loaded, state)


def test_sharded_state_of_two_ranks_is_imported_with_the_optimizer_by_name(tmp_path: Path) -> None:
    # FSDP2 and get_state_dict, as torch's own tutorial saves; loaded into one process with other groups.
    program = PROGRAMS / "dcp_world.py"
    told = warm().run(program, tmp_path / "rendezvous", tmp_path / "dcp", tmp_path / "truth.pt", timeout=90)
    assert told.returncode == 0, told.stderr
    assert len(list((tmp_path / "dcp").glob("*.distcp"))) == 2
    truth, store = torch.load(tmp_path / "truth.pt", weights_only=True), MemoryStore()
    import_checkpoint(tmp_path / "dcp", store=store, step=4)
    model = torch.nn.Sequential(torch.nn.Linear(5, 7), torch.nn.LayerNorm(7), torch.nn.Linear(7, 3))
    parameters = list(model.parameters())
    optimizer = torch.optim.AdamW([{"params": parameters[2:]}, {"params": parameters[:2]}])
    state = {"model": model, "optimizer": optimizer, "step": 0}
    everstep.load(store=store, state=state)
    assert same(dict(model.state_dict()), truth["model"])
    moments = {name: optimizer.state[p]["exp_avg"] for name, p in model.named_parameters()}
    assert same(moments, truth["exp_avg"])
    assert [group["lr"] for group in optimizer.param_groups] == [0.5, 0.25]
    assert state["step"] == 4


@pytest.mark.parametrize("form", ["torch", "dcp"])
def test_bare_state_dict_becomes_the_model(form: str, tmp_path: Path) -> None:
    before, after = made(1)["model"], made(2)["model"]
    store = MemoryStore()
    import_checkpoint(write(form, before.state_dict(), tmp_path / "file"), store=store, key="net")
    everstep.load(store=store, state={"net": after})
    assert same(before.state_dict(), after.state_dict())


def test_file_with_a_tensor_of_one_element_that_has_a_stride_is_imported(tmp_path: Path) -> None:
    torch.save({"model": {"one": torch.arange(1.0, 7.0)[::6]}}, tmp_path / "file.pt")
    store = MemoryStore()
    import_checkpoint(tmp_path / "file.pt", store=store)
    assert everstep.load(store=store).state["model"]["one"].tolist() == [1.0]


def test_safetensors_file_and_sharded_folder_become_the_model(tmp_path: Path) -> None:
    before = made(1)["model"].state_dict()
    save_file(before, tmp_path / "weights.safetensors")
    folder = tmp_path / "hub"
    folder.mkdir()
    half = len(before) // 2
    parts = [dict(list(before.items())[:half]), dict(list(before.items())[half:])]
    names = [f"model-0000{i}-of-00002.safetensors" for i in (1, 2)]
    for name, part in zip(names, parts, strict=True):
        save_file(part, folder / name)
    where = {name: file for file, part in zip(names, parts, strict=True) for name in part}
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"metadata": {}, "weight_map": where}))
    for source in (tmp_path / "weights.safetensors", folder, index):
        store = MemoryStore()
        import_checkpoint(source, store=store)
        after = made(2)["model"]
        everstep.load(store=store, state={"model": after})
        assert same(before, after.state_dict())


def test_import_reads_a_tensor_at_a_time_and_checks_each_chunk(tmp_path: Path) -> None:
    big = {f"w{i}": torch.randn(300_000) for i in range(6)}
    save_file(big, tmp_path / "big.safetensors")
    source, seen = open_source(tmp_path / "big.safetensors"), []
    real = source.read
    object.__setattr__(source, "read", lambda names: ((seen.append(n), (n, t))[1] for n, t in real(names)))
    store = open_store(str(tmp_path / "run"), part_size=2**20)
    record = incoming.bring(source, store, 3, "a" * 32, "2026-11-21T12:00:00Z")
    assert len(record.shards[0].xxh3_128) == 7 < CHUNKS
    assert Catalog(store).verify() == ()
    assert sorted(seen) == sorted(source.tensors)
    assert same(everstep.load(store=store).state["model"], big)


@pytest.mark.parametrize("where", ["local", pytest.param("s3_server", marks=pytest.mark.s3)])
def test_import_of_several_parts_arrives_whole_on_a_store(where: str, place: Any, tmp_path: Path) -> None:
    state = {"model": {f"w{i}": torch.randn(1_000_000) for i in range(3)}, "epoch": 2}
    store = place(where)("run")
    import_checkpoint(write("dcp", state, tmp_path / "dcp"), store=store, step=2)
    assert Catalog(store).verify(2) == ()
    assert same(everstep.load(store=store).state, state)


# Bad input is refused by name, and the target stays as it was.


class Evil:
    def __reduce__(self) -> Any:
        return (print, ("executed",))


def bad_files(folder: Path) -> dict[str, tuple[Path, str]]:
    good = {"w": torch.randn(64, 64), "b": torch.zeros(3)}
    save_file(good, folder / "cut.safetensors")
    data = (folder / "cut.safetensors").read_bytes()
    (folder / "cut.safetensors").write_bytes(data[:-40])
    torch.save({"model": good, "hook": Evil()}, folder / "evil.pt")
    torch.save(good, folder / "cut.pt")
    data = (folder / "cut.pt").read_bytes()
    (folder / "cut.pt").write_bytes(data[: len(data) // 2])
    torch.save({"w": torch.zeros(2, dtype=torch.complex128)}, folder / "wide.pt")
    torch.save([1, 2], folder / "list.pt")
    torch.save({"model": good, 3: 4}, folder / "number.pt")
    torch.save(good, folder / "old.pt", _use_new_zipfile_serialization=False)
    hub = folder / "hub"
    hub.mkdir()
    (hub / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"w": "model-1.safetensors"}}))
    out = folder / "out"
    out.mkdir()
    (out / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"w": "../cut.safetensors"}}))
    (folder / "empty").mkdir()
    for name in ("lost", "short", "evil", "value", "hole"):
        state = {"model": good, **({"hook": Evil()} if name == "value" else {})}
        dcp_save(state, storage_writer=FileSystemWriter(folder / name), no_dist=True)
    part = next((folder / "lost").glob("*.distcp"))
    part.unlink()
    short = next((folder / "short").glob("*.distcp"))
    short.write_bytes(short.read_bytes()[:-100])
    (folder / "evil" / ".metadata").write_bytes(pickle.dumps(Evil()))
    described = pickle.loads((folder / "hole" / ".metadata").read_bytes())
    described.state_dict_metadata["model.w"].size = torch.Size((65, 64))  # as if a rank's part were left out
    (folder / "hole" / ".metadata").write_bytes(pickle.dumps(described))
    return {
        "hole": (folder / "hole", r"\.metadata: model\.w: its pieces hold 4096 of 4160 elements"),
        "cut.safetensors": (folder / "cut.safetensors", r"cut\.safetensors: is no whole safetensors file"),
        "evil.pt": (folder / "evil.pt", r"evil\.pt: holds objects that only pickle makes"),
        "cut.pt": (folder / "cut.pt", r"cut\.pt: "),
        "wide.pt": (folder / "wide.pt", r"wide\.pt: model/w: a torch\.complex128 tensor"),
        "list.pt": (folder / "list.pt", r"list\.pt: holds a list"),
        "number.pt": (folder / "number.pt", r"number\.pt: key 3"),
        "old.pt": (folder / "old.pt", r"old\.pt: is no file that torch\.save writes today"),
        "hub": (hub, r"model-1\.safetensors: is missing"),
        "out": (out, r"weight_map: w is in .* outside of the folder"),
        "empty": (folder / "empty", r"empty: holds no checkpoints"),
        "nothing": (folder / "nothing", r"nothing: there is no such file"),
        "lost": (folder / "lost", rf"{part.name}: is missing"),
        "short": (folder / "short", rf"{short.name}: has \d+ bytes, \.metadata says at least"),
        "evil": (folder / "evil", r"\.metadata: is no description of a checkpoint: it names builtins\.print"),
        "value": (folder / "value", r"hook: a value that only pickle makes"),
    }


@pytest.mark.parametrize(
    "name",
    [
        "cut.safetensors", "evil.pt", "cut.pt", "wide.pt", "list.pt", "number.pt", "old.pt", "hub", "out", "empty",
        "nothing", "lost", "hole", "short", "evil", "value",
    ],
)  # fmt: skip
def test_bad_input_is_refused_by_name_before_anything_is_written(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path, text = bad_files(tmp_path)[name]
    store = MemoryStore()
    with pytest.raises(CheckpointError, match=text):
        import_checkpoint(path, store=store)
    assert store.objects == {}
    assert "executed" not in capsys.readouterr().out


def test_import_into_a_log_is_refused(runs: Any, tmp_path: Path) -> None:
    torch.save({"w": torch.zeros(2)}, tmp_path / "a.pt")
    store = MemoryStore("target")
    runs(store).save(1)
    before = dict(store.objects)
    with pytest.raises(CheckpointError, match="memory://target: holds a log of 2 records already"):
        import_checkpoint(tmp_path / "a.pt", store=store)
    assert store.objects == before


def bring(how: str, target: Any, folder: Path) -> None:
    """Bring a state into a store, as `everstep ckpt import` or `cp` does."""
    if how == "import":
        import_checkpoint(write("torch", {"w": torch.ones(2)}, folder / "a"), store=target)
        return
    source = MemoryStore("source")
    with everstep.Checkpointer(store=source) as run:
        run.restore({"w": torch.zeros(2)})
        run.save(0, {"w": torch.ones(2)}).wait(30)
    copy(source, Catalog(source).find(), target, uuid.uuid4().hex, "now")


@pytest.mark.parametrize("how", ["import", "copy"])
def test_what_was_interrupted_at_any_request_can_be_repeated(how: str, tmp_path: Path) -> None:
    store, at, cut_off = MemoryStore(), 0, 0
    while at < 30:
        at += 1
        store.objects = {name: data for name, data in store.objects.items() if not name.startswith("log/")}
        try:
            bring(how, FaultStore(store, {at: Fail(RetryableError("away"))}), tmp_path)
            break
        except RetryableError:
            cut_off += Catalog(store).begun()
            assert Catalog(store).latest() is None
        bring(how, store, tmp_path)
        found = everstep.load(store=store, state={"w": (w := torch.zeros(2))} if how == "copy" else None)
        assert (w if how == "copy" else found.state["model"]["w"]).tolist() == [1.0, 1.0]
    assert at > 3
    assert cut_off  # between its two records


@pytest.mark.parametrize("how", ["import", "copy"])
def test_answer_that_is_lost_at_any_request_changes_nothing(how: str, tmp_path: Path) -> None:
    calls = FaultStore(MemoryStore())
    bring(how, calls, tmp_path)
    assert any(call.startswith("put data/") for call in calls.calls)
    for at in range(len(calls.calls)):
        store = MemoryStore()
        retrying = RetryingStore(FaultStore(store, {at: LoseResponse()}), RetryPolicy(first=0.001), pacer=Pacer())
        bring(how, retrying, tmp_path)
        assert Catalog(store).find().step == 0


@pytest.mark.parametrize("how", ["import", "copy"])
def test_run_that_begins_while_bytes_come_keeps_its_log(runs: Any, how: str, tmp_path: Path) -> None:
    class Beside(MemoryStore):
        """A run begins here when the first bytes are to be written."""

        begun: Any = None

        def open_write(self, name: str, size: int) -> Any:
            if self.begun is None:
                self.begun = False
                self.begun, _ = runs(self).begin()
            return super().open_write(name, size)

    store = Beside()
    with pytest.raises(CheckpointError, match="holds a log of 1 records already; give an empty folder"):
        bring(how, store, tmp_path)
    store.begun.save(1, runs.state(1)).wait(30)
    store.begun.close()
    assert Catalog(store).find().step == 1


@pytest.mark.parametrize("how", ["import", "copy"])
@pytest.mark.parametrize("record", [0, 1])
def test_of_two_that_begin_at_once_one_is_refused(how: str, record: int, tmp_path: Path) -> None:
    class Raced(MemoryStore):
        """Another import is done right before the record is created."""

        raced = False

        def create(self, name: str, data: Any) -> None:
            if name == record_name(record) and not self.raced:
                self.raced = True
                bring(how, self, tmp_path)
            super().create(name, data)

    store = Raced()
    with pytest.raises(CheckpointError, match="another writer has begun there meanwhile; give an empty folder"):
        bring(how, store, tmp_path)
    assert Catalog(store).find().step == 0


def test_stateful_keys_are_the_callers_to_name(tmp_path: Path) -> None:
    class Counter:
        def __init__(self, n: int) -> None:
            self.n = n

        def state_dict(self) -> dict[str, Any]:
            return {"n": self.n}

        def load_state_dict(self, state: dict[str, Any]) -> None:
            self.n = state["n"]

    torch.save({"w": {"x": torch.zeros(1)}, "counter": {"n": 4}}, tmp_path / "a.pt")
    store, counter = MemoryStore(), Counter(0)
    with pytest.raises(StateMismatch, match="stateful='count': there is no such key; there are counter, w"):
        import_checkpoint(tmp_path / "a.pt", store=store, stateful=["count"])
    import_checkpoint(tmp_path / "a.pt", store=store, stateful=["counter"])
    everstep.load(store=store, state={"counter": counter})
    assert counter.n == 4


def test_step_may_be_an_integer_of_any_kind_and_nothing_else(tmp_path: Path) -> None:
    source = write("torch", {"w": torch.ones(2)}, tmp_path / "a")
    for step in (np.int64(3), torch.tensor(3)):
        assert import_checkpoint(source, store=MemoryStore(), step=step).step == 3  # type: ignore[arg-type]
    for step in ("3", None, -1, 2.5, True):
        store = MemoryStore()
        with pytest.raises(CheckpointError, match="an integer from 0 to"):
            import_checkpoint(source, store=store, step=step)  # type: ignore[arg-type]
        assert store.objects == {}


@pytest.mark.parametrize("key", ["@0", "$x", ""])
@pytest.mark.parametrize("form", ["safetensors", "torch"])
def test_key_that_no_state_can_have_is_refused(form: str, key: str, tmp_path: Path) -> None:
    path = tmp_path / f"a.{form}"
    state = {"w": torch.ones(2)}
    save_file(state, path) if form == "safetensors" else torch.save(state, path)
    with pytest.raises(StateMismatch, match=re.escape(f"key {key!r}: a text that does not start with")):
        import_checkpoint(path, store=MemoryStore(), key=key)
