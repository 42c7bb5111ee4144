"""A process group whose waits can be given up, and whose members change while the program keeps its handle.

gloo may lose a transfer when its connection breaks: a waiter gets no error and waits until the group's timeout
(measured on torch 2.13 with sockets shut at a random moment: 5 of 120 waits). So the program never waits for gloo.
Each collective gets an answer of our own, which gloo's work completes, or `abandon` ends within a millisecond. The
program holds one group for its whole life; `attach` puts the group of another round behind it.

Invariant: a collective ends once, with its result or with `PeerLost`; after `abandon` no collective of the abandoned
round succeeds, and none begins before `attach`.

Collectives on an accelerator's tensors stay NCCL's own: they are watched, and aborted with the round. Their tensors
then hold garbage, but no optimizer uses it, because the round is over. UNPROVEN: untested on GPUs.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from everstep.contract.calls import Call, Page
from everstep.recovery.errors import LoopError
from everstep.recovery.group.in_flight import CollectiveWork, CombinedWork, InFlightCollectives, PeerLost, WaitingTime
from everstep.recovery.group.script_location import ScriptLocation
from everstep.torch_private.groups import allgather_options

BACKEND = "everstep"
# Point-to-point operations: how messages describe them.
_POINT: dict[str, Callable[[Any], tuple[str, str]]] = {
    "send": lambda arguments: ("send", f"to rank {arguments[1]}"),
    "recv": lambda arguments: ("recv", f"from rank {arguments[1]}"),
    "recv_anysource": lambda _: ("recv", "from any rank"),
}


class RecoverableGroup(dist.ProcessGroup):
    """torch's collectives over the group of the present round; between two rounds each of them fails at once.

    `on_lost`: called once a round, in one of gloo's threads, if a collective fails before `abandon`, with the reason
    and the number of that round. `waiting`: shared by groups of one program. `scope`: where the script may use the
    group; without it, everywhere.
    """

    def __init__(
        self,
        on_lost: Callable[[str, int], None] | None = None,
        waiting: WaitingTime | None = None,
        scope: ScriptLocation | None = None,
    ) -> None:
        super().__init__(0, 1)  # type: ignore[call-arg]
        self._scope = scope
        self._waiting = waiting or WaitingTime()
        self._in_flight = InFlightCollectives(on_lost, self._waiting)
        self._inner: Any = None
        self._abort: Callable[[], None] | None = None
        self.on_begin: Callable[[str, Any], None] | None = None  # gets a collective's name and its output tensors
        self.on_point: Callable[[str, int], None] | None = None  # gets "send" or "recv", and the other rank
        # Whether a collective must end as if all members had this one's values. May raise `PeerLost`.
        self.stands_in: Callable[[str], bool] | None = None
        self.on_rank: Callable[[], None] | None = None  # called when this member's rank is asked for
        self._rank, self._size = 0, 1
        self._process = os.getpid()
        self._name = ""
        self.knows_place = False  # whether rank and size are final, although the first round has not begun

    @property
    def lost(self) -> str | None:
        """Why collectives fail at present; None while they work."""
        return self._in_flight.lost

    @property
    def failures(self) -> int:
        """How many collectives have ended with `PeerLost`, in all rounds."""
        return self._in_flight.failures

    @property
    def lost_at(self) -> str:
        """The script's place when a collective failed: ` at train.py:31 in main`, or empty."""
        return self._in_flight.lost_at

    @property
    def begun(self) -> int:
        """How many collectives were begun in this round."""
        with self._in_flight.lock:
            return self._in_flight.calls.begun

    def recent(self) -> tuple[Call, ...]:
        """The newest collectives that were begun in this round, oldest first."""
        with self._in_flight.lock:
            return self._in_flight.calls.recent

    def waits_in(self) -> Call | None:
        """The oldest collective in flight: this member has begun it, and another may not have."""
        return self._in_flight.waits_in()

    @property
    def waits(self) -> bool:
        """Whether a collective is in flight."""
        return self._in_flight.waits_in() is not None

    @property
    def waited(self) -> float:
        """Seconds in which a collective was in flight, in all rounds, not counting those of an accelerator."""
        return self._waiting.seconds

    def write_calls(self, path: str) -> None:
        """Keep the newest calls in a file."""
        self._in_flight.calls.write_to(Page(path))

    @property
    def left(self) -> list[Any]:
        """gloo's works that were given up in this round, and may still run."""
        return list(self._in_flight.left)

    @property
    def left_on_device(self) -> list[Any]:
        """Works of an accelerator that still run."""
        return self._in_flight.on_device()

    def attach(
        self, inner: Any, rank: int, size: int, abort: Callable[[], None] | None = None, *, round_: int = -1
    ) -> None:
        """Work over `inner`, a group of the round with this number, from now on. After `abandon`. `abort` ends its
        collectives of an accelerator's tensors.

        Hold on to `inner` until its connections are closed: its destructor waits for gloo's threads.
        """
        in_flight = self._in_flight
        with in_flight.lock:
            assert self._inner is None, "the group of the round before was not abandoned"
            self._inner, self._rank, self._size, self._abort = inner, rank, size, abort
            in_flight.restart(round_)

    def set_rank(self, rank: int, size: int) -> None:
        """Set rank and size, also while no round is attached."""
        self._rank, self._size = rank, size

    def abandon(self, reason: str) -> None:
        """End every collective in flight with `PeerLost(reason)`, and let no new one begin. Any thread may call it."""
        on_device = self._in_flight.on_device()
        self._in_flight.give_up(reason)
        with self._in_flight.lock:
            self._in_flight.failures += len(on_device)  # their tensors hold garbage
            self._inner = None
            abort, self._abort = self._abort, None
        if abort is not None:  # in a thread of its own, because it may wait for the device
            threading.Thread(target=abort, name="everstep-abort", daemon=True).start()

    def _run(self, name: str, value: Any, same: Sequence[Any], *arguments: Any) -> Any:
        """Begin a collective. `same`: the tensors whose shapes must be equal on all members. The last argument is the
        options."""
        if os.getpid() != self._process:  # gloo's threads are its parent's, so it would wait for ever
            raise LoopError(
                f"{name} in a process that the script has forked (os.fork): the group is its parent's. End that "
                "process behind its work: os._exit(0)"
            )
        remedy = self._scope.collective(name) if self._scope is not None and not self._scope.free else ""
        if self.on_begin is not None:
            self.on_begin(name, value)
        in_flight, answer = self._in_flight, CollectiveWork(value, self._waits(name), remedy)
        if self.stands_in is not None and self.stands_in(name):
            _copy_own(name, arguments)
            answer.finish(None)
            return answer
        with in_flight.lock:
            inner, lost = self._inner, in_flight.lost
            device = _on_device(same or value)
            if lost is not None:
                in_flight.failures += 1
            else:
                answer.call = (
                    in_flight.calls.point(*_POINT[name](arguments))
                    if name in _POINT
                    else in_flight.calls.begin(name, same, arguments[-1])
                )
                if not device:
                    in_flight.begin(answer)
        if lost is not None:
            answer.finish(PeerLost(lost))
            return answer
        if device:
            return self._run_on_device(answer, getattr(inner, name), *arguments)
        try:
            answer.work = getattr(inner, name)(*arguments)
        except RuntimeError as e:
            in_flight.failed(answer, e)
            return answer
        in_flight.begun(answer)
        try:
            future = answer.work.get_future()
        except RuntimeError:  # some of gloo's works have no future
            threading.Thread(target=in_flight.ended, args=(answer, answer.work.wait), daemon=True).start()
        else:
            future.add_done_callback(lambda done: in_flight.ended(answer, done.value))
        return answer

    def _waits(self, name: str) -> Callable[[str], None] | None:
        scope = self._scope
        if scope is None:
            return None
        begun = scope.entered
        return lambda what: scope.waits(begun, what or name)

    def _run_on_device(self, answer: CollectiveWork, collective: Callable[..., Any], *arguments: Any) -> Any:
        """Run a collective on NCCL. It orders its work by streams and has its own abort, so it needs no answer of
        ours."""
        in_flight = self._in_flight
        try:
            work = collective(*arguments)
        except RuntimeError as e:
            if (lost := in_flight.lost) is not None:
                in_flight.failures += 1
                raise PeerLost(lost) from e
            if not isinstance(e, dist.DistBackendError):
                raise
            with in_flight.lock:
                in_flight.begin(answer)
            in_flight.failed(answer, e)
            return answer
        in_flight.begun_on_device(answer.call, work)
        return work

    # The methods that c10d calls, from Python, and those whose names begin with `get` also from C++.

    def rank(self) -> int:
        if self._scope is not None and not self.knows_place:
            self._scope.check_known("rank")
        if self.on_rank is not None:
            self.on_rank()
        return self._rank

    def size(self) -> int:
        if self._scope is not None and not self.knows_place:
            self._scope.check_known("size")
        return self._size

    def ask_ranks(self, what: str) -> None:
        """Called when `what` reads the ranks. Raises `LoopError` if the script reads them before they are known."""
        if self._scope is not None:
            self._scope.unknown(what)

    def getRank(self) -> int:
        return self._rank

    def getSize(self) -> int:
        return self._size

    def getBackendName(self) -> str:
        return BACKEND

    def getGroupName(self) -> str:
        return self._name

    def setGroupName(self, name: str) -> None:
        self._name = name

    def _set_sequence_number_for_group(self) -> None:
        pass

    def allreduce(self, tensors: Any, opts: Any = None) -> Any:  # type: ignore[override]
        return self._run("allreduce", tensors, tensors, tensors, opts or c10d.AllreduceOptions())

    def allreduce_coalesced(self, tensors: Any, opts: Any = None) -> Any:
        return self._run("allreduce_coalesced", tensors, tensors, tensors, opts or c10d.AllreduceCoalescedOptions())

    def broadcast(self, tensors: Any, opts: Any = None) -> Any:  # type: ignore[override]
        return self._run("broadcast", tensors, tensors, tensors, opts or c10d.BroadcastOptions())

    def reduce(self, tensors: Any, opts: Any = None) -> Any:  # type: ignore[override]
        return self._run("reduce", tensors, tensors, tensors, opts or c10d.ReduceOptions())

    def allgather(self, outputs: Any, inputs: Any, opts: Any = None) -> Any:
        return self._run("allgather", outputs, inputs, outputs, inputs, opts or allgather_options())

    def _allgather_base(self, output: Any, input: Any, opts: Any = None) -> Any:
        return self._run("_allgather_base", output, [input], output, input, opts or allgather_options())

    def all_gather_single(self, output: Any, input: Any, opts: Any = None) -> Any:
        return self._allgather_base(output, input, opts)

    def allgather_coalesced(self, outputs: Any, inputs: Any, opts: Any = None) -> Any:
        return self._run("allgather_coalesced", outputs, inputs, outputs, inputs, opts or allgather_options())

    def allgather_into_tensor_coalesced(self, outputs: Any, inputs: Any, opts: Any = None) -> Any:
        opts = opts or allgather_options()
        if _on_device(inputs):
            return self._run("allgather_into_tensor_coalesced", outputs, inputs, outputs, inputs, opts)
        return self._in_turn(self._allgather_base, outputs, inputs, opts)

    def gather(self, outputs: Any, inputs: Any, opts: Any = None) -> Any:  # type: ignore[override]
        return self._run("gather", outputs, inputs, outputs, inputs, opts or c10d.GatherOptions())

    def scatter(self, outputs: Any, inputs: Any, opts: Any = None) -> Any:  # type: ignore[override]
        return self._run("scatter", outputs, outputs, outputs, inputs, opts or c10d.ScatterOptions())

    def reduce_scatter(self, outputs: Any, inputs: Any, opts: Any = None) -> Any:  # type: ignore[override]
        return self._run("reduce_scatter", outputs, outputs, outputs, inputs, opts or c10d.ReduceScatterOptions())

    def _reduce_scatter_base(self, output: Any, input: Any, opts: Any = None) -> Any:
        return self._run("_reduce_scatter_base", output, [output], output, input, opts or c10d.ReduceScatterOptions())

    def reduce_scatter_single(self, output: Any, input: Any, opts: Any = None) -> Any:
        return self._reduce_scatter_base(output, input, opts)

    def reduce_scatter_tensor_coalesced(self, outputs: Any, inputs: Any, opts: Any = None) -> Any:
        opts = opts or c10d.ReduceScatterOptions()
        if _on_device(inputs):
            return self._run("reduce_scatter_tensor_coalesced", outputs, outputs, outputs, inputs, opts)
        return self._in_turn(self._reduce_scatter_base, outputs, inputs, opts)

    def _in_turn(self, collective: Callable[..., Any], outputs: Any, inputs: Any, opts: Any) -> Any:
        """Run a coalesced collective that DTensor needs and gloo's Python group lacks: one collective per tensor."""
        answers = [collective(output, input, opts) for output, input in zip(outputs, inputs, strict=True)]
        return answers[0] if len(answers) == 1 else CombinedWork(answers)

    # The amounts that members send to each other may differ.

    def alltoall(self, outputs: Any, inputs: Any, opts: Any = None) -> Any:
        return self._run("alltoall", outputs, (), outputs, inputs, opts or c10d.AllToAllOptions())

    def alltoall_base(self, output: Any, input: Any, out_sizes: Any, in_sizes: Any, opts: Any = None) -> Any:
        opts = opts or c10d.AllToAllOptions()
        return self._run("alltoall_base", output, (), output, input, out_sizes, in_sizes, opts)

    def barrier(self, opts: Any = None) -> Any:
        return self._run("barrier", None, (), opts or c10d.BarrierOptions())

    # Point-to-point operations: the other members run no such call.

    def send(self, tensors: Any, to: int, tag: int = 0) -> Any:
        if self.on_point is not None:
            self.on_point("send", to)
        return self._run("send", tensors, (), tensors, to, tag)

    def recv(self, tensors: Any, source: int, tag: int = 0) -> Any:
        if self.on_point is not None:
            self.on_point("recv", source)
        return self._run("recv", tensors, (), tensors, source, tag)

    def recv_anysource(self, tensors: Any, tag: int = 0) -> Any:
        return self._run("recv_anysource", tensors, (), tensors, tag)


def _copy_own(name: str, arguments: Sequence[Any]) -> None:
    """Copy this member's input of a gathering collective into its place in the output."""
    if "gather" not in name:
        return
    outputs, inputs = arguments[0], arguments[1]
    pairs = [(outputs, inputs)] if isinstance(outputs, torch.Tensor) else zip(outputs, inputs, strict=False)
    with torch.no_grad():
        for output, own in pairs:
            for part in output if isinstance(output, list | tuple) else (output,):
                if own.numel() and part.numel() % own.numel() == 0:
                    part.view(-1, own.numel()).copy_(own.reshape(1, -1))


def _on_device(tensors: Any) -> bool:
    """Whether the collective uses tensors on an accelerator."""
    while isinstance(tensors, list | tuple):
        if not tensors:
            return False
        tensors = tensors[0]
    return isinstance(tensors, torch.Tensor) and tensors.device.type != "cpu"
