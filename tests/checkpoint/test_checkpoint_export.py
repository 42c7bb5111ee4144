"""A commit as files for other tools, and as a log of its own elsewhere."""

import json
import os
import resource
import signal
from pathlib import Path
from typing import Any

import pytest
import safetensors
import torch
from safetensors.torch import load_file, load_model

import everstep
from everstep.checkpoint import CheckpointError, Damaged, import_checkpoint
from everstep.checkpoint.convert.copying import copy
from everstep.checkpoint.convert.outgoing import export
from everstep.checkpoint.retention.catalog import Catalog
from everstep.storage import MemoryStore, open_store


def network(seed: int) -> torch.nn.Module:
    torch.manual_seed(seed)
    return torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.BatchNorm1d(8), torch.nn.Linear(8, 3))


def committed(store: MemoryStore, **extra: Any) -> dict[str, Any]:
    model = network(1)
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.randn(5, 6)).square().sum().backward()
    optimizer.step()
    state = {"model": model, "optimizer": optimizer, "progress": {"epoch": 3, "best": (0.5, "x")}} | extra
    with everstep.Checkpointer(store=store, on_event=lambda kind, **_: None) as checkpointer:
        checkpointer.restore(dict(state))
        checkpointer.save(7, state).wait(30)
    return state


def test_weights_open_with_the_safetensors_library_under_the_names_of_the_module(tmp_path: Path) -> None:
    store = MemoryStore()
    state = committed(store)
    names = everstep.Checkpointer(store=store).export(tmp_path / "out")
    assert names == ("model.safetensors", "optimizer.safetensors", "state.json")
    fresh = network(2)
    assert load_model(fresh, tmp_path / "out" / "model.safetensors") == (set(), [])  # type: ignore[comparison-overlap]
    for name, tensor in state["model"].state_dict().items():
        assert torch.equal(fresh.state_dict()[name], tensor)
    with safetensors.safe_open(tmp_path / "out" / "model.safetensors", "pt") as file:
        assert file.metadata() == {"format": "pt"}, "what Hugging Face's loaders ask for"
    moments = load_file(tmp_path / "out" / "optimizer.safetensors")
    assert torch.equal(moments["state/0/exp_avg"], state["optimizer"].state_dict()["state"][0]["exp_avg"])
    assert sorted(p.name for p in (tmp_path / "out").iterdir()) == sorted(names), "no temporary file stays"


def test_weights_are_readable_by_whom_the_umask_lets(tmp_path: Path) -> None:
    """An image that copies them runs as another user than the one that exported."""
    store = MemoryStore()
    committed(store)
    before = os.umask(0o022)
    try:
        names = everstep.Checkpointer(store=store).export(tmp_path)
    finally:
        os.umask(before)
    assert {name: (tmp_path / name).stat().st_mode & 0o777 for name in names} == dict.fromkeys(names, 0o644)


def test_metrics_also_those_that_came_late_go_with_a_copy_and_an_export(tmp_path: Path) -> None:
    store, elsewhere = MemoryStore(), MemoryStore()
    with everstep.Checkpointer(store=store, on_event=lambda kind, **_: None) as run:
        run.restore({"epoch": 0})
        run.save(7, {"epoch": 1}, metrics={"loss": 2.0, "lr": 0.1}).wait(30)
        run.add_metrics(7, {"loss": 1.5, "accuracy": 0.5})
    want = {"loss": 1.5, "lr": 0.1, "accuracy": 0.5}
    copy(store, Catalog(store).find(7), elsewhere, "0" * 32, "2026-01-01T00:00:00Z")
    assert Catalog(elsewhere).list()[0].metrics == want
    everstep.Checkpointer(store=elsewhere).export(tmp_path)
    assert json.loads((tmp_path / "state.json").read_text())["metrics"] == want


