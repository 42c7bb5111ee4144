"""Modules that read a `state_dict` in their own way say themselves what they lack; a partial load passes that on."""

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils.parametrizations import weight_norm

import everstep
from everstep.checkpoint import StateMismatch
from support.checkpoint.saves import saved


class Hooked(nn.Module):
    """Has a hook that changes nothing, and a part whose name differs from run to run."""

    def __init__(self, name: str) -> None:
        super().__init__()
        setattr(self, name, nn.Linear(2, 2))
        self.head = nn.Linear(2, 2)
        self.register_load_state_dict_pre_hook(lambda *_: None)


class Own(Hooked):
    def load_state_dict(self, state_dict: Any, strict: bool = True, assign: bool = False) -> Any:
        super().load_state_dict(state_dict, strict, assign)


class Reads(Hooked):
    def _load_from_state_dict(self, *arguments: Any) -> None:
        super()._load_from_state_dict(*arguments)


class Extra(Hooked):
    def get_extra_state(self) -> Any:
        return {"scale": 1.0}

    def set_extra_state(self, state: Any) -> None:
        self.scale = state["scale"]


@pytest.mark.parametrize("kind", [Hooked, Own, Reads])
def test_renamed_part_of_a_module_with_a_hook_is_reported(kind: type[Hooked]) -> None:
    store, into = saved({"model": kind("encoder")}), kind("backbone")
    before = {name: value.clone() for name, value in into.state_dict().items()}
    report = everstep.load(store=store, state={"model": into}, strict=False).report
    assert report.missing == ("model/backbone.weight", "model/backbone.bias")
    assert report.not_taken == ("model/encoder.weight", "model/encoder.bias")
    assert torch.equal(into.backbone.weight, before["backbone.weight"])  # type: ignore[arg-type,union-attr]
    assert not torch.equal(into.head.weight, before["head.weight"])
    run = everstep.Checkpointer(store=store, on_event=lambda kind, **_: None)
    assert run.restore({"model": into}, strict=False) == 5
    assert run.report == report


@pytest.mark.parametrize("kind", [Hooked, Own, Reads])
def test_renamed_part_of_a_module_with_a_hook_is_refused_where_what_is_taken_must_fit(kind: type[Hooked]) -> None:
    store, into = saved({"model": kind("encoder")}), kind("backbone")
    with pytest.raises(StateMismatch, match=r"model/backbone\.weight is in the state passed and not in the commit"):
        everstep.load(store=store, state={"model": into}, exclude=["model/head"])
    with pytest.raises(StateMismatch, match=r"encoder\.weight"):
        everstep.Checkpointer(store=store, on_event=lambda kind, **_: None).restore(
            {"model": into}, include=["model/*"]
        )
    # What the selection leaves out is no misfit.
    report = everstep.load(store=store, state={"model": into}, include=["model/head"]).report
    assert report.not_taken == ("model/encoder.weight", "model/encoder.bias")


def test_parametrized_weight_that_the_commit_lacks_is_reported() -> None:
    store = saved({"model": nn.ModuleDict({"conv": nn.Linear(2, 2), "body": nn.Linear(2, 2)})})
    into = nn.ModuleDict({"conv": weight_norm(nn.Linear(2, 2)), "body": nn.Linear(2, 2)})
    report = everstep.load(store=store, state={"model": into}, strict=False).report
    assert report.not_taken == ("model/conv.weight",)
    assert set(report.missing) == {f"model/conv.parametrizations.weight.original{n}" for n in (0, 1)}
    with pytest.raises(StateMismatch, match=r"model/conv\.parametrizations"):
        everstep.load(store=store, state={"model": into}, exclude=["model/body"])


def test_extra_state_that_the_commit_lacks_is_reported() -> None:
    store, into = saved({"model": Hooked("encoder")}), Extra("encoder")
    report = everstep.load(store=store, state={"model": into}, strict=False).report
    assert report.missing == ("model/_extra_state",)
    back = everstep.load(store=saved({"model": into}), state={"model": Hooked("encoder")}, strict=False).report
    assert back.not_taken == ("model/_extra_state",)


def test_module_with_a_hook_is_not_converted_in_silence() -> None:
    store, into = saved({"model": Hooked("encoder")}), Hooked("encoder").half()
    for options in ({}, {"strict": False}, {"exclude": ["model/head"]}):
        with pytest.raises(StateMismatch, match=r"model/encoder\.weight: F32 in the commit, F16 in the state passed"):
            everstep.load(store=store, state={"model": into}, **options)  # type: ignore[arg-type]
    everstep.load(store=store, state={"model": into}, cast=True)
    assert into.head.weight.dtype == torch.float16
