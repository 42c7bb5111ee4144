"""ADR 0032: groups are made anew as long as torch cannot change the members of one."""

from __future__ import annotations

import torch
import torch.distributed as dist


def test_installed_torch_cannot_change_the_members_of_a_group() -> None:
    places = (dist, dist.ProcessGroup, torch._C._distributed_c10d.Backend)
    found = [f"{place}.{name}" for place in places for name in dir(place) if "reconfigure" in name]
    assert not found, "torch has it now: check the conditions of docs/adr/0032 and decide"
