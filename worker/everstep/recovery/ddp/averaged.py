"""Finds the parameters that a DDP object averages: those that required gradients when it was made.

A script may freeze and unfreeze parameters at any time, and torch's reducer keeps the parameters that it was made with.
A new reducer must be made with the same ones on each rank, whether they require gradients at that moment or not.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from everstep.torch_private import reducers


def parameters_of(ddp: Any) -> list[torch.nn.Parameter]:
    """The parameters of the DDP object's present reducer, in the order of the module. If the script has frozen or
    unfrozen parameters since, finding them allocates memory for gradients for a moment."""
    if not hasattr(ddp, "reducer"):
        return []  # other hooks average all of them
    now, _ = reducers.parameters_for_reducer(ddp)
    logged = reducers.logged(ddp)
    count, size = logged.get("num_parameter_tensors"), logged.get("total_parameter_size_bytes")
    if (count, size) == (len(now), sum(p.numel() * p.element_size() for p in now)):
        return now
    every = [p for name, p in ddp.module.named_parameters() if name not in ddp.parameters_to_ignore]
    if count == len(every):
        return every
    try:
        made = {id(p) for bucket in reducers.zero_buckets(ddp) for p in bucket.parameters()}
    except RuntimeError:
        return now  # the reducer does not give sparse gradients
    return [p for p in every if id(p) in made]


def lists_for_reducer(ddp: Any, reduced: Sequence[torch.nn.Parameter]) -> tuple[list[torch.nn.Parameter], list[bool]]:
    """The arguments that DDP's constructor gives its reducer: these parameters, and whether each has a sparse gradient.
    The parameters must require gradients during the call."""
    wanted = set(map(id, reduced))
    parameters, sparse = reducers.parameters_for_reducer(ddp)
    listed = [(p, is_sparse) for p, is_sparse in zip(parameters, sparse, strict=True) if id(p) in wanted]
    return [p for p, _ in listed], [is_sparse for _, is_sparse in listed]


@contextmanager
def requiring_gradients(parameters: Sequence[torch.nn.Parameter]) -> Iterator[None]:
    """Let the parameters require gradients while a reducer is made: it needs the graph node of each one's gradient."""
    frozen = [p for p in parameters if not p.requires_grad]
    for p in frozen:
        p.requires_grad_(True)
    try:
        yield
    finally:
        for p in frozen:
            p.requires_grad_(False)