def test_export_of_several_keys_is_not_imported_as_one_module_without_a_word(tmp_path: Path) -> None:
    store, back = MemoryStore(), MemoryStore()
    committed(store)
    everstep.Checkpointer(store=store).export(tmp_path)
    with pytest.raises(CheckpointError, match=r"with the keys model, optimizer, progress, and an import.*ckpt restore"):
        import_checkpoint(tmp_path, store=back)
    assert not back.objects
    import_checkpoint(tmp_path / "model.safetensors", store=back)
    assert list(everstep.load(store=back).state) == ["model"]


def test_everything_that_is_no_tensor_is_json(tmp_path: Path) -> None:
    store = MemoryStore()
    committed(store)
    everstep.Checkpointer(store=store).export(tmp_path, 7)
    told = json.loads((tmp_path / "state.json").read_text())
    assert (told["step"], told["state"]["progress"]["tree"]) == (7, {"epoch": 3, "best": {"$tuple": [0.5, "x"]}})
    assert told["state"]["model"]["tree"]["0.weight"] == {"$tensor": "0.weight"}
    assert told["state"]["model"]["files"] == ["model.safetensors"]


def test_weights_beyond_the_limit_are_split_as_hugging_face_splits_them(tmp_path: Path) -> None:
    store = MemoryStore()
    state = committed(store)
    names = export(store, Catalog(store).find(), tmp_path, max_bytes=200)
    files = [n for n in names if n.startswith("model-")]
    assert files[0].endswith(f"-00001-of-{len(files):05d}.safetensors")
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    assert set(index["weight_map"].values()) == set(files)
    assert index["metadata"]["total_size"] == sum(
        t.numel() * t.element_size() for t in state["model"].state_dict().values()
    )
    for name, file in index["weight_map"].items():
        assert torch.equal(load_file(tmp_path / file)[name], state["model"].state_dict()[name])


def test_tied_weights_are_in_the_file_under_each_of_their_names(tmp_path: Path) -> None:
    store = MemoryStore()
    model = network(1)
    model[2].weight = torch.nn.Parameter(model[0].weight.detach()[:3].clone().new_zeros(3, 8))
    model.register_parameter("tied", model[2].weight)
    committed(store, model=model)
    everstep.Checkpointer(store=store).export(tmp_path)
    found = load_file(tmp_path / "model.safetensors")
    assert torch.equal(found["tied"], found["2.weight"])


def test_keys_that_are_no_file_names_get_one_inside_the_folder(tmp_path: Path) -> None:
    store = MemoryStore()
    one, two = torch.tensor([1.0]), torch.tensor([2.0])
    committed(store, **{"../../evil": one, "a/b": two, "a:b": one})
    names = everstep.Checkpointer(store=store).export(tmp_path / "out")
    assert sorted(p.name for p in tmp_path.rglob("*") if p.is_file()) == sorted(names)
    told = json.loads((tmp_path / "out" / "state.json").read_text())["state"]
    files = [told[key]["files"][0] for key in ("../../evil", "a/b", "a:b")]
    assert [float(load_file(tmp_path / "out" / f)[""][0]) for f in files] == [1.0, 2.0, 1.0]


def test_folder_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    store = MemoryStore()
    committed(store)
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match="file: cannot be written"):
        everstep.Checkpointer(store=store).export(tmp_path / "file")


def test_damaged_commit_is_not_exported(tmp_path: Path) -> None:
    store = MemoryStore()
    committed(store)
    shard = next(n for n in store.objects if n.startswith("data/"))
    store.objects[shard] = store.objects[shard][:-1] + b"\xff"
    with pytest.raises(Damaged, match=shard):
        everstep.Checkpointer(store=store).export(tmp_path)
    assert not list(tmp_path.glob("*.safetensors"))


def copied(source: MemoryStore, target: Any, step: int | None = None) -> Any:
    return copy(source, Catalog(source).find(step), target, "c" * 32, "2026-11-21T12:00:00Z")


def test_copy_is_a_log_of_its_own_that_a_run_goes_on_from(runs: Any, tmp_path: Path) -> None:
    source = MemoryStore()
    runs(source).save(1, 2, 3)
    before = dict(source.objects)
    target = open_store(str(tmp_path / "copy"))
    record = copied(source, target, 2)
    assert source.objects == before
    assert (record.step, record.n) == (2, 1)
    assert Catalog(target).verify() == ()
    runs(target).save(5, 6, 7)
    assert runs(target).restored() == 7
    assert [f.step for f in Catalog(target).list()] == [7, 6, 5], "what was copied is cleaned up like any other"


