"""The cases of PyTorch's `test/distributed/checkpoint` that convert a model from one division into another.

Those of test_fsdp_tp_checkpoint_conversion and of test_hsdp_checkpoint, with the optimizer, in both directions, and
with DDP and an undivided model too; test_checkpoint_union.py has test_fsdp_ep and test_pipeline. Real processes over
gloo: see `tables.py`.
"""

from functools import partial
from pathlib import Path

import pytest
from worlds_of_processes import results_of

run = partial(results_of, Path(__file__).with_name("tables.py"))

pytestmark = [pytest.mark.timeout(600), pytest.mark.long]


def test_any_division_of_a_model_loads_into_any_other(tmp_path: Path) -> None:
    root, sizes = tmp_path / "perceptron", (1, 3)
    saves = [f"models_save:{n}:{root}:which=perceptron" for n in sizes]
    results = run(tmp_path / "out", *saves, *(f"models_load:{n}:{root}" for n in sizes))
    (digest,) = {digest for world in results[:2] for result in world for digest in result.values()}
    for world in results[2:]:
        assert {found for result in world for found in result.values()} == {digest}
