"""Which collectives this process has begun, in words that are the same on every member whose program does the same.

Ranks that do not fit together are found by comparing these. The newest are also in a small file, mapped into memory:
gloo ends a process by SIGABRT when its peer sends more than it waits for, and then nobody is left to be asked. Knows no
torch: a tensor is what has a `dtype` and a `shape`.

Invariant: `what` names only what has to be the same on all members of a round, so that a difference is a mistake.
"""

from __future__ import annotations

import mmap
import struct
import sys
import threading
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

KEPT = 8  # of the newest: a member may be ahead of another by what it need not wait for
MAX_WHAT = 120
IN_GROUP = " in a group of some ranks"
POINT = ("send(", "recv(")  # how calls between two members begin
NO_MATCH = "the ranks' collectives do not match: "  # an agent's words, by which the operator knows that failure
MAX_SHAPES = 3
MAX_KNOWN = 1024  # kinds of calls whose words are remembered

_SLOT = 160
_HEAD = struct.Struct("<QH")
# As the functions of torch.distributed are called.
_NAMES = {
    "allreduce": "all_reduce",
    "allreduce_coalesced": "all_reduce_coalesced",
    "allgather": "all_gather",
    "_allgather_base": "all_gather_into_tensor",
    "allgather_coalesced": "all_gather_coalesced",
    "allgather_into_tensor_coalesced": "all_gather_into_tensor_coalesced",
    "_reduce_scatter_base": "reduce_scatter_tensor",
    "alltoall": "all_to_all",
    "alltoall_base": "all_to_all_single",
}


@dataclass(frozen=True, slots=True)
class Call:
    """A collective: its number since the round began, from 1, and what it is."""

    number: int
    what: str


def in_group(call: Call) -> Call:
    """As one of a group that other ranks are not in: they may rightly be in another one of their own."""
    return Call(call.number, f"{call.what[: MAX_WHAT - len(IN_GROUP)]}{IN_GROUP}")


class Calls:
    """Of one group, in the order in which they were begun. Each method is called under the group's lock."""

    def __init__(self) -> None:
        self._number = 0
        self._known: dict[tuple[Any, ...], str] = {}
        self._recent: deque[Call] = deque(maxlen=KEPT)
        self._page: Page | None = None

    @property
    def begun(self) -> int:
        """In this round."""
        return self._number

    @property
    def recent(self) -> tuple[Call, ...]:
        """The newest, oldest first."""
        return tuple(self._recent)

    def write_to(self, page: Page) -> None:
        self._page = page

    def restart(self) -> None:
        """A round begins."""
        self._number = 0
        self._recent.clear()
        if self._page is not None:
            self._page.clear()

    def begin(self, name: str, same: Sequence[Any], options: Any = None) -> Call:
        """One begins. `same`: its tensors that have to be alike on all members."""
        root = getattr(options, "rootRank", None)
        tensors = tuple((t.dtype, t.shape) for t in same)
        kind = (name, root, tensors)
        what = self._known.get(kind)
        if what is None:
            if len(self._known) >= MAX_KNOWN:
                self._known.clear()
            what = self._known[kind] = _words(name, root, tensors)
        self._number += 1
        call = Call(self._number, what)
        self._recent.append(call)
        if self._page is not None:
            self._page.write(call)
        return call

    def point(self, name: str, what: str) -> Call:
        """One begins between two members. It is not counted: the others run none."""
        return Call(self._number, f"{name}({what})"[:MAX_WHAT])


def _words(name: str, root: int | None, tensors: Sequence[tuple[Any, Any]]) -> str:
    shown = [f"{str(kind).removeprefix('torch.')}{list(shape)}" for kind, shape in tensors[:MAX_SHAPES]]
    if len(tensors) > MAX_SHAPES:
        values = sum(shape.numel() for _, shape in tensors)
        shown.append(f"{len(tensors) - MAX_SHAPES} more, {values} values in all")
    if root is not None:
        shown.append(f"root {root}")
    return f"{_NAMES.get(name, name)}({', '.join(shown)})"[:MAX_WHAT]


