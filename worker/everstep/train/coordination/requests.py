"""Lets a person ask for a profile of a process whose world does not change: nobody announces rounds to it.

Under an agent the agent is asked, as for a process that recovers; under another launcher the process itself is.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping

from everstep.contract import env
from everstep.instruments import listener
from everstep.instruments.live_profile import LiveProfile
from everstep.recovery.announcements import Announcements


def listen(live: LiveProfile, step: Callable[[], int | None], environ: Mapping[str, str] = os.environ) -> None:
    """Answer requests from now on. `step`: the present one."""
    if path := environ.get(env.AGENT_SOCKET):
        Announcements(path, recovers=False).on_profile(live.ask)
    else:
        listener.listen(live, step)
