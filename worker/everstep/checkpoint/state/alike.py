"""Digests of what a commit has once and all ranks have: they show whether the ranks' content is the same.

Invariant: ranks that have the same content have equal digests.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Mapping, Sequence
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

BUDGET: Final = 2**26  # bytes that are hashed; in a larger state only the beginning of each tensor is
LEAST: Final = 2**12  # bytes that are hashed of each tensor, at least
SAMPLED: Final = 16  # elements of each tensor, where only samples are compared
MOST_SAMPLED: Final = 100  # tensors of a key of which samples are compared in one save


def differing(by_rank: Sequence[Mapping[str, int]]) -> list[str]:
    """The keys whose digests are not equal on all ranks, or that some ranks lack."""
    return sorted({key for digests in by_rank for key in digests if len({other.get(key) for other in by_rank}) > 1})


def digests(state: Mapping[str, Any], captured: Captured) -> dict[str, int]:
    """A digest of 62 bits for each replicated key, over its values and its tensors.

    Left out are modules' buffers, the content of sharded tensors, and all tensors of a key that may have buffers which
    cannot be recognized (the `state_dict` of an average of models)."""
    whole = [t for name, t in captured.tensors.items() if name not in captured.buffers and not is_sharded(t)]
    return _digests(state, captured, lambda body: body, lambda key: _below(key, captured), bytes_of_each(whole))


def digests_of_samples(state: Mapping[str, Any], captured: Captured, turn: int) -> dict[str, int]:
    """The same over some elements of some tensors, for a save that must not wait. `turn`: the number of the save, by
    which each tensor is looked at now and then."""
    return _digests(state, captured, _of_few_names, lambda key: samples(_below(key, captured, turn)), LEAST)


def _digests(
    state: Mapping[str, Any], captured: Captured, values: Callable[[Any], Any],
    tensors: Callable[[str], list[torch.Tensor]], most: int,
) -> dict[str, int]:  # fmt: skip
    """A digest for each replicated key, over `values` of what is encoded there, and the first `most` bytes of each of
    its `tensors`."""
    by_key: dict[str, int] = {}
    for key, body in captured.values.items():
        if key in captured.unions:
            continue
        digest = xxhash.xxh3_64(json.dumps(canonical(values(body)), sort_keys=True).encode())
        for tensor in tensors(key) if _is_known(state[key]) else ():
            digest.update(first_bytes(tensor, most))
        by_key[key] = digest.intdigest() >> 2
    return by_key


def _below(key: str, captured: Captured, turn: int | None = None) -> list[torch.Tensor]:
    """The tensors of a key that all ranks hold whole, without buffers; with a `turn` at most `MOST_SAMPLED`."""
    tensors, below = captured.tensors, f"{key}/"
    names = sorted(name for name in tensors if name.startswith(below) or name == key)
    if turn is not None and names:
        every = -(-len(names) // MOST_SAMPLED)
        names = names[turn % every :: every]
    return [tensors[name].detach() for name in names if name not in captured.buffers and not is_sharded(tensors[name])]


def _of_few_names(body: Any) -> Any:
    """The encoded values of a key, without the names of a module's or an optimizer's tensors: sorting thousands of them
    takes longer than all else here, and ranks have compared them in earlier saves."""
    tree = body["tree"]
    if body["kind"] == "module":
        return ""
    return tree["param_groups"] if isinstance(tree, dict) and set(tree) == {"state", "param_groups"} else body


def samples(tensors: Collection[torch.Tensor]) -> list[torch.Tensor]:
    """Some elements of each tensor, in few tensors: one for each type and device, and one of each tensor that is no
    plain row of numbers."""
    rows: dict[tuple[torch.dtype, torch.device], list[torch.Tensor]] = {}
    others: list[torch.Tensor] = []
    for tensor in tensors:
        if type(tensor) is not torch.Tensor or not tensor.is_contiguous():
            others.append(tensor.reshape(-1)[:SAMPLED] if layouts.is_dense(tensor) else tensor)
        elif count := min(SAMPLED, tensor.numel()):
            row = tensor.as_strided((count,), (tensor.numel() // count,), tensor.storage_offset())
            rows.setdefault((tensor.dtype, tensor.device), []).append(row)
    return [*(torch.cat(of_kind) for of_kind in rows.values()), *others]


def digests_of_union(state: Mapping[str, Any], captured: Captured, teams: Teams) -> dict[str, int]:
    """A digest of 62 bits for each tensor of a union that several ranks have, by its name and these ranks. Modules'
    buffers are left out, as in `digests`. Parts of sharded tensors are not: two stages may give one name to different
    tensors."""
    known = {key for key in captured.unions if _is_known(inside(state[key]))}
    parts: dict[str, torch.Tensor] = {}
    for name in (name for key in sorted(known) for name in references(captured.values[key])):
        if len(team := teams.get(name, ())) > 1 and name not in captured.buffers:
            part = local_of(captured.tensors[name].detach())
            parts[f"{name} of ranks {', '.join(str(rank) for rank in team)}"] = part
    most = bytes_of_each(parts.values())
    return {name: xxhash.xxh3_64_intdigest(first_bytes(tensor, most)) >> 2 for name, tensor in parts.items()}


def unlike(by_rank: Sequence[Mapping[str, int]]) -> str | None:
    """The error's text for the first name whose digests are not equal on all ranks that have it; None if there is
    none."""
    for name in sorted({name for digests in by_rank for name in digests}):
        ranks = [rank for rank, digests in enumerate(by_rank) if name in digests]
        if odd := [rank for rank in ranks if by_rank[rank][name] != by_rank[ranks[0]][name]]:
            return (
                f"{name}: rank {odd[0]} holds it with other content than rank {ranks[0]}. A commit has one value of "
                "what several ranks of a union hold: broadcast it, or give it another name on each rank, such as the "
                "number of its layer or expert in the whole model"
            )
    return None


def _is_known(target: Any) -> bool:
    """Whether it is known which tensors in the target are buffers."""
    if isinstance(target, torch.nn.Module | torch.optim.Optimizer | torch.Tensor):
        return True
    if hasattr(target, "state_dict") or is_state_dict(target):  # as a module's state_dict has
        return False
    parts = target.values() if isinstance(target, Mapping) else target if isinstance(target, list | tuple) else ()
    return all(_is_known(part) for part in parts)


def bytes_of_each(tensors: Collection[torch.Tensor]) -> int:
    """How many bytes of each tensor are hashed, at most."""
    size = sum(map(layouts.size_of, tensors))
    return size if size <= BUDGET else max(LEAST, BUDGET // len(tensors))


def first_bytes(tensor: torch.Tensor, most: int) -> Any:
    """The first bytes of a tensor, at most `most`, cut before they are copied from a device. Of a tensor that is not
    dense, its description and the first bytes of each of its parts."""
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