def test_copy_into_a_store_that_has_a_log_is_refused(runs: Any) -> None:
    source, target = MemoryStore(), MemoryStore("target")
    runs(source).save(1)
    runs(target).save(9)
    with pytest.raises(CheckpointError, match="memory://target: holds a log of 2 records"):
        copied(source, target)
    assert runs(target).restored() == 9


@pytest.mark.parametrize("gone", [True, False])
def test_copy_of_a_damaged_commit_makes_no_commit(runs: Any, gone: bool) -> None:
    source, target = MemoryStore(), MemoryStore()
    runs(source).save(1)
    shard = next(n for n in source.objects if n.startswith("data/"))
    if gone:
        del source.objects[shard]
    else:
        source.objects[shard] = source.objects[shard][:-1] + b"\xff"
    with pytest.raises(Damaged, match=shard):
        copied(source, target)
    assert Catalog(target).latest() is None


def test_each_key_has_a_file_of_its_own_whatever_its_name(tmp_path: Path) -> None:
    keys = ["a/b", "a_b", "a_b-1", "A_b", "a b", "a_b-2"]
    store = MemoryStore()
    committed(store, **{key: torch.full((2,), float(i)) for i, key in enumerate(keys)})
    everstep.Checkpointer(store=store).export(tmp_path)
    told = json.loads((tmp_path / "state.json").read_text())["state"]
    files = {key: told[key]["files"] for key in keys}
    assert len({name.casefold() for (name,) in files.values()}) == len(keys)
    for i, key in enumerate(keys):
        assert next(iter(load_file(tmp_path / files[key][0]).values())).tolist() == [i, i]


def test_export_over_an_older_one_that_is_cut_off_does_not_look_whole(tmp_path: Path) -> None:
    store = MemoryStore()
    committed(store)
    run = everstep.Checkpointer(store=store)
    run.export(tmp_path)
    (shard,) = Catalog(store).find().shards
    store.objects[shard.path] = b"damaged"
    with pytest.raises(Damaged):
        run.export(tmp_path)
    assert not (tmp_path / "state.json").exists()


@pytest.mark.parametrize("form", ["safetensors", "huggingface", "torch", "dcp"])
def test_disk_that_is_full_is_named_with_the_file(form: str, in_child: Any, tmp_path: Path) -> None:
    store = MemoryStore()
    committed(store, large=torch.zeros(50_000))
    run = everstep.Checkpointer(store=store)

    def body() -> None:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, 10_000))
        keys = ["large"] if form == "huggingface" else None
        with pytest.raises(CheckpointError, match=f"{tmp_path}/out.*cannot be written: .*the disk is full"):
            run.export(tmp_path / "out", format=form, keys=keys)

    assert in_child(body) == 0
    left = [p.name for p in tmp_path.rglob("*") if p.is_file()]
    assert not [name for name in left if "large" in name or "partial" in name or "state" in name], left


def test_names_that_dcp_takes_for_one_are_refused_by_it_in_our_words(tmp_path: Path) -> None:
    store = MemoryStore()
    committed(store, t={1: torch.zeros(1), "1": torch.zeros(1)})
    with pytest.raises(CheckpointError, match=r"out: DCP cannot hold it: .*t\.1; take another format"):
        everstep.Checkpointer(store=store).export(tmp_path / "out", format="dcp")


@pytest.mark.parametrize("form", ["torch", "dcp"])
def test_folder_that_one_is_in_can_be_the_target(form: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = MemoryStore()
    committed(store)
    (tmp_path / "out").mkdir()
    monkeypatch.chdir(tmp_path / "out")
    if form == "torch":
        with pytest.raises(CheckpointError, match="out: cannot be written"):
            everstep.Checkpointer(store=store).export(".", format=form)
    else:
        assert ".metadata" in everstep.Checkpointer(store=store).export(".", format=form)
