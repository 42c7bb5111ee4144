"""A state that is saved, for tests of how it is loaded."""

from typing import Any

import everstep
from everstep.storage import MemoryStore


def saved(state: dict[str, Any]) -> MemoryStore:
    """A store whose one commit, of step 5, is this state."""
    store = MemoryStore()
    with everstep.Checkpointer(store=store, on_event=lambda kind, **_: None) as run:
        run.restore({})
        run.save(5, state)
    return store
