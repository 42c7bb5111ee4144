"""Reads digests of the tensors that a script's own variables hold and that are not tracked: an average of the weights
kept by hand, a hidden state, a replay buffer.

What stands in a module or in a container is one value, under the name of the outermost one. A large tensor that hangs
in a graph of derivatives is a result of its step, and left out; a small one may be a loss that a later step is
compared with. Bounds: `VISITS` objects, `MOST` tensors, `MOST_BYTES`; what lies beyond is named.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from everstep.checkpoint.state.layouts import size_of
from everstep.rehearse.record import MOST_BYTES
from everstep.train.guards.contents import DIGEST, digest_of, shape_of
from everstep.train.guards.plain_values import Roots, own_tensors
from everstep.train.guards.script_objects import NamedValue

VISITS = 8000
MOST = 1024  # tensors
SMALL = 1024  # elements


def held_tensors(roots: Roots) -> tuple[dict[str, str], list[str]]:
    """What each value is and its digest, by name; and the names of what is too much to be read. Raises what the
    script's own classes raise."""
    found: dict[str, list[NamedValue]] = {}
    count, beyond = 0, list[str]()
    for name, held in own_tensors(roots.all(), roots, VISITS):
        value = held.value
        if isinstance(value, torch.Tensor) and value.grad_fn is not None and value.numel() > SMALL:
            continue
        count += 1
        if count > MOST:
            beyond.append(name)
        else:
            found.setdefault(name, []).append(held)
    left, values = MOST_BYTES, dict[str, str]()
    sizes = {name: sum(_size(one.value) for one in parts) for name, parts in found.items() if name not in beyond}
    for name, size in sorted(sizes.items(), key=lambda item: item[1]):
        left -= size
        if left < 0:
            beyond.append(name)
        else:
            values[name] = _text(name, found[name])
    return values, sorted(set(beyond))


def _size(value: Any) -> int:
    return int(value.nbytes) if isinstance(value, np.ndarray) else size_of(value)


def _text(name: str, parts: list[NamedValue]) -> str:
    if len(parts) == 1 and parts[0].name == name:
        return f"{shape_of(parts[0].value)}{DIGEST}{digest_of(parts[0].value)}"
    what = f"{len(parts)} tensor{'s' if len(parts) > 1 else ''}"
    return f"{what}{DIGEST}{digest_of({held.name: held.value for held in parts})}"
