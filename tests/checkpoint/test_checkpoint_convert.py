"""Commits in and out, against the libraries that they come from and go to: torch.distributed.checkpoint, torch.save,
safetensors and transformers."""

import json
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file, save_file
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from warm_python import warm

import everstep
from everstep.checkpoint import CheckpointError, StateMismatch, import_checkpoint, incoming
from everstep.checkpoint.catalog import Catalog
from everstep.checkpoint.chunks import CHUNKS
from everstep.checkpoint.differences import differences, of_commit
from everstep.checkpoint.outgoing import export_as
from everstep.checkpoint.source_files import open_source
from everstep.storage import MemoryStore, RetryableError, open_store
from everstep.storage.faults import Fail, FaultStore

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")


def made(seed: int) -> dict[str, Any]:
    """A model, its optimizer and scheduler after a step, and values of each kind."""
    torch.manual_seed(seed)
    model = torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.BatchNorm1d(8), torch.nn.Linear(8, 3))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.5 / seed)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3)
    model(torch.randn(4, 6)).sum().backward()
    optimizer.step()
    scheduler.step()
    return {
        "model": model,
        "optimizer": optimizer,
        "scheduler": scheduler,
        "epoch": seed,
        "seen": {"samples": [seed, 2]},
    }


def plain(state: dict[str, Any]) -> dict[str, Any]:
    return {key: value.state_dict() if hasattr(value, "state_dict") else value for key, value in state.items()}


def same(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor):
        return one.dtype == other.dtype and torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(value, other[key]) for key, value in one.items())
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(same, one, other))
    return type(one) is type(other) and bool(one == other)


def committed(state: dict[str, Any], step: int = 5) -> MemoryStore:
    store = MemoryStore()
    with everstep.Checkpointer(store=store) as checkpointer:
        checkpointer.restore(state)
        checkpointer.save(step, state).wait(30)
    return store


def write(form: str, state: dict[str, Any], path: Path) -> Path:
    if form == "torch":
        torch.save(state, path)
    else:
        dcp.save(state, storage_writer=dcp.FileSystemWriter(path), no_dist=True)
    return path


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
    program = Path(__file__).with_name("dcp_world.py")
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
    for name in ("lost", "short", "evil", "value"):
        state = {"model": good, **({"hook": Evil()} if name == "value" else {})}
        dcp.save(state, storage_writer=dcp.FileSystemWriter(folder / name), no_dist=True)
    part = next((folder / "lost").glob("*.distcp"))
    part.unlink()
    short = next((folder / "short").glob("*.distcp"))
    short.write_bytes(short.read_bytes()[:-100])
    (folder / "evil" / ".metadata").write_bytes(pickle.dumps(Evil()))
    return {
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
        "nothing", "lost", "short", "evil", "value",
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


def test_import_that_was_interrupted_leaves_no_log_and_can_be_repeated(tmp_path: Path) -> None:
    torch.save({"w": torch.ones(2)}, tmp_path / "a.pt")
    inner = MemoryStore()
    calls = 0
    for at in range(20):  # dies at each call in turn
        with_fault = FaultStore(inner, {at: Fail(RetryableError("away"))})
        try:
            import_checkpoint(tmp_path / "a.pt", store=with_fault)
        except RetryableError:
            calls += 1
            if Catalog(inner).begun():
                break  # the open record was written: from there on the folder is taken, and holds no commit
            assert Catalog(inner).latest() is None
            continue
        break
    assert calls >= 2
    fresh = MemoryStore()
    import_checkpoint(tmp_path / "a.pt", store=fresh)
    assert everstep.load(store=fresh).state["model"]["w"].tolist() == [1.0, 1.0]


# Out.


def test_dcp_loads_an_export_into_a_live_state(tmp_path: Path) -> None:
    before, after = made(1), plain(made(2))
    store = committed(before)
    names = export_as(store, Catalog(store).find(), tmp_path / "dcp", "dcp")
    assert ".metadata" in names
    dcp.load(after, storage_reader=dcp.FileSystemReader(tmp_path / "dcp"), no_dist=True)
    assert same(after, plain(before))


def test_optimizer_that_was_saved_by_name_goes_out_as_torch_names_it(tmp_path: Path) -> None:
    before, after = made(1), made(2)
    state = {key: everstep.Union(before[key]) for key in ("model", "optimizer")}
    store = committed(state)
    export_as(store, Catalog(store).find(), tmp_path / "dcp", "dcp")
    model, optimizer = after["model"], after["optimizer"]
    weights, moments = get_state_dict(model, optimizer)
    dcp.load({"model": weights, "optimizer": moments}, checkpoint_id=tmp_path / "dcp", no_dist=True)
    set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=moments)
    assert same(model.state_dict(), before["model"].state_dict())
    assert same(optimizer.state_dict()["state"], before["optimizer"].state_dict()["state"])
    assert optimizer.param_groups[0]["lr"] == before["optimizer"].param_groups[0]["lr"]
    back = MemoryStore()
    import_checkpoint(tmp_path / "dcp", store=back)
    assert list(differences(of_commit(store, Catalog(store).find()), of_commit(back, Catalog(back).find()))) == []


