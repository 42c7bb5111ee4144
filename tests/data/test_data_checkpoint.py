"""The position in a commit: loader and sampler are state like any other, and a changed dataset stops the restore."""

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch

from everstep import Checkpointer
from everstep.data import DatasetChanged, ElasticLoader, ElasticSampler, Unacknowledged


def test_85_86_position_comes_back_with_the_parameters(tmp_path: Path) -> None:
    weights = torch.zeros(4)
    loader = ElasticLoader(list(range(100)), global_batch=10, num_workers=2)
    sampler = ElasticSampler(list(range(100)), 1, 0)
    state = {"weights": weights, "data": loader, "sampler": sampler}
    checkpointer = Checkpointer(str(tmp_path), every_steps=1)
    checkpointer.restore(state)
    used = []
    for batch in itertools.islice(loader, 3):
        used += batch.data.tolist()
        with pytest.raises(Unacknowledged):
            checkpointer.save(1, state)
        weights += 1
        loader.acknowledge()
        sampler.consumed(10)
    checkpointer.save(3, state).wait()
    checkpointer.close()
    loader.close()

    again: dict[str, Any] = {
        "weights": torch.zeros(4),
        "data": ElasticLoader(list(range(100)), global_batch=10),
        "sampler": ElasticSampler(list(range(100)), 1, 0),
    }
    second = Checkpointer(str(tmp_path))
    assert second.restore(again) == 3
    second.close()
    assert again["weights"].tolist() == [3.0] * 4  # type: ignore[union-attr]
    rest = list(itertools.chain(*(b.data.tolist() for b in again["data"])))  # type: ignore[union-attr]
    assert rest == list(again["sampler"])  # type: ignore[arg-type]
    assert sorted(used + rest) == list(range(100))

    other = {"weights": torch.zeros(4), "data": ElasticLoader(list(range(99)), global_batch=10), "sampler": sampler}
    third = Checkpointer(str(tmp_path))
    with pytest.raises(DatasetChanged, match="its length was 100 and is 99"):
        third.restore(other)
    third.close()
