"""Names that a package loads on their first use are there: a table of texts says in which module each of them is."""

from __future__ import annotations

import importlib

import pytest


@pytest.mark.parametrize(
    "package",
    ["everstep", "everstep.checkpoint", "everstep.client", "everstep.data", "everstep.roles", "everstep.storage"],
)
def test_each_public_name_can_be_imported(package: str) -> None:
    module = importlib.import_module(package)
    assert module.__all__
    for name in module.__all__:
        getattr(module, name)