def test_torch_loads_an_export_without_executing_anything(tmp_path: Path) -> None:
    before = made(1)
    before |= {"array": np.arange(3.0), "blob": b"\x00\xff", "t": (1, float("inf")), "keys": {1: "a", (2, 3): "b"}}
    store = committed(before)
    look = everstep.Checkpointer(store=store)
    assert look.export(tmp_path / "all.pt", format="torch") == ("all.pt",)
    found = torch.load(tmp_path / "all.pt", weights_only=True)
    assert same(found["model"], before["model"].state_dict())
    assert same(found["optimizer"], before["optimizer"].state_dict())
    assert (found["epoch"], found["blob"], found["keys"]) == (1, b"\x00\xff", {1: "a", (2, 3): "b"})
    assert found["array"].tolist() == [0.0, 1.0, 2.0]
    look.export(tmp_path / "model.pt", format="torch", keys=["model"])
    after = made(2)["model"]
    after.load_state_dict(torch.load(tmp_path / "model.pt", weights_only=True))
    assert same(after.state_dict(), before["model"].state_dict())
    assert sorted(p.name for p in tmp_path.iterdir()) == ["all.pt", "model.pt"]


@pytest.mark.parametrize("max_bytes", [5_000_000_000, 20_000])
def test_transformers_loads_an_exported_model_and_an_import_of_its_own(tmp_path: Path, max_bytes: int) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM  # noqa: PLC0415

    config = LlamaConfig(
        vocab_size=64, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2,
        max_position_embeddings=32,
    )  # fmt: skip
    torch.manual_seed(1)
    model = LlamaForCausalLM(config).eval()
    store = committed({"model": model, "epoch": 3})
    folder = tmp_path / "hub"
    config.save_pretrained(folder)
    names = export_as(store, Catalog(store).find(), folder, "huggingface", None, max_bytes)
    assert ("model.safetensors.index.json" in names) == (max_bytes < 10**6)
    loaded, told = LlamaForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert not told["missing_keys"]
    assert not told["unexpected_keys"]
    tokens = torch.arange(8)[None]
    with torch.no_grad():
        assert torch.equal(loaded.eval()(tokens).logits, model(tokens).logits)
    loaded.save_pretrained(tmp_path / "again", max_shard_size=max_bytes)
    back = MemoryStore()
    import_checkpoint(tmp_path / "again", store=back)
    torch.manual_seed(2)
    fresh = LlamaForCausalLM(config).eval()
    everstep.load(store=back, state={"model": fresh})
    with torch.no_grad():
        assert torch.equal(fresh(tokens).logits, model(tokens).logits)


def test_tied_weights_go_out_under_both_names_and_come_back_under_one(tmp_path: Path) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM  # noqa: PLC0415

    config = LlamaConfig(
        vocab_size=64, hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2,
        tie_word_embeddings=True,
    )  # fmt: skip
    model = LlamaForCausalLM(config).eval()
    store = committed({"model": model})
    config.save_pretrained(tmp_path / "hub")
    export_as(store, Catalog(store).find(), tmp_path / "hub", "huggingface")
    loaded, told = LlamaForCausalLM.from_pretrained(tmp_path / "hub", output_loading_info=True)
    assert not told["missing_keys"]
    assert loaded.lm_head.weight.data_ptr() == loaded.model.embed_tokens.weight.data_ptr()
    loaded.save_pretrained(tmp_path / "again")
    back = MemoryStore()
    import_checkpoint(tmp_path / "again", store=back)
    fresh = LlamaForCausalLM(config).eval()
    found = everstep.load(store=back, state={"model": fresh}, strict=False)
    assert found.report.missing == ("model/lm_head.weight",)
    assert same(fresh.state_dict(), model.state_dict())


def test_model_is_not_exported_beside_another_one(tmp_path: Path) -> None:
    store = committed({"model": made(1)["model"]})
    save_file({"w": torch.zeros(1)}, tmp_path / "model-00001-of-00002.safetensors")
    with pytest.raises(CheckpointError, match=r"holds model-00001-of-00002\.safetensors already"):
        export_as(store, Catalog(store).find(), tmp_path, "huggingface")


@pytest.mark.parametrize(
    ("form", "keys", "text"),
    [
        ("zip", None, "format 'zip': one of safetensors, huggingface, torch, dcp"),
        ("torch", ["nope"], "has no key 'nope'; it has epoch, model, optimizer"),
        ("huggingface", ["epoch"], "epoch: holds no tensors"),
        ("safetensors", ["model"], "has all keys"),
    ],
)
def test_export_that_cannot_be_is_refused_by_name(form: str, keys: Any, text: str, tmp_path: Path) -> None:
    store = committed(made(1))
    with pytest.raises(CheckpointError, match=text):
        export_as(store, Catalog(store).find(), tmp_path / "out", form, keys)
    assert not [p for p in tmp_path.rglob("*") if p.is_file()]