def line_of_script() -> str:
    """Where the main thread is in the script: ` at train.py:31 in main`, or nothing."""
    script = getattr(sys.modules["__main__"], "__file__", None)
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    while frame is not None and frame.f_code.co_filename != script:
        frame = frame.f_back
    if frame is None:
        return ""
    return f" at {Path(frame.f_code.co_filename).name}:{frame.f_lineno} in {frame.f_code.co_name}"


class Page:
    """A file that holds the newest calls of a process, also after its end."""

    def __init__(self, path: str | Path) -> None:
        with open(path, "w+b") as file:
            file.truncate(KEPT * _SLOT)
            self._bytes = mmap.mmap(file.fileno(), KEPT * _SLOT)

    def write(self, call: Call) -> None:
        at = call.number % KEPT * _SLOT
        text = call.what.encode()[: _SLOT - _HEAD.size]
        # The number last: with it the slot counts.
        self._bytes[at + _HEAD.size : at + _HEAD.size + len(text)] = text
        _HEAD.pack_into(self._bytes, at, call.number, len(text))

    def clear(self) -> None:
        self._bytes[:] = bytes(KEPT * _SLOT)


def read_page(path: Path) -> tuple[Call, ...]:
    """The calls in the file of a process, oldest first; none if there is no such file, or it cannot be read."""
    try:
        data = path.read_bytes()
    except OSError:
        return ()
    return tuple(sorted(_slots(data), key=lambda call: call.number))


def _slots(data: bytes) -> Iterator[Call]:
    for at in range(0, min(len(data), KEPT * _SLOT) - _SLOT + 1, _SLOT):
        number, length = _HEAD.unpack_from(data, at)
        if number and length <= _SLOT - _HEAD.size:
            start = at + _HEAD.size
            yield Call(number, data[start : start + length].decode(errors="replace"))


def row(call: Call | None) -> list[Any] | None:
    """As it is sent."""
    return None if call is None else [call.number, call.what]


def rows(calls: Sequence[Call]) -> list[list[Any] | None]:
    """As they are sent."""
    return [row(call) for call in calls]


def read_row(row: object) -> Call | None:
    """As it came. Raises ValueError."""
    return None if row is None else read_rows([row])[0]


def read_rows(rows: object) -> tuple[Call, ...]:
    """As they came. Raises ValueError."""
    if not isinstance(rows, list) or len(rows) > KEPT:
        raise ValueError(f"a list of at most {KEPT} calls is expected")
    return tuple(Call(int(number), str(what)[:MAX_WHAT]) for number, what in rows)


@dataclass(frozen=True, slots=True)
class StepStatus:
    """A process's answer to its agent: its step (None: between two steps), whether a collective of it waits for others,
    and the seconds of its slowest recent step. `call`: the program's collective that waits; None if none waits, or one
    of ours between two steps. `recent`: the program's newest collectives, oldest first."""

    step: int | None
    waits: bool
    slowest: float
    call: Call | None = None
    recent: tuple[Call, ...] = ()

    @property
    def progress(self) -> object:
        """A value that changes when the process makes progress."""
        return self.step, self.waits, self.call, self.recent[-1:]

    def fields(self) -> dict[str, Any]:
        """As it is sent."""
        calls = {"call": row(self.call), "recent": rows(self.recent)}
        return {"step": self.step, "waits": self.waits, "slowest": self.slowest, **calls}

    @classmethod
    def read(cls, fields: Mapping[str, Any]) -> StepStatus:
        """As it came. Raises KeyError, TypeError, ValueError."""
        call, recent = read_row(fields.get("call")), read_rows(fields.get("recent", []))
        return cls(fields["step"], bool(fields["waits"]), float(fields["slowest"]), call, recent)
