"""Commits as other libraries read them: torch.distributed.checkpoint, torch.load and transformers; and compared."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load

import everstep
from everstep.checkpoint import CheckpointError, import_checkpoint
from everstep.checkpoint.convert.differences import differences, of_commit
from everstep.checkpoint.convert.outgoing import export_as
from everstep.checkpoint.convert.source_files import open_source
from everstep.checkpoint.retention.catalog import Catalog
from everstep.storage import MemoryStore
from support.checkpoint.conversions import committed, made, plain, same

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")


def test_dcp_loads_an_export_into_a_live_state(tmp_path: Path) -> None:
    before, after = made(1), plain(made(2))
    store = committed(before)
    names = export_as(store, Catalog(store).find(), tmp_path / "dcp", "dcp")
    assert ".metadata" in names
    dcp_load(after, storage_reader=FileSystemReader(tmp_path / "dcp"), no_dist=True)
    assert same(after, plain(before))


def test_optimizer_that_was_saved_by_name_goes_out_as_torch_names_it(tmp_path: Path) -> None:
    before, after = made(1), made(2)
    state = {key: everstep.Union(before[key]) for key in ("model", "optimizer")}
    store = committed(state)
    export_as(store, Catalog(store).find(), tmp_path / "dcp", "dcp")
    model, optimizer = after["model"], after["optimizer"]
    weights, moments = get_state_dict(model, optimizer)
    dcp_load({"model": weights, "optimizer": moments}, checkpoint_id=tmp_path / "dcp", no_dist=True)
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


@pytest.mark.parametrize(
    ("one", "other", "names"),
    [
        ({"v": [1, 2]}, {"v": (1, 2)}, ["v"]),
        ({"v": {"0": 1}}, {"v": [1]}, ["v"]),
        ({"v": {0: 1}}, {"v": {"0": 1}}, ["v"]),
        ({"v": {0: 1, "0": 2}}, {"v": {"0": 2, 0: 9}}, ["v/0~"]),
        ({"v": {0: 1, "0": 2}}, {"v": {0: 1, "0": 9}}, ["v/0"]),
        ({"a/b": torch.tensor(1), "a": {"b": 2}}, {"a/b": torch.tensor(7), "a": {"b": 2}}, ["a/b~"]),
        ({"a/b": 1}, {"a": {"b": 1}}, ["(the state)"]),
        ({"v": torch.tensor([2**63], dtype=torch.uint64)}, {"v": torch.tensor([-(2**63)])}, ["v"]),
        ({"v": torch.tensor([2**53 + 1])}, {"v": torch.tensor([2.0**53], dtype=torch.float64)}, ["v"]),
    ],
)
def test_states_that_differ_only_in_their_containers_or_last_digit_are_told_apart(
    one: dict[str, Any], other: dict[str, Any], names: list[str]
) -> None:
    stores = [committed(one), committed(other)]
    sources = [of_commit(s, Catalog(s).find()) for s in stores]
    found = list(differences(*sources))
    assert [d.name for d in found] == names
    assert "equal values" not in found[0].text
    assert list(differences(sources[0], sources[0])) == []


def test_what_each_rank_has_of_its_own_is_compared_too() -> None:
    stores = []
    for seed in (1, 2):
        torch.manual_seed(seed)
        stores.append(committed({"v": 1, "rng": everstep.RngState()}))
    found = list(differences(*[of_commit(s, Catalog(s).find()) for s in stores]))
    assert found
    assert all(d.name.startswith("@0/rng/") for d in found)


def test_safetensors_export_is_unchanged(tmp_path: Path) -> None:
    store = committed(made(1))
    names = everstep.Checkpointer(store=store).export(tmp_path / "out")
    assert "state.json" in names
    assert same(load_file(tmp_path / "out" / "model.safetensors"), dict(made(1)["model"].state_dict()))
