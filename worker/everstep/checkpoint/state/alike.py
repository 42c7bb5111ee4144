"""Whether all ranks hold what a commit holds once.

Invariant: a digest says nothing that differs between ranks that hold the same.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from typing import Any, Final

import numpy as np
import torch
import xxhash

from everstep.checkpoint.state import layouts
from everstep.checkpoint.state.capture import Captured
from everstep.checkpoint.state.holders import Teams
from everstep.checkpoint.state.sharding import is_sharded, local_of
from everstep.checkpoint.state.tree import references
from everstep.checkpoint.state.union import canonical, inside
from everstep.torch_private.modules import is_state_dict

BUDGET: Final = 2**26  # bytes that are looked at; of a larger state an equal part of each tensor
LEAST: Final = 2**12  # bytes of each tensor


def differing(told: Sequence[Mapping[str, int]]) -> list[str]:
    """The keys of which the ranks have told other digests than each other, or that not all of them have."""
    return sorted({key for one in told for key in one if len({other.get(key) for other in told}) > 1})


def digests(state: Mapping[str, Any], captured: Captured) -> dict[str, int]:
    """62 bits of each key that is replicated: its values, and its tensors but for modules' buffers. Of a sharded tensor
    its presence alone, and of what may hold buffers without saying so (an average's `state_dict`) its values alone."""
    found: dict[str, int] = {}
    listed = {name: t.detach() for name, t in captured.tensors.items() if name not in captured.buffers}
    whole = {name: t for name, t in listed.items() if not is_sharded(t)}
    most = bytes_of_each(whole.values())
    for key, body in captured.values.items():
        if key in captured.unions:
            continue
        digest = xxhash.xxh3_64(json.dumps(canonical(body), sort_keys=True).encode())
        for name, tensor in sorted(whole.items() if _is_known(state[key]) else ()):
            if name == key or name.startswith(f"{key}/"):
                digest.update(first_bytes(tensor, most))
        found[key] = digest.intdigest() >> 2
    return found


def digests_of_union(state: Mapping[str, Any], captured: Captured, teams: Teams) -> dict[str, int]:
    """62 bits of what several ranks hold alike of a union's tensors, by the name and these ranks; but for modules'
    buffers, as in `digests`. Parts of sharded tensors too: two stages may call different things by one name."""
    known = {key for key in captured.unions if _is_known(inside(state[key]))}
    held: dict[str, torch.Tensor] = {}
    for name in (name for key in sorted(known) for name in references(captured.values[key])):
        if len(team := teams.get(name, ())) > 1 and name not in captured.buffers:
            part = local_of(captured.tensors[name].detach())
            held[f"{name} of ranks {', '.join(str(rank) for rank in team)}"] = part
    most = bytes_of_each(held.values())
    return {name: xxhash.xxh3_64_intdigest(first_bytes(tensor, most)) >> 2 for name, tensor in held.items()}


def unlike(told: Sequence[Mapping[str, int]]) -> str | None:
    """The complaint about the first name of which ranks that hold it have told other digests, or None."""
    for name in sorted({name for one in told for name in one}):
        ranks = [rank for rank, one in enumerate(told) if name in one]
        if odd := [rank for rank in ranks if told[rank][name] != told[ranks[0]][name]]:
            return (
                f"{name}: rank {odd[0]} holds it with other content than rank {ranks[0]}. A commit has one value of "
                "what several ranks of a union hold: broadcast it, or give it another name on each rank, such as the "
                "number of its layer or expert in the whole model"
            )
    return None


def _is_known(target: Any) -> bool:
    """Whether it is known which of its tensors are buffers, or that none is."""
    if isinstance(target, torch.nn.Module | torch.optim.Optimizer | torch.Tensor):
        return True
    if hasattr(target, "state_dict") or is_state_dict(target):  # as a module's state_dict has
        return False
    parts = target.values() if isinstance(target, Mapping) else target if isinstance(target, list | tuple) else ()
    return all(_is_known(part) for part in parts)


def bytes_of_each(tensors: Collection[torch.Tensor]) -> int:
    """How many bytes of each tensor are looked at, at most."""
    size = sum(map(layouts.size_of, tensors))
    return size if size <= BUDGET else max(LEAST, BUDGET // len(tensors))


def first_bytes(tensor: torch.Tensor, most: int) -> Any:
    """At most so many bytes of a tensor, cut before they are copied from a device. Of one that is not dense, what it is
    and at most so many bytes of each of its parts."""
    if not layouts.is_dense(tensor):
        head, parts = layouts.parts_of(tensor)
        return b"".join([head.encode(), *(bytes(first_bytes(part, most)) for part in parts)])
    return to_bytes(tensor.reshape(-1)[: most // tensor.element_size()])


def to_bytes(tensor: torch.Tensor) -> Any:
    """A CPU tensor's own bytes, or a copy of those of another device's."""
    if not tensor.numel():
        return np.empty(0, dtype=np.uint8)
    flat = tensor.detach().cpu().resolve_conj().resolve_neg().contiguous().view(-1)
    if len(flat) == 1:  # contiguous for torch with any stride, which a row of bytes may not have
        flat = flat.as_strided((1,), (1,))
    return flat.view(torch.uint8).numpy()
