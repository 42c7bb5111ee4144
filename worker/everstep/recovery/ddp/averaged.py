"""Which parameters a DDP object averages: those that required gradients when it was made, whatever they do now.

A script may freeze and thaw parameters at any time, and torch's reducer keeps those that it was made with. One that is
made anew must be made with the same, on each rank, whether they require gradients in this moment or not.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch


def parameters_of(ddp: Any) -> list[torch.nn.Parameter]:
    """Those that its present reducer has, in the order of the module. A large one costs memory for its gradients for a
    moment where the script has frozen or thawed parameters since."""
    if not hasattr(ddp, "reducer"):
        return []  # all of them are left to other hooks
    now, _ = ddp._build_params_for_reducer()
    told = ddp._get_ddp_logging_data()
    count, size = told.get("num_parameter_tensors"), told.get("total_parameter_size_bytes")
    if (count, size) == (len(now), sum(p.numel() * p.element_size() for p in now)):
        return list(now)
    every = [p for name, p in ddp.module.named_parameters() if name not in ddp.parameters_to_ignore]
    if count == len(every):
        return every
    try:
        made = {id(p) for bucket in ddp.reducer._get_zeros_like_grad_buckets() for p in bucket.parameters()}
    except RuntimeError:
        return list(now)  # it does not tell of sparse gradients
    return [p for p in every if id(p) in made]


def lists_for_reducer(ddp: Any, reduced: Sequence[torch.nn.Parameter]) -> tuple[list[torch.nn.Parameter], list[bool]]:
    """What DDP's constructor passes on: these parameters, and whether each has a sparse gradient. While they require
    gradients."""
    wanted = set(map(id, reduced))
    parameters, sparse = ddp._build_params_for_reducer()
    listed = [(p, is_sparse) for p, is_sparse in zip(parameters, sparse, strict=True) if id(p) in wanted]
    return [p for p, _ in listed], [is_sparse for _, is_sparse in listed]


@contextmanager
def requiring_gradients(parameters: Sequence[torch.nn.Parameter]) -> Iterator[None]:
    """For as long as a reducer is made: it asks each for the node of its graph that gathers its gradient."""
    frozen = [p for p in parameters if not p.requires_grad]
    for p in frozen:
        p.requires_grad_(True)
    try:
        yield
    finally:
        for p in frozen:
            p.requires_grad_(False)
