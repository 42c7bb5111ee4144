"""What the author of a storage backend needs to trust it: the contract suite, and a store that fails on purpose.

`StoreContract` needs pytest and is loaded on first use; the faults need nothing.
"""

from typing import TYPE_CHECKING, Any

from everstep.storage.faults import Delay, Die, DieAfter, Fail, Fault, FaultStore, LoseResponse, Tear

if TYPE_CHECKING:
    from everstep.testing.contract import StoreContract

__all__ = [
    "Delay",
    "Die",
    "DieAfter",
    "Fail",
    "Fault",
    "FaultStore",
    "LoseResponse",
    "StoreContract",
    "Tear",
]


def __getattr__(name: str) -> Any:
    if name == "StoreContract":
        from everstep.testing.contract import StoreContract  # noqa: PLC0415  needs pytest

        return StoreContract
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
