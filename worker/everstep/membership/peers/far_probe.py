"""Probes the members that are not neighbours in the ring of connections, one at a time, in turn, for ever.

So an agent's traffic does not grow with the world. Invariant: nothing is decided here. A member that does not answer is
handed to the peer monitor for a closer look.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

from everstep.contract.document import Member
from everstep.membership.peers.probe import MOST_REST, Reached, Silent, probe

FIRST_LAP = 0.25  # seconds between two far members in the first pass over all of them
LATER_LAPS = 2.0


class FarProbe:
    """Probes one member after the other, for ever."""

    def __init__(self, members: list[Member], suspect: Callable[[Member], None]) -> None:
        self._members, self._suspect = members, suspect
        self._stopped = threading.Event()
        threading.Thread(target=self._run, name="everstep-far-probe", daemon=True).start()

    def stop(self) -> None:
        self._stopped.set()

    def _run(self) -> None:
        pause = FIRST_LAP
        while True:
            for member in self._members:
                if self._stopped.wait(pause):
                    return
                found = probe(member, self._stopped.is_set, attempts=1, rest=MOST_REST)
                if isinstance(found, Reached):
                    found.connection.close()
                elif isinstance(found, Silent) and not self._stopped.is_set():
                    self._suspect(member)
            pause = LATER_LAPS
