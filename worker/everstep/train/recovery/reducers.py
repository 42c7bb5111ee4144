"""DistributedDataParallel in a new round.

Its reducer knows buckets that it ordered by the gradients' arrival, and the number of ranks. A member that keeps old
buckets beside a new one that has others adds up gradients of different parameters, without any error. So every member
makes its reducer anew, as DDP's constructor does, without that constructor's broadcast: who gives its state to whom is
agreed on elsewhere. Uses names of torch's that are not public; `tests/train/test_recovery_reducers.py` watches them.
"""

from __future__ import annotations

import gc
import weakref
from typing import Any

from torch.nn.parallel import DistributedDataParallel


class Reducers:
    """The DDP objects of this process, found once: after the script has built them."""

    def __init__(self) -> None:
        self._found = [weakref.ref(ddp) for ddp in parallel()]

    def __len__(self) -> int:
        return len(self.alive())

    def alive(self) -> list[DistributedDataParallel]:
        """Those that the script still holds."""
        return [ddp for reference in self._found if (ddp := reference()) is not None]

    def rebuild(self) -> None:
        """For the round that has begun. On every member."""
        for ddp in self.alive():
            rebuild(ddp)


def parallel() -> list[DistributedDataParallel]:
    """The DDP objects of this process."""
    return [o for o in gc.get_objects() if issubclass(type(o), DistributedDataParallel)]


def rebuild(ddp: Any) -> None:
    """Make the reducer of a DDP object anew."""
    hooks = list(ddp._comm_hooks)
    ddp.reducer._remove_autograd_hooks()
    parameters, expect_sparse = ddp._build_params_for_reducer()
    names = ddp._build_debug_param_to_name_mapping(parameters)
    ddp._ddp_init_helper(parameters, expect_sparse, names, ddp.static_graph)
    ddp._has_rebuilt_buckets = False
    ddp.require_forward_param_sync = True
    if ddp.static_graph:
        ddp.static_graph = False  # or the next call takes it for done
        ddp._set_static_graph()
    ddp._comm_hooks.clear()
    for hook, state in hooks:
        ddp.register_comm_hook(state, hook)