def test_export_over_what_is_there_is_refused(tmp_path: Path) -> None:
    store = committed(made(1))
    (tmp_path / "a.pt").write_text("mine")
    (tmp_path / "dcp").mkdir()
    (tmp_path / "dcp" / "file").write_text("mine")
    for form, name in (("torch", "a.pt"), ("dcp", "dcp")):
        with pytest.raises(CheckpointError, match=f"{name}: is there already"):
            export_as(store, Catalog(store).find(), tmp_path / name, form)
    assert (tmp_path / "a.pt").read_text() == "mine"


@pytest.mark.parametrize("form", ["torch", "dcp", "huggingface"])
def test_export_that_is_interrupted_leaves_nothing_that_looks_whole(
    form: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = committed(made(1))
    out = tmp_path / "out"
    real, count = Path.rename, [0]

    def dies(*_: Any, **__: Any) -> None:
        count[0] += 1
        raise KeyboardInterrupt

    def later(path: Path, to: Any) -> Any:
        if Path(to).name.endswith(".index.json"):
            dies()
        return real(path, to)

    if form == "huggingface":
        monkeypatch.setattr(Path, "replace", later)
    else:
        monkeypatch.setattr(Path, "rename", dies)
    with pytest.raises(KeyboardInterrupt):
        export_as(store, Catalog(store).find(), out, form, None, 300)
    monkeypatch.undo()
    assert count == [1]
    if form == "huggingface":
        assert not [p for p in out.iterdir() if p.name in ("model.safetensors", "model.safetensors.index.json")]
        with pytest.raises(CheckpointError, match="holds no checkpoints"):
            open_source(out)
    else:
        assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("form", ["torch", "dcp"])
def test_export_of_a_damaged_commit_leaves_nothing(form: str, tmp_path: Path) -> None:
    store = committed(made(1))
    shard = next(n for n in store.objects if n.startswith("data/"))
    store.objects[shard] = store.objects[shard][:-1] + bytes([store.objects[shard][-1] ^ 1])
    with pytest.raises(CheckpointError, match="fails its checksum"):
        export_as(store, Catalog(store).find(), tmp_path / "out", form)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("form", ["torch", "dcp"])
def test_what_goes_out_and_comes_back_is_the_same(form: str, tmp_path: Path) -> None:
    store = committed(made(1))
    export_as(store, Catalog(store).find(), tmp_path / "out", form)
    back = MemoryStore()
    import_checkpoint(tmp_path / "out", store=back)
    found = list(differences(of_commit(store, Catalog(store).find()), of_commit(back, Catalog(back).find())))
    assert found == []
    assert list(differences(of_commit(store, Catalog(store).find()), open_source(tmp_path / "out"))) == []


# Differences.


def test_differences_are_all_named() -> None:
    nan = float("nan")
    one = {
        "a": torch.tensor([1.0, 2.0, nan]), "shape": torch.zeros(2), "type": torch.zeros(2), "gone": torch.zeros(1),
        "big": torch.tensor([2**60]), "unsigned": torch.tensor([2**63], dtype=torch.uint64), "epoch": 1,
        "same": [1, {"x": nan}],
        "z": torch.tensor([1j]), "f8": torch.ones(2).to(torch.float8_e4m3fn), "scalar": torch.tensor(1.0),
    }  # fmt: skip
    other = {
        "a": torch.tensor([1.0, 2.25, nan]), "shape": torch.zeros(1, 2), "type": torch.zeros(2).half(), "new": 3,
        "big": torch.tensor([2**60 + 1]),
        "unsigned": torch.tensor([2**63 + 1], dtype=torch.uint64), "epoch": True,
        "same": [1, {"x": nan}],
        "z": torch.tensor([1j + 3]), "f8": torch.ones(2).to(torch.float8_e4m3fn), "scalar": torch.tensor(nan),
    }  # fmt: skip
    stores = [committed(one), committed(other)]
    found = {d.name: d for d in differences(*[of_commit(s, Catalog(s).find()) for s in stores])}
    assert {name: d.kind for name, d in found.items()} == {
        "a": "values", "shape": "shape", "type": "dtype", "gone": "missing", "new": "added", "big": "values",
        "unsigned": "values", "epoch": "value", "z": "values", "scalar": "values",
    }  # fmt: skip
    assert (found["a"].elements, found["a"].greatest) == (1, 0.25)
    assert found["z"].greatest == 3.0
    assert found["scalar"].greatest == float("inf")
    assert found["shape"].text == "[2] → [1, 2]"
    assert found["type"].text == "float32 → float16, equal values"


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


def test_safetensors_export_is_unchanged(tmp_path: Path) -> None:
    store = committed(made(1))
    names = everstep.Checkpointer(store=store).export(tmp_path / "out")
    assert "state.json" in names
    assert same(load_file(tmp_path / "out" / "model.safetensors"), dict(made(1)["model"].state_dict()))
