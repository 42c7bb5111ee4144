"""Refuses `no_sync()` of a DDP object with `static_graph=True` where torch fails in it.

torch 2.13 learns the graph in a reducer's first pass, and averages gradients in it even in `no_sync()`: then it fails
with an internal assertion. Each round makes a new reducer, so under everstep-run a script that averages in its first
step would fail there after a peer is lost. It is refused before that, in its first `no_sync()`.
"""

from __future__ import annotations

import functools
import sys
from typing import Any

from torch.nn.parallel import DistributedDataParallel

from everstep.recovery.errors import LoopError
from everstep.recovery.group.recoverable import RecoverableGroup
from everstep.recovery.group.script_location import script_call_site
from everstep.torch_private import reducers
from everstep.torch_private.patches import replace

_FAILS = (
    "torch learns a static graph in a reducer's first pass, and fails if that pass is in no_sync(); after each loss of "
    "a peer there is a new reducer. Leave no_sync() out: `contextlib.nullcontext()` in its place averages the sum so "
    "far in each pass, which comes to the same gradients. Or leave static_graph=True out"
)


@functools.cache
def install() -> None:
    """Put the check in place. Called when a run begins; does nothing the second time, whatever other libraries have put
    around it since."""
    replace("no_sync", _checked, DistributedDataParallel)


def _checked(no_sync: Any) -> Any:
    @functools.wraps(no_sync)
    def checked(ddp: Any) -> Any:
        # A DDP object has the second attribute only with a static graph.
        if ddp.static_graph and (
            isinstance(ddp.process_group, RecoverableGroup) or not reducers.delays_static_pass(ddp)
        ):
            site = script_call_site(sys._getframe(1))
            raise LoopError(
                f"no_sync(){site.at if site is not None else ''} of DistributedDataParallel("
                f"{type(ddp.module).__name__}) with static_graph=True: {_FAILS}"
            )
        return no_sync(ddp)

    return checked
